"""Print what `forebay kv verify` found; nothing is computed here."""

from typing import TYPE_CHECKING

from forebay.analysis.kv.verify import Verdict, parts
from forebay.analysis.units import NONE, printable
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


def print_verdict(verdict: Verdict, tolerance: float, near: bool, console: "Console") -> None:
    """The parts side by side, the cache, and whether it is near enough."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    version = f", vLLM {printable(verdict.log.version)}" if verdict.log.version else ""
    title = f"{printable(verdict.plan.shape.name)} on {printable(verdict.plan.gpu.name)}{version}"
    console.print(Text(title, style="bold"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("arithmetic", "log", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, predicted, logged in parts(verdict):
        size = predicted / GIB
        error = NONE if not logged or logged < 0.5 else f"{(size / logged - 1) * 100:+.1f} %"
        told = NONE if logged is None else f"{logged:.2f}"
        table.add_row(_LABELS[name], f"{size:.2f}", told, error)
    table.add_row(
        "tokens, from the configuration",
        f"{verdict.predicted_tokens:,}",
        f"{verdict.actual_tokens:,}",
        f"{verdict.error * 100:+.1f} %",
    )
    if verdict.low_blocks is not None:
        off = verdict.bytes_error or 0.0
        table.add_row(
            "blocks, from the logged GiB",
            f"{verdict.low_blocks:,} to {verdict.high_blocks:,}",
            f"{verdict.actual_blocks:,}",
            "exact" if verdict.exact else f"{off * 100:+.1f} %",
        )
    console.print(table)
    if verdict.low_blocks is not None:
        console.print(Text("The logged GiB have two decimals: hence the range.", style="dim"))
    for note in verdict.notes:
        console.print(Text(f"note: {note}", style="dim"))
    word = "within" if near else "beyond"
    style = "bold green" if near else "bold red"
    console.print(Text(f"{word} {tolerance:g} %", style=style))
