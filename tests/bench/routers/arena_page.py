"""The results as one HTML page with plots, and the generated part of bench-routers.md."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from arena_contenders import CONTENDERS
from arena_html import best_table, latency_table, served_table
from arena_plan import Record
from arena_results import Entry, Estimate, comparisons, groups
from arena_tables import (
    LEGEND,
    about_of,
    circumstances,
    in_course_order,
    order_of,
    ranked,
    seconds,
    tables,
    title,
)

from forebay.analysis.charts import svg
from forebay.analysis.report.page import html_page
from forebay.traces.errors import InputError

BEGIN, END = "<!-- generated: tests/bench/routers/bench_routers.py --write-docs -->", "<!-- end -->"
LEFT, ROW = 168.0, 23.0
APART = 3.5  # chats above, documents below the middle of a row, so that neither hides the other
SHAPES = {"chat": 0, "document": 3}
LOADS = "overload "


def page(records: Sequence[Record]) -> str:
    """The whole page."""
    body = ["<h1>Routers side by side</h1>"]
    if not records:
        body.append("<p>No results yet.</p>")
    for group, found in groups(records).items():
        entries = in_course_order(found)
        body.append(f"<h2>{escape(title(group))}</h2><p class='small'>")
        body.append(f"{escape(circumstances(entries))}</p><p class='soft small'>")
        body.append(f"{escape(LEGEND)}</p>")
        if best := best_table(comparisons(entries)):
            body.append(f"<h3>Forebay against the best peer of each figure</h3>{best}")
        body.append(goodput_by_load(entries))
        for workload in order_of(entries):
            of = ranked([one for one in entries if one.workload == workload])
            body.append(f"<h2>{escape(workload)}</h2><p>")
            body.append(f"{escape(about_of(of, group))}</p>{tails_plot(of)}")
            body.append(served_table(of) + latency_table(of))
    body.append(_commands(records))
    return html_page("Routers side by side", "".join(body))


def tails_plot(entries: Sequence[Entry]) -> str:
    """The 99th percentile of TTFT by router and bucket, with its interval; log axis."""
    drawn = [one for one in entries if one.valid]
    points = [
        (row, bucket, estimate)
        for row, entry in enumerate(drawn)
        for bucket in entry.buckets()
        if (estimate := entry.ttft(bucket, 0.99)) is not None
    ]
    if not points:
        return ""
    ends = [
        value for _, _, of in points
        for value in (of.value, *((of.interval.low, of.interval.high) if of.interval else ()))
    ]  # fmt: skip
    low, high = svg.log_domain(ends)
    x = svg.Scale(low, high, LEFT, svg.WIDTH - svg.RIGHT, log=True)
    bottom = svg.TOP + len(drawn) * ROW + 4
    parts = []
    for tick in svg.log_ticks(low, high):
        parts.append(svg.line(x(tick), svg.TOP, x(tick), bottom, "grid"))
        parts.append(svg.text(x(tick), bottom + 16, svg.latency_label(tick), "tick"))
    for row, entry in enumerate(drawn):
        parts.append(svg.text(LEFT - 10, _y(row) + 4, entry.router, "tick", "end"))
    for row, bucket, of in points:
        y = _y(row) + (-APART if bucket == "chat" else APART)
        parts.append(_point(x, y, bucket, of, drawn[row].router))
    parts.append(svg.text(LEFT, bottom + 34, "TTFT p99: circles chat, diamonds documents", "axis",
                          "start"))  # fmt: skip
    label = "99th percentile of the time to first token: " + "; ".join(
        f"{drawn[row].router} {bucket} {seconds(of.value)}" for row, bucket, of in points
    )
    return _figure("".join(parts), bottom + 42, label)


def _y(row: int) -> float:
    return svg.TOP + (row + 0.5) * ROW


def _point(x: svg.Scale, y: float, bucket: str, of: Estimate, router: str) -> str:
    kind = f"run{1 if bucket == 'chat' else 0}"
    parts = []
    if of.interval is not None:
        path = f"M{x(of.interval.low):.1f} {y:.1f}H{x(of.interval.high):.1f}"
        parts.append(svg.element("path", d=path, class_=f"curve {kind}"))
    told = f"{router}, {bucket}: {seconds(of.value)}"
    parts.append(svg.mark(SHAPES.get(bucket, 1), x(of.value), y, f"mark {kind}", told))
    return "".join(parts)


def goodput_by_load(entries: Sequence[Entry]) -> str:
    """Goodput at each load of the overload workloads, one line a core router."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for entry in entries:
        contender = CONTENDERS.get(entry.router)
        if not entry.workload.startswith(LOADS) or contender is None or not contender.core:
            continue
        estimate = entry.mean("goodput_per_s")
        load = entry.records[0]["load"]
        if estimate is not None and load:
            lines.setdefault(entry.router, []).append((float(load), estimate.value))
    if not lines or max(map(len, lines.values())) < 2:
        return ""
    most = max(value for points in lines.values() for _, value in points)
    loads = sorted({load for points in lines.values() for load, _ in points})
    bottom = svg.HEIGHT - svg.BOTTOM
    x = svg.Scale(0.0, loads[-1], svg.LEFT, svg.WIDTH - svg.RIGHT)
    y = svg.Scale(0.0, most * 1.08 or 1.0, bottom, svg.TOP)
    parts = [svg.line(x(0), bottom, x(loads[-1]), bottom, "base")]
    for load in loads:
        parts.append(svg.text(x(load), bottom + 17, f"{load:g}x", "tick"))
    for tick in (most / 2, most):
        parts.append(svg.line(x.start, y(tick), x.end, y(tick), "grid"))
        parts.append(svg.text(x.start - 8, y(tick) + 4, f"{tick:.1f} /s", "tick", "end"))
    listed = []
    for number, (router, points) in enumerate(lines.items()):
        places = [(x(load), y(value)) for load, value in sorted(points)]
        path = "M" + "L".join(f"{at:.1f} {to:.1f}" for at, to in places)
        parts.append(svg.element("path", d=path, class_=f"curve run{number % 6}"))
        parts += [svg.mark(number, at, to, f"mark run{number % 6}", router) for at, to in places]
        key = svg.mark(number, 7, 7, f"mark run{number % 6}", "")
        drawn = svg.element("svg", key, viewBox="0 0 14 14", class_="key", aria_hidden="true")
        listed.append(f"<li>{drawn}{escape(router)}</li>")
    parts.append(svg.text((x.start + x.end) / 2, svg.HEIGHT - 6, "offered load", "axis"))
    label = "Goodput by offered load: " + "; ".join(
        f"{router} " + ", ".join(f"{load:g}x {value:.2f}/s" for load, value in sorted(points))
        for router, points in lines.items()
    )
    return (
        f"<h2>Goodput under overload</h2><ul class='legend'>{''.join(listed)}</ul>"
        + _figure("".join(parts), svg.HEIGHT, label)
    )  # fmt: skip


def _figure(drawn: str, height: float, label: str) -> str:
    return (
        "<div class='plots one'><figure>"
        f'<svg viewBox="0 0 {svg.WIDTH:g} {height:g}" class="plot" role="img" '
        f'aria-label="{escape(label)}">{drawn}</svg></figure></div>'
    )


def _commands(records: Sequence[Record]) -> str:
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(note)}<br><code>{escape(command)}</code></dd>"
        for name, note, command in commands(records)
    )
    return f"<h2>How each was started</h2><dl>{rows}</dl>" if rows else ""


def commands(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """(router, its settings, the command line of its latest run)."""
    latest = {one["router"]: one["command"] for one in records if "command" in one}
    return [
        (name, contender.note, latest[name])
        for name, contender in CONTENDERS.items()
        if name in latest
    ]


def generated(records: Sequence[Record]) -> str:
    """Return all tables, as Markdown."""
    return tables(records).strip("\n")


def write_docs(path: Path, records: Sequence[Record]) -> None:
    """Put the tables between the marks of `path`; raises InputError without marks."""
    text = path.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise InputError(f"{path}: the lines {BEGIN} and {END} are missing; put them back")
    made = generated(records)
    path.write_text(f"{head}{begin}\n\n{made}\n\n{end}{tail}", encoding="utf-8")
