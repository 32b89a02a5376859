"""Write the table of a comparison: for a terminal of 80 columns or more, as Markdown, or as CSV.

Text from files is passed as Text, never as Rich markup. Nothing is computed here.
"""

import csv
import io
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from forebay.analysis.compare.compare import Comparison, definition_notes, rows_of, sides_of
from forebay.analysis.compare.headline import Headline
from forebay.analysis.compare.lines import WHOLE_RUN
from forebay.analysis.runs.provenance import simulated
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

    print_headline(comparison, words, console)
    console.print(_table(comparison))
    console.print(Text(notes(comparison), style="dim"))


def print_headline(comparison: Comparison, words: Headline, console: "Console") -> None:
    """Print the headline and the warnings."""
    from rich.text import Text

    console.print(Text(words.summary, style=MOODS[words.mood]))
    for point in words.points:
        console.print(Text(f"  {point}"))
    for warning in comparison.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))


def notes(comparison: Comparison) -> str:
    """The explanation under the table."""
    text = (
        "Latencies are of answered requests, from when each was due. B/A: the second run's figure "
        "divided by the first's. = : equal within 5 %. ~ : not significant, the 95 % interval "
        f"includes 1; without an interval there is no verdict. {NONE} : not measured, or fewer "
        f"than {comparison.min_beyond} samples beyond the percentile (p99 needs "
        f"{comparison.min_beyond * 100:,} requests)."
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
    for section, rows in groupby(rows_of([comparison]), key=lambda row: row.line.section):
        table.add_row(Text(_title(comparison, section), style="bold"))
        for row in rows:
            line = row.line
            better = names[line.better] if line.better else ""
            cells = (f"  {line.label}", *row.texts, ratio(line.change), better)
            table.add_row(*(Text(cell) for cell in cells))
            if (interval := line.change_interval) is not None:
                low, high = f"{ratio(interval.low)} to", ratio(interval.high)
                interval_row = ("    95 % interval of B/A", low, high, "", "")
                table.add_row(*(Text(cell, style="dim") for cell in interval_row))
        table.add_section()
    return table


def _title(comparison: Comparison, section: str) -> str:
    if section == WHOLE_RUN:
        if any(simulated(side.run) for side in (comparison.a, comparison.b)):
            return "all requests · simulated"
        valid = all(verdict.valid for verdict in comparison.verdicts)
        return "all requests · valid" if valid else "all requests"
    a, b = comparison.a.of[section], comparison.b.of[section]
    by_id = ", paired by id" if section in comparison.paired else ""
    return f"{section} · {a.answered:,} and {b.answered:,} answered{by_id}"


def markdown(comparisons: Sequence[Comparison], summaries: Sequence[str]) -> str:
    """Return the summaries, a table of all figures, and notes on definitions."""
    names = [_cell(side.name) for side in sides_of(comparisons)]
    heads = ["", *names, *(["B/A"] if len(names) == 2 else [])]
    lines = [*summaries, ""] if summaries else []
    lines += [_row(heads), _row(["---", *["---:"] * (len(heads) - 1)])]
    heading = ""
    for row in rows_of(comparisons):
        if row.heading != heading:
            heading = row.heading
            lines.append(_row([f"**{_cell(heading)}**", *[""] * (len(heads) - 1)]))
        change = [ratio(row.line.change)] if len(names) == 2 else []
        lines.append(_row([row.line.label, *row.texts, *change]))
    origins = [
        f"{side.name}: {note}." for side in sides_of(comparisons) if (note := simulated(side.run))
    ]
    notes = [*origins, *definition_notes(comparisons)]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def csv_table(comparisons: Sequence[Comparison]) -> str:
    """Return a line for each figure, in base units, empty where it is not known."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [side.name for side in sides_of(comparisons)]
    writer.writerow(["section", "figure", "unit", *names])
    for row in rows_of(comparisons):
        writer.writerow([row.line.section, row.line.key, row.line.unit, *row.values])
    return out.getvalue()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
