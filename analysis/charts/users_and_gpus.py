"""Draw users against GPUs, one curve per document size, with one mark per search."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from forebay.analysis.charts import svg
from forebay.analysis.charts.panels import (
    Axis,
    Panel,
    Series,
    count_label,
    drawn_panels,
    svg_document,
)


@dataclass(frozen=True, slots=True)
class Curve:
    """Least GPUs of one seed by number of users. `error` states why points are missing."""

    document_tokens: int
    points: tuple[tuple[int, int], ...]
    error: str = ""


def draw(curves: Sequence[Curve], label: str) -> str:
    """Draw the plot as a standalone SVG with one mark per search."""
    series = []
    for curve in curves:
        # The key also names a document size for which no search succeeded.
        name = f"{curve.document_tokens:,} tokens"
        points = [(float(users), float(gpus)) for users, gpus in curve.points]
        series.append(Series(name if points else f"{name}: no number of GPUs", points, points))
    users, gpus = (Axis(title, count_label, log=False) for title in ("users", "GPUs"))
    panel = Panel(series, users, gpus, tooltip="{x} users, {name}: {y} GPUs")
    title = svg.element("title", escape(label))
    return svg_document(title + drawn_panels(panel), panel.height, label)
