"""Print a memory budget, or its comparison with a log. Only units and shares are computed here."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forebay.analysis.kv.plan import Plan
from forebay.analysis.kv.verify import CacheCheck, parts
from forebay.analysis.statistics.units import NONE, printable
from forebay.replay.engine.hardware.specs import GIB

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NO_GRAPHS = (
    "vLLM 0.21 and later also reserves memory for CUDA graphs; the amount depends on the model "
    "(1.3 GiB in vllm-project/vllm#50722): give yours with --cuda-graph-gib. Utilisation defaults "
    "to 0.9 here and up to vLLM 0.19, to 0.92 in 0.28."
)
_LABELS = {
    "weights": "weights, GiB",
    "activation": "activation peak, GiB",
    "non_torch": "outside torch, GiB",
    "cuda_graphs": "CUDA graphs, GiB",
    "kv_cache": "KV cache, GiB",
}


def as_json(plan: Plan, lengths: Sequence[int]) -> dict[str, Any]:
    """The plan as plain data: bytes, blocks, tokens."""
    budget, options, layout = plan.budget, plan.options, plan.budget.layout
    return {
        "model": plan.shape.name,
        "attention": plan.shape.attention,
        "weights_source": plan.shape.weights_source,
        "gpu": plan.gpu.name,
        "gpu_memory_gib": plan.gpu.gib,
        "tensor_parallel": options.tensor_parallel,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": plan.max_model_len,
        "block_size": layout.block_size,
        "kv_value_bytes": options.value_bytes,
        "bytes_per_token": layout.bytes_per_token,
        "state_bytes": layout.state_bytes,
        "bytes": {
            "requested": round(budget.requested),
            "weights": round(budget.weights),
            "adapters": budget.adapters,
            "activation": round(budget.activation),
            "non_torch": round(budget.non_torch),
            "cuda_graphs": round(budget.cuda_graphs),
            "pool": round(budget.pool),
        },
        "blocks": budget.blocks,
        "pool_tokens": budget.pool_tokens(plan.max_model_len),
        "longest_request_tokens": budget.longest(plan.max_model_len),
        "least_gpu_memory_utilization": _share(plan, plan.max_model_len),
        "concurrency": [
            {
                "tokens": length,
                "kv_bytes": layout.request_blocks(length) * layout.block_bytes,
                "requests": round(budget.concurrency(length), 4),
                "whole_requests": budget.whole_requests(length),
                "least_gpu_memory_utilization": _share(plan, length),
            }
            for length in lengths
        ],
    }


def _share(plan: Plan, tokens: int) -> float | None:
    """The least utilisation for one request of `tokens`, or None if it never fits."""
    share = plan.budget.least_utilization(tokens)
    return share if share <= 1 else None


def print_plan(plan: Plan, lengths: Sequence[int], console: "Console") -> None:
    """Print the budget in GiB, the concurrency at each length, and the longest request."""
    from rich.text import Text

    console.print(Text(_title(plan), style="bold"))
    # First the memory budget of one GPU.
    lines = _table("GiB", label="one GPU")
    lines.add_column("", overflow="fold")
    for label, size, note in _lines(plan):
        lines.add_row(Text(label), f"{size / GIB:,.2f}", Text(note, style="dim"))
    console.print(lines)
    # Then the requests that fit, by their length.
    table = _table("tokens a request", "GiB each", "at once", "whole", "needs utilisation")
    layout = plan.budget.layout
    for length in lengths:
        share = _share(plan, length)
        table.add_row(
            f"{length:,}",
            f"{layout.request_blocks(length) * layout.block_bytes / GIB:,.2f}",
            f"{plan.budget.concurrency(length):,.2f}x",
            f"{plan.budget.whole_requests(length):,}",
            "does not fit" if share is None else f"{share:.2f}",
        )
    console.print(table)
    for line in _limits(plan):
        console.print(Text(line))
    if not plan.options.cuda_graph_gib:
        console.print(Text(NO_GRAPHS, style="dim"))


def _table(*figures: str, label: str | None = None) -> "Table":
    """Make a table with columns of figures, after a column of text if it has a `label`."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    if label is not None:
        table.add_column(label, no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _title(plan: Plan) -> str:
    tp = plan.options.tensor_parallel
    where = plan.gpu.name if tp == 1 else f"{tp} x {plan.gpu.name}"
    layout = plan.budget.layout
    title = (
        f"{plan.shape.name} on {where}: {plan.shape.attention}, {layout.layers} layers, "
        f"{layout.bytes_per_token / 1024:g} KiB per token"
    )
    if plan.shape.sliding_layers:
        title += (
            f"; {plan.shape.sliding_layers} layers keep at most {layout.window_tokens:,} tokens"
        )
    if layout.state_bytes:
        title += f"; a request keeps states of {layout.state_bytes / (1 << 20):,.1f} MiB"
    return title


def _lines(plan: Plan) -> list[tuple[str, float, str]]:
    budget, options = plan.budget, plan.options
    tokens = budget.pool_tokens(plan.max_model_len)
    share = f"{options.gpu_memory_utilization:g} of {plan.gpu.gib:.2f}"
    step = f"{options.max_num_batched_tokens:,} tokens or {options.max_num_seqs:,} sequences"
    rows = [
        ("requested memory", budget.requested, share),
        ("- weights", budget.weights, plan.shape.weights_source),
        ("- activation peak", budget.activation, step),
        ("- outside torch", budget.non_torch, "driver, libraries, NCCL"),
    ]
    if (room := options.adapters) is not None:
        note = f"LoRA: {room.slots} of rank {room.rank} at most"
        rows.insert(2, ("- adapters", budget.adapters, note))
    if budget.cuda_graphs:
        rows.append(("- CUDA graphs", budget.cuda_graphs, "as given"))
    blocks = f"{budget.blocks:,} blocks of {budget.layout.block_size}: {tokens:,} tokens"
    return [*rows, ("KV cache", budget.pool, blocks)]


def _limits(plan: Plan) -> list[str]:
    longest = plan.budget.longest(plan.max_model_len)
    if longest < plan.max_model_len:
        text = (
            f"One request of the model's {plan.max_model_len:,} tokens does not fit: vLLM starts "
            f"with --max-model-len {longest} or less"
        )
        share = _share(plan, plan.max_model_len)
        return [text + (f", or with utilisation {share:.2f}." if share else ".")]
    share = plan.budget.least_utilization(plan.max_model_len)
    return [
        f"Out of memory below utilisation {share:.2f} for one request of {longest:,} tokens, the "
        "longest context."
    ]


def print_check(check: CacheCheck, tolerance: float, near: bool, console: "Console") -> None:
    """Print the memory parts side by side, the cache, and whether it is within the tolerance."""
    from rich.text import Text

    version = f", vLLM {printable(check.log.version)}" if check.log.version else ""
    title = f"{printable(check.plan.shape.name)} on {printable(check.plan.gpu.name)}{version}"
    console.print(Text(title, style="bold"))
    table = _table("computed", "logged", "error", label="")
    # The parts of the memory budget. A relative error below 0.5 GiB would be rounding.
    for name, predicted, logged in parts(check):
        size = predicted / GIB
        error = NONE if not logged or logged < 0.5 else f"{(size / logged - 1) * 100:+.1f} %"
        text = NONE if logged is None else f"{logged:.2f}"
        table.add_row(_LABELS[name], f"{size:.2f}", text, error)
    table.add_row(
        "tokens, from the configuration",
        f"{check.predicted_tokens:,}",
        f"{check.actual_tokens:,}",
        f"{check.error * 100:+.1f} %",
    )
    notes = [f"note: {note}" for note in check.notes]
    # The logged GiB check the arithmetic apart from the memory model.
    if check.low_blocks is not None:
        off = check.bytes_error or 0.0
        notes.insert(0, "The blocks are a range because the logged GiB have two decimals.")
        table.add_row(
            "blocks, from the logged GiB",
            f"{check.low_blocks:,} to {check.high_blocks:,}",
            f"{check.actual_blocks:,}",
            "exact" if check.exact else f"{off * 100:+.1f} %",
        )
    console.print(table)
    for note in notes:
        console.print(Text(note, style="dim"))
    word, style = ("within", "bold green") if near else ("beyond", "bold red")
    console.print(Text(f"{word} {tolerance:g} %", style=style))
