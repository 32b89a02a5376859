"""Confidence interval of a ratio of two percentiles, by a block bootstrap.

Latencies of one run are not independent, because a queue makes whole periods slow. Resampling
single requests would give far too narrow intervals. So blocks of consecutive requests are drawn
(sqrt(n) long, circular: Politis and Romano 1992). The two runs are resampled separately, which is
conservative if both replay the same trace. A fixed seed gives the same interval for the same runs.
"""

import math
from dataclasses import dataclass

import numpy as np

from forebay.analysis.statistics.quantiles import Floats, finite, rank_of

SEED = 20_240_229
RESAMPLES = 1_000
FEWEST_RESAMPLES = 200
FEWEST_SAMPLES = 20  # with fewer, even the median is noise
WORK = 20_000_000  # most samples drawn per run: long runs get fewer resamples


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """The middle 95 % of the resampled ratios."""

    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 1, that is, equality."""
        return self.low > 1 or self.high < 1


def ratio_interval(
    a: Floats, b: Floats, share: float, seed: int = SEED, resamples: int = RESAMPLES
) -> ConfidenceInterval | None:
    """95 % interval of the ratio of the `share` quantiles of `a` and `b`.

    Samples are in the order in which the requests were due. None if either run has fewer than
    `FEWEST_SAMPLES`.
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
