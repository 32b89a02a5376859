"""The study `kv`: predicted KV-cache use against the reported use, until it is full.

A full cache does not run out of memory: vLLM queues requests, or preempts and recomputes them.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from forebay.analysis.charts.panels import (
    Axis,
    Panel,
    Series,
    count_label,
    document,
    share_label,
)
from forebay.analysis.experiments.gauges import GaugeSample, Pool
from forebay.analysis.experiments.http_system import http_ways
from forebay.analysis.experiments.result import Column, Result
from forebay.analysis.experiments.study import Study, study
from forebay.analysis.experiments.systems import IN_TURN, PlayedLoad, Seen, SimWay, Way
from forebay.analysis.experiments.target import SIM, StudyFailed
from forebay.analysis.kv.plan import Choices, Plan, choose_gpu, make_plan
from forebay.replay.sim.scenario import DIRECT, Scenario
from forebay.traces.errors import InputError
from forebay.traces.schema import TraceRequest

HELP = """Predicted against reported KV-cache use, and the point where the cache is
full.

Sends 1, 2 ... long requests at once until more do not fit. The prediction is
that of `forebay kv`. For a URL, give --gpu and the flags of the server.

Example:  forebay experiment kv --target sim:phi-3-mini@h200-nvl --out runs/kv
"""
BEYOND = 2  # requests beyond those that fit, to see that they wait
MOST = 256  # requests at once for a server whose max_num_seqs is unknown
LEVELS = 6
BATCHED, SEATS = 8192, 256
COLUMNS = (
    Column("requests", "requests", "count"),
    Column("predicted_share", "predicted", "share"),
    Column("reported_share", "reported", "share"),
    Column("running", "running", "count"),
    Column("waiting", "waiting", "count"),
    Column("preempted", "preempted", "count"),
    Column("predicted_tokens", "predicted tokens", "count", shown=False),
    Column("reported_tokens", "reported tokens", "count", shown=False),
    Column("failed", "failed", "count", shown=False),
    Column("together", "together", "text", shown=False),
)


@study("kv")
def command(
    options: Study,
    prompt_tokens: Annotated[
        int, typer.Option(min=16, help="Prompt tokens of each long request.")
    ] = 32_000,
    output_tokens: Annotated[
        int, typer.Option(min=2, help="Output tokens of every request.")
    ] = 512,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="The server's value.")
    ] = BATCHED,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="The server's value.")] = SEATS,
    gpu_memory_utilization: Annotated[float, typer.Option(help="The server's value.")] = 0.9,
    kv_cache_dtype: Annotated[str, typer.Option(help="The server's value: auto or fp8.")] = "auto",
) -> None:
    choices = Choices(
        kv_cache_dtype=kv_cache_dtype,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )

    async def work() -> Result:
        way = await _way(options, choices)
        pool, length = way.pools[0], prompt_tokens + output_tokens
        room = way.about.context
        # Reject loads that cannot fill the cache before anything is measured.
        if room is not None and length > room:
            raise InputError(
                f"--prompt-tokens {prompt_tokens}: longer than {room} tokens with its output"
            )
        plan = predicted_plan(options, way, choices)
        fit = requests_that_fit(pool, length)
        if not fit:
            raise InputError(
                f"--prompt-tokens {prompt_tokens}: the KV cache has only {pool.tokens} tokens"
            )
        if fit + BEYOND > (way.max_num_seqs or MOST):
            raise InputError(
                f"--prompt-tokens {prompt_tokens}: {fit} requests of that length fit, more than "
                f"may run at once ({way.max_num_seqs or MOST}); give longer prompts"
            )
        # Every count of requests is a load of its own, up to a few beyond the full cache.
        rows = []
        for count in counts(fit):
            trace = [
                TraceRequest(f"{count}-{i}", 0.0, prompt_tokens, output_tokens)
                for i in range(count)
            ]
            (load,) = await way.play(f"kv-{count}", trace)
            rows.append(table_row(load, pool, prompt_tokens, length))
        needed = tokens_needed(fit, prompt_tokens, max_num_batched_tokens)
        more = needed if output_tokens < needed else None
        return result(way, plan, pool, rows, length, options.settings(), more)

    options.finish(work())


async def _way(options: Study, choices: Choices) -> Way:
    (target,) = options.targets
    if not target.startswith(SIM):
        (way,) = await http_ways(options, [("target", [target])], ())
        if not way.pools:
            raise InputError(
                f"--target {target}: no vllm:cache_config_info on /metrics; give the URL of the "
                "engine itself, because a proxy does not pass it on"
            )
        return way
    if choices.kv_cache_dtype != "auto" or choices.gpu_memory_utilization != 0.9:
        raise InputError("--kv-cache-dtype, --gpu-memory-utilization: fixed for a sim: target")
    config = options.engine(target, choices.max_num_batched_tokens, choices.max_num_seqs)
    return SimWay(IN_TURN, Scenario(config, 1, DIRECT), target, watched=True)


def predicted_plan(options: Study, way: Way, choices: Choices) -> Plan | None:
    """The computed size of the cache, or None if the model or the GPU is not known."""
    if way.about.model is None or way.about.gpu is None:
        return None
    gpu = choose_gpu(way.about.gpu.name, way.about.gpu.memory_gib)
    return make_plan(way.about.model.shape, gpu, choices)


def requests_that_fit(pool: Pool, length: int) -> int:
    """Whole requests of `length` tokens in the usable blocks, that is, all but the null block."""
    return (pool.blocks - 1) // -(-length // pool.block_tokens)


def tokens_needed(fit: int, prompt_tokens: int, batched_tokens: int) -> int:
    """Output tokens of the first request while the prompts of the others are computed.

    Each step makes one token of every answer, and computes prompts with the rest of its budget.
    """
    return 1 + -(-(fit - 1) * prompt_tokens // max(1, batched_tokens - fit))


def counts(fit: int) -> list[int]:
    """The numbers of requests to try: a few steps up to `fit`, then one by one beyond it."""
    steps = {max(1, round(fit * i / (LEVELS - 1))) for i in range(LEVELS)}
    return sorted(steps | {fit + extra for extra in range(1, BEYOND + 1)})


def table_row(load: PlayedLoad, pool: Pool, prompt_tokens: int, length: int) -> dict[str, Any]:
    if not load.samples:
        raise StudyFailed("the engine's /metrics no longer has vllm:kv_cache_usage_perc")
    usable, count = pool.blocks - 1, len(load.seen)
    fit = requests_that_fit(pool, length)
    let_in = min(count, usable // -(-prompt_tokens // pool.block_tokens))
    predicted = min(1.0, let_in * -(-length // pool.block_tokens) / usable)
    reported = max(sample.kv_share for sample in load.samples)
    before = min(sample.preemptions for sample in load.samples)
    return {
        "requests": count,
        "predicted_share": predicted,
        "reported_share": reported,
        "predicted_tokens": predicted * usable * pool.block_tokens,
        "reported_tokens": reported * usable * pool.block_tokens,
        "running": max(sample.running for sample in load.samples),
        "waiting": max((sample.waiting for sample in settled(load)), default=0),
        "preempted": max(sample.preemptions for sample in load.samples) - before,
        "failed": sum(not reply.ok for reply in load.seen),
        "together": were_together(load.seen, fit),
    }


def were_together(seen: Sequence[Seen], fit: int) -> bool:
    """True if the first `fit` answers had all begun before any ended."""
    begun = sorted(reply.due_s + reply.ttft_s for reply in seen if reply.ttft_s is not None)[:fit]
    ended = min((reply.done_s for reply in seen if reply.done_s is not None), default=0.0)
    return not begun or begun[-1] <= ended


def settled(load: PlayedLoad) -> Sequence[GaugeSample]:
    """The samples with the most running requests. Before, requests wait for their prefill."""
    most = max(sample.running for sample in load.samples)
    first = next(sample.at_s for sample in load.samples if sample.running == most)
    return [sample for sample in load.samples if sample.at_s >= first and sample.running == most]


def full_at(rows: Sequence[dict[str, Any]], a_request: float) -> int | None:
    """The first number of requests of which some waited or were preempted for lack of KV blocks.

    `a_request` is the share of the cache that one request uses. If more than that was free, they
    waited for another reason. The result is None if the cache was never full.
    """
    for row in rows:
        held_back = row["running"] < row["requests"] or row["preempted"]
        if held_back and row["reported_share"] > 1 - a_request:
            return int(row["requests"])
    return None


def result(
    way: Way, plan: Plan | None, pool: Pool, rows: list[dict[str, Any]], length: int,
    settings: dict[str, Any], more_output: int | None = None,
) -> Result:  # fmt: skip
    """Compare the rows with the prediction.

    Args:
        more_output: output tokens that it takes to have all requests together, if that is more
            than each had.
    """
    fit = requests_that_fit(pool, length)
    by_arithmetic = plan.budget.pool_tokens(plan.max_model_len) if plan else None
    error = by_arithmetic / pool.tokens - 1 if by_arithmetic else None
    a_request = -(-length // pool.block_tokens) / (pool.blocks - 1)
    # The prediction is judged only by rows that fit and whose requests ran together.
    full, apart = full_at(rows, a_request), [
        abs(row["predicted_share"] - row["reported_share"])
        for row in rows
        if row["requests"] <= fit and row["together"]
    ]  # fmt: skip
    facts: dict[str, Any] = {
        "predicted_pool_tokens": by_arithmetic,
        "reported_pool_tokens": pool.tokens,
        "pool_error": error,
        "predicted_full_at": fit + 1,
        "reported_full_at": full,
        "worst_share_error": max(apart),
    }
    # Notes say which parts of the prediction were not tested.
    notes = []
    if plan is None:
        notes.append(
            "the size of the cache was not predicted, because that needs a known --model and --gpu;"
            " use is predicted from the reported size"
        )
    if way.about.name.startswith(SIM):
        notes.append(
            "the simulated engine computes its cache with the same arithmetic, so only the use is "
            "checked, not the size"
        )
    apart_from = [row["requests"] for row in rows if not row["together"]]
    if apart_from and apart_from[0] <= fit:
        notes.append(
            f"rows from {apart_from[0]:,} requests on do not count: some requests had ended before "
            "the answers to others began"
        )
    if failed := sum(row["failed"] for row in rows):
        notes.append(f"{failed} requests failed")
    words = _sentence(facts, rows, length, pool.tokens, more_output if apart_from else None)
    return Result(
        "kv", way.about.name, words, COLUMNS, rows, facts, _plot(rows, fit), notes, settings
    )


def _sentence(
    facts: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    length: int,
    tokens: int,
    more_output: int | None,
) -> str:
    words = f"The KV cache holds {tokens:,} tokens"
    if facts["predicted_pool_tokens"] is not None:
        words += f" (predicted {facts['predicted_pool_tokens']:,}, {facts['pool_error']:+.1%})"
    words += f". Its use was predicted within {facts['worst_share_error'] * 100:.1f} points"
    predicted, full = facts["predicted_full_at"], facts["reported_full_at"]
    # The cache was never full: either the study was too short or the prediction is wrong.
    if full is None and more_output is not None:
        return (
            f"{words}. Where it is full was not seen, because the first requests had ended before "
            f"the last were prefilled: give --output-tokens {more_output} or more."
        )
    if full is None:
        last = rows[-1]
        words += f". {predicted:,} requests of {length:,} tokens should have filled it and did not"
        if last["running"] < last["requests"]:
            return (
                f"{words}: max_num_seqs let only {last['running']:,} run, or a step has fewer "
                "tokens than --max-num-batched-tokens says."
            )
        return f"{words}, nor with {last['requests']:,}."
    # The cache was full: compare the count, and describe the fate of the rest.
    agrees = "as predicted" if full == predicted else f"against {predicted:,} predicted"
    preempted = rows[-1]["preempted"]
    then = "the rest waited"
    if preempted:
        then = f"{preempted:,} {'was' if preempted == 1 else 'were'} preempted"
    words += f". It was full with {full:,} requests of {length:,} tokens, {agrees}. "
    if rows[-1]["failed"]:
        return f"{words}Then {rows[-1]['failed']:,} requests failed."
    return f"{words}Then {then} and nothing ran out of memory."


def _plot(rows: Sequence[dict[str, Any]], fit: int) -> str:
    def of(key: str) -> list[tuple[float, float]]:
        return [(float(row["requests"]), row[key]) for row in rows]

    series = [
        Series("predicted", (), of("predicted_share")),
        Series("reported peak", of("reported_share")),
    ]
    x = Axis("requests at once", count_label, log=False)
    y = Axis("KV cache in use", share_label, log=False)
    return document(Panel(series, x, y, (float(fit), "last that fits")))
