"""Write the figures of several runs as a Markdown table or as CSV."""

import csv
import io
from collections.abc import Sequence

from forebay.analysis.compare.compare import Comparison, definition_notes, rows_of, sides_of
from forebay.analysis.statistics.units import ratio


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
    notes = definition_notes(comparisons)
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
