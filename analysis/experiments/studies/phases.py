"""The study `phases`: prefill and decode on the roofline of a model and a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from forebay.analysis.charts.panels import Axis, Panel, Series, count_label, document
from forebay.analysis.experiments.result import Column, Row
from forebay.analysis.experiments.server_study import ServerStudy, decode_work, prefill_work
from forebay.analysis.experiments.study import integers
from forebay.analysis.statistics.units import ratio
from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.traces.ground.errors import InputError

PREFILL, DECODE = "prefill", "decode"
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
        Column("flop_per_byte", "FLOP/byte", "figure"),
        Column("flop_per_s", "FLOP/s", "count", shown=False),
        Column("peak_share", "peak", "share"),
        Column("bandwidth_share", "bandwidth", "share"),
        Column("bound", "bound by", "text"),
        Column("static_slots", "static batch", "share"),
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
            batch, seconds, slots = 1, measured["ttft_s"], None
            work = prefill_work(tokens)
        else:
            measured = await self.decoded(size, self.output_tokens, self.prompt_tokens)
            tokens, batch, prompt = size, size, self.prompt_tokens
            seconds, slots = measured["steady_itl_s"] or measured["tpot_s"], static_slots(batch)
            work = decode_work(batch, prompt + self.output_tokens // 2)
        row = {"phase": phase, "prompt_tokens": prompt, "batch": batch, "static_slots": slots}
        row |= {"seconds": seconds, "tokens_per_s": tokens / seconds}
        return row | self.reached(work, seconds, *SHARES)

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
            "static batch: share of slots that decode where a batch waits for its longest answer "
            "(exponential lengths, 1/H(batch)); vLLM's continuous batching refills a slot at once",
        ]
        self.note_warm(self.warm)
        return (
            f"Prefill computes {best['tokens_per_s']:,.0f} tokens/s at {best['prompt_tokens']:,} "
            f"tokens, {ratio(best['ratio'])} what a batch of {alone['batch']} decodes "
            f"({alone['tokens_per_s']:,.0f}). The ridge point of {gpu.name} is {ridge:,.0f} "
            f"FLOP/byte. A prefill of {short['prompt_tokens']:,} tokens has "
            f"{short['flop_per_byte']:,.0f} and is bound by {short['bound']}. A token of a batch "
            f"of {alone['batch']} has {alone['flop_per_byte']:.2f} and is bound by "
            f"{alone['bound']}."
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


def static_slots(batch: int) -> float:
    """Return the share of slots that decode while a static batch waits for its longest answer.

    For exponentially distributed lengths of mean m the longest of n has the mean m * H(n), where
    H(n) = 1 + 1/2 + ... + 1/n, so the share is 1 / H(n). Continuous batching fills a free slot in
    the next step: 1.0 while requests wait.
    """
    return 1.0 / sum(1.0 / slot for slot in range(1, batch + 1))
