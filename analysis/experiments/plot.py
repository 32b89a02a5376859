"""A plot of measured points with fitted curves, as an SVG document of its own, axes logarithmic."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from forebay.analysis import svg

STYLE = """:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--soft:#57606a;--rule:#dfe3e8;
--run0:#b85c00;--run1:#0a63b8;--run2:#0b7a5b;--run3:#8b3f8f;--run4:#5c6670;--run5:#a8203e}
@media(prefers-color-scheme:dark){:root{--paper:#14171a;--ink:#e6e9ec;--soft:#9fa9b4;--rule:#30363d;
--run0:#f2a04e;--run1:#68b0f5;--run2:#4cc7a1;--run3:#d694d8;--run4:#a9b3bd;--run5:#f48a9e}}
text{font:12px system-ui,sans-serif;fill:var(--soft)}
.key{fill:var(--ink);paint-order:stroke;stroke:var(--paper);stroke-width:5}
.paper{fill:var(--paper)}
.grid{stroke:var(--rule)}.base{stroke:var(--soft)}.note{stroke:var(--soft);stroke-dasharray:3 4}
.curve{fill:none;stroke:var(--c);stroke-width:2}.mark{fill:var(--c);stroke:var(--paper)}
.run0{--c:var(--run0)}.run1{--c:var(--run1)}.run2{--c:var(--run2)}.run3{--c:var(--run3)}
.run4{--c:var(--run4)}.run5{--c:var(--run5)}"""
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """Measured points and the curve through them; either may be empty. y in seconds."""

    name: str
    points: Points
    curve: Points = ()


def xy_plot(
    series: Sequence[Series], x_title: str, y_title: str, note: tuple[float, str] | None = None
) -> str:
    """Draw `series`; `note` is a place on the x axis with a word for it. All values above 0."""
    every = [point for one in series for point in (*one.points, *one.curve)]
    x_low, x_high = svg.log_domain(x for x, _ in every)
    y_low, y_high = svg.log_domain(y for _, y in every)
    bottom = svg.HEIGHT - svg.BOTTOM
    x = svg.Scale(x_low, x_high, svg.LEFT, svg.WIDTH - svg.RIGHT, log=True)
    y = svg.Scale(y_low, y_high, bottom, svg.TOP + 14, log=True)
    drawn = [svg.element("rect", width=svg.WIDTH, height=svg.HEIGHT, class_="paper")]
    for tick in svg.log_ticks(x_low, x_high):
        drawn.append(svg.line(x(tick), y.end, x(tick), bottom, "grid"))
        anchor = "end" if x(tick) > svg.WIDTH - svg.RIGHT - 16 else "middle"
        drawn.append(svg.text(x(tick), bottom + 17, f"{tick:,.0f}", "tick", anchor))
    for tick in svg.log_ticks(y_low, y_high):
        drawn.append(svg.line(x.start, y(tick), x.end, y(tick), "grid"))
        drawn.append(svg.text(x.start - 8, y(tick) + 4, svg.latency_label(tick), "tick", "end"))
    drawn.append(svg.line(x.start, bottom, x.end, bottom, "base"))
    drawn.append(svg.text((x.start + x.end) / 2, svg.HEIGHT - 6, x_title, "axis"))
    drawn.append(svg.text(4, svg.TOP, y_title, "axis", "start"))
    if note and x_low <= note[0] <= x_high:
        at = x(note[0])
        drawn.append(svg.line(at, y.end, at, bottom, "note"))
        drawn.append(svg.text(at - 5, y.end + 11, note[1], "tick", "end"))
    for number, one in enumerate(series):
        path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in one.curve)
        if path:
            drawn.append(svg.element("path", d="M" + path, class_=f"curve run{number % 6}"))
        for a, b in one.points:
            title = f"{one.name}: {a:,.0f}, {svg.latency_label(b)}"
            drawn.append(svg.mark(number, x(a), y(b), f"mark run{number % 6}", title))
        row = bottom - 10 - 16 * (len(series) - 1 - number)
        drawn.append(svg.mark(number, x.end - 12, row - 4, f"mark run{number % 6}", ""))
        drawn.append(svg.text(x.end - 22, row, one.name, "key", "end"))
    label = escape(f"{y_title} against {x_title}: {', '.join(one.name for one in series)}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {svg.WIDTH:g} {svg.HEIGHT:g}" '
        f'role="img" aria-label="{label}"><style>{STYLE}</style>{"".join(drawn)}</svg>\n'
    )
