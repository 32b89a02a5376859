"""The study `memory`: KV cache in pages against a reserved cache, by concurrency and length."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from forebay.analysis.charts.panels import Axis, Panel, Series, count_label, document
from forebay.analysis.experiments.result import Column, Result
from forebay.analysis.experiments.study import Study, integers, study
from forebay.analysis.experiments.target import SIM
from forebay.analysis.kv.plan import Choices, Plan, check_fits, choose_gpu, make_plan
from forebay.replay.engine.flags import GpuMemoryUtilization
from forebay.replay.engine.hardware.specs import GIB
from forebay.traces.errors import InputError

HELP = """Memory of requests in pages (vLLM) against a fixed reservation of
max_model_len each.

Arithmetic for a sim: target, nothing is sent: how many requests fit, how much a
reservation wastes, activations, and the attention matrix that FlashAttention
never stores.

Example:  forebay experiment memory --target sim:llama-3-8b@h200 --used-tokens 512 --out runs/memory
"""
SCORE_BYTES = 4  # attention scores are computed in 32 bits
COLUMNS = (
    Column("max_model_len", "max_model_len", "count"),
    Column("reserved_gib", "GiB reserved", "figure"),
    Column("paged_gib", "GiB paged", "figure"),
    Column("saved_share", "saved", "share"),
    Column("reserved_at_once", "at once", "count"),
    Column("paged_at_once", "paged", "count"),
    Column("gain", "gain", "ratio"),
    Column("activation_gib", "activation", "figure"),
    Column("matrix_gib", "matrix", "figure"),
    Column("matrix_layer_gib", "matrix of a layer GiB", "figure", shown=False),
    Column("matrix_head_gib", "matrix of a head GiB", "figure", shown=False),
)


@study("memory")
def command(
    options: Study,
    max_model_lens: Annotated[
        str, typer.Option(help="Tokens that are reserved for a request; k is 1,024.")
    ] = "2k,4k,8k,16k,32k",
    used_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that a request has on average.")
    ] = 512,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the columns in GiB.")] = 100,
    gpu_memory_utilization: GpuMemoryUtilization = 0.9,
) -> None:
    (target,) = options.targets
    if not target.startswith(SIM):
        raise InputError(f"--target {target}: memory is arithmetic; give sim:MODEL@GPU")
    config = options.engine(target)
    gpu = choose_gpu(config.gpu_spec.name, config.gpu_spec.memory_gib)
    choices = Choices(gpu_memory_utilization=gpu_memory_utilization)
    plan = make_plan(config.model_spec.shape, gpu, choices)
    check_fits(plan, used_tokens)
    lengths = integers(max_model_lens, "--max-model-lens")
    longest = plan.shape.max_model_len
    if used_tokens > lengths[0] or lengths[-1] > longest:
        raise InputError(
            f"--max-model-lens {max_model_lens}: give lengths from --used-tokens {used_tokens} "
            f"to {longest}"
        )
    rows = [table_row(plan, length, used_tokens, requests) for length in lengths]

    async def work() -> Result:
        return result(target, plan, rows, used_tokens, requests, options.settings())

    options.finish(work())


def table_row(plan: Plan, length: int, used: int, requests: int) -> dict[str, Any]:
    """Compare `requests` of `used` tokens in pages with as many reservations of `length`."""
    layout, shape = plan.budget.layout, plan.shape
    reserved = layout.request_blocks(length) * layout.block_bytes
    paged = layout.request_blocks(used) * layout.block_bytes
    alone = Choices(max_num_batched_tokens=length, max_num_seqs=1)
    head = SCORE_BYTES * length * length
    fit, more = plan.budget.whole_requests(length), plan.budget.whole_requests(used)
    return {
        "max_model_len": length,
        "used_tokens": used,
        "requests": requests,
        "reserved_gib": requests * reserved / GIB,
        "paged_gib": requests * paged / GIB,
        "saved_share": 1 - paged / reserved,
        "reserved_at_once": fit,
        "paged_at_once": more,
        "gain": more / fit if fit else None,
        "activation_gib": make_plan(shape, plan.gpu, alone).budget.activation / GIB,
        "matrix_head_gib": head / GIB,
        "matrix_layer_gib": head * shape.heads / GIB,
        "matrix_gib": head * shape.heads * shape.layers / GIB,
    }


def result(
    target: str, plan: Plan, rows: list[dict[str, Any]], used: int, requests: int,
    settings: dict[str, Any],
) -> Result:  # fmt: skip
    """The table of all lengths, with a sentence on the first."""
    first = rows[0]
    gain = f"{first['gain']:.1f} times as many" if first["gain"] else "others do not fit"
    sentence = (
        f"{requests:,} requests of {used:,} tokens take {first['paged_gib']:.2f} GiB in pages and "
        f"{first['reserved_gib']:.2f} GiB with {first['max_model_len']:,} tokens reserved for each "
        f"({first['saved_share']:.1%} saved). Beside the weights "
        f"{first['paged_at_once']:,} fit in pages, {gain}."
    )
    layout = plan.budget.layout
    facts = {
        "bytes_per_token": layout.bytes_per_token,
        "pool_gib": plan.budget.pool / GIB,
        "weights_gib": plan.budget.weights / GIB,
        "step_activation_gib": plan.budget.activation / GIB,
    }
    notes = [
        f"GiB of {requests:,} requests, reserved and in pages; at once: whole requests in the "
        f"{facts['pool_gib']:.1f} GiB beside the weights",
        "activation, GiB: the peak of a step with one whole prompt of max_model_len; vLLM reserves "
        f"it once for a step ({facts['step_activation_gib']:.2f} GiB), not for each request",
        "matrix, GiB: 32-bit attention scores of all heads and layers; FlashAttention stores none",
    ]
    plot = _plot(plan, rows, used)
    return Result("memory", target, sentence, COLUMNS, rows, facts, plot, notes, settings)


def _plot(plan: Plan, rows: Sequence[dict[str, Any]], used: int) -> str:
    most = min(rows[0]["paged_at_once"], 4 * max(1, rows[0]["reserved_at_once"]))
    pool = plan.budget.pool / GIB
    series = [
        Series(f"in pages, {used:,} used", (), _line(rows[0]["paged_gib"], rows[0], most, pool))
    ]
    for row in rows[::2][:3]:
        name = f"{row['max_model_len']:,} reserved"
        series.append(Series(name, (), _line(row["reserved_gib"], row, most, pool)))
    lengths = [
        Series(name, points, points)
        for name, key in (("in pages", "paged_at_once"), ("reserved", "reserved_at_once"))
        if (points := [(float(r["max_model_len"]), float(r[key])) for r in rows if r[key]])
    ]
    at_once = Axis("requests at once", count_label, log=False)
    return document(
        Panel(series, at_once, Axis("GiB of KV cache", count_label, log=False)),
        Panel(
            lengths,
            Axis("max_model_len", count_label),
            Axis("requests at once", count_label),
            key_left=True,
        ),
    )


def _line(gib: float, row: dict[str, Any], most: int, pool: float) -> list[tuple[float, float]]:
    """Memory against concurrency, up to the end of the pool."""
    each = gib / row["requests"]
    last = min(float(most), pool / each)
    return [(0.0, 0.0), (last, last * each)]
