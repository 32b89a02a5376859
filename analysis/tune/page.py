"""Write the answer as one page that needs no other file: verdict, picture, table, commands."""

import math
from collections.abc import Callable, Sequence
from html import escape
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from forebay.analysis.charts import svg
from forebay.analysis.statistics.units import counts, duration, money, shares
from forebay.analysis.tune.figures import (
    IN_TIME,
    LEVEL,
    PAUSE,
    SHARES,
    Figure,
    OtherwiseRow,
)
from forebay.analysis.tune.otherwise import Answer
from forebay.analysis.tune.setups import to_type
from forebay.analysis.tune.show import off_by, present, table_name, twin_lines

ROW, HEAD, FOOT = 22.0, 34.0, 28.0
NAMES, GAP, RIGHT = 170.0, 18.0, 12.0
WIDTH = 1000.0
MOST_BUCKETS = 3
"""Buckets that the picture has room for."""
Label = Callable[[float], str]
INDENT = "\N{NO-BREAK SPACE}" * 4
_JINJA = Environment(
    autoescape=True, lstrip_blocks=True, trim_blocks=True, undefined=StrictUndefined
)


def page(answer: Answer, source: str, remarks: Sequence[str], *, priced: bool) -> str:
    """Return the HTML."""
    # Without advice only the present set-up was played.
    best, played = answer.verdict.best, len(answer.rows) > 1
    kind = "doubtful" if answer.twin.why_not else "better" if best else ""
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    style = files("forebay.analysis.report").joinpath("report.css").read_text(encoding="utf-8")
    # From the verdict down to the checks and the commands.
    return _JINJA.from_string(template).render(
        style=Markup(style),
        source=source,
        facts=_facts(answer, source),
        kind=kind,
        verdict=answer.verdict,
        remarks=remarks,
        picture=Markup(picture(answer, priced=priced)) if played else "",
        caption=f"In time: {', '.join(map(str, answer.slos))}.",
        heads=_heads(answer, priced=priced),
        table=[_cells(row, answer, priced=priced) for row in answer.rows],
        twin=[line for line in twin_lines(answer.twin, fitted=answer.fitted) if line[0] != " "],
        checks=[
            (
                f"{line.bucket} {line.name}",
                duration(line.observed_s),
                duration(line.predicted_s),
                off_by(line.error),
            )
            for line in answer.twin.lines
        ],
        ways=_ways(answer) if played else [],
        impossible=list(answer.impossible.items()),
        origin=f"Made by forebay tune {version('forebay')}. Simulated: check it on a real server.",
    )


def _facts(answer: Answer, source: str) -> str:
    kinds = ", ".join(f"{count:,} {name}" for name, count in answer.in_buckets.items())
    return (
        f"{source}: {answer.requests:,} requests ({kinds}) in {answer.span_s / 60:,.0f} min. "
        f"Now: {present(answer)}."
    )


def _ways(answer: Answer) -> list[tuple[str, str, bool]]:
    """Return the set-ups with the lines to type, the best first and open."""
    best = answer.verdict.best
    rows = [row for row in answer.rows[1:] if row is not best]
    ordered = [best, *rows] if best is not None else rows
    return [(row.set_up.name, "\n".join(to_type(row.set_up)), row is best) for row in ordered]


def _heads(answer: Answer, *, priced: bool) -> list[str]:
    times = [f"{name} {share}" for name in answer.in_buckets for share in SHARES]
    cost = "cost of 1M tokens" if priced else "GPU s for 1M tokens"
    return ["in time", "refused", "GPU s", cost, *times, "pause p99"]


def _cells(row: OtherwiseRow, answer: Answer, *, priced: bool) -> dict[str, Any]:
    names = [f"{name}.ttft_{share}" for name in answer.in_buckets for share in SHARES]
    cost = money([row.per_million])[0] if priced else counts([row.per_million])[0]
    cells = [_cell(IN_TIME, row.figures[IN_TIME])]
    cells += [(text, "", "") for text in (f"{row.refused:,}", f"{row.gpu_s:,.0f}", cost)]
    cells += [_cell(name, row.figures[name]) for name in (*names, PAUSE)]
    best = answer.verdict.best
    shown = table_name(row.set_up.name).replace("  ", INDENT)
    return {"name": shown, "cells": cells, "best": row is best}


def _cell(name: str, figure: Figure) -> tuple[str, str, str]:
    """Return the text, the interval and the class of a cell."""
    low, high = figure.low, figure.high
    if name == IN_TIME:
        ends = "" if low is None or high is None else f"{low * 100:.1f} to {high * 100:.1f}"
        return shares([figure.value])[0], ends, figure.against
    ends = ""
    if low is not None and high is not None and math.isfinite(high):
        ends = f"{duration(low)} to {duration(high)}"
    return duration(figure.value), ends, figure.against


def picture(answer: Answer, *, priced: bool) -> str:
    """Draw a panel for each bucket's slowest percentile, requests in time and the cost."""
    # A panel for each bucket, then one for requests in time and for the cost.
    rows = answer.rows
    panels: list[tuple[str, list[Figure], bool]] = []
    for name in list(answer.in_buckets)[:MOST_BUCKETS]:
        share = next(
            (s for s in ("p99", "p95", "p50") if rows[0].figures[f"{name}.ttft_{s}"].value), None
        )
        if share is not None:
            title = f"{name}: first token {share}"
            panels.append((title, [row.figures[f"{name}.ttft_{share}"] for row in rows], True))
    panels.append(("in time", [row.figures[IN_TIME] for row in rows], False))
    cost = "cost of 1M tokens" if priced else "GPU s for 1M tokens"
    panels.append((cost, [Figure(row.per_million) for row in rows], False))
    # Names on the left, then the panels.
    height = HEAD + ROW * len(rows) + FOOT
    drawn = [
        svg.text(
            4,
            HEAD + ROW * n + 15,
            table_name(row.set_up.name).replace("  ", INDENT),
            "name",
            "start",
        )
        for n, row in enumerate(rows)
    ]
    wide = (WIDTH - NAMES - RIGHT) / len(panels)
    for number, (title, figures, log) in enumerate(panels):
        start = NAMES + wide * number
        drawn += _panel(title, figures, start, start + wide - GAP, log=log)
    label = escape("What each set-up would have cost whom; the table below has the figures")
    return svg.element(
        "svg",
        "".join(drawn),
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        class_="plot picture",
        role="img",
        aria_label=label,
    )


def _panel(
    title: str, figures: Sequence[Figure], start: float, end: float, *, log: bool
) -> list[str]:
    values = [
        value
        for figure in figures
        for value in (figure.value, figure.low, figure.high)
        if value is not None and math.isfinite(value)
    ]
    # The scale.
    label: Label = svg.latency_label
    if log:
        low, high = svg.log_domain(values)
        ticks = svg.log_ticks(low, high)
    else:
        low, high = 0.0, 1.0 if title == "in time" else max(values, default=1.0)
        ticks = [low, high / 2, high]
        label = "{:.0%}".format if title == "in time" else _whole
    x = svg.Scale(low, high, start, end, log=log)
    bottom = HEAD + ROW * len(figures)
    # Title, the twin's own error, the grid, then the marks.
    drawn = [svg.text(start, 14, title, "name", "start")]
    present = figures[0]
    if present.low is not None and present.high is not None:  # the twin's own error
        at, to = x(present.low), x(present.high)
        drawn.append(
            svg.element("rect", x=at, y=HEAD, width=to - at, height=bottom - HEAD, class_="twin")
        )
    drawn += [svg.line(x(tick), HEAD, x(tick), bottom, "grid") for tick in ticks]
    for tick, anchor in ((ticks[0], "start"), (ticks[-1], "end")):
        drawn.append(svg.text(x(tick), bottom + 17, label(tick), "tick", anchor))
    if present.value is not None:
        drawn.append(svg.line(x(present.value), HEAD, x(present.value), bottom, "present"))
    for number, figure in enumerate(figures):
        if figure.value is not None:
            drawn += _mark(figure, x, HEAD + ROW * number + ROW / 2, label, present=number == 0)
    return drawn


def _mark(figure: Figure, x: svg.Scale, y: float, label: Label, *, present: bool) -> list[str]:
    """Draw a figure with its interval."""
    kind = "none" if present else figure.against or "none"
    drawn = []
    if not present and figure.low is not None and figure.high is not None:
        drawn.append(svg.line(x(figure.low), y, x(figure.high), y, f"range {kind}"))
    shape = {"better": 2, "worse": 4, LEVEL: 1}.get(kind, 0)
    value = figure.value or 0.0
    return [*drawn, svg.mark(shape, x(value), y, kind, label(value))]


def _whole(value: float, /) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
