"""Print the shipped calibrations as a table or JSON."""

from typing import TYPE_CHECKING

from forebay.replay.engine.timing.step_constants import shipped
from forebay.traces.ground.command_line.messages import print_json

if TYPE_CHECKING:
    from rich.table import Table

_NUMERIC = ("line", "measured", "model", "error", "left out", "value", "prior")


def print_shipped(as_json: bool) -> None:
    """Print the shipped calibrations and the measurements that each was checked against."""
    if as_json:
        print_json({"calibrations": [calibration.as_json() for calibration in shipped()]})
        return
    from rich.console import Console
    from rich.text import Text

    table = new_table("model", "GPU", "how far checked", right=())
    for calibration in shipped():
        words = (
            calibration.model if calibration.model != "*" else "any other",
            calibration.gpu,
            calibration.checked,
        )
        table.add_row(*(Text(word) for word in words))
    console = Console(highlight=False)
    console.print(table)
    console.print(Text("--json shows the source of each number.", style="dim"))


def new_table(*headings: str, right: tuple[str, ...] = _NUMERIC) -> "Table":
    """Return an empty table. The columns named in `right` are right-aligned."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left")
    return table
