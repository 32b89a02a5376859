"""Many latencies as few numbers that can be pooled: counts in bins 2 % wide. Pure.

A record must be small, and a percentile of several seeds together needs all their samples: bins
keep every percentile to within 1 %. Requests without an answer count as latencies that never end,
so that refusing the slow ones cannot make a router look fast where `failures` is asked for.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from forebay.analysis.statistics.quantiles import Floats, finite, order_statistic

WIDTH = math.log(1.02)
PERCENTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
Binned = Mapping[str, Any]
"""`requests` in all, `answered`, percentiles and maximum in ms, and `bins`: [bin, count, ...]."""


def summarise(seconds: Floats, requests: int) -> dict[str, Any]:
    """Answered requests' latencies out of `requests`; percentiles by order statistic."""
    ordered = np.sort(finite(seconds))
    told: dict[str, Any] = {"requests": requests, "answered": len(ordered)}
    for name, share in PERCENTILES.items():
        told[name] = _ms(order_statistic(ordered, share)) if len(ordered) else None
    told["max"] = _ms(float(ordered[-1])) if len(ordered) else None
    numbers, counts = np.unique([bin_of(one) for one in ordered.tolist()], return_counts=True)
    pairs = zip(numbers.tolist(), counts.tolist(), strict=True)
    told["bins"] = [int(one) for pair in pairs for one in pair]
    return told


def bin_of(seconds: float) -> int:
    """Number of the bin; bin 0 is 0.1 ms and below."""
    return max(0, round(math.log(max(seconds, 1e-9) / 1e-4) / WIDTH))


def middle_s(number: int) -> float:
    return 1e-4 * math.exp(number * WIDTH)


def pooled(samples: Iterable[Binned]) -> tuple[dict[int, int], int]:
    """Counts by bin of several records together, and how many requests had no answer."""
    counts: dict[int, int] = {}
    lost = 0
    for one in samples:
        bins = one["bins"]
        for number, count in zip(bins[::2], bins[1::2], strict=True):
            counts[number] = counts.get(number, 0) + count
        lost += one["requests"] - one["answered"]
    return counts, lost


def quantile_s(counts: Mapping[int, int], share: float, lost: int = 0) -> float | None:
    """The `share` quantile, `lost` more samples being infinite; None without any sample."""
    total = sum(counts.values()) + lost
    if not total:
        return None
    rank = max(1, math.ceil(share * total - 1e-9))
    below = 0
    for number in sorted(counts):
        below += counts[number]
        if below >= rank:
            return middle_s(number)
    return math.inf


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)
