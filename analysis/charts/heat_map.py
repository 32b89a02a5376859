"""Draw a grid of shares as an SVG document: one column per length, one row per depth."""

from collections.abc import Mapping, Sequence

from forebay.analysis.charts import svg
from forebay.analysis.charts.panels import svg_document

DARK = 0.55  # from this share on, text uses the colour of the paper


def heat_map(
    shares: Mapping[tuple[int, float], float | None],
    columns: Sequence[int],
    rows: Sequence[float],
    x_title: str,
    y_title: str,
    title: str,
) -> str:
    """Draw `shares` by (column, row), 0 to 1. Darker is more, None is not measured."""
    left, top = svg.LEFT, svg.TOP + 28
    width = (svg.WIDTH - svg.RIGHT - left) / len(columns)
    height = (svg.HEIGHT - svg.BOTTOM - top) / len(rows)
    drawn = [svg.text(4, svg.TOP, title, "key", "start")]
    drawn.append(svg.text(4, svg.TOP + 18, y_title, "axis", "start"))
    for number, row in enumerate(rows):
        y = top + number * height
        drawn.append(svg.text(left - 8, y + height / 2 + 4, f"{row:g}", "tick", "end"))
        for place, column in enumerate(columns):
            x = left + place * width
            share = shares.get((column, row))
            drawn.append(_cell(x, y, width, height, share, f"{column:,}, {row:g}"))
            label = "–" if share is None else f"{share:.0%}"
            kind = "over" if share is not None and share >= DARK else "under"
            drawn.append(svg.text(x + width / 2, y + height / 2 + 4, label, kind))
    for place, column in enumerate(columns):
        x = left + (place + 0.5) * width
        drawn.append(svg.text(x, svg.HEIGHT - svg.BOTTOM + 17, f"{column:,}", "tick"))
    middle = (left + svg.WIDTH - svg.RIGHT) / 2
    drawn.append(svg.text(middle, svg.HEIGHT - 6, x_title, "axis"))
    return svg_document("".join(drawn), svg.HEIGHT, f"{title}: {y_title} against {x_title}")


def _cell(x: float, y: float, width: float, height: float, share: float | None, name: str) -> str:
    label = "not measured" if share is None else f"{share:.1%}"
    return svg.element(
        "rect", svg.element("title", f"{name}: {label}"), x=x + 1, y=y + 1, width=width - 2,
        height=height - 2, class_="cell run1", fill_opacity=f"{0.06 + 0.94 * (share or 0.0):.2f}",
    )  # fmt: skip
