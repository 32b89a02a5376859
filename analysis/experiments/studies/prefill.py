"""The study `prefill`: TTFT against prompt length, and where the quadratic term leads."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Annotated, Any

import typer

from forebay.analysis.charts.panels import Series, xy_plot
from forebay.analysis.experiments.result import Column, Result
from forebay.analysis.experiments.study import Batched, Lengths, Study, integers, study
from forebay.analysis.experiments.target import About, Ask, StudyTarget
from forebay.analysis.statistics.fitting import fit_terms
from forebay.analysis.statistics.units import duration
from forebay.replay.engine.timing.roofline import bound_by, least
from forebay.replay.engine.timing.step_time import StepWork
from forebay.traces.errors import InputError

HELP = """TTFT of a single request against its prompt length, without cache hits.

Fits fixed + linear + quadratic seconds and finds the length above which the
quadratic term is the largest.

Example:  forebay experiment prefill --target sim:phi-3-mini@h200-nvl --out runs/prefill
"""
LENGTHS = "1k,2k,4k,8k,16k,32k,64k,96k,128000"
LEAST_LENGTHS = 3  # the curve has three terms
COLUMNS = (
    Column("prompt_tokens", "prompt", "count"),
    Column("ttft_s", "TTFT"),
    Column("fitted_s", "fitted"),
    Column("lowest_s", "lowest", shown=False),
    Column("highest_s", "highest", shown=False),
    Column("tokens_per_s", "tokens/s", "count"),
    Column("peak_share", "of peak", "share"),
    Column("bound", "bound by", "text"),
)


@study("prefill")
def command(
    options: Study,
    lengths: Lengths = LENGTHS,
    repeats: Annotated[int, typer.Option(min=1, help="Requests of each length.")] = 3,
    max_num_batched_tokens: Batched = None,
) -> None:
    tokens = integers(lengths, "--lengths")
    if len(tokens) < LEAST_LENGTHS:
        raise InputError(
            f"--lengths {lengths}: give {LEAST_LENGTHS} lengths or more, to fit a curve"
        )

    async def work() -> Result:
        async with options.open(batched=max_num_batched_tokens) as server:
            settings = options.settings(server, repeats=repeats)
            return await prefill(server, tokens, repeats, settings)

    options.finish(work())


async def prefill(
    server: StudyTarget, lengths: Sequence[int], repeats: int, settings: dict[str, Any]
) -> Result:
    """Send `repeats` prompts of every length, one request at a time."""
    about = server.about
    usable = [n for n in lengths if about.context is None or n < about.context]
    if len(usable) < LEAST_LENGTHS:
        raise InputError(
            f"--lengths: only {len(usable)} of them fit in the context of {about.context:,} "
            f"tokens; give {LEAST_LENGTHS} or more that do"
        )
    rows = []
    for tokens in usable:
        answers = []
        for number in range(repeats):
            answers += await server.run([Ask(f"prompt of {tokens}, {number}", tokens, 1)])
        times = [answer.ttft_s for answer in answers]
        prompt = round(median(answer.prompt_tokens for answer in answers))
        row = {
            "prompt_tokens": prompt,
            "cached_tokens": max(answer.cached_tokens for answer in answers),
            "ttft_s": median(times),
            "lowest_s": min(times),
            "highest_s": max(times),
        }
        rows.append(row | _shares(about, prompt, median(times)))
    return _result(about, rows, len(lengths) - len(usable), settings)


def _shares(about: About, tokens: int, ttft_s: float) -> dict[str, Any]:
    shares: dict[str, Any] = {"tokens_per_s": tokens / ttft_s}
    if about.model is not None and about.gpu is not None:
        work = StepWork(tokens, 1, 1, chunks=[(tokens, 0)])
        floor = least(about.model, about.gpu, [work])
        shares["peak_share"] = floor.compute_s / ttft_s
        shares["bound"] = bound_by(floor, ttft_s)
    return shares


def _result(
    about: About, rows: list[dict[str, Any]], left_out: int, settings: dict[str, Any]
) -> Result:
    xs = [float(row["prompt_tokens"]) for row in rows]
    # Attention grows with the square of the length, everything else linearly.
    (fixed_s, linear_s, square_s), worst = fit_terms(xs, [row["ttft_s"] for row in rows], (0, 1, 2))
    crossover = linear_s / square_s if square_s > 0 else math.inf
    for row in rows:
        n = row["prompt_tokens"]
        row["fitted_s"] = fixed_s + linear_s * n + square_s * n * n
    notes = []
    if left_out:
        notes.append(f"{left_out} lengths were skipped: longer than {about.context:,} tokens")
    if any(row["cached_tokens"] for row in rows):
        notes.append("the server reports prefix cache hits: some prefills were not cold")
    if about.model is None or about.gpu is None:
        notes.append("shares of peak need a known --model and --gpu")
    longest = rows[-1]
    # The sentence gives the formula, its crossover, and the resource that binds.
    words = (
        f"TTFT = {duration(fixed_s)} + {linear_s * 1e6:.1f} µs per token + "
        f"{square_s * 1e12:,.0f} ps per token squared (worst error {worst:.1%}). "
    )
    if math.isfinite(crossover):
        words += f"The quadratic term exceeds the linear one from {crossover:,.0f} tokens"
    else:
        words += "No quadratic term was found at these lengths"
    if "bound" in longest:
        words += (
            f". At {longest['prompt_tokens']:,} tokens a prefill is bound by {longest['bound']}, "
            f"{longest['peak_share']:.0%} of peak FLOP/s"
        )
    facts = {
        "fixed_s": fixed_s,
        "linear_s_per_token": linear_s,
        "quadratic_s_per_token2": square_s,
        "crossover_tokens": crossover if math.isfinite(crossover) else None,
        "worst_error": worst,
    }
    return Result(
        "prefill", about.name, words + ".", COLUMNS, rows, facts, _plot(rows, facts), notes,
        settings,
    )  # fmt: skip


def _plot(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    low, high = rows[0]["prompt_tokens"], rows[-1]["prompt_tokens"]
    places = [low * (high / low) ** (i / 60) for i in range(61)]
    a, b, c = (facts[k] for k in ("fixed_s", "linear_s_per_token", "quadratic_s_per_token2"))
    series = [
        Series("measured, with the fit", [(r["prompt_tokens"], r["ttft_s"]) for r in rows],
               [(n, a + b * n + c * n * n) for n in places])
    ]  # fmt: skip
    crossover = facts["crossover_tokens"]
    note = (crossover, "quadratic leads") if crossover else None
    return xy_plot(series, "prompt tokens", "TTFT", note)
