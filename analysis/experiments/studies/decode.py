"""The study `decode`: time per output token against output length and batch."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

import typer

from forebay.analysis.charts.panels import Series, xy_plot
from forebay.analysis.experiments.result import Column, Result
from forebay.analysis.experiments.study import Batched, PromptTokens, Study, integers, study
from forebay.analysis.experiments.target import About, Ask, MeasuredAnswer, StudyFailed, StudyTarget
from forebay.analysis.statistics.fitting import fit_terms
from forebay.analysis.statistics.units import duration
from forebay.replay.engine.timing.roofline import bound_by, least
from forebay.replay.engine.timing.step_time import StepWork

HELP = """Time per output token against output length (one request) and batch size.

Fits seconds per token and fixed seconds per request, and names the resource
that limits decoding.

Example:  forebay experiment decode --target sim:phi-3-mini@h200-nvl --out runs/decode
"""
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


@study("decode")
def command(
    options: Study,
    lengths: Annotated[
        str, typer.Option(help="Output tokens of a single request; k is 1,024.")
    ] = "128,256,512,1k,2k",
    batches: Annotated[
        str, typer.Option(help="Numbers of equal requests at once.")
    ] = "1,2,4,8,16,32,64",
    batch_output_tokens: Annotated[
        int, typer.Option(min=8, help="Output tokens of each request in a batch.")
    ] = 256,
    prompt_tokens: PromptTokens = 1000,
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs of each load; the median is reported.")
    ] = 3,
    max_num_batched_tokens: Batched = None,
) -> None:
    loads = [(1, n) for n in integers(lengths, "--lengths")]
    loads += [(b, batch_output_tokens) for b in integers(batches, "--batches")]

    async def work() -> Result:
        async with options.open(batched=max_num_batched_tokens) as server:
            settings = options.settings(server, repeats=repeats)
            return await decode(
                server, list(dict.fromkeys(loads)), prompt_tokens, batch_output_tokens, repeats,
                settings,
            )  # fmt: skip

    options.finish(work())


async def decode(
    server: StudyTarget,
    loads: Sequence[tuple[int, int]],
    prompt_tokens: int,
    batch_output: int,
    repeats: int,
    settings: dict[str, Any],
) -> Result:
    """Run every (batch, output tokens) of `loads`. A batch is sent at once."""
    rows = []
    for batch, output in sorted(loads):
        seen = []
        for number in range(repeats):
            asks = [
                Ask(f"batch of {batch}, {number}.{i}", prompt_tokens, output) for i in range(batch)
            ]
            seen.append(_measured(await server.run(asks)))
        row: dict[str, Any] = {"batch": batch, "output_tokens": output}
        for key in ("tpot_s", "steady_itl_s", "e2e_s"):
            values = [value for measured in seen if (value := measured[key]) is not None]
            row[key] = median(values) if values else None
        itl = row["steady_itl_s"] or row["tpot_s"]
        row["tokens_per_s"] = batch / itl
        rows.append(row | _shares(server.about, batch, prompt_tokens + output // 2, itl))
    return _result(server.about, rows, batch_output, settings)


def _measured(answers: list[MeasuredAnswer]) -> dict[str, float | None]:
    """Medians over the requests of a load. ITL counts only while all of them decode."""
    tpots, e2es, gaps = [], [], list[float]()
    for answer in answers:
        _ = answer.ttft_s  # raises StudyFailed if it was not answered
        if answer.latency.tpot_s is None or answer.latency.e2e_service_s is None:
            raise StudyFailed(f"{answer.ask.name}: fewer tokens than requested")
        tpots.append(answer.latency.tpot_s)
        e2es.append(answer.latency.e2e_service_s)
    first = max(answer.events_s[0] for answer in answers)
    last = min(answer.events_s[-1] for answer in answers)
    for answer in answers:
        gaps += [b - a for a, b in pairwise(answer.events_s) if a >= first and b <= last]
    return {
        "tpot_s": median(tpots),
        "e2e_s": median(e2es),
        # The mean, because the median halves when two tokens arrive in one read.
        "steady_itl_s": sum(gaps) / len(gaps) if gaps else None,
    }


def _shares(about: About, batch: int, context: int, itl_s: float) -> dict[str, Any]:
    if about.model is None or about.gpu is None:
        return {}
    work = StepWork(batch, batch, batch, decode_context=batch * context)
    floor = least(about.model, about.gpu, [work])
    return {
        "bandwidth_share": floor.memory_s / itl_s,
        "peak_share": floor.compute_s / itl_s,
        "bound": bound_by(floor, itl_s),
    }


def _result(
    about: About, rows: list[dict[str, Any]], batch_output: int, settings: dict[str, Any]
) -> Result:
    alone = [row for row in rows if row["batch"] == 1]
    batches = [row for row in rows if row["output_tokens"] == batch_output]
    measured = [(float(r["batch"]), float(r["steady_itl_s"] or r["tpot_s"])) for r in batches]
    facts: dict[str, Any] = {}
    words = _cost_alone(alone, facts) + _gain_of_batches(batches, facts)
    curve = _fitted_curve(measured, facts) if len(batches) > 2 else []
    notes = []
    if not (about.gpu and about.model):
        notes.append("shares of bandwidth and FLOP/s need a known --model and --gpu")
    series = [Series(f"{batch_output} output tokens", measured, curve)]
    plot = xy_plot(series, "requests at once", "time between tokens")
    sentence = ". ".join(words) + "."
    return Result("decode", about.name, sentence, COLUMNS, rows, facts, plot, notes, settings)


def _cost_alone(alone: list[dict[str, Any]], facts: dict[str, Any]) -> list[str]:
    """Describe one request alone, and add its fitted costs to `facts`."""
    words = []
    if len(alone) > 1:
        outputs = [float(row["output_tokens"]) for row in alone]
        (fixed_s, token_s), worst = fit_terms(outputs, [row["e2e_s"] for row in alone], (0, 1))
        facts |= {"fixed_s_per_request": fixed_s, "s_per_token": token_s, "worst_error": worst}
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


def _gain_of_batches(batches: list[dict[str, Any]], facts: dict[str, Any]) -> list[str]:
    """Compare the largest batch with the smallest, and add the gain to `facts`."""
    if len(batches) < 2:
        return []
    few, many = batches[0], batches[-1]
    gain = many["tokens_per_s"] / few["tokens_per_s"]
    facts["throughput_gain"] = gain
    text = (
        f"A batch of {many['batch']} generates {gain:.1f}× as many tokens per second as a batch "
        f"of {few['batch']}"
    )
    if "bound" in many:
        text += f", bound by {many['bound']} at {many['bandwidth_share']:.0%} of bandwidth"
    return [text]


def _fitted_curve(
    measured: list[tuple[float, float]], facts: dict[str, Any]
) -> list[tuple[float, float]]:
    """Fit a line to (batch, ITL), add its terms to `facts`, and return points to plot."""
    (step_s, more_s), _ = fit_terms([x for x, _ in measured], [y for _, y in measured], (0, 1))
    facts |= {"itl_s": step_s, "itl_s_per_request": more_s}
    low, high = measured[0][0], measured[-1][0]
    places = [low * (high / low) ** (i / 60) for i in range(61)]
    return [(n, step_s + more_s * n) for n in places]
