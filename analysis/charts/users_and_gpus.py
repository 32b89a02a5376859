"""Draw users against GPUs, one curve per document size, with one mark per search."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from forebay.analysis.charts import svg

COLOURS = ("#2a6f97", "#c8553d", "#588157", "#7b5ea7", "#b08900", "#444444")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.grid{stroke:#ddd}.base{stroke:#333}"
    ".curve{fill:none;stroke-width:2}"
)


@dataclass(frozen=True, slots=True)
class Curve:
    """Least GPUs of one seed by number of users. `error` states why points are missing."""

    document_tokens: int
    points: tuple[tuple[int, int], ...]
    error: str = ""


def draw(drawn: Sequence[Curve], label: str) -> str:
    """Draw the plot as a standalone SVG with one mark per search."""
    points = [point for curve in drawn for point in curve.points]
    most_users = max((n for n, _ in points), default=1)
    most_gpus = max((gpus for _, gpus in points), default=1)
    bottom = svg.HEIGHT - svg.BOTTOM
    x = svg.Scale(0, most_users * 1.02, svg.LEFT, svg.WIDTH - svg.RIGHT)
    y = svg.Scale(0, most_gpus * 1.05, bottom, svg.TOP)
    parts = [svg.element("style", STYLE)]
    # Grid and labels lie below the curves.
    for tick in _ticks(most_gpus):
        parts.append(svg.line(x.start, y(tick), x.end, y(tick), "grid" if tick else "base"))
        parts.append(svg.text(x.start - 8, y(tick) + 4, f"{tick:,}", "tick", "end"))
    for tick in _ticks(most_users):
        parts.append(svg.text(x(tick), bottom + 18, f"{tick:,}", "tick"))
    parts.append(svg.text((x.start + x.end) / 2, svg.HEIGHT - 8, "users", "label"))
    parts.append(svg.text(14, svg.TOP + 4, "GPUs", "label", "start"))
    for number, curve in enumerate(drawn):
        colour = COLOURS[number % len(COLOURS)]
        name = f"{curve.document_tokens:,} tokens"
        path = "L".join(f"{x(n):.1f} {y(gpus):.1f}" for n, gpus in curve.points)
        if path:
            parts.append(svg.element("path", d=f"M{path}", class_="curve", stroke=colour))
        marks = "".join(
            svg.mark(number, x(n), y(gpus), "mark", f"{n:,} users, {name}: {gpus} GPUs")
            for n, gpus in curve.points
        )
        parts.append(svg.element("g", marks, fill=colour))
        # The legend also names a document size for which no search succeeded.
        legend = name if curve.points else f"{name}: no number of GPUs"
        at = svg.TOP + 18 + 16 * number
        parts.append(svg.mark(number, x.start + 14, at - 4, "mark", ""))
        parts[-1] = svg.element("g", parts[-1], fill=colour)
        parts.append(svg.text(x.start + 24, at, legend, "legend", "start"))
    return svg.element(
        "svg",
        "".join([svg.element("title", escape(label)), *parts]),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {svg.WIDTH:g} {svg.HEIGHT:g}",
        role="img",
    )


def _ticks(most: int) -> range:
    step = next(
        factor * 10**power
        for power in range(9)
        for factor in (1, 2, 5)
        if most / (factor * 10**power) <= 6
    )
    return range(0, most + 1, step)
