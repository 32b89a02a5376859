"""Decide from the requests of a trial whether a load meets the targets, and how sure that is. Pure.

Three things make a plain share of good requests misleading, and each has a rule here:

    warm-up   a system that starts empty is fast: `warm_up` finds the requests that do not count
    clumps    late requests come together, so n of them are worth fewer: `clump_size`
    looks     a trial that is extended until it decides has several chances to be wrong:
              `z_of_looks` divides the error among them (Bonferroni)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from forebay.analysis.statistics.intervals import wilson
from forebay.analysis.statistics.quantiles import Floats

CONFIDENCE = 0.95
WARM_UP_SHARE = 0.1
WARM_UP_ANSWERS = 2.0  # median answer times
MOST_WARM_UP = 0.5
BATCHES = 20
LEAST_MARKED = 2 * BATCHES
"""Clumps are measured on at least this number of the slowest requests. A trial without a miss has
some, and they come together as misses would."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The judged requests of one load: `good` of `count` met the targets.

    `effective` is the number of independent requests that they are worth.
    """

    good: int
    count: int
    effective: float

    @property
    def share(self) -> float:
        return self.good / self.count if self.count else 0.0

    def interval(self, z: float) -> tuple[float, float]:
        """Wilson interval of the share for the quantile `z` of the normal distribution."""
        return wilson(self.share * self.effective, self.effective, z)

    def decides(self, least_share: float, z: float) -> bool | None:
        """True: at least `least_share` are good. False: fewer are. None: undecided."""
        low, high = self.interval(z)
        if low >= least_share:
            return True
        return False if high < least_share else None

    def requests_to_decide(self, least_share: float, z: float) -> float:
        """Return the approximate number of requests that would decide with this share."""
        gap = abs(self.share - least_share)
        if not gap or not self.effective:
            return inf
        variance = max(self.share * (1 - self.share), least_share * (1 - least_share))
        return z * z * variance / (gap * gap) * self.count / self.effective


def pooled_evidence(parts: Sequence[Evidence]) -> Evidence:
    return Evidence(
        sum(part.good for part in parts),
        sum(part.count for part in parts),
        sum(part.effective for part in parts),
    )


def z_of_looks(looks: int) -> float:
    """Return the one-sided quantile when the error is divided among `looks` decisions."""
    return NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / max(1, looks))


def judge_trial(due_s: Floats, score: Floats, answer_s: Floats) -> Evidence:
    """Judge one trial, whose requests are in order of arrival.

    Args:
        due_s: seconds at which each request was due.
        score: its worst latency as a share of its target. At most 1 is good, inf without answer.
        answer_s: time from due to the last token, NaN without answer.
    """
    first = warm_up(due_s, answer_s)
    judged = score[first:]
    return Evidence(int((judged <= 1).sum()), len(judged), len(judged) / clump_size(slow(judged)))


def warm_up(due_s: Floats, answer_s: Floats) -> int:
    """Return the number of first requests that do not count.

    A tenth of the trial, or the arrivals within two median answer times if these are more: by then
    the requests in flight have been replaced. At most half of the trial.
    """
    count = len(due_s)
    times_s = answer_s[~np.isnan(answer_s)]
    settled_s = WARM_UP_ANSWERS * float(np.median(times_s)) if len(times_s) else np.inf
    within = int(np.searchsorted(due_s, due_s[0] + settled_s)) if count else 0
    return min(max(int(WARM_UP_SHARE * count), within), int(MOST_WARM_UP * count))


def slow(score: Floats) -> NDArray[np.bool_]:
    """Mark the requests that missed a target. If these are few, mark the slowest instead."""
    if len(score) <= LEAST_MARKED:
        return score > 1
    next_slowest = float(np.partition(score, -LEAST_MARKED - 1)[-LEAST_MARKED - 1])
    return score > min(1.0, next_slowest)


def clump_size(marked: NDArray[np.bool_]) -> float:
    """Return the mean size of a clump of marked requests: the design effect of consecutive batches.

    The variance of batch shares over the variance of independent requests, at least 1 (L. Kish,
    Survey Sampling, 1965, 5.4; batch means as in G. S. Fishman, Discrete-Event Simulation, 2001,
    6.6).
    """
    size = len(marked) // BATCHES
    if size < 2:
        return 1.0
    batches = marked[: size * BATCHES].reshape(BATCHES, size).mean(axis=1)
    share = float(batches.mean())
    if not 0 < share < 1:
        return 1.0
    return max(1.0, float(batches.var(ddof=1)) * size / (share * (1 - share)))
