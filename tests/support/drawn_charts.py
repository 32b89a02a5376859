"""Read a chart back: the ticks of its axes tell which value lies at a place of the drawing."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from paths import ROOT

SVG = "{http://www.w3.org/2000/svg}"
STUDIES = ROOT / "docs/assets/studies"
OFF = 0.35  # a place is written to a tenth of a unit, and the ticks are, too
UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "%": 0.01, "T": 1e12, "M": 1e6, "": 1.0}
Points = list[tuple[float, float]]


def number(label: str) -> float:
    """The value of a label, such as `300 ms`."""
    found = re.fullmatch(r"([\d.,]+) ?(\D*)", label)
    assert found, label
    return float(found[1].replace(",", "")) * UNITS[found[2]]


@dataclass(frozen=True, slots=True)
class Ruler:
    """An axis, by its ticks: value = low + unit * place, of logarithms if `log`."""

    unit: float
    low: float
    log: bool

    @classmethod
    def of(cls, ticks: Points) -> "Ruler":
        """The scale, linear or logarithmic, on which all (place, value) of `ticks` lie."""
        places, values = np.array(ticks).T
        for log in (False, True)[: 1 + bool((values > 0).all())]:
            scaled = np.log(values) if log else values
            unit, low = np.polyfit(places, scaled, 1)
            if np.abs((scaled - low) / unit - places).max() < OFF:
                return cls(float(unit), float(low), log)
        raise AssertionError(f"no scale fits {ticks}")

    def value(self, place: float) -> float:
        at = self.low + self.unit * place
        return float(np.exp(at)) if self.log else at

    def place(self, value: float) -> float:
        return float((np.log(value) if self.log else value) - self.low) / self.unit


@dataclass(slots=True)
class Line:
    """A series: its marks with their tooltips, and its curve, in units of the drawing."""

    marks: Points = field(default_factory=list)
    curve: Points = field(default_factory=list)
    tooltips: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Panel:
    x: Ruler
    y: Ruler
    lines: Mapping[str, Line]
    notes: Mapping[str, float]

    def points(self, name: str) -> Points:
        """The values of a series: of its curve, or else of its marks."""
        line = self.lines[name]
        return [(self.x.value(x), self.y.value(y)) for x, y in line.curve or line.marks]

    def assert_at(self, seen: Points, values: Iterable[tuple[float, float]]) -> None:
        expected = [(self.x.place(x), self.y.place(y)) for x, y in values]
        assert np.array(seen) == pytest.approx(np.array(expected), abs=OFF)

    def assert_shows(self, name: str, values: Points, *, joined: bool = True) -> None:
        """The marks of a series are at `values`, and so are its tooltips and its curve."""
        line = self.lines[name]
        self.assert_at(line.marks, values)
        if joined:
            self.assert_at(line.curve, values)
        told = [tuple(map(number, tip.rpartition(": ")[2].split(", "))) for tip in line.tooltips]
        assert np.array(told) == pytest.approx(np.array(values), rel=0.05)


def centre(shape: int, path: str) -> tuple[float, float]:
    """The middle of a mark. Triangles are not as high above it as below."""
    xs, ys = np.array(re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.partition("a")[0]), dtype=float).T
    if "a" in path:
        return float(xs[0]) + 4.2, float(ys[0])
    y = {2: ys.min() + 5.25, 4: ys.max() - 5.25}.get(shape, (ys.min() + ys.max()) / 2)
    return float(xs.min() + xs.max()) / 2, float(y)


def read_panel(drawn: ElementTree.Element, names: Sequence[str]) -> Panel:
    """Read a panel. `names` are those of its series where it has no key."""
    texts = [(t.get("class"), float(t.get("x", 0)), float(t.get("y", 0)), t.text or "")
             for t in drawn.iter(f"{SVG}text")]  # fmt: skip
    lines: list[Line] = []
    keys: list[str] = []
    last = ""
    for path in drawn.iter(f"{SVG}path"):
        (kind, run, *_), d = path.get("class", "").split(), path.get("d", "")
        tip, shape = path.find(f"{SVG}title"), int(run[-1])
        if (tip is None and kind == "mark") or "h" in d:  # in the key, a mark or a piece of curve
            y = float(d.partition(" ")[2].partition("h")[0]) if "h" in d else centre(shape, d)[1]
            keys += [t for of, _, ty, t in texts if of == "key" and abs(ty - 4 - y) < 1]
            continue
        # A series is its curve and its marks, in this order, or one of both.
        if kind == "curve" or run != last:
            lines.append(Line())
        last = run
        if tip is None:
            lines[-1].curve = [(float(x), float(y)) for x, y in
                               (at.split() for at in d[1:].split("L"))]  # fmt: skip
        else:
            lines[-1].marks.append(centre(shape, d))
            lines[-1].tooltips.append(tip.text or "")
    notes = [t for of, _, _, t in texts if of == "key" and t not in keys]
    places = [float(n.get("x1", 0)) for n in drawn.iter(f"{SVG}line") if n.get("class") == "note"]
    return Panel(
        Ruler.of([(x, number(t)) for of, x, y, t in texts if of == "tick" and y == 271]),
        Ruler.of([(y - 4, number(t)) for of, x, y, t in texts if of == "tick" and y != 271]),
        dict(zip(keys or names, lines, strict=True)), dict(zip(notes, places, strict=True)),
    )  # fmt: skip


def read_panels(name: str) -> list[Panel]:
    panels: list[Panel] = []
    root = ElementTree.parse(STUDIES / f"{name}.svg").getroot()
    for drawn in root.iter(f"{SVG}g"):
        panels.append(read_panel(drawn, list(panels[0].lines) if panels else []))
    return panels


def looks(panel: ElementTree.Element) -> list[tuple[str, ...]]:
    """The classes of each series, by the samples in the key."""
    return [
        tuple(path.get("class", "").split()[1:])
        for path in panel.iter(f"{SVG}path")
        if path.find(f"{SVG}title") is None
        and ("h" in path.get("d", "") or "mark" in path.get("class", ""))
    ]


def covered(panel: ElementTree.Element, lines: Iterable[Line]) -> list[str]:
    """The words of the key and of notes that lie on a mark or a curve."""
    places = [place for line in lines for place in line.marks]
    for (a, b), (c, d) in (two for line in lines for two in pairwise(line.curve)):
        places += [(a + (c - a) * part, b + (d - b) * part) for part in np.linspace(0, 1, 20)]
    found = []
    for text in panel.iter(f"{SVG}text"):
        words, x, y = text.text or "", float(text.get("x", 0)), float(text.get("y", 0))
        width = 6.2 * len(words) * (-1 if text.get("text-anchor") == "end" else 1)
        left, right = sorted((x, x + width))
        if text.get("class") == "key" and any(
            left < at < right and y - 9 < down < y + 2 for at, down in places
        ):
            found.append(words)
    return found
