"""Show where the time of single requests went: the median, the 90th and the 99th percentile.

They are the requests at these ranks of the time to the first token, so they are real ones: their
ids are there for `forebay explain`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.analysis.compare.figures import RunFigures
from forebay.analysis.runs.run import RunData
from forebay.analysis.statistics.quantiles import rank_of, samples_beyond

RANKS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LONGEST = "longest"
PARTS = {
    "late": "client late",
    "queue": "queue of the proxy",
    "first": "server to first token",
    "rest": "rest of the answer",
}
LONGEST_BAR_EM = 16.0


@dataclass(frozen=True, slots=True)
class SpentTime:
    """One request: its rank, its id, and seconds by the keys of PARTS, which add up to its E2E."""

    rank: str
    request_id: str
    parts: dict[str, float]


def spent_times(side: RunFigures, bucket: str, min_beyond: int) -> list[SpentTime]:
    """Return the requests at the ranks that the count allows, and the longest request.

    Empty for a run of histograms, which does not know the times of one request.
    """
    run = side.run
    if run.info.get("joint") is False:
        return []
    ttft, e2e = run.numbers["ttft_response_s"], run.numbers["e2e_response_s"]
    usable = np.flatnonzero(side.of[bucket].ok & np.isfinite(ttft) & np.isfinite(e2e))
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


def breakdown(
    runs: Sequence[RunFigures], buckets: Sequence[str], min_beyond: int
) -> list[tuple[str, int, SpentTime, float]]:
    """Return the bucket, the number of the run, the request, and the width of a second in em."""
    rows = []
    for bucket in buckets:
        requests = [
            (number, spent)
            for number, side in enumerate(runs)
            for spent in spent_times(side, bucket, min_beyond)
        ]
        longest_s = max((sum(spent.parts.values()) for _, spent in requests), default=0.0)
        em_per_s = LONGEST_BAR_EM / longest_s if longest_s else 0.0
        rows += [(bucket, number, spent, em_per_s) for number, spent in requests]
    return rows
