"""Print a memory budget as JSON or as a table. Only units and shares are computed here."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forebay.analysis.kv.plan import Plan
from forebay.replay.engine.hardware.specs import GIB

if TYPE_CHECKING:
    from rich.console import Console

NO_GRAPHS = (
    "vLLM 0.21 and later also reserves memory for CUDA graphs; the amount depends on the model "
    "(1.3 GiB in vllm-project/vllm#50722): give yours with --cuda-graph-gib. Utilisation defaults "
    "to 0.9 here and up to vLLM 0.19, to 0.92 in 0.28."
)


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
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console.print(Text(_title(plan), style="bold"))
    # First the memory budget of one GPU.
    lines = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    lines.add_column("one GPU", no_wrap=True)
    lines.add_column("GiB", justify="right", no_wrap=True)
    lines.add_column("", overflow="fold")
    for label, size, note in _lines(plan):
        lines.add_row(Text(label), f"{size / GIB:,.2f}", Text(note, style="dim"))
    console.print(lines)
    # Then the requests that fit, by their length.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("tokens a request", "GiB each", "at once", "whole", "needs utilisation"):
        table.add_column(heading, justify="right", no_wrap=True)
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
    rows = [
        (
            "requested memory",
            budget.requested,
            f"{options.gpu_memory_utilization:g} of {plan.gpu.gib:.2f}",
        ),
        ("- weights", budget.weights, plan.shape.weights_source),
        (
            "- activation peak",
            budget.activation,
            f"{options.max_num_batched_tokens:,} tokens or {options.max_num_seqs:,} sequences",
        ),
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
