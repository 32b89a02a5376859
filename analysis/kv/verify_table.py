"""Print the result of `forebay kv verify`. Nothing is computed here."""

from typing import TYPE_CHECKING

from forebay.analysis.kv.verify import CacheCheck, parts
from forebay.analysis.statistics.units import NONE, printable
from forebay.replay.engine.hardware.specs import GIB

if TYPE_CHECKING:
    from rich.console import Console

_LABELS = {
    "weights": "weights, GiB",
    "activation": "activation peak, GiB",
    "non_torch": "outside torch, GiB",
    "cuda_graphs": "CUDA graphs, GiB",
    "kv_cache": "KV cache, GiB",
}


def print_check(check: CacheCheck, tolerance: float, near: bool, console: "Console") -> None:
    """Print the memory parts side by side, the cache, and whether it is within the tolerance."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    version = f", vLLM {printable(check.log.version)}" if check.log.version else ""
    title = f"{printable(check.plan.shape.name)} on {printable(check.plan.gpu.name)}{version}"
    console.print(Text(title, style="bold"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("computed", "logged", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
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
    # The logged GiB check the arithmetic apart from the memory model.
    if check.low_blocks is not None:
        off = check.bytes_error or 0.0
        table.add_row(
            "blocks, from the logged GiB",
            f"{check.low_blocks:,} to {check.high_blocks:,}",
            f"{check.actual_blocks:,}",
            "exact" if check.exact else f"{off * 100:+.1f} %",
        )
    console.print(table)
    if check.low_blocks is not None:
        console.print(
            Text("The blocks are a range because the logged GiB have two decimals.", style="dim")
        )
    for note in check.notes:
        console.print(Text(f"note: {note}", style="dim"))
    word = "within" if near else "beyond"
    style = "bold green" if near else "bold red"
    console.print(Text(f"{word} {tolerance:g} %", style=style))
