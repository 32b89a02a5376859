"""Compare each set-up with the present one, and the twin with what happened. Pure.

A figure of a set-up is *level* with the present one if the difference may be chance (95 %), or if
it is within the twin's own error: how far the twin is off where it repeats what happened.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from forebay.analysis.statistics.intervals import difference_interval, ratio_interval
from forebay.analysis.statistics.quantiles import (
    Floats,
    finite,
    order_statistic,
    samples_beyond,
)
from forebay.analysis.tune.plays import Flags, Play
from forebay.analysis.tune.setups import SetUp
from forebay.replay.plan.slo import Slo
from forebay.replay.sim.summary import met

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
FEWEST_BEYOND = 3
"""Samples that must exceed a percentile that is shown. Its interval tells if it differs."""
INSTANT_S = 0.02
"""No user sees a difference below this. It is added to both times before they are compared."""
LEAST_ERROR, LEAST_POINTS = 0.03, 0.002
"""No twin counts as better than this, as a factor of times and as a share of requests."""
ASSUMED_ERROR, ASSUMED_POINTS = 0.15, 0.02
"""The twin's error where nothing was observed."""
MOST_OFF, MOST_OFF_TAIL, MOST_POINTS = 1 / 3, 1.0, 0.1
"""A twin gives no advice that is clearly further off at p50 or p95, at p99, or in the requests in
time. At p50 and p95 the second bound holds for a difference that may be chance, too."""
FEWEST_COMPARED = 50
PARTS = 10
OBSERVABLE = ("ttft", "e2e", "tpot")
LEVEL, BETTER, WORSE = "level", "better", "worse"
IN_TIME, PAUSE = "in_time", "pause_p99"
Names = NDArray[np.object_]


@dataclass(frozen=True, slots=True)
class Observed:
    """The original outcomes of the requests, in order of arrival.

    Attributes:
        metrics: seconds by metric (ttft, e2e, tpot), from arrival, NaN where unknown.
        ended: the request was answered to its end, or rejected.
        done: the request was answered.
    """

    metrics: dict[str, Floats]
    ended: Flags
    done: Flags


@dataclass(frozen=True, slots=True)
class RepeatLine:
    """One percentile of the first tokens of a bucket: observed and by the twin, in seconds.

    Attributes:
        requests: number of requests in the bucket.
        clear: the difference is more than chance (95 %).
    """

    bucket: str
    name: str
    observed_s: float
    predicted_s: float
    requests: int = 0
    clear: bool = True

    @property
    def error(self) -> float:
        """Return the factor between both less 1: 0.1 for 10 % too fast or too slow."""
        return math.exp(abs(_distance(self.predicted_s, self.observed_s))) - 1.0

    @property
    def far(self) -> bool:
        """True if the twin is too far off for an advice."""
        tail = self.name == "p99"
        clearly, surely = (MOST_OFF_TAIL, math.inf) if tail else (MOST_OFF, MOST_OFF_TAIL)
        return self.error > (clearly if self.clear else surely)


@dataclass(frozen=True, slots=True)
class Repeat:
    """The error of the twin, where it repeats the original outcomes.

    Attributes:
        compared: number of requests whose outcome is known.
        in_time: share of these in time: observed, and by the twin.
        errors: the largest error of the percentiles of each bucket.
        points: error of the share in time.
        why_not: why the twin gives no advice, as sentences; "" if it does.
    """

    compared: int = 0
    lines: tuple[RepeatLine, ...] = ()
    in_time: tuple[float, float] | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    points: float = ASSUMED_POINTS
    why_not: str = ""

    @property
    def error(self) -> float:
        """Return the largest error of all buckets."""
        return max(self.errors.values(), default=ASSUMED_ERROR)

    @property
    def distance(self) -> float:
        """Return the mean distance of its percentiles, in the logarithm, to compare two twins."""
        total = sum(line.requests for line in self.lines)
        logs = (math.log(1 + line.error) * line.requests for line in self.lines)
        return sum(logs) / total if total else math.inf


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a set-up: seconds, or a share.

    Attributes:
        low, high: 95 % interval of its difference from the present set-up, around that one's
            figure. For the present set-up: the twin's error. None where it is not known.
        against: level, better or worse than the present set-up, "" where that is not known.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    against: str = ""


@dataclass(frozen=True, slots=True)
class OtherwiseRow:
    """One set-up with its figures by name: in_time, chat.ttft_p99, pause_p99 and so on.

    Attributes:
        gpu_s: GPU seconds in which servers computed.
        per_million: held GPU seconds for a million output tokens, or their price.
    """

    set_up: SetUp
    figures: Mapping[str, Figure]
    refused: int
    gpu_s: float
    per_million: float | None

    def those(self, against: str) -> list[str]:
        """Return the names of the figures that are level, better or worse."""
        return [name for name, figure in self.figures.items() if figure.against == against]


def repeat(observed: Observed, play: Play, bucket: Names, slos: Sequence[Slo]) -> Repeat:
    """Compare the play of the present set-up with what happened.

    Args:
        bucket: the bucket of each request.
    """
    ended, both = observed.ended, observed.done & play.done
    compared = int(ended.sum())
    if both.sum() < FEWEST_COMPARED:
        return Repeat(
            compared,
            why_not=f"The times of only {int(both.sum())} answers are known; "
            f"{FEWEST_COMPARED} are needed.",
        )
    # First tokens by bucket, of requests that both answered.
    lines = tuple(
        line
        for name in dict.fromkeys(bucket[both])
        for line in _lines(
            name, *(o.metrics["ttft"][both & (bucket == name)] for o in (observed, play))
        )
    )
    errors = {
        name: max([LEAST_ERROR, *(line.error for line in lines if line.bucket == name)])
        for name in dict.fromkeys(line.bucket for line in lines)
    }
    # Requests in time, by the targets that can be observed.
    seen_slos = [slo for slo in slos if slo.metric in OBSERVABLE]
    shares = tuple(
        float(met(seen_slos, bucket, of.metrics, of.done)[ended].mean()) for of in (observed, play)
    )
    in_time = shares[0], shares[1]
    points = max(LEAST_POINTS, abs(in_time[1] - in_time[0]))
    off = _off(lines, in_time)
    why_not = f"{off} {_when_off(observed, play, both)}".strip() if off else ""
    return Repeat(compared, lines, in_time, errors, points, why_not)


def _lines(bucket: str, seen_s: Floats, said_s: Floats) -> Iterator[RepeatLine]:
    """Compare the first tokens of a bucket, of the same requests."""
    for name, share in SHARES.items():
        seen, said = _quantile(seen_s, share), _quantile(said_s, share)
        if seen is None or said is None:
            continue
        interval = ratio_interval(said_s, seen_s, share, paired=True)
        clear = interval is not None and interval.clear
        yield RepeatLine(bucket, name, seen, said, len(seen_s), clear)


def _off(lines: Sequence[RepeatLine], in_time: tuple[float, float]) -> str:
    """Name the figure in which the twin is too far off, and a likely reason. "" for no figure."""
    # The figure that is furthest off.
    far = (line for line in lines if line.far)
    worst = max(far, key=lambda line: line.error, default=None)
    if worst is not None:
        slower = worst.predicted_s < worst.observed_s
        what = (
            f"{worst.bucket} {worst.name}: {worst.predicted_s:.3g} s predicted, "
            f"{worst.observed_s:.3g} s observed."
        )
    elif abs(in_time[1] - in_time[0]) > MOST_POINTS:
        slower = in_time[0] < in_time[1]
        what = f"In time: {in_time[1]:.1%} predicted, {in_time[0]:.1%} observed."
    else:
        return ""
    # The direction tells which reasons are likely.
    if slower:
        return (
            f"{what} The servers were slower than the twin: they did work that is not in this "
            "traffic, or their flags, router, model or GPU are not those given."
        )
    return (
        f"{what} The servers were faster than the twin: give their flags, router (--policy), model "
        "and GPU."
    )


def _when_off(observed: Observed, play: Play, both: Flags) -> str:
    """Name the part of the traffic in which the twin is off. "" if it is off everywhere."""
    size = int(both.sum()) // PARTS
    seen, said = (of.metrics["ttft"][both][: size * PARTS] for of in (observed, play))
    logs = np.log((said + INSTANT_S) / (seen + INSTANT_S)).reshape(PARTS, size)
    off = np.flatnonzero(np.abs(np.median(logs, axis=1)) > math.log(1 + MOST_OFF))
    if not 0 < len(off) <= PARTS // 2:
        return ""
    parts = ", ".join(f"{part * 100 // PARTS} to {(part + 1) * 100 // PARTS} %" for part in off)
    return f"It is off in this part of the requests: {parts}. Look what happened then."


def rows_of(
    set_ups: Sequence[SetUp],
    plays: Sequence[Play],
    bucket: Names,
    twin: Repeat,
    price_per_gpu_hour: float | None = None,
) -> list[OtherwiseRow]:
    """Make the row of each set-up. The first is the present one."""
    return [
        OtherwiseRow(
            set_up,
            _figures(plays[0], play, bucket, twin),
            play.refused,
            play.gpu_s,
            _per_million(play, price_per_gpu_hour),
        )
        for set_up, play in zip(set_ups, plays, strict=True)
    ]


def _per_million(play: Play, price_per_gpu_hour: float | None) -> float | None:
    if not play.output_tokens:
        return None
    seconds = play.held_s / play.output_tokens * 1e6
    return seconds if price_per_gpu_hour is None else seconds / 3600 * price_per_gpu_hour


def _figures(base: Play, play: Play, bucket: Names, twin: Repeat) -> dict[str, Figure]:
    figures = {IN_TIME: _share(base, play, twin.points)}
    for name in dict.fromkeys(bucket):
        error = twin.errors.get(name, twin.error)
        for percentile, share in SHARES.items():
            inside = bucket == name
            figures[f"{name}.ttft_{percentile}"] = _time(
                base.metrics["ttft"][inside], play.metrics["ttft"][inside], share, error
            )
    figures[PAUSE] = _time(base.metrics["stall"], play.metrics["stall"], 0.99, twin.error)
    # Who refuses some answers the others sooner, which is no gain while fewer are in time.
    refuses = play.refused > base.refused and play.in_time.mean() < base.in_time.mean()
    unjudged = (BETTER, WORSE, LEVEL) if play is base else (BETTER,) if refuses else ()
    return {
        name: replace(figure, against="") if figure.against in unjudged else figure
        for name, figure in figures.items()
    }


def _share(base: Play, play: Play, points: float) -> Figure:
    before, now = float(base.in_time.mean()), float(play.in_time.mean())
    if np.array_equal(base.in_time, play.in_time):
        return Figure(now, max(0.0, now - points), min(1.0, now + points), LEVEL)
    low, high = difference_interval(play.in_time, base.in_time)
    against = LEVEL
    if abs(now - before) > points and not low <= 0.0 <= high:
        against = BETTER if now > before else WORSE
    return Figure(now, max(0.0, before + low), min(1.0, before + high), against)


def _time(base: Floats, play: Floats, share: float, error: float) -> Figure:
    before, now = _quantile(base, share), _quantile(play, share)
    if before is None or now is None:
        return Figure(now)
    if now == before and np.array_equal(base, play, equal_nan=True):
        return Figure(now, now / (1 + error), now * (1 + error), LEVEL)
    both = ~np.isnan(base) & ~np.isnan(play)
    interval = ratio_interval(play[both], base[both], share, paired=True)
    if interval is None:
        return Figure(now)
    low, high = before * interval.low, before * interval.high
    distance = _distance(now, before)
    within = abs(distance) <= math.log(1 + error) or abs(now - before) < INSTANT_S
    if within or not interval.clear:
        return Figure(now, low, high, LEVEL)
    return Figure(now, low, high, BETTER if distance < 0 else WORSE)


def _quantile(values_s: Floats, share: float) -> float | None:
    """Return a quantile, None with too few samples beyond it."""
    ordered = np.sort(finite(values_s))
    if samples_beyond(share, len(ordered)) < FEWEST_BEYOND:
        return None
    return order_statistic(ordered, share)


def _distance(one_s: float, other_s: float) -> float:
    return math.log((one_s + INSTANT_S) / (other_s + INSTANT_S))
