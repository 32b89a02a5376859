"""replay/plan/schedule.py: intended times, their statistics, and what cannot be scheduled."""

import hashlib
import re
import struct
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.replay.plan.schedule import Arrivals, Schedule, make_schedule, parse_arrivals
from forebay.traces.ground.errors import InputError

TRACE = [0.0, 1.0, 1.0, 4.0]  # three gaps in 4 s: 0.75 a second


def gaps(schedule: Schedule) -> list[float]:
    return [later - earlier for earlier, later in pairwise(schedule.times_s)]


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        ("trace", Arrivals("trace")),
        ("constant", Arrivals("constant")),
        ("poisson", Arrivals("poisson")),
        ("gamma:2.5", Arrivals("gamma", 2.5)),
        ("closed:16", Arrivals("closed", 16)),
    ],
)
def test_parse_arrivals(text: str, arrivals: Arrivals) -> None:
    assert parse_arrivals(text) == arrivals


@pytest.mark.parametrize(
    "text",
    [
        *("", "uniform", "trace:", "poisson:2"),
        *("gamma", "gamma:", "gamma:x", "gamma:0", "gamma:-1", "gamma:nan"),
        *("closed", "closed:0", "closed:-2", "closed:1.5", "closed:²", "closed:99999999"),
    ],
)
def test_arrivals_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="--arrivals"):
        parse_arrivals(text)


@pytest.mark.parametrize(
    ("rate", "speed", "times"),
    [
        (None, None, [0.0, 1.0, 1.0, 4.0]),
        (None, 2.0, [0.0, 0.5, 0.5, 2.0]),  # twice as fast
        (1.5, None, [0.0, 0.5, 0.5, 2.0]),  # the mean rate of the trace is 0.75
        (0.375, None, [0.0, 2.0, 2.0, 8.0]),
    ],
)
def test_a_rate_divides_time_and_drops_nothing(
    rate: float | None, speed: float | None, times: list[float]
) -> None:
    schedule = make_schedule(TRACE, Arrivals("trace"), rate_per_s=rate, speed=speed)
    assert list(schedule.times_s) == pytest.approx(times)
    assert schedule.count == len(TRACE)


@pytest.mark.parametrize(
    ("duration", "count", "window"),
    [(None, 4, 16 / 3), (4.0, 3, 4.0), (4.1, 4, 16 / 3), (0.5, 1, 0.5)],
)
def test_a_duration_cuts_the_end(duration: float | None, count: int, window: float) -> None:
    schedule = make_schedule(TRACE, Arrivals("trace"), duration_s=duration)
    assert (schedule.count, len(schedule.times_s)) == (count, count)
    assert schedule.window_s == pytest.approx(window)


def test_constant_gaps_are_constant() -> None:
    schedule = make_schedule([0.0] * 1000, Arrivals("constant"), rate_per_s=8)
    assert gaps(schedule) == pytest.approx([0.125] * 999)
    assert schedule.window_s == pytest.approx(125)  # not 124.875: the last has its gap too


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (Arrivals("poisson"), 1.0),
        (Arrivals("gamma", 1.0), 1.0),
        (Arrivals("gamma", 0.25), 0.25),
        (Arrivals("gamma", 3.0), 3.0),
    ],
)
def test_rate_and_burstiness_are_what_was_asked(arrivals: Arrivals, cv: float) -> None:
    schedule = make_schedule([0.0] * 100_000, arrivals, rate_per_s=50, seed=7)
    between = gaps(schedule)
    assert fmean(between) == pytest.approx(1 / 50, rel=0.03)
    assert pstdev(between) / fmean(between) == pytest.approx(cv, rel=0.03)


def test_poisson_gaps_do_not_repeat() -> None:
    """Lag-1 autocorrelation near 0 and Fano factor near 1 (a known load generator: 0.5 and 4.8)."""
    schedule = make_schedule([0.0] * 50_000, Arrivals("poisson"), rate_per_s=50, seed=3)
    between = gaps(schedule)
    mean = fmean(between)
    lagged = sum((a - mean) * (b - mean) for a, b in pairwise(between))
    assert abs(lagged / sum((gap - mean) ** 2 for gap in between)) < 0.02
    windows = [0] * (int(schedule.times_s[-1] * 10) + 1)
    for when in schedule.times_s:
        windows[int(when * 10)] += 1
    assert pstdev(windows[:-1]) ** 2 / fmean(windows[:-1]) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("arrivals", [Arrivals("poisson"), Arrivals("gamma", 2.0)])
def test_equal_seeds_give_equal_schedules(arrivals: Arrivals) -> None:
    one = make_schedule(TRACE * 10, arrivals, rate_per_s=2, seed=1)
    again = make_schedule(TRACE * 10, arrivals, rate_per_s=2, seed=1)
    other = make_schedule(TRACE * 10, arrivals, rate_per_s=2, seed=2)
    assert one == again
    assert one.sha256 != other.sha256


def test_the_schedule_hash_is_that_of_the_times() -> None:
    """Golden: another process, or another version of ours, must come to the same times."""
    schedule = make_schedule([0.0] * 3, Arrivals("poisson"), rate_per_s=2, seed=0)
    assert list(schedule.times_s) == [0.0, 0.9303035555326117, 1.6396181320184926]
    little_endian = struct.pack("<3d", *schedule.times_s)
    assert schedule.sha256 == hashlib.sha256(little_endian).hexdigest()


def test_without_a_rate_the_trace_keeps_its_own() -> None:
    schedule = make_schedule(TRACE, Arrivals("constant"), speed=2.0)
    assert gaps(schedule) == pytest.approx([1 / 1.5] * 3)


def test_closed_loop_has_no_times() -> None:
    schedule = make_schedule(TRACE, Arrivals("closed", 2), duration_s=9.0)
    assert (schedule.count, list(schedule.times_s), schedule.arrivals.closed) == (4, [], 2)


@pytest.mark.parametrize(
    ("arrivals", "wanted", "says"),
    [
        (Arrivals("trace"), {"rate_per_s": 0.0}, "--rate: 0"),
        (Arrivals("trace"), {"rate_per_s": -1.0}, "--rate"),
        (Arrivals("trace"), {"rate_per_s": float("nan")}, "--rate"),
        (Arrivals("trace"), {"speed": 0.0}, "--speed"),
        (Arrivals("trace"), {"duration_s": 0.0}, "--duration"),
        (Arrivals("trace"), {"speed": 1.0, "rate_per_s": 1.0}, "--rate and --speed"),
        (Arrivals("closed", 2), {"rate_per_s": 1.0}, "closed:N has no rate"),
    ],
)
def test_what_cannot_be_scheduled(arrivals: Arrivals, wanted: dict[str, float], says: str) -> None:
    with pytest.raises(InputError, match=says):
        make_schedule(TRACE, arrivals, **wanted)  # type: ignore[arg-type]


def test_a_trace_without_a_rate() -> None:
    at_once = [0.0, 0.0, 0.0]
    with pytest.raises(InputError, match="cannot be stretched"):
        make_schedule(at_once, Arrivals("trace"), rate_per_s=2)
    with pytest.raises(InputError, match="give --rate"):
        make_schedule(at_once, Arrivals("poisson"))
    with pytest.raises(InputError, match="nothing is due in the first 1 s"):
        make_schedule([5.0, 6.0], Arrivals("trace"), duration_s=1.0)


@given(
    st.lists(st.floats(min_value=0, max_value=1e6), min_size=2, max_size=50),
    st.floats(min_value=1e-3, max_value=1e4),
)
@settings(max_examples=100, deadline=None)
def test_a_rescaled_trace_has_the_rate_and_the_order(times: list[float], rate: float) -> None:
    times = sorted(times)
    if times[-1] - times[0] < 1e-3:
        return
    schedule = make_schedule(times, Arrivals("trace"), rate_per_s=rate)
    assert schedule.count == len(times)
    assert list(schedule.times_s) == sorted(schedule.times_s)
    span = schedule.times_s[-1] - schedule.times_s[0]
    assert (len(times) - 1) / span == pytest.approx(rate, rel=1e-6)


def profile_times(text: str, count: int, rate: float | None = None) -> list[float]:
    schedule = make_schedule([0.0] * count, parse_arrivals(text), rate_per_s=rate, seed=5)
    return list(schedule.times_s)


def within(times: list[float], start_s: float, end_s: float) -> int:
    return sum(start_s <= time < end_s for time in times)


def test_bursts_come_in_their_phases_at_the_mean_rate() -> None:
    times = profile_times("onoff:10s/30s", 40_000, rate=5)
    assert all(time % 40 < 10 for time in times)
    assert len(times) / times[-1] == pytest.approx(5, rel=0.03)
    assert within(times, 0, 10) == pytest.approx(200, abs=60)


def test_a_ramp_rises_and_then_stays() -> None:
    times = profile_times("ramp:0-20/100s", 5_000)
    assert within(times, 0, 50) == pytest.approx(250, abs=60)
    assert within(times, 50, 100) == pytest.approx(750, abs=100)
    assert within(times, 100, 200) == pytest.approx(2000, abs=150)


def test_steps_end_after_the_last() -> None:
    times = profile_times("steps:1,4,0,2/100s", 100_000)
    found = [within(times, start, start + 100) for start in (0, 100, 200, 300)]
    assert found == pytest.approx([100, 400, 0, 200], abs=70)
    assert len(times) == sum(found)


def test_a_day_has_its_peak_and_its_trough() -> None:
    times = profile_times("diurnal:1.5/400s", 40_000, rate=50)
    assert within(times, 75, 125) / 50 == pytest.approx(75, rel=0.05)
    assert within(times, 275, 325) / 50 == pytest.approx(25, rel=0.1)
    assert times == sorted(times)
    assert times == profile_times("diurnal:1.5/400s", 40_000, rate=50)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("onoff:10s", "onoff:10s/50s"),
        ("ramp:1-0/5m", "the last rate must be above 0"),
        ("steps:0,0/5s", "must not all be 0"),
        ("steps:1,x/5s", "steps:1,2,4/60s"),
        ("diurnal:3/24h", "1 to 2 times the mean"),
    ],
)
def test_profiles_that_make_no_sense(text: str, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        parse_arrivals(text)


def test_a_profile_with_rates_takes_no_other() -> None:
    with pytest.raises(InputError, match="has its own rates"):
        profile_times("ramp:1-2/5m", 10, rate=3)
