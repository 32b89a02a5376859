"""Show the curve of a search as a table in a terminal, and as an SVG plot."""

from typing import TYPE_CHECKING

from forebay.analysis.charts.panels import Axis, Panel, Series, count_label, document
from forebay.analysis.statistics.units import duration

if TYPE_CHECKING:
    from rich.table import Table

    from forebay.analysis.search.result import SearchResult

WORDS = {True: "yes", False: "no", None: "unsure"}


def curve_table(result: "SearchResult") -> "Table":
    """Make a row for each load, with the interval that decided the load."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("requests/s", "met", "attainment", "interval", "judged", "TTFT p50", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in result.points:
        table.add_row(
            f"{point.rate_per_s:g}",
            WORDS[point.met],
            f"{point.attainment:.2%}",
            f"{point.low:.2%} - {point.high:.2%}",
            f"{point.judged:,}",
            duration(point.ttft_p50_s),
            duration(point.ttft_p99_s),
        )
    return table


def curve_plot(result: "SearchResult") -> str:
    """Plot attainment, and TTFT, against the load."""
    loads = Axis("requests per second offered", count_label)
    note = None if result.highest_per_s is None else (result.highest_per_s, "highest load")
    met = [(point.rate_per_s, point.attainment) for point in result.points]
    share = Axis("share of requests that met their targets", lambda v: f"{v:.0%}", log=False)
    panels = [Panel([Series("attainment", met, met)], loads, share, note, key_left=True)]
    latency = []
    for name, column in (("TTFT p50", "ttft_p50_s"), ("TTFT p99", "ttft_p99_s")):
        points = [(p.rate_per_s, getattr(p, column)) for p in result.points if getattr(p, column)]
        if points:
            latency.append(Series(name, points, points))
    if latency:
        panels.append(Panel(latency, loads, Axis("time"), note, key_left=True))
    return document(*panels)
