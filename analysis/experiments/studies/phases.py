"""The study `phases`: prefill and decode on the roofline of a model and a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Annotated

import typer

from forebay.analysis.charts.panels import Axis, Panel, Series, count_label, document
from forebay.analysis.experiments.result import Column, Row
from forebay.analysis.experiments.server_study import ServerStudy, decode_work, prefill_work
from forebay.analysis.experiments.study import Seed, integers
from forebay.analysis.experiments.target import SIM, Ask, MeasuredAnswer
from forebay.analysis.statistics.units import ratio
from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.traces.ground.errors import InputError

PREFILL, DECODE = "prefill", "decode"
STATIC_BATCHES = 20
SHARES = ("flop_per_byte", "flop_per_s", "peak_share", "bandwidth_share", "bound")


@dataclass(kw_only=True)
class Phases(ServerStudy):
    """Prefill and decode: tokens per second, their ratio, FLOP per byte, and the
    roofline.

    Compares the measured times with the peaks of the GPU's data sheet.

    Example:  forebay experiment phases --target sim:phi-3-mini@h200-nvl --out runs/phases
    """

    NAME = "phases"
    COLUMNS = (
        Column("phase", "phase", "text"),
        Column("prompt_tokens", "prompt", "count"),
        Column("batch", "batch", "count"),
        Column("seconds", "time", "s", shown=False),
        Column("tokens_per_s", "tokens/s", "count"),
        Column("ratio", "ratio", "ratio"),
        Column("flop_per_byte", "FLOP/B", "figure"),
        Column("flop_per_s", "FLOP/s", "count", shown=False),
        Column("peak_share", "peak", "share"),
        Column("bandwidth_share", "bandwidth", "share"),
        Column("bound", "bound by", "text"),
        Column("static_slots", "static", "share", shown=False),
        Column("static_tokens_per_s", "static tokens/s", "count", shown=False),
        Column("continuous_tokens_per_s", "continuous", "count", shown=False),
    )

    lengths: Annotated[str, typer.Option(help="Prompt tokens of the prefills; k is 1,024.")] = (
        "512,4k,32k,128000"
    )
    batches: Annotated[str, typer.Option(help="Numbers of requests that decode.")] = "1,16,64"
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt tokens of every decoding request.")
    ] = 1000
    output_tokens: Annotated[
        int, typer.Option(min=8, help="Output tokens of every decoding request.")
    ] = 256
    seed: Seed = 0
    warm: list[Row] = field(default_factory=list, init=False)
    sheets: tuple[ModelSpec, GpuSpec] = field(init=False)

    async def loads(self) -> Sequence[tuple[str, int]]:
        batches = integers(self.batches, "--batches")
        lengths = await self.open_for(self.lengths)
        about = self.server.about
        if about.model is None:
            raise InputError(
                "--model: the roofline needs a model that `forebay engine --help` lists"
            )
        if about.gpu is None:
            raise InputError("--gpu: the roofline needs the GPU's data sheet, such as h200")
        self.sheets = about.model, about.gpu
        return [*((PREFILL, n) for n in lengths), *((DECODE, batch) for batch in batches)]

    async def row(self, load: tuple[str, int]) -> Row:
        """Measure a prompt alone, or one step of a batch in the middle of its answers."""
        phase, size = load
        if phase == PREFILL:
            measured = await self.prefilled(size)
            self.warm.append(measured)
            tokens = prompt = measured["prompt_tokens"]
            batch, seconds, batching = 1, measured["ttft_s"], Row()
            work = prefill_work(tokens)
        else:
            measured = await self.decoded(size, self.output_tokens, self.prompt_tokens)
            tokens, batch, prompt = size, size, self.prompt_tokens
            seconds = measured["steady_itl_s"] or measured["tpot_s"]
            batching = await self.batched(batch)
            work = decode_work(batch, prompt + self.output_tokens // 2)
        row = {"phase": phase, "prompt_tokens": prompt, "batch": batch}
        row |= {"seconds": seconds, "tokens_per_s": tokens / seconds}
        return row | self.reached(work, seconds, *SHARES) | batching

    async def batched(self, batch: int) -> Row:
        """Play answers of unlike lengths in static batches, and with each slot refilled at once.

        A static batch waits for its longest answer. The lengths are exponential. A server by URL
        has slots of its own, so only a simulated engine is measured.
        """
        if not self.target.startswith(SIM):
            return {}
        dice = Random(f"{self.seed}:batches:{batch}")
        lengths = [
            2 + round(dice.expovariate(1 / self.output_tokens))
            for _ in range(STATIC_BATCHES * batch)
        ]
        asks = [Ask(f"answer {i}", self.prompt_tokens, n) for i, n in enumerate(lengths)]
        parts = [asks[i : i + batch] for i in range(0, len(asks), batch)]
        static_s = [_last_s(await self.server.run(part)) for part in parts]
        refilled = await self.open(self.target, max_num_seqs=batch)
        slots = [batch * max(ask.output_tokens for ask in part) for part in parts]
        return {
            "static_slots": sum(lengths) / sum(slots),
            "static_tokens_per_s": sum(lengths) / sum(static_s),
            "continuous_tokens_per_s": sum(lengths) / _last_s(await refilled.run(asks)),
        }

    def sentence(self, rows: Sequence[Row]) -> str:
        """Compare the phases. The ratios refer to the first decode row."""
        alone = next(row for row in rows if row["phase"] == DECODE)
        for row in rows:
            row["ratio"] = row["tokens_per_s"] / alone["tokens_per_s"]
        # The sentence contrasts the best prefill with one decode step.
        short, prefills = rows[0], [row for row in rows if row["phase"] == PREFILL]
        best = max(prefills, key=lambda row: float(row["tokens_per_s"]))
        model, gpu = self.sheets
        ridge = gpu.peak_flops / gpu.bandwidth
        self.facts |= {
            "ridge_flop_per_byte": ridge,
            "peak_flops": gpu.peak_flops,
            "bandwidth_bytes_per_s": gpu.bandwidth,
            "weight_bytes": model.weight_bytes,
            "prefill_tokens_per_s": best["tokens_per_s"],
            "decode_tokens_per_s": alone["tokens_per_s"],
            "prefill_to_decode": best["ratio"],
        }
        # The notes state the assumptions of the FLOPs and of the static batch.
        self.notes[:0] = [
            "FLOPs and bytes are the least that the phase needs; overhead: below 40 % of the roof",
            "static: share of slots that decode where a batch waits for its longest answer "
            f"({STATIC_BATCHES} batches, exponential lengths, played)",
        ]
        self.note_warm(self.warm)
        return (
            f"Prefill computes {best['tokens_per_s']:,.0f} tokens/s at {best['prompt_tokens']:,} "
            f"tokens, {ratio(best['ratio'])} what a batch of {alone['batch']} decodes "
            f"({alone['tokens_per_s']:,.0f}). The ridge point of {gpu.name} is {ridge:,.0f} "
            f"FLOP/byte. A prefill of {short['prompt_tokens']:,} tokens has "
            f"{short['flop_per_byte']:,.0f} and is bound by {short['bound']}. A token of a batch "
            f"of {alone['batch']} has {alone['flop_per_byte']:.2f} and is bound by "
            f"{alone['bound']}.{batching_words(rows, alone)}"
        )

    def plot(self, rows: Sequence[Row]) -> str:
        """Reached FLOP/s against FLOP per byte, under the roof of the data sheet."""
        _, gpu = self.sheets
        ridge = gpu.peak_flops / gpu.bandwidth
        reached = {
            phase: [(r["flop_per_byte"], r["flop_per_s"]) for r in rows if r["phase"] == phase]
            for phase in (PREFILL, DECODE)
        }
        xs = [x for points in reached.values() for x, _ in points]
        ends = (min(xs) / 2, ridge, max(2 * max(xs), ridge * 2))
        roof = [(x, min(gpu.peak_flops, x * gpu.bandwidth)) for x in ends]
        series = [Series(phase, points) for phase, points in reached.items()]
        series.append(Series(f"roof of {gpu.name}", (), roof))
        y = Axis("FLOP/s", lambda flops: f"{flops / 1e12:g} T")
        return document(Panel(series, Axis("FLOP per byte", count_label), y, (ridge, "ridge")))


def batching_words(rows: Sequence[Row], alone: Row) -> str:
    """Return the gain of continuous batching at the largest batch, if it was played."""
    played = [row for row in rows if row.get("static_tokens_per_s") and row["batch"] > 1]
    if not played:
        return ""
    row = max(played, key=lambda row: int(row["batch"]))
    most = row["continuous_tokens_per_s"]
    return (
        f" With answers of unlike length, static batches of {row['batch']} keep "
        f"{row['static_slots']:.0%} of their slots busy. To refill each slot at once gives "
        f"{ratio(most / row['static_tokens_per_s'])} their tokens/s, and "
        f"{ratio(most / alone['continuous_tokens_per_s'])} those of one request at a time."
    )


def _last_s(answers: Sequence[MeasuredAnswer]) -> float:
    """Seconds until the last token of all answers."""
    return max(answer.events_s[-1] for answer in answers)
