"""Draw measured points and their curves as panels of one SVG document."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
_ANCHOR = {1: "start", -1: "end"}  # of a text that goes right, or left


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
    def key_below(self) -> bool:
        """True if the key has too many rows for a corner."""
        return self.keyed and len(self.series) > svg.MARKS

    @property
    def height(self) -> float:
        return svg.HEIGHT + (KEY_ROW * len(self.series) + 8 if self.key_below else 0)

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
    return svg_document(drawn_panels(*panels), sum(panel.height for panel in panels), label)


def drawn_panels(*panels: Panel) -> str:
    """The panels one below the other, for `svg_document`."""
    drawn, down = [], 0.0
    for panel in panels:
        drawn.append(svg.element("g", "".join(_draw(panel)), transform=f"translate(0 {down:g})"))
        down += panel.height
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
    # The note's text goes to the side of its line that has more room.
    taken = _taken(panel, x, y)
    if panel.note and x_low <= panel.note[0] <= x_high:
        at = x(panel.note[0])
        drawn.append(svg.line(at, y.end, at, bottom, "note"))
        side, anchor = (-5, "end") if at > (x.start + x.end) / 2 else (5, "start")
        end = at + math.copysign(len(panel.note[1]) * LETTER + 5, side)
        rows = [y.end + 11 + KEY_ROW * number for number in range(ROWS)]
        row = min(rows, key=lambda row: _covered(taken, at, end, row - KEY_ROW, row + 6))
        drawn.append(svg.text(at + side, row, panel.note[1], "key", anchor))
        taken += [(at, row), (end, row)]
        taken += [(at, y.end + (bottom - y.end) * step / STEPS) for step in range(STEPS + 1)]
    for number, series in enumerate(panel.series):
        drawn += _series(number, series, x, y, panel)
    if panel.keyed:
        drawn += _key(panel, x, y, taken)
    return drawn


def _taken(panel: Panel, x: svg.Scale, y: svg.Scale) -> list[tuple[float, float]]:
    """Places of the drawing that a text should leave free: marks, and places along the curves."""
    taken = [(x(a), y(b)) for series in panel.series for a, b in series.points]
    for series in panel.series:
        for (from_x, from_y), (to_x, to_y) in pairwise((x(a), y(b)) for a, b in series.curve):
            parts = (step / STEPS for step in range(STEPS + 1))
            taken += [(from_x + (to_x - from_x) * p, from_y + (to_y - from_y) * p) for p in parts]
    return taken


def _covered(
    taken: Sequence[tuple[float, float]], start: float, end: float, top: float, bottom: float
) -> int:
    """How many places a text would cover."""
    left, right = sorted((start, end))
    return sum(left <= at <= right and top <= down <= bottom for at, down in taken)


def _key(
    panel: Panel, x: svg.Scale, y: svg.Scale, taken: Sequence[tuple[float, float]]
) -> list[str]:
    """The key, in the corner where it covers least, or below a panel of more than six series."""
    names = [series.name for series in panel.series]
    rows, width = len(names), max(map(len, names)) * LETTER + 22
    tops = (y.start - 10 - KEY_ROW * (rows - 1), y.end + KEY_ROW)
    corners = [(edge, away, top) for top in tops for edge, away in ((x.end, -1), (x.start, 1))]

    def covers(corner: tuple[float, int, float]) -> int:
        edge, away, top = corner
        return _covered(taken, edge, edge + away * width, top - KEY_ROW, top + KEY_ROW * rows - 8)

    edge, away, top = min(corners, key=covers)
    if panel.key_below:
        edge, away, top = x.start, 1, svg.HEIGHT + KEY_ROW - 4
    drawn = []
    for number, series in enumerate(panel.series):
        at, row = edge + away * 12, top + KEY_ROW * number
        kind = f"run{number % svg.MARKS}{_again(number)}"
        if series.points:
            drawn.append(svg.mark(number, at, row - 4, f"mark {kind}", ""))
        else:
            sample = f"M{at - 6:.1f} {row - 4:.1f}h12"
            drawn.append(svg.element("path", d=sample, class_=f"curve {kind}"))
        drawn.append(svg.text(edge + away * 22, row, series.name, "key", _ANCHOR[away]))
    return drawn


def _series(number: int, series: Series, x: svg.Scale, y: svg.Scale, panel: Panel) -> list[str]:
    drawn = []
    path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in series.curve)
    kind = f"run{number % svg.MARKS}{_again(number)}"
    if path:
        drawn.append(svg.element("path", d="M" + path, class_=f"curve {kind}"))
    for a, b in series.points:
        title = panel.tooltip.format(name=series.name, x=panel.x.label(a), y=panel.y.label(b))
        drawn.append(svg.mark(number, x(a), y(b), f"mark {kind}", title))
    return drawn


def _again(number: int) -> str:
    """The class of a series whose colour an earlier one has: its curve is dashed."""
    return " again" if number >= svg.MARKS else ""
