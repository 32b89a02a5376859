"""Scales, ticks and SVG elements for plots. They know nothing of runs.

Sizes are user units of a drawing 480 units wide. A page shows it about 1:1 on a desktop and at
3/4 on a phone; the margins leave room for the larger letters used there.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 480.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 66.0, 16.0, 12.0, 46.0
STEPS_S = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400),
    *(21_600, 43_200, 86_400, 172_800, 604_800),
)
TIME_UNITS = ((10_800.0, 3_600.0, "hours"), (1_200.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values from `low` to `high` to drawing units. Values outside map to the ends."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def of_all(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Map many values."""
        inside = np.clip(values, self.low, self.high)
        if self.log:
            part = np.log(inside / self.low) / math.log(self.high / self.low)
        else:
            part = (inside - self.low) / (self.high - self.low)
        placed: NDArray[np.float64] = self.start + part * (self.end - self.start)
        return placed

    def __call__(self, value: float) -> float:
        return float(self.of_all(np.array([value]))[0])


def log_domain(values: Iterable[float]) -> tuple[float, float]:
    """Bounds around the positive values, at 1, 2 or 5 times a power of ten."""
    positive = [v for v in values if v > 0 and math.isfinite(v)]
    if not positive:
        return 1.0, 10.0
    low, high = _step(min(positive), up=False), _step(max(positive), up=True)
    return (low, high) if high >= low * 5 else (low / 2, high * 2)


def _step(value: float, up: bool) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    steps = [power * f for f in (1, 2, 5, 10)]
    if up:
        return next(s for s in steps if s >= value * 0.999)
    return next(s for s in reversed(steps) if s <= value * 1.001)


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 (or 3) times them while that gives at most seven ticks."""
    for factors in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        ticks = [
            10.0**power * factor
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for factor in factors
        ]
        ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        if len(ticks) <= 7:
            break
    return ticks


def time_ticks(high_s: float) -> list[float]:
    """Round seconds from 0, at most seven of them."""
    step = next((s for s in STEPS_S if high_s / s <= 6), high_s / 6)
    return [step * i for i in range(int(high_s / step + 1e-9) + 1)]


def time_unit(high_s: float) -> tuple[float, str]:
    """The unit of an axis of time, in seconds, and its name."""
    return next((unit_s, name) for least_s, unit_s, name in TIME_UNITS if high_s >= least_s)


def linear_ticks(high: float) -> list[float]:
    """Round values from 0 to the first at or above `high`, at most seven of them."""
    if not high > 0:
        return [0.0, 1.0]
    step = _step(high / 5, up=True)
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)]


def latency_label(value_s: float) -> str:
    """The label of a latency tick: `500 µs`, `20 ms`, `5 s`, `10 min`."""
    for scale, unit in ((60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if value_s >= scale * 0.9999 and not (unit == "min" and value_s < 600):
            return f"{round(value_s / scale, 1 if unit == 'min' else 3):g} {unit}"
    return f"{round(value_s * 1e6, 3):g} µs"


def element(name: str, content: str = "", **attributes: object) -> str:
    """Write one element. Attribute values are escaped, `content` is not.

    `_` in attribute names becomes `-`."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>"


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "middle") -> str:
    """A label. Its text is escaped here.

    A `key` may lie on curves, so it has a rim in the colour of the paper: the same letters below
    it, as outlines. With `paint-order` some renderers draw the rim over the letters.
    """
    layers = ("halo", kind) if kind == "key" else (kind,)
    return "".join(
        element("text", escape(content), x=x, y=y, class_=layer, text_anchor=anchor)
        for layer in layers
    )


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def y_axis(x: Scale, y: Scale, label: Callable[[float], str], ticks: Sequence[float]) -> str:
    """Write horizontal lines with their labels, and the base line of a plot."""
    drawn = [line(x.start, y(tick), x.end, y(tick), "grid") for tick in ticks]
    drawn += [text(x.start - 8, y(tick) + 4, label(tick), "tick", "end") for tick in ticks]
    return "".join([*drawn, line(x.start, y.start, x.end, y.start, "base")])


def x_labels(x: Scale, labels: Sequence[tuple[float, str]], y: float, letter: float) -> str:
    """Write ascending labels below an axis, as far as they do not lie on each other."""
    drawn = []
    free = math.inf  # the labels right of here have been drawn
    for value, label in reversed(labels):
        at = x(value)
        anchor = "end" if at > WIDTH - RIGHT - 16 else "middle"
        right = at if anchor == "end" else at + len(label) * letter / 2
        if right <= free:
            drawn.append(text(at, y, label, "tick", anchor))
            free = right - len(label) * letter
    return "".join(drawn)


def steps_path(points: Sequence[tuple[float, float]]) -> str:
    """The path of a staircase: across to the next x, then up to its y."""
    if not points:
        return ""
    (x, y), *rest = points
    return f"M{_number(x)} {_number(y)}" + "".join(f"H{_number(x)}V{_number(y)}" for x, y in rest)


def dots_path(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    """Dots as zero-length strokes with round ends, 10 bytes each. Equal dots are drawn once."""
    dots = np.unique(np.rint(np.column_stack((x, y))).astype(np.int64), axis=0)
    return "".join(f"M{x} {y}h0" for x, y in dots.tolist())


MARKS = 6  # shapes that distinguish runs without colour
THIN, LONG = 0.45, 1.3  # half the width and half the length of the arms of a plus
PLUS = (
    (-THIN, -LONG), (THIN, -LONG), (THIN, -THIN), (LONG, -THIN), (LONG, THIN), (THIN, THIN),
    (THIN, LONG), (-THIN, LONG), (-THIN, THIN), (-LONG, THIN), (-LONG, -THIN), (-THIN, -THIN),
)  # fmt: skip


def mark(shape: int, x: float, y: float, kind: str, title: str) -> str:
    """A small mark with a tooltip. `title` is escaped here."""
    r = 4.2
    outlines = (
        f"M{_number(x - r)} {_number(y)}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
        _polygon(x, y, [(-r, -r), (r, -r), (r, r), (-r, r)]),
        _polygon(x, y, [(0, -1.25 * r), (1.2 * r, r), (-1.2 * r, r)]),
        _polygon(x, y, [(0, -1.35 * r), (1.35 * r, 0), (0, 1.35 * r), (-1.35 * r, 0)]),
        _polygon(x, y, [(0, 1.25 * r), (1.2 * r, -r), (-1.2 * r, -r)]),
        _polygon(x, y, [(dx * r, dy * r) for dx, dy in PLUS]),
    )
    tooltip = element("title", escape(title)) if title else ""
    return element("path", tooltip, d=outlines[shape % MARKS], class_=kind)


def _polygon(x: float, y: float, corners: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_number(x + dx)} {_number(y + dy)}" for dx, dy in corners) + "z"


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".rstrip("0").rstrip(".")
    return str(value)
