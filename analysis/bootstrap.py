"""How sure a ratio of two percentiles is: a bootstrap that keeps neighbours in time together.

Latencies of one run are not independent: a queue makes whole stretches slow. Drawing single
requests would make the interval far too narrow and sell noise as a win, so blocks of consecutive
requests (sqrt(n) long, circular: Politis and Romano 1992) are drawn. The two runs are drawn apart,
which is on the safe side when both replay the same trace. Seeded: same runs, same interval.
"""

import math
from dataclasses import dataclass

import numpy as np

from forebay.analysis.quantiles import Floats, finite, rank_of

SEED = 20_240_229
RESAMPLES = 1_000
FEWEST_RESAMPLES = 200
FEWEST_SAMPLES = 20  # below this not even the median can be told from noise
WORK = 20_000_000  # samples drawn per run at most: long runs get fewer resamples


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """The middle 95 % of the resampled ratios."""

    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 1, that is, equality."""
        return self.low > 1 or self.high < 1


def ratio_interval(
    a: Floats, b: Floats, share: float, seed: int = SEED, resamples: int = RESAMPLES
) -> ConfidenceInterval | None:
    """95 % interval of the ratio of the `share` quantiles of `a` and `b`.

    Both are samples in the order in which the requests were due. None when either has fewer than
    `FEWEST_SAMPLES` samples.
    """
    a, b = finite(a), finite(b)
    if min(len(a), len(b)) < FEWEST_SAMPLES:
        return None
    count = max(FEWEST_RESAMPLES, min(resamples, WORK // max(len(a), len(b))))
    generator = np.random.Generator(np.random.PCG64(seed))
    above = _resampled(a, share, count, generator)
    below = _resampled(b, share, count, generator)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = above / below
    ratios = np.sort(ratios[~np.isnan(ratios)])
    if not len(ratios):
        return None
    low = ratios[rank_of(0.025, len(ratios)) - 1]
    high = ratios[rank_of(0.975, len(ratios)) - 1]
    return ConfidenceInterval(float(low), float(high))


def _resampled(values: Floats, share: float, count: int, generator: np.random.Generator) -> Floats:
    n = len(values)
    block = max(1, round(math.sqrt(n)))
    blocks = math.ceil(n / block)
    rank = rank_of(share, n)
    within = np.arange(block)
    quantiles = np.empty(count)
    for i in range(count):
        starts = generator.integers(0, n, size=blocks)
        drawn = ((starts[:, None] + within) % n).ravel()[:n]
        quantiles[i] = np.partition(values[drawn], rank - 1)[rank - 1]
    return quantiles
