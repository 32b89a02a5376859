"""Find the knee of a curve of throughput against load. Pure.

There are two rules, and the result names the rule that was used:

    kneedle        for a concurrency sweep: the point furthest above the chord from the first to
                   the last point, both axes scaled to 0..1 (Satopää, Albrecht, Irwin, Raghavan:
                   "Finding a Kneedle in a Haystack", ICDCS Workshops 2011; the offline case
                   without smoothing, because the points are measured means)
    last_followed  for a rate sweep: the last rate of which at least `FOLLOWED` was completed,
                   with no failure at a lower rate

The first rule depends on how far the sweep goes, so `gain_of_last_doubling` checks that it went
far enough. It finds no bend in a sweep that starts on the plateau; `is_flat` does.
"""

from collections.abc import Sequence

KNEEDLE = "Kneedle (Satopää et al. 2011) on this sweep"
FOLLOWED = 0.95
FOLLOWING = f"the last rate of which at least {FOLLOWED:.0%} was completed"
FLAT = 0.10
"""A sweep has reached the plateau if its last doubling of load gained less than this share."""
FLAT_THROUGHOUT = f"no load had {FLAT:.0%} more throughput than the first"


def kneedle(loads: Sequence[float], throughputs: Sequence[float]) -> int | None:
    """Index of the knee of a rising curve. None with fewer than 3 points or no bend."""
    if len(loads) < 3:
        return None
    low_x, high_x = loads[0], loads[-1]
    low_y, high_y = throughputs[0], max(throughputs)
    if high_y <= low_y or high_x <= low_x:
        return None
    above = [
        (y - low_y) / (high_y - low_y) - (x - low_x) / (high_x - low_x)
        for x, y in zip(loads, throughputs, strict=True)
    ]
    best = max(range(len(above)), key=above.__getitem__)
    return best if above[best] > 0.05 else None


def gain_of_last_doubling(loads: Sequence[float], throughputs: Sequence[float]) -> float:
    """Relative gain of throughput from half the largest load to all of it, inf with one load."""
    half = [y for x, y in zip(loads, throughputs, strict=True) if x <= loads[-1] / 2 + 1e-9]
    if not half or half[-1] <= 0:
        return float("inf")
    return throughputs[-1] / half[-1] - 1


def is_flat(throughputs: Sequence[float]) -> bool:
    """True if the sweep starts on the plateau: no load gains `FLAT` over the first."""
    return max(throughputs) < throughputs[0] * (1 + FLAT)


def last_followed(offered: Sequence[float], achieved: Sequence[float]) -> int | None:
    """Index of the last rate that was followed, or None if the first was not."""
    last = None
    for index, (rate, completed) in enumerate(zip(offered, achieved, strict=True)):
        if completed < FOLLOWED * rate:
            break
        last = index
    return last
