"""Write the figures of several runs as a Markdown table or as CSV."""

import csv
import io
from collections.abc import Sequence

from forebay.analysis.compare.compare import Comparison, definition_notes
from forebay.analysis.compare.lines import TableRow, table_rows
from forebay.analysis.runs.run import RunData
from forebay.analysis.statistics.units import ratio


def markdown(
    runs: Sequence[RunData], comparisons: Sequence[Comparison], summaries: Sequence[str]
) -> str:
    """Return the summaries, a table of all figures, and notes on definitions."""
    two = len(runs) == 2
    heads = ["", *(_cell(run.name) for run in runs), *(["B/A"] if two else [])]
    lines = [*summaries, ""] if summaries else []
    lines += [_row(heads), _row(["---", *["---:"] * (len(heads) - 1)])]
    heading = ""
    for row in _rows(runs, comparisons):
        if row.heading != heading:
            heading = row.heading
            lines.append(_row([f"**{_cell(heading)}**", *[""] * (len(heads) - 1)]))
        change = [ratio(row.line.change)] if two else []
        lines.append(_row([row.line.label, *row.texts, *change]))
    notes = definition_notes(runs)
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def csv_table(runs: Sequence[RunData], comparisons: Sequence[Comparison]) -> str:
    """Return a line for each figure, in base units, empty where it is not known."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["section", "figure", "unit", *(run.name for run in runs)])
    for row in _rows(runs, comparisons):
        line = row.line
        writer.writerow([line.section, line.key, line.unit, *row.values])
    return out.getvalue()


def _rows(runs: Sequence[RunData], comparisons: Sequence[Comparison]) -> list[TableRow]:
    return table_rows([comparison.lines for comparison in comparisons], len(runs))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
