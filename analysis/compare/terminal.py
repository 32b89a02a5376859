"""Print a comparison on a terminal of 80 columns or more.

Text from files is passed as Text, never as Rich markup. Nothing is computed here.
"""

from typing import TYPE_CHECKING

from forebay.analysis.compare.compare import WHOLE_RUN, Comparison, ComparisonRow, definition_notes
from forebay.analysis.compare.headline import Headline
from forebay.analysis.statistics.units import (
    NONE,
    counts,
    durations,
    money,
    rates,
    ratio,
    ratios,
    shares,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FORMATS = {
    "s": durations,
    "per_s": rates,
    "share": shares,
    "ratio": ratios,
    "count": counts,
    "money": money,
}
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
    return "\n".join([text, *definition_notes((comparison.a, comparison.b))])


def better_name(comparison: Comparison, line: ComparisonRow) -> str:
    """The name of the better run, `=`, `~` or nothing."""
    names = {"a": comparison.a.name, "b": comparison.b.name, "equal": "=", "unclear": "~"}
    return names[line.better] if line.better else ""


def _table(comparison: Comparison) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("", no_wrap=True)
    for name in (comparison.a.name, comparison.b.name):
        table.add_column(
            Text(name, overflow="fold"), justify="right", min_width=min(12, max(9, len(name)))
        )
    table.add_column("B/A", justify="right", no_wrap=True, min_width=5)
    table.add_column("better", overflow="fold", min_width=6)
    section = ""
    for line in comparison.lines:
        if line.section != section:
            section = line.section
            table.add_row(Text(_title(comparison, section), style="bold"), end_section=False)
        table.add_row(*(Text(cell) for cell in _cells(comparison, line)))
        if (interval := line.change_interval) is not None:
            low, high = f"{ratio(interval.low)} to", ratio(interval.high)
            interval_row = ("    95 % interval of B/A", low, high, "", "")
            table.add_row(*(Text(cell, style="dim") for cell in interval_row))
        if _last_of(comparison, line):
            table.add_section()
    return table


def _cells(comparison: Comparison, line: ComparisonRow) -> list[str]:
    a, b = FORMATS[line.unit]([line.a, line.b])
    return [f"  {line.label}", a, b, ratio(line.change), better_name(comparison, line)]


def _last_of(comparison: Comparison, line: ComparisonRow) -> bool:
    at = comparison.lines.index(line) + 1
    return at == len(comparison.lines) or comparison.lines[at].section != line.section


def _title(comparison: Comparison, section: str) -> str:
    if section == WHOLE_RUN:
        valid = all(verdict.valid for verdict in comparison.verdicts)
        return "all requests · valid" if valid else "all requests"
    a, b = comparison.figures[section]
    by_id = ", paired by id" if section in comparison.paired else ""
    return f"{section} · {a.answered:,} and {b.answered:,} answered{by_id}"
