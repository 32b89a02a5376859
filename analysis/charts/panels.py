"""Draw measured points and their curves as panels of one SVG document."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import pairwise
from typing import Any

from forebay.analysis.charts import svg

# Plain colours for both themes, because many renderers know no CSS variables.
_CSS = files(__package__).joinpath("panels.css").read_text(encoding="utf-8")
STYLE = "".join(_CSS.splitlines())
Points = Sequence[tuple[float, float]]
KEY_ROW = 16
LETTER = 7.5  # width of a letter of 12 pixels, with its part of the gap to the next label
ROWS, STEPS = 8, 40  # rows that a note may stand in, and points at which a line is tried


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: title, tick labels, and whether it is logarithmic or starts at 0."""

    title: str
    label: Callable[[float], str] = svg.latency_label
    log: bool = True

    def domain(self, values: Iterable[float]) -> tuple[float, float]:
        if self.log:
            return svg.log_domain(values)
        ticks = svg.linear_ticks(max(values, default=0.0))
        return 0.0, ticks[-1]

    def ticks(self, low: float, high: float) -> list[float]:
        return svg.log_ticks(low, high) if self.log else svg.linear_ticks(high)


def count_label(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:g}"


def share_label(value: float) -> str:
    return f"{value * 100:g} %"


@dataclass(frozen=True, slots=True)
class Series:
    """Measured points and a curve. Either may be empty."""

    name: str
    points: Points
    curve: Points = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot of a document.

    Attributes:
        note: a place on the x axis, and its label.
        keyed: False leaves the key out, for a panel below another of the same series.
        tooltip: the words of a point, from the name of its series and the labels of its place.
    """

    series: Sequence[Series]
    x: Axis
    y: Axis
    note: tuple[float, str] | None = None
    keyed: bool = True
    tooltip: str = "{name}: {x}, {y}"

    @property
    def label(self) -> str:
        names = ", ".join(series.name for series in self.series)
        return f"{self.y.title} against {self.x.title}: {names}"


def line(
    name: str, rows: Iterable[Mapping[str, Any]], x: str, y: str, *, zeros: bool = False
) -> Series:
    """Two columns of a table as points that are joined. Rows without a value are left out.

    Args:
        zeros: keep values of 0, which a logarithmic axis does not have.
    """
    pairs = [(row[x], row.get(y)) for row in rows]
    points = [(float(a), b) for a, b in pairs if b or (zeros and b is not None)]
    return Series(name, points, points)


def xy_plot(
    series: Sequence[Series], x_title: str, y_title: str, note: tuple[float, str] | None = None
) -> str:
    """Plot seconds against a count on logarithmic axes. All values must be above 0."""
    return document(Panel(series, Axis(x_title, count_label), Axis(y_title), note))


def document(*panels: Panel) -> str:
    """An SVG document with the panels one below the other."""
    label = "; ".join(panel.label for panel in panels)
    return svg_document(drawn_panels(*panels), len(panels) * svg.HEIGHT, label)


def drawn_panels(*panels: Panel) -> str:
    """The panels one below the other, for `svg_document`."""
    drawn = []
    for number, panel in enumerate(panels):
        down = number * svg.HEIGHT
        drawn.append(svg.element("g", "".join(_draw(panel)), transform=f"translate(0 {down:g})"))
    return "".join(drawn)


def svg_document(content: str, height: float, label: str) -> str:
    """An SVG document of `height` units around `content`."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {svg.WIDTH:g} {height:g}" '
        f'role="img" aria-label="{escape(label)}"><style>{STYLE}</style>'
        f'<rect width="{svg.WIDTH:g}" height="{height:g}" class="paper"/>{content}</svg>\n'
    )


def _draw(panel: Panel) -> list[str]:
    every = [point for series in panel.series for point in (*series.points, *series.curve)]
    x_low, x_high = panel.x.domain([x for x, _ in every])
    y_low, y_high = panel.y.domain([y for _, y in every])
    bottom = svg.HEIGHT - svg.BOTTOM
    # SVG counts y downwards, so the vertical scale starts at the bottom.
    x = svg.Scale(x_low, x_high, svg.LEFT, svg.WIDTH - svg.RIGHT, log=panel.x.log)
    y = svg.Scale(y_low, y_high, bottom, svg.TOP + 14, log=panel.y.log)
    # Grid, tick labels and axis titles lie below the curves.
    ticks = panel.x.ticks(x_low, x_high)
    drawn = [svg.line(x(tick), y.end, x(tick), bottom, "grid") for tick in ticks]
    labels = [(tick, panel.x.label(tick)) for tick in ticks]
    drawn.append(svg.x_labels(x, labels, bottom + 17, LETTER))
    drawn.append(svg.y_axis(x, y, panel.y.label, panel.y.ticks(y_low, y_high)))
    drawn.append(svg.text((x.start + x.end) / 2, svg.HEIGHT - 6, panel.x.title, "axis"))
    drawn.append(svg.text(4, svg.TOP, panel.y.title, "axis", "start"))
    # The note's text goes to the side of its line that has more room, and to a row that is free.
    note = (x.start, x.start, y.end)
    if panel.note and x_low <= panel.note[0] <= x_high:
        at, wide = x(panel.note[0]), len(panel.note[1]) * LETTER + 5
        drawn.append(svg.line(at, y.end, at, bottom, "note"))
        side, anchor = (-5, "end") if at > (x.start + x.end) / 2 else (5, "start")
        left, right = sorted((at, at + math.copysign(wide, side)))
        rows = [y.end + 11 + KEY_ROW * number for number in range(ROWS)]
        heights = _heights(panel, x, y, left, right)
        row = next((row for row in rows if _is_free(heights, row)), rows[0])
        drawn.append(svg.text(at + side, row, panel.note[1], "key", anchor))
        note = left, right, row
    for number, series in enumerate(panel.series):
        drawn += _series(number, series, x, y, panel)
    return drawn + (list(_key(panel, x, y, note)) if panel.keyed else [])


def _key(
    panel: Panel, x: svg.Scale, y: svg.Scale, note: tuple[float, float, float]
) -> Iterator[str]:
    """Yield the names of the series, in the first corner where they cover neither curve nor note.

    The key ends just above the x axis, or begins below the top.
    """
    wide = max(len(series.name) for series in panel.series) * LETTER + 22
    below, above = y.start - 10 - KEY_ROW * (len(panel.series) - 1), y.end + KEY_ROW
    left, right = (x.start, 1, "start"), (x.end, -1, "end")
    corners = [(below, left), (below, right), (above, left), (above, right)]

    def is_free(top: float, edge: float, away: float) -> bool:
        start, end = sorted((edge, edge + away * wide))
        heights = _heights(panel, x, y, start, end)
        if note[0] < end and start < note[1]:
            heights.append(note[2])
        return _is_free(heights, top, len(panel.series))

    free = (corner for corner in corners if is_free(corner[0], *corner[1][:2]))
    top, (edge, away, anchor) = next(free, corners[0])
    for number, series in enumerate(panel.series):
        row = top + KEY_ROW * number
        yield svg.mark(number, edge + away * 12, row - 4, f"mark run{number % 6}", "")
        yield svg.text(edge + away * 22, row, series.name, "key", anchor)


def _heights(panel: Panel, x: svg.Scale, y: svg.Scale, left: float, right: float) -> list[float]:
    """Return the heights at which points and curves are between two places."""
    heights = []
    for series in panel.series:
        heights += [y(b) for a, b in series.points if left <= x(a) <= right]
        places = [(x(a), y(b)) for a, b in series.curve or series.points]
        for (from_x, from_y), (to_x, to_y) in pairwise(places):
            parts = (step / STEPS for step in range(STEPS + 1))
            heights += [
                from_y + (to_y - from_y) * part
                for part in parts
                if left <= from_x + (to_x - from_x) * part <= right
            ]
    return heights


def _is_free(heights: Sequence[float], row: float, rows: int = 1) -> bool:
    """True if text in this row, and in the rows below it, covers none of the heights."""
    last = row + KEY_ROW * (rows - 1)
    return not any(row - KEY_ROW <= height <= last + 6 for height in heights)


def _series(number: int, series: Series, x: svg.Scale, y: svg.Scale, panel: Panel) -> list[str]:
    drawn = []
    path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in series.curve)
    if path:
        drawn.append(svg.element("path", d="M" + path, class_=f"curve run{number % 6}"))
    for a, b in series.points:
        title = panel.tooltip.format(name=series.name, x=panel.x.label(a), y=panel.y.label(b))
        drawn.append(svg.mark(number, x(a), y(b), f"mark run{number % 6}", title))
    return drawn
