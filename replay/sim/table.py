"""Show simulated cases as one table: the values that vary, then the results."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from forebay.replay.plan.slo import SESSION
from forebay.replay.results.summary import highest_firm


def results_table(results: Sequence[dict[str, Any]]) -> Table:
    """Make a row for each case, with latencies in seconds.

    With few samples a cell has a lower percentile and its name.
    """
    varied = list(results[0]["case"])
    buckets = [name for name in results[0]["ttft_ms"] if name != "all"]
    table = Table(
        caption=_caption(results), box=SIMPLE_HEAD, show_edge=False, pad_edge=False,
        padding=(0, 1, 0, 0), caption_justify="left",
    )  # fmt: skip
    # Columns: the values that vary, then the results.
    for name in varied:
        table.add_column(name, style="bold", overflow="fold")
    for name in ("rejected", "met", "good/s", "hit"):
        table.add_column(name, justify="right", no_wrap=True)
    for bucket in buckets:
        table.add_column(f"{bucket}\np99", justify="right", no_wrap=True)
    table.add_column("stall", justify="right", no_wrap=True)
    # With set arrivals, tasks take as long as their pauses: a column for those who set a target.
    tasks = any(slo.startswith(f"{SESSION}=") for result in results for slo in result["slos"])
    if tasks:
        table.add_column("session\nE2E p99", justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            *("none" if (value := result["case"][name]) is None else str(value) for name in varied),
            f"{sum(result['rejected'].values()):,}",
            f"{result['attainment']:.1%}",
            _number(result["goodput_per_s"], 1.0),
            _number(result["hit_ratio"], 1.0, ".0%"),
            *(_p99(result["ttft_ms"][bucket]) for bucket in buckets),
            _number(result["stall_ms"]["all"]["max"], 1e-3),
            *([_p99(result["session_e2e_ms"]["all"])] if tasks else []),
        )
    return table


def _p99(figures: dict[str, Any]) -> str:
    """Return p99, or the highest percentile below it that the count allows, with its name."""
    name, value = highest_firm(figures, "p99")
    shown = _number(value, 1e-3, ".3g")
    return shown if name == "p99" or value is None else f"{name} {shown}"


def _number(value: float | None, scale: float, how: str = ".2f") -> str:
    return "-" if value is None else format(value * scale, how)


def _caption(results: Sequence[dict[str, Any]]) -> str:
    result = results[0]
    slos = ", ".join(result["slos"]) or "none stated"
    return (
        f"{result['requests']:,} requests in virtual time; met: share of all requests that met "
        f"{slos}{_possible(results)}; TTFT by bucket in s; stall: longest gap in an answer, s"
    )


def _possible(results: Sequence[dict[str, Any]]) -> str:
    shares = [r["share_of_possible"] for r in results if r["share_of_possible"] is not None]
    if not shares:  # no scheduler could serve a request in time
        return ""
    ends = sorted({f"{min(shares):.1%}", f"{max(shares):.1%}"}, key=lambda end: float(end[:-1]))
    return f"; good/s: {' to '.join(ends)} of the most that any scheduler could reach"
