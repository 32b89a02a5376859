"""The study `decode`: time per output token against output length and batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from forebay.analysis.charts.panels import Series, xy_plot
from forebay.analysis.experiments.result import Column, Row
from forebay.analysis.experiments.server_study import ServerStudy, decode_work
from forebay.analysis.experiments.study import PromptTokens, integers
from forebay.analysis.statistics.fitting import curve_points, fit_terms
from forebay.analysis.statistics.units import duration


@dataclass(kw_only=True)
class Decode(ServerStudy):
    """Time per output token against output length (one request) and batch size.

    Fits seconds per token and fixed seconds per request, and names the resource
    that limits decoding.

    Example:  forebay experiment decode --target sim:phi-3-mini@h200-nvl --out runs/decode
    """

    NAME = "decode"
    COLUMNS = (
        Column("batch", "batch", "count"),
        Column("output_tokens", "output", "count"),
        Column("tpot_s", "TPOT"),
        Column("steady_itl_s", "steady ITL"),
        Column("e2e_s", "E2E", shown=False),
        Column("tokens_per_s", "tokens/s", "count"),
        Column("bandwidth_share", "of bandwidth", "share"),
        Column("peak_share", "of peak FLOP/s", "share", shown=False),
        Column("bound", "bound by", "text"),
    )

    lengths: Annotated[str, typer.Option(help="Output tokens of a single request; k is 1,024.")] = (
        "128,256,512,1k,2k"
    )
    batches: Annotated[str, typer.Option(help="Numbers of equal requests at once.")] = (
        "1,2,4,8,16,32,64"
    )
    batch_output_tokens: Annotated[
        int, typer.Option(min=8, help="Output tokens of each request in a batch.")
    ] = 256
    prompt_tokens: PromptTokens = 1000

    async def loads(self) -> Sequence[tuple[int, int]]:
        loads = {(1, n) for n in integers(self.lengths, "--lengths")}
        loads |= {(b, self.batch_output_tokens) for b in integers(self.batches, "--batches")}
        await self.open_server()
        return sorted(loads)

    async def row(self, load: tuple[int, int]) -> Row:
        batch, output = load
        row = await self.decoded(batch, output, self.prompt_tokens)
        itl_s = row["steady_itl_s"] or row["tpot_s"]
        work = decode_work(batch, self.prompt_tokens + output // 2)
        reached = self.reached(work, itl_s, "bandwidth_share", "peak_share", "bound")
        return row | {"tokens_per_s": batch / itl_s} | reached

    def sentence(self, rows: Sequence[Row]) -> str:
        alone = [row for row in rows if row["batch"] == 1]
        batches = self._batches(rows)
        words = self._cost_alone(alone) + self._gain_of_batches(batches)
        if len(batches) > 2:
            measured = self._gaps(batches)
            terms, _ = fit_terms([x for x, _ in measured], [y for _, y in measured], (0, 1))
            self.facts |= dict(zip(("itl_s", "itl_s_per_request"), terms, strict=True))
        blind = "bound" not in rows[0]
        self.note("shares of bandwidth and FLOP/s need a known --model and --gpu", when=blind)
        return ". ".join(words) + "."

    def _batches(self, rows: Sequence[Row]) -> list[Row]:
        return [row for row in rows if row["output_tokens"] == self.batch_output_tokens]

    def _gaps(self, batches: Sequence[Row]) -> list[tuple[float, float]]:
        """(batch, ITL) of each batch."""
        return [(float(r["batch"]), float(r["steady_itl_s"] or r["tpot_s"])) for r in batches]

    def _cost_alone(self, alone: Sequence[Row]) -> list[str]:
        """Describe one request alone, and add its fitted costs to the facts."""
        words = []
        if len(alone) > 1:
            outputs = [float(row["output_tokens"]) for row in alone]
            (fixed_s, token_s), worst = fit_terms(outputs, [row["e2e_s"] for row in alone], (0, 1))
            self.facts |= {
                "fixed_s_per_request": fixed_s,
                "s_per_token": token_s,
                "worst_error": worst,
            }
            words.append(
                f"Alone, a request costs {duration(fixed_s)} plus {duration(token_s)} per token "
                f"(worst error {worst:.1%})"
            )
        if alone and "bound" in alone[0]:
            words.append(
                f"A batch of 1 is bound by {alone[0]['bound']}, at "
                f"{alone[0]['bandwidth_share']:.0%} of bandwidth"
            )
        return words

    def _gain_of_batches(self, batches: Sequence[Row]) -> list[str]:
        """Compare the largest batch with the smallest, and add the gain to the facts."""
        if len(batches) < 2:
            return []
        few, many = batches[0], batches[-1]
        gain = self.facts["throughput_gain"] = many["tokens_per_s"] / few["tokens_per_s"]
        text = (
            f"A batch of {many['batch']} generates {gain:.1f}× as many tokens per second as a "
            f"batch of {few['batch']}"
        )
        if "bound" in many:
            text += f", bound by {many['bound']} at {many['bandwidth_share']:.0%} of bandwidth"
        return [text]

    def plot(self, rows: Sequence[Row]) -> str:
        measured, facts = self._gaps(self._batches(rows)), self.facts
        curve = []
        if "itl_s" in facts:
            curve = curve_points(
                measured, lambda n: facts["itl_s"] + facts["itl_s_per_request"] * n
            )
        series = [Series(f"{self.batch_output_tokens} output tokens", measured, curve)]
        return xy_plot(series, "requests at once", "time between tokens")
