"""The study `phases`: prefill and decode on the roofline of a model and a GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from forebay.analysis.charts.panels import Axis, Panel, Series, count_label, document
from forebay.analysis.experiments.result import Column, Result
from forebay.analysis.experiments.studies import decode as decoding
from forebay.analysis.experiments.studies import prefill as prefilling
from forebay.analysis.experiments.study import Batched, Study, integers, study
from forebay.analysis.experiments.target import About
from forebay.analysis.statistics.units import ratio
from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.replay.engine.timing.roofline import Least, bound_by, least
from forebay.replay.engine.timing.step_time import StepWork
from forebay.traces.errors import InputError

HELP = """Prefill beside decode: tokens per second, their ratio, FLOP per byte, and the
roofline.

Compares the measured times with the peaks of the GPU's data sheet.

Example:  forebay experiment phases --target sim:phi-3-mini@h200-nvl --out runs/phases
"""
PREFILL, DECODE = "prefill", "decode"
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


@study("phases")
def command(
    options: Study,
    lengths: Annotated[
        str, typer.Option(help="Prompt tokens of the prefills; k is 1,024.")
    ] = "512,4k,32k,128000",
    batches: Annotated[str, typer.Option(help="Numbers of requests that decode.")] = "1,16,64",
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt tokens of every decoding request.")
    ] = 1000,
    output_tokens: Annotated[
        int, typer.Option(min=8, help="Output tokens of every decoding request.")
    ] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each row.")] = 3,
    max_num_batched_tokens: Batched = None,
) -> None:
    prompts = integers(lengths, "--lengths")
    loads = [(batch, output_tokens) for batch in integers(batches, "--batches")]
    if len(prompts) < prefilling.LEAST_LENGTHS:
        raise InputError(f"--lengths {lengths}: give {prefilling.LEAST_LENGTHS} lengths or more")

    async def work() -> Result:
        async with options.open(batched=max_num_batched_tokens) as server:
            settings = options.settings(server, repeats=repeats)
            model, gpu = known(server.about)
            first = await prefilling.prefill(server, prompts, repeats, settings)
            second = await decoding.decode(
                server, loads, prompt_tokens, output_tokens, repeats, settings
            )
        rows = [prefill_row(model, gpu, row) for row in first.rows]
        rows += [decode_row(model, gpu, row, prompt_tokens) for row in second.rows]
        comparison = result(server.about.name, model, gpu, rows)
        return replace(comparison, settings=settings, notes=[*comparison.notes, *first.notes])

    options.finish(work())


def known(about: About) -> tuple[ModelSpec, GpuSpec]:
    """The model and GPU of a target. Raises InputError without the data of either."""
    if about.model is None:
        raise InputError("--model: the roofline needs a model that `forebay engine --help` lists")
    if about.gpu is None:
        raise InputError("--gpu: the roofline needs the GPU's data sheet, such as h200")
    return about.model, about.gpu


def prefill_row(model: ModelSpec, gpu: GpuSpec, row: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt alone, from a row of the study `prefill`."""
    tokens = row["prompt_tokens"]
    floor = least(model, gpu, [StepWork(tokens, 1, 1, chunks=[(tokens, 0)])])
    about = {"phase": PREFILL, "prompt_tokens": tokens, "batch": 1, "static_slots": None}
    return about | _shares(floor, row["ttft_s"], tokens)


def decode_row(
    model: ModelSpec, gpu: GpuSpec, row: Mapping[str, Any], prompt_tokens: int
) -> dict[str, Any]:
    """One step of a batch in the middle of its answers, from a row of the study `decode`."""
    batch = row["batch"]
    context = batch * (prompt_tokens + row["output_tokens"] // 2)
    floor = least(model, gpu, [StepWork(batch, batch, batch, decode_context=context)])
    about = {"phase": DECODE, "prompt_tokens": prompt_tokens, "batch": batch}
    shares = _shares(floor, row["steady_itl_s"] or row["tpot_s"], batch)
    return about | shares | {"static_slots": static_slots(batch)}


def static_slots(batch: int) -> float:
    """Return the share of slots that decode while a static batch waits for its longest answer.

    For exponentially distributed lengths of mean m the longest of n has the mean m * H(n), where
    H(n) = 1 + 1/2 + ... + 1/n, so the share is 1 / H(n). Continuous batching fills a free slot in
    the next step: 1.0 while requests wait.
    """
    return 1.0 / sum(1.0 / slot for slot in range(1, batch + 1))


def _shares(floor: Least, seconds: float, tokens: int) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "flop_per_byte": floor.flops / floor.bytes,
        "flop_per_s": floor.flops / seconds,
        "peak_share": floor.compute_s / seconds,
        "bandwidth_share": floor.memory_s / seconds,
        "bound": bound_by(floor, seconds),
    }


def result(name: str, model: ModelSpec, gpu: GpuSpec, rows: Sequence[dict[str, Any]]) -> Result:
    """Compare the phases. The ratios refer to the first decode row."""
    alone = next(row for row in rows if row["phase"] == DECODE)
    for row in rows:
        row["ratio"] = row["tokens_per_s"] / alone["tokens_per_s"]
    # The sentence contrasts the best prefill with one decode step.
    short = rows[0]
    best = max((r for r in rows if r["phase"] == PREFILL), key=lambda r: float(r["tokens_per_s"]))
    ridge = gpu.peak_flops / gpu.bandwidth
    facts = {
        "ridge_flop_per_byte": ridge,
        "peak_flops": gpu.peak_flops,
        "bandwidth_bytes_per_s": gpu.bandwidth,
        "weight_bytes": model.weight_bytes,
        "prefill_tokens_per_s": best["tokens_per_s"],
        "decode_tokens_per_s": alone["tokens_per_s"],
        "prefill_to_decode": best["ratio"],
    }
    sentence = (
        f"Prefill computes {best['tokens_per_s']:,.0f} tokens/s at {best['prompt_tokens']:,} "
        f"tokens, {ratio(best['ratio'])} what a batch of {alone['batch']} decodes "
        f"({alone['tokens_per_s']:,.0f}). The ridge point of {gpu.name} is {ridge:,.0f} FLOP/byte. "
        f"A prefill of {short['prompt_tokens']:,} tokens has {short['flop_per_byte']:,.0f} and is "
        f"bound by {short['bound']}. A token of a batch of {alone['batch']} has "
        f"{alone['flop_per_byte']:.2f} and is bound by {alone['bound']}."
    )
    # The notes state the assumptions of the FLOPs and of the static batch.
    notes = [
        "FLOPs and bytes are the least that the phase needs; overhead: below 40 % of the roof",
        "static batch: share of slots that decode where a batch waits for its longest answer "
        "(exponential lengths, 1/H(batch)); vLLM's continuous batching refills a slot at once",
    ]
    plot = roofline_plot(gpu, rows)
    return Result("phases", name, sentence, COLUMNS, rows, facts, plot, notes)


def roofline_plot(gpu: GpuSpec, rows: Sequence[Mapping[str, Any]]) -> str:
    """Reached FLOP/s against FLOP per byte, under the roof of the data sheet."""
    ridge = gpu.peak_flops / gpu.bandwidth
    places = [(row["flop_per_byte"], row["flop_per_s"]) for row in rows]
    low, high = min(x for x, _ in places) / 2, max(x for x, _ in places) * 2
    roof = [(x, min(gpu.peak_flops, x * gpu.bandwidth)) for x in (low, ridge, max(high, ridge * 2))]
    series = [
        Series(phase, [p for p, row in zip(places, rows, strict=True) if row["phase"] == phase])
        for phase in (PREFILL, DECODE)
    ]
    x, y = Axis("FLOP per byte", count_label), Axis("FLOP/s", tera_label)
    return document(
        Panel([*series, Series(f"roof of {gpu.name}", (), roof)], x, y, (ridge, "ridge"))
    )


def tera_label(flops: float) -> str:
    return f"{flops / 1e12:g} T"
