"""Order statistics of latencies: exact, never interpolated, hidden if samples are too few.

The q-quantile is the inverted CDF: the smallest observed value that at least a share q of the
samples do not exceed. So it is the latency of a real request, as in HdrHistogram. A percentile
with fewer than `MIN_BEYOND` samples beyond it depends on one or two requests: it is None here and
a dash in every table. This module reads no file and uses no randomness.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIN_BEYOND = 10
EQUAL_WITHIN = 0.05  # figures within 5 % are called equal
SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}


def rank_of(share: float, count: int) -> int:
    """The 1-based rank of the `share` quantile among `count` samples.

    Rounds to nine places first, because 0.07 * 100 is 7.000000000000001 in floats but rank 7 is
    meant.
    """
    return min(count, max(1, math.ceil(round(share * count, 9))))


def samples_beyond(share: float, count: int) -> int:
    """Number of samples that rank above the quantile."""
    return count - rank_of(share, count) if count else 0


def order_statistic(ordered: Floats, share: float) -> float:
    """The `share` quantile of ascending values.

    Raises:
        ValueError: there are no values.
    """
    if not len(ordered):
        raise ValueError("no samples, so no percentile")
    return float(ordered[rank_of(share, len(ordered)) - 1])


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles by name in the unit of the samples. None if too few samples are beyond."""

    count: int
    values: dict[str, float | None]
    max: float | None


def percentile_table(
    samples: Floats | Sequence[float],
    unanswered: int = 0,
    min_beyond: int = MIN_BEYOND,
) -> Percentiles:
    """Percentiles of `samples` without NaN, plus `unanswered` samples of +inf."""
    ordered = np.sort(finite(samples))
    count = len(ordered) + unanswered
    values: dict[str, float | None] = {}
    for name, share in SHARES.items():
        rank = rank_of(share, count)
        if not count or count - rank < min_beyond:
            values[name] = None
        else:
            values[name] = float(ordered[rank - 1]) if rank <= len(ordered) else math.inf
    longest = math.inf if unanswered else (float(ordered[-1]) if len(ordered) else None)
    return Percentiles(count, values, longest)


def finite(samples: Floats | Sequence[float]) -> Floats:
    """The finite samples."""
    values = np.asarray(samples, dtype=np.float64)
    return values[np.isfinite(values)]


def tail_curve(samples: Floats | Sequence[float], unanswered: int = 0) -> tuple[Floats, Floats]:
    """The percentile curve on HDR's scale: x = 1 / (1 - percentile), y = value.

    Sample i of n (1-based) is at x = n / (n - i + 1), from the share strictly below it, so that the
    longest has a finite x. The `unanswered` count as samples above all others.
    """
    ordered = np.sort(finite(samples))
    count = len(ordered) + unanswered
    ranks = np.arange(1, len(ordered) + 1, dtype=np.float64)
    return count / (count - ranks + 1), ordered
