"""Plan when each request is due: one list of due times, made before the first request.

    trace      the trace's own times, divided by a speed
    constant   equal gaps
    poisson    exponential gaps
    gamma:CV   gamma gaps with that coefficient of variation (1 is poisson, more is burstier)
    closed:N   no times: N requests in flight, and a new request when a request ends
    onoff, ramp, steps, diurnal   Poisson with a rate that changes (rate_profile.py)

A rate scales time and never drops rows. A duration cuts off the end. Equal seeds give equal times
in every process, from Python's own generator, because numpy's streams may change. Pure: no clock,
no global randomness.
"""

import hashlib
import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from forebay.replay.plan.rate_profile import FORMS, RateProfile, parse_profile
from forebay.traces.ground.errors import InputError

KINDS = (
    "trace, constant, poisson, gamma:CV, closed:N, onoff:10s/50s, ramp:1-10/5m, steps:1,2,4/60s or "
    "diurnal:1.8/24h"
)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The kind of arrivals. `parameter` is the CV of gamma, the N of closed, else 0.

    `profile` is the rate over time of a kind whose rate changes, and `text` the option's text.
    """

    kind: str
    parameter: float = 0.0
    profile: RateProfile | None = None
    text: str = ""

    def __str__(self) -> str:
        named = f"{self.kind}:{self.parameter:g}" if self.parameter else self.kind
        return self.text or named

    @property
    def closed(self) -> int:
        """Number of requests kept in flight, 0 for an open loop."""
        return int(self.parameter) if self.kind == "closed" else 0


TRACE_ARRIVALS = Arrivals("trace")


def parse_arrivals(text: str) -> Arrivals:
    """Read `--arrivals` (InputError: another form)."""
    kind, colon, value = text.partition(":")
    if kind in ("trace", "constant", "poisson") and not colon:
        return Arrivals(kind)
    if kind == "gamma" and colon:
        return Arrivals(kind, _positive(value, "--arrivals gamma", "a CV, e.g. gamma:2"))
    if kind == "closed" and colon:
        if not (value.isascii() and value.isdigit() and 0 < int(value) <= 1_000_000):
            raise InputError(f"--arrivals: {text!r}: give a number of clients, e.g. closed:16")
        return Arrivals(kind, int(value))
    if kind in FORMS and colon:
        return Arrivals(kind, profile=parse_profile(kind, value, text), text=text)
    raise InputError(f"--arrivals: {text!r} is none of {KINDS}")


def _positive(text: str, option: str, meaning: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 1e-3 <= value <= 1e3):
        raise InputError(f"{option}: {text!r} is not {meaning} (0.001 to 1000)")
    return value


@dataclass(frozen=True, slots=True)
class Schedule:
    """The plan of a run.

    Attributes:
        arrivals: the kind of arrivals.
        count: number of scheduled requests (for a closed loop: the most).
        times_s: due times from the start of the run, ascending. Empty for a closed loop.
        window_s: seconds of arrivals, 0 if unknown beforehand. A closed loop may run out of
            requests earlier.
        sha256: hash of the times as little-endian doubles, to distinguish schedules.
    """

    arrivals: Arrivals
    count: int
    times_s: Sequence[float]
    window_s: float
    sha256: str

    def window_after(self, sent: int) -> float:
        """Return the seconds of arrivals, if the run was not stopped. 0: until the last answer.

        A closed loop that sent its whole trace ended before its duration. This does not count then.
        """
        return 0.0 if self.arrivals.closed and sent == self.count else self.window_s


def make_schedule(
    trace_s: Sequence[float],
    arrivals: Arrivals,
    *,
    rate_per_s: float | None = None,
    speed: float | None = None,
    duration_s: float | None = None,
    seed: int = 0,
) -> Schedule:
    """Plan one due time for each arrival time of the trace.

    Args:
        trace_s: ascending arrival times of the trace, seconds.
        rate_per_s: mean rate, by default the trace's own.
        speed: pace as a multiple of the trace's own, not together with a rate.
        duration_s: keep only requests that are due before this second of the run.
        seed: seed of random gaps.

    Raises:
        InputError: a number out of range, or a rate that this trace cannot be scaled to.
    """
    _check_numbers(rate_per_s, speed, duration_s)
    if rate_per_s is not None and speed is not None:
        raise InputError("--rate and --speed both set the pace; give one of them")
    if arrivals.closed:
        if rate_per_s is not None or speed is not None:
            raise InputError("--arrivals closed:N has no rate; leave out --rate and --speed")
        return Schedule(arrivals, len(trace_s), (), duration_s or 0.0, _sha256(array("d")))
    # An open loop: make the times, and cut them off at the duration.
    times = array("d", _times(trace_s, arrivals, rate_per_s, speed, seed))
    count = bisect_left(times, duration_s) if duration_s is not None else len(times)
    if not count:
        if duration_s is None:
            raise InputError(f"--arrivals {arrivals}: nothing is due before the last step ends")
        raise InputError(f"--duration: nothing is due in the first {duration_s:g} s; raise it")
    # n arrivals span n-1 gaps: the window is one mean gap longer than from first to last
    window = (times[-1] - times[0]) * len(times) / max(1, len(times) - 1)
    if count < len(times):
        window = duration_s or 0.0
    return Schedule(arrivals, count, times[:count], window, _sha256(times[:count]))


def _check_numbers(rate_per_s: float | None, speed: float | None, duration_s: float | None) -> None:
    for value, option in ((rate_per_s, "--rate"), (speed, "--speed"), (duration_s, "--duration")):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(f"{option}: {value:g} is not a number above 0")


def _sha256(times: "array[float]") -> str:
    little = array("d", times)
    if array("H", [1]).tobytes()[0] == 0:
        little.byteswap()
    return hashlib.sha256(little.tobytes()).hexdigest()


def _times(
    trace_s: Sequence[float],
    arrivals: Arrivals,
    rate_per_s: float | None,
    speed: float | None,
    seed: int,
) -> Iterator[float]:
    span_s = trace_s[-1] - trace_s[0] if trace_s else 0.0
    own_rate = (len(trace_s) - 1) / span_s if span_s > 0 else None
    if arrivals.kind == "trace":
        if rate_per_s is not None:
            if own_rate is None:
                raise InputError(
                    "--rate: all requests of this trace arrive at once, so its time cannot be "
                    "stretched; use --arrivals poisson"
                )
            speed = rate_per_s / own_rate
        return (when / (speed or 1.0) for when in trace_s)
    rate, count = _rate(arrivals, rate_per_s, speed, own_rate), len(trace_s)
    if arrivals.profile is not None:
        return arrivals.profile.arrival_times(count, rate, Random(seed))
    if arrivals.kind == "constant":
        return (index / rate for index in range(count))
    return _random_times(count, arrivals, rate, Random(seed))


def _rate(
    arrivals: Arrivals, rate_per_s: float | None, speed: float | None, own_rate: float | None
) -> float:
    """Return the mean rate of made times, 0 for a profile with its own rates."""
    if arrivals.profile is not None and arrivals.profile.absolute:
        if rate_per_s is not None or speed is not None:
            raise InputError(f"--arrivals {arrivals}: has its own rates; leave out --rate, --speed")
        return 0.0
    rate = rate_per_s if rate_per_s is not None else (own_rate or 0.0) * (speed or 1.0)
    if rate <= 0:
        raise InputError(f"--arrivals {arrivals.kind}: this trace has no rate; give --rate")
    return rate


def _random_times(count: int, arrivals: Arrivals, rate: float, random: Random) -> Iterator[float]:
    """Make `count` times of a renewal process, the first at 0."""
    shape = 1.0 / arrivals.parameter**2 if arrivals.kind == "gamma" else 1.0
    now = 0.0
    for _ in range(count):
        yield now
        if arrivals.kind == "gamma":
            now += random.gammavariate(shape, 1.0 / (shape * rate))
        else:
            now += random.expovariate(rate)
