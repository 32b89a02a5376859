"""Write the figures of several runs as a Markdown table or as CSV."""

import csv
import io
from collections.abc import Sequence

from forebay.analysis.compare.compare import (
    WHOLE_RUN,
    Comparison,
    ComparisonRow,
    Unit,
    definition_notes,
)
from forebay.analysis.compare.terminal import FORMATS
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
    section = ""
    for (of, label, unit), values, first in _figures(runs, comparisons):
        if of != section:
            section = of
            title = "all requests" if of == WHOLE_RUN else of
            lines.append(_row([f"**{_cell(title)}**", *[""] * (len(heads) - 1)]))
        cells = [label, *FORMATS[unit](values)]
        lines.append(_row([*cells, ratio(first.change)] if two else cells))
    notes = definition_notes(runs)
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def csv_table(runs: Sequence[RunData], comparisons: Sequence[Comparison]) -> str:
    """Return a line for each figure, in base units, empty where it is not known."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["section", "figure", "unit", *(run.name for run in runs)])
    for (of, _, unit), values, first in _figures(runs, comparisons):
        writer.writerow([of, first.key, unit, *("" if v is None else v for v in values)])
    return out.getvalue()


def _figures(
    runs: Sequence[RunData], comparisons: Sequence[Comparison]
) -> list[tuple[tuple[str, str, Unit], list[float | None], ComparisonRow]]:
    """Return each figure with its values of all runs, in order of the sections."""
    table: dict[tuple[str, str], tuple[ComparisonRow, list[float | None]]] = {}
    for number, comparison in enumerate(comparisons, 1):
        for line in comparison.lines:
            empty: list[float | None] = [None] * max(2, len(runs))
            _, values = table.setdefault((line.section, line.key), (line, empty))
            values[0], values[number] = line.a, line.b
    sections = list(dict.fromkeys(section for section, _ in table))
    return [
        ((line.section, line.label, line.unit), values[: len(runs)], line)
        for section in sections
        for (of, _), (line, values) in table.items()
        if of == section
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
