"""Confidence intervals of a share, and of ratios of shares and of percentiles. Pure.

Shares: requests are taken as independent. Requests of one burst are not, so the true intervals are
somewhat wider. The ratio of two percentiles has its interval from batch means.

Latencies of one run are not independent, because a queue makes whole periods slow. So each run is
cut into batches of consecutive requests, and their differences tell how sure the share of requests
above a threshold is (batch means: G. S. Fishman, Discrete-Event Simulation, 2001, 6.6).

    separate runs   a value may be a run's percentile if the share above it is as it should be
                    (inversion of a t test); both intervals together give the ratio's
                    (G. Y. Zou and A. Donner, Stat. Med. 27, 2008). A second test compares the
                    shares above one threshold, and the wider interval stands: in a short run of a
                    busy queue the first alone is wrong in one case of eight. Five batches: ten
                    still depend on each other, and differ in 15 of 100 pairs of equal, long runs
    paired runs     the same requests at the same times: the common part of both runs falls out of
                    the difference, so the interval is far narrower. Ten batches. Where one jam
                    holds all slow requests of a run, their ratios give the interval (a sign test:
                    H. A. David and H. N. Nagaraja, Order Statistics, 2003, 7.1)

`tests/bench/compare_verdicts.py` measures both on queues, and `compare_simulated.py` on runs of the
simulator. A bootstrap of blocks found a difference in half of the pairs of equal runs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.analysis.statistics.quantiles import Floats, finite, order_statistic

FEWEST_SAMPLES = 20  # with fewer, even the median is noise
BATCHES, SEPARATE_BATCHES = 10, 5  # batches of paired and of separate runs
T_95, SEPARATE_T_95 = 2.262, 2.776  # Student's t for 95 % on both sides, with one fewer freedoms
LEAST_STEP, WIDEN, WIDEST = 0.01, 1.6, 7.0  # steps to a limit, in the log of the ratio
HALVINGS = 10
Z_95 = 1.96  # quantile of the normal distribution for 95 % intervals


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """An interval that holds the ratio with 95 % confidence."""

    low: float
    high: float

    @property
    def clear(self) -> bool:
        """True if the interval excludes 1, that is, equality."""
        return self.low > 1 or self.high < 1

    def least_change(self, ratio: float) -> float:
        """The least change that an interval as wide as this one tells from equality.

        0.1 is 10 %. Inf, if the interval around `ratio` has no end.
        """
        if not self.low or math.isinf(self.high):
            return math.inf
        return max(self.high / ratio, ratio / self.low) - 1.0


def ratio_interval(
    a: Floats, b: Floats, share: float, *, paired: bool = False
) -> ConfidenceInterval | None:
    """95 % interval of the ratio of the `share` quantiles of `a` and `b`.

    Samples are in the order in which the requests were due. None if either run has fewer than
    `FEWEST_SAMPLES`, or a quantile that is not above 0. `paired`: both have the same requests.
    """
    a, b = finite(a), finite(b)
    if min(len(a), len(b)) < FEWEST_SAMPLES:
        return None
    of_a, of_b = (order_statistic(np.sort(values), share) for values in (a, b))
    if not (0.0 < of_a < math.inf and 0.0 < of_b < math.inf):
        return None
    ratio = of_a / of_b
    if paired and len(a) == len(b):
        half = _paired_half(a, b, share)
        if half < math.inf:
            return ConfidenceInterval(ratio * math.exp(-half), ratio * math.exp(half))
        return _batches_interval(a, b, share, ratio)
    low_a, high_a = _limits(a, of_a, share)
    low_b, high_b = _limits(b, of_b, share)
    slower, faster = _scale_limits(a, b, of_a, of_b)
    low, high = max(math.hypot(low_a, high_b), slower), max(math.hypot(high_a, low_b), faster)
    return ConfidenceInterval(ratio * math.exp(-low), ratio * math.exp(high))


def difference_interval(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> tuple[float, float]:
    """95 % interval of the share of `a` less the share of `b`, both of the same requests in order.

    (-1, 1) for fewer than `FEWEST_SAMPLES` requests.
    """
    if len(a) < FEWEST_SAMPLES:
        return -1.0, 1.0
    differences = _batches(a) - _batches(b)
    half = T_95 * float(differences.std(ddof=1)) / math.sqrt(BATCHES)
    middle = float(a.mean()) - float(b.mean())
    return max(-1.0, middle - half), min(1.0, middle + half)


def _scale_limits(a: Floats, b: Floats, of_a: float, of_b: float) -> tuple[float, float]:
    """Return the distances in logs down and up from the ratio of the percentiles to its limits.

    A factor may be the ratio if as many requests of A as of B, times the factor, are above a
    threshold between both percentiles.
    """

    def may_be(factor: float) -> bool:
        threshold = math.sqrt(of_a * of_b * factor)
        above_a, above_b = (
            _batches(values > threshold, SEPARATE_BATCHES) for values in (a, b * factor)
        )
        variance = float(above_a.var(ddof=1) + above_b.var(ddof=1)) / SEPARATE_BATCHES
        return abs(float(above_a.mean() - above_b.mean())) <= SEPARATE_T_95 * math.sqrt(variance)

    ratio = of_a / of_b
    below = _limit(lambda log: may_be(ratio * math.exp(-log)))
    return below, _limit(lambda log: may_be(ratio * math.exp(log)))


def _limits(values: Floats, middle: float, share: float) -> tuple[float, float]:
    """Return the distances in logs down and up from `middle` to the limits of the quantile."""

    def may_be(value: float) -> bool:
        """True if as many requests are above the value as would be, were it the quantile."""
        above = _batches(values > value, SEPARATE_BATCHES)
        off = abs(float(above.mean()) - (1.0 - share))
        return off <= SEPARATE_T_95 * float(above.std(ddof=1)) / math.sqrt(SEPARATE_BATCHES)

    below = _limit(lambda log: may_be(middle * math.exp(-log)))
    above = _limit(lambda log: may_be(middle * math.exp(log)))
    return below, above


def _paired_half(a: Floats, b: Floats, share: float) -> float:
    """Return half the width of the interval, in the log of the ratio, inf if it is not known.

    The requests above the percentile of their own run are mostly the same. How far the rest
    differs is a share of requests, and the slope of either run's distribution turns it into time.
    """
    ordered = np.sort(a), np.sort(b)
    at = [order_statistic(values, share) for values in ordered]
    differences = _batches(a > at[0]) - _batches(b > at[1])
    off = T_95 * float(differences.std(ddof=1)) / math.sqrt(BATCHES)
    if share + off >= 1.0 or share - off <= 0.0:
        return math.inf
    logs = [
        abs(math.log(order_statistic(values, near) / middle))
        for values, middle in zip(ordered, at, strict=True)
        for near in (share - off, share + off)
        if order_statistic(values, near) > 0.0
    ]
    return max(logs)


def _batches_interval(a: Floats, b: Floats, share: float, ratio: float) -> ConfidenceInterval:
    """Return the interval from the second smallest to the second largest ratio of ten batches.

    It holds the ratio of a typical batch with 97.9 % confidence. An end that does not reach
    `ratio` itself is not known.
    """
    of_a, of_b = (
        [order_statistic(batch, share) for batch in np.sort(_cut(values))] for values in (a, b)
    )
    ratios = sorted(
        slow / fast if fast else math.inf for slow, fast in zip(of_a, of_b, strict=True)
    )
    low, high = ratios[1], ratios[-2]
    return ConfidenceInterval(low if low < ratio else 0.0, high if high > ratio else math.inf)


def _batches(above: NDArray[np.bool_], count: int = BATCHES) -> Floats:
    """Return the share of requests above a threshold in each batch."""
    means: Floats = _cut(above, count).mean(axis=1)
    return means


def _cut(values: NDArray[Any], count: int = BATCHES) -> NDArray[Any]:
    """Return the values in rows of consecutive requests. The last few are left out."""
    size = len(values) // count
    return values[: size * count].reshape(count, size)


def _limit(may_be: Callable[[float], bool]) -> float:
    """Return the distance from 0 up to which `may_be` holds, or inf beyond `WIDEST`."""
    near, far = 0.0, LEAST_STEP
    while may_be(far):
        near, far = far, far * WIDEN
        if far > WIDEST:
            return math.inf
    for _ in range(HALVINGS):
        middle = (near + far) / 2
        near, far = (middle, far) if may_be(middle) else (near, middle)
    return far


def wilson(good: float, count: float, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a share (E. B. Wilson, JASA 22, 1927), or (0, 1) without samples.

    `z` is the quantile of the normal distribution on each side; the default makes it 95 % wide.
    """
    if not count:
        return 0.0, 1.0
    share, square = good / count, z * z / count
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def share_ratio_interval(
    a: float | None, count_a: int, b: float | None, count_b: int
) -> ConfidenceInterval | None:
    """95 % interval of share `a` of `count_a` requests over share `b` of `count_b`.

    The interval excludes 1 exactly if the hybrid-score interval of the difference (R. G. Newcombe,
    Statist. Med. 17, 1998, method 10) excludes 0. Both combine the two Wilson intervals, as
    A. Donner and G. Zou (Stat. Methods Med. Res. 21, 2012) do for a ratio. None if a share is
    unknown or a count is 0.
    """
    if a is None or b is None or not (0 <= a <= 1 and 0 <= b <= 1 and count_a and count_b):
        return None
    most = _lowest_ratio(b, count_b, a, count_a)
    return ConfidenceInterval(_lowest_ratio(a, count_a, b, count_b), 1 / most if most else math.inf)


def _lowest_ratio(a: float, count_a: int, b: float, count_b: int) -> float:
    low, _ = wilson(a * count_a, count_a)
    _, high = wilson(b * count_b, count_b)
    of_a, of_b = low * (2 * a - low), high * (2 * b - high)
    if of_a <= 0:
        return 0.0
    return of_a / (a * b + math.sqrt(max(0.0, (a * b) ** 2 - of_a * of_b)))
