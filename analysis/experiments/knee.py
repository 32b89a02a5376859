"""Where a curve of throughput against load bends. Pure.

Two rules, both stated with the result:

    kneedle        of a concurrency sweep: the point furthest above the chord from the first to the
                   last one, both axes scaled to 0..1 (Satopää, Albrecht, Irwin, Raghavan: "Finding
                   a Kneedle in a Haystack", ICDCS Workshops 2011; its offline case without
                   smoothing, the points being measured means)
    last_followed  of a rate sweep: the last rate of which at least `FOLLOWED` came out again, none
                   before it having failed to

The first depends on how far the sweep goes, so whether it went far enough is said too. It finds no
bend in a sweep that began on the plateau; `is_flat` does.
"""

from collections.abc import Sequence

KNEEDLE = "Kneedle (Satopää et al. 2011) on this sweep"
FOLLOWED = 0.95
FOLLOWING = f"the last rate of which at least {FOLLOWED:.0%} was completed"
FLAT = 0.10
"""A sweep has met the plateau when its last doubling of load brought less than this."""
FLAT_THROUGHOUT = f"no load brought {FLAT:.0%} more than the first"


def kneedle(loads: Sequence[float], throughputs: Sequence[float]) -> int | None:
    """Index of the knee of a rising curve; None with fewer than 3 points or without a bend."""
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
    """By what share throughput rose from half of the largest load to it; inf with one load."""
    half = [y for x, y in zip(loads, throughputs, strict=True) if x <= loads[-1] / 2 + 1e-9]
    if not half or half[-1] <= 0:
        return float("inf")
    return throughputs[-1] / half[-1] - 1


def is_flat(throughputs: Sequence[float]) -> bool:
    """Whether no load brought `FLAT` more than the first: the sweep began on the plateau."""
    return max(throughputs) < throughputs[0] * (1 + FLAT)


def last_followed(offered: Sequence[float], achieved: Sequence[float]) -> int | None:
    """Index of the last rate that was followed; None when not even the first was."""
    last = None
    for index, (rate, came) in enumerate(zip(offered, achieved, strict=True)):
        if came < FOLLOWED * rate:
            break
        last = index
    return last
