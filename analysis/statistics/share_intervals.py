"""Confidence intervals of a share, and of the ratio of two shares, from counts. Pure.

Requests are taken as independent. Requests of one burst are not, so the true intervals are somewhat
wider.
"""

from math import inf, sqrt

from forebay.analysis.statistics.quantile_intervals import ConfidenceInterval

Z_95 = 1.96  # quantile of the normal distribution for 95 % intervals


def wilson(good: float, count: float, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a share (E. B. Wilson, JASA 22, 1927), or (0, 1) without samples.

    `z` is the quantile of the normal distribution on each side; the default makes it 95 % wide.
    """
    if not count:
        return 0.0, 1.0
    share, square = good / count, z * z / count
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * sqrt(share * (1 - share) / count + square / (4 * count))
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
    return ConfidenceInterval(_lowest_ratio(a, count_a, b, count_b), 1 / most if most else inf)


def _lowest_ratio(a: float, count_a: int, b: float, count_b: int) -> float:
    low, _ = wilson(a * count_a, count_a)
    _, high = wilson(b * count_b, count_b)
    of_a, of_b = low * (2 * a - low), high * (2 * b - high)
    if of_a <= 0:
        return 0.0
    return of_a / (a * b + sqrt(max(0.0, (a * b) ** 2 - of_a * of_b)))
