"""Print a comparison on a terminal of 80 columns or more.

Text from files is passed as Text, never as Rich markup. Nothing is computed here.
"""

from itertools import groupby
from typing import TYPE_CHECKING

from forebay.analysis.compare.compare import Comparison, definition_notes
from forebay.analysis.compare.headline import Headline
from forebay.analysis.compare.lines import WHOLE_RUN
from forebay.analysis.statistics.units import NONE, ratio

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MOODS = {
    "better": "bold green",
    "worse": "bold red",
    "mixed": "bold yellow",
    "doubtful": "bold yellow",
    "none": "bold",
}


def print_comparison(comparison: Comparison, words: Headline, console: "Console") -> None:
    """Print the headline, the warnings and the table."""
    from rich.text import Text

    console.print(Text(words.summary, style=MOODS[words.mood]))
    for point in words.points:
        console.print(Text(f"  {point}"))
    for warning in comparison.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    console.print(_table(comparison))
    console.print(Text(notes(comparison), style="dim"))


def notes(comparison: Comparison) -> str:
    """The explanation under the table."""
    text = (
        "Latencies are of answered requests, from when each was due. B/A: the second run's figure "
        "divided by the first's. = : equal within 5 %. ~ : not significant, the 95 % interval "
        f"includes 1. {NONE} : not measured, or fewer than {comparison.min_beyond} samples beyond "
        f"the percentile (p99 needs {comparison.min_beyond * 100:,} requests)."
    )
    if comparison.slos:
        text += f" Targets: {', '.join(str(slo) for slo in comparison.slos)}."
    return "\n".join([text, *definition_notes([comparison])])


def _table(comparison: Comparison) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # The columns fit into 80 characters.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("", no_wrap=True)
    for name in (comparison.a.name, comparison.b.name):
        table.add_column(
            Text(name, overflow="fold"), justify="right", min_width=min(12, max(9, len(name)))
        )
    table.add_column("B/A", justify="right", no_wrap=True, min_width=5)
    table.add_column("better", overflow="fold", min_width=6)
    # A section for all requests and for each bucket, in which an interval follows its line.
    names = {"a": comparison.a.name, "b": comparison.b.name, "equal": "=", "unclear": "~"}
    for section, lines in groupby(comparison.lines, key=lambda line: line.section):
        table.add_row(Text(_title(comparison, section), style="bold"))
        for line in lines:
            better = names[line.better] if line.better else ""
            cells = (f"  {line.label}", *line.texts, ratio(line.change), better)
            table.add_row(*(Text(cell) for cell in cells))
            if (interval := line.change_interval) is not None:
                low, high = f"{ratio(interval.low)} to", ratio(interval.high)
                interval_row = ("    95 % interval of B/A", low, high, "", "")
                table.add_row(*(Text(cell, style="dim") for cell in interval_row))
        table.add_section()
    return table


def _title(comparison: Comparison, section: str) -> str:
    if section == WHOLE_RUN:
        valid = all(verdict.valid for verdict in comparison.verdicts)
        return "all requests · valid" if valid else "all requests"
    a, b = comparison.a.of[section], comparison.b.of[section]
    by_id = ", paired by id" if section in comparison.paired else ""
    return f"{section} · {a.answered:,} and {b.answered:,} answered{by_id}"
