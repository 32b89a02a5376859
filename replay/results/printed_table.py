"""Show a summary as a compact table in a terminal."""

from typing import TYPE_CHECKING, Any

from forebay.replay.results.server_metrics import gauge_text
from forebay.replay.results.summary import firm, highest_firm

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

UNKNOWN = "–"
SHOWN = ("p50", "p90", "p95", "p99", "p99.9", "max")


def summary_table(summary: dict[str, Any]) -> "RenderableType":
    """Make a table with the tails of each bucket, and below it the results of the whole run."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    # The tails of each bucket.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("bucket", "requests", "done", "TTFT p50", "p99", "max", "stall p99", "goodput/s"):
        table.add_column(name, justify="left" if name == "bucket" else "right")
    buckets = [name for name, count in summary["requests_by_bucket"].items() if count]
    for name in ["all", *buckets]:
        ttft, stall = summary["ttft_ms"][name], summary["stall_ms"][name]
        of_all = name == "all"
        requests = summary["requests"] if of_all else summary["requests_by_bucket"][name]
        goodput = summary["goodput_by_bucket_per_s"].get(name)
        table.add_row(
            name,
            str(requests),
            str(summary["completed"] if of_all else ttft["count"]),
            _ms(firm(ttft, "p50")),
            _highest(ttft, "p99"),
            _ms(ttft["max"]),
            _highest(stall, "p99"),
            _number(summary["goodput_per_s"] if of_all else goodput, 2),
        )
    # The results of the whole run.
    lag = summary["schedule_lag_ms"]
    rates = {"requests": "requests", "output tokens": "output_tokens",
             "prompt tokens": "prompt_tokens", "all tokens": "total_tokens"}  # fmt: skip
    shown = (f"{name} {_number(summary[f'{key}_per_s'], 2)}/s" for name, key in rates.items())
    since_s = summary["verdict_at_s"]
    since = "" if since_s is None else f" from second {since_s:.1f} on"
    lines = [
        f"answered: {'   '.join(shown)}",
        f"hit ratio {_number(summary['hit_ratio'], 3)}   "
        f"attainment {_number(summary['attainment'], 3)}   "
        f"offered {_number(summary['offered_rate_per_s'], 2)}/s   "
        f"schedule lag p50 {_ms(firm(lag, 'p50'))} p99 {_ms(firm(lag, 'p99'))} "
        f"max {_ms(lag['max'])}",
        f"rejected {_counts(summary['rejected'])}   failed {_counts(summary['failed'])}",
        *([servers] if (servers := _servers(summary)) else []),
        f"verdict: {summary['verdict']} ({summary['verdict_reason']}){since}",
        *unanswered_lines(summary),
    ]
    return Group(table, *map(Text, lines), _quantities(summary, buckets))


def _servers(summary: dict[str, Any]) -> str:
    """Return the load of the servers and the energy of an answer, "" if no page was sampled."""
    text, joules = gauge_text(summary), summary.get("energy_j_per_request")
    return text if joules is None else f"{text}   energy {joules:,.0f} J a request"


def _quantities(summary: dict[str, Any], buckets: list[str]) -> "Table":
    """Make the table of each quantity of each bucket that has samples and firm values."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("quantity", *SHOWN):
        table.add_column(name, justify="left" if name == "quantity" else "right")
    for bucket in buckets:
        for name in ("TTFT", "TPOT", "ITL", "E2E", "stall", "queue"):
            figures = summary[f"{name.lower()}_ms"][bucket]
            if figures["count"]:
                table.add_row(f"{bucket} {name}", *(_ms(firm(figures, share)) for share in SHOWN))
    if summary["sessions"]:
        figures = summary["session_e2e_ms"]["all"]
        table.add_row("session E2E", *(_ms(firm(figures, share)) for share in SHOWN))
    return table


def _highest(figures: dict[str, Any], name: str) -> str:
    """Return a percentile, or the highest lower percentile that the count allows, with its name.

    With too few samples for any percentile it is unknown. The table has the maximum elsewhere.
    """
    allowed, value = highest_firm(figures, name)
    if allowed == "max":
        return UNKNOWN
    return _ms(value) if allowed == name or value is None else f"{allowed} {_ms(value)}"


def unanswered_lines(summary: dict[str, Any]) -> list[str]:
    """Return one line for each kind of unanswered request that has words of the server."""
    lines = []
    for kind in summary["unanswered"]:
        if kind["said"]:
            status = "" if kind["status"] in (None, 200) else f" (HTTP {kind['status']})"
            requests = f"{kind['requests']:,} requests; the first one: {kind['said']}"
            lines.append(f"{kind['reason']}{status}: {requests}")
    return lines


def _ms(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value / 1e3:.2f} s" if value >= 1e3 else f"{value:.1f} ms"


def _number(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def _counts(counts: dict[str, int]) -> str:
    if not counts:
        return "0"
    pairs = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"{sum(counts.values())} ({pairs})"
