"""Show where the time of single requests went: the median, the 90th and the 99th percentile.

They are the requests at these ranks of the time to the first token, so they are real ones: their
ids are there for `forebay explain`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from forebay.analysis.report.plots import legend_mark
from forebay.analysis.runs.run import RunData
from forebay.analysis.statistics.quantiles import rank_of, samples_beyond
from forebay.analysis.statistics.units import durations

RANKS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LONGEST = "longest"
PARTS = (
    ("late", "client late"),
    ("queue", "queue of the proxy"),
    ("first", "server to first token"),
    ("rest", "rest of the answer"),
)


@dataclass(frozen=True, slots=True)
class SpentTime:
    """One request: its rank, its id, and seconds by the keys of PARTS, which add up to its E2E."""

    rank: str
    request_id: str
    parts: dict[str, float]


def spent_times(run: RunData, bucket: str, min_beyond: int) -> list[SpentTime]:
    """Return the requests at the ranks that the count allows, and the longest request.

    Empty for a run of histograms, which does not know the times of one request.
    """
    if run.info.get("joint") is False:
        return []
    ttft, e2e = run.numbers["ttft_response_s"], run.numbers["e2e_response_s"]
    usable = np.flatnonzero(run.rows(bucket, "ok") & np.isfinite(ttft) & np.isfinite(e2e))
    order = usable[np.argsort(ttft[usable], kind="stable")]
    count = len(order)
    chosen = {
        name: order[rank_of(share, count) - 1]
        for name, share in RANKS.items()
        if count and samples_beyond(share, count) >= min_beyond
    }
    if count:
        chosen[LONGEST] = order[-1]
    return [_spent(run, name, int(at)) for name, at in chosen.items()]


def _spent(run: RunData, name: str, at: int) -> SpentTime:
    numbers = {key: float(run.numbers[key][at]) for key in run.numbers}
    ttft_s, e2e_s = numbers["ttft_response_s"], numbers["e2e_response_s"]
    late_s = max(0.0, float(np.nan_to_num(ttft_s - numbers["ttft_service_s"])))
    queue_s = min(float(np.nan_to_num(numbers["queue_ms"])) / 1e3, ttft_s - late_s)
    parts = {
        "late": late_s,
        "queue": queue_s,
        "first": ttft_s - late_s - queue_s,
        "rest": max(0.0, e2e_s - ttft_s),
    }
    return SpentTime(name, run.words["request_id"][at] or run.words["id"][at], parts)


def breakdown_section(runs: Sequence[RunData], min_beyond: int) -> str:
    """A table with a bar for each of these requests, or "" if no run knows them."""
    buckets = list(dict.fromkeys(name for run in runs for name in run.buckets()))
    groups = [(bucket, _rows(runs, bucket, min_beyond)) for bucket in buckets]
    if not any(rows for _, rows in groups):
        return ""
    keys = "".join(
        f'<li><span class="part {key}"></span>{escape(label)}</li>' for key, label in PARTS
    )
    heads = "".join(f'<th class="n name" scope="col">{escape(label)}</th>' for _, label in PARTS)
    body = "".join(
        f'<tr><th class="section" colspan="8" scope="rowgroup">{escape(bucket)}</th></tr>{rows}'
        for bucket, rows in groups
        if rows
    )
    return (
        "<section><h2>Where the time went</h2>"
        '<p class="soft small">Single requests, at these percentiles of the time to the first '
        "token. <code>forebay explain ID</code> says more about each while the proxy remembers "
        f'it.</p><ul class="legend">{keys}</ul><div class="scroll" tabindex="0"><table><thead>'
        f'<tr><th scope="col">run</th><th scope="col">request</th><th></th>{heads}'
        f'<th scope="col">id</th></tr></thead><tbody>{body}</tbody></table></div></section>'
    )


def _rows(runs: Sequence[RunData], bucket: str, min_beyond: int) -> str:
    rows = [
        (number, run, spent)
        for number, run in enumerate(runs)
        for spent in spent_times(run, bucket, min_beyond)
    ]
    longest_s = max((sum(spent.parts.values()) for _, _, spent in rows), default=0.0)
    return "".join(_row(number, run, spent, longest_s) for number, run, spent in rows)


def _row(number: int, run: RunData, spent: SpentTime, longest_s: float) -> str:
    width = 16.0 / longest_s if longest_s else 0.0  # em
    bars = "".join(
        f'<span class="part {key}" style="width:{spent.parts[key] * width:.2f}em"></span>'
        for key, _ in PARTS
    )
    times = durations([spent.parts[key] for key, _ in PARTS])
    cells = "".join(f'<td class="n">{escape(text)}</td>' for text in times)
    return (
        f'<tr><td class="run">{legend_mark(number)} {escape(run.name)}</td>'
        f'<td>{spent.rank}</td><td class="bars">{bars}</td>{cells}'
        f'<td class="run"><code>{escape(spent.request_id)}</code></td></tr>'
    )
