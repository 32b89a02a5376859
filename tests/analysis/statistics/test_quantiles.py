"""Order statistics, intervals of their ratios, numbers as text and the scales of plots."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.analysis.charts import svg
from forebay.analysis.statistics.intervals import ratio_interval
from forebay.analysis.statistics.quantiles import (
    order_statistic,
    percentile_table,
    rank_of,
    samples_beyond,
    tail_curve,
)
from forebay.analysis.statistics.units import (
    counts,
    duration,
    durations,
    numbered,
    printable,
    rates,
    ratio,
    shares,
)

ONE_TO_THOUSAND = np.arange(1.0, 1001.0)


@given(st.integers(1, 5000), st.integers(1, 1000))
@example(100, 70)  # 0.07 * 100 is 7.000000000000001 in floats
@example(2, 500)  # half of two samples do not exceed the first
def test_rank_agrees_with_exact_fractions(count: int, thousandths: int) -> None:
    exact = math.ceil(Fraction(thousandths, 1000) * count)
    assert rank_of(thousandths / 1000, count) == exact


@given(
    st.lists(st.floats(0, 1e4), min_size=1, max_size=60),
    st.sampled_from([0.001, 0.25, 0.5, 0.9, 0.99, 0.999]),
)
def test_quantile_is_observed_and_covers_the_share(values: list[float], share: float) -> None:
    ordered = np.sort(np.array(values))
    value = order_statistic(ordered, share)
    assert value in values
    assert (ordered <= value).mean() >= share - 1e-9
    below = ordered[ordered < value]
    assert len(below) / len(ordered) < share + 1e-9


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="no samples"):
        order_statistic(np.array([]), 0.5)
    table = percentile_table([])
    assert (table.count, table.max, set(table.values.values())) == (0, None, {None})


def test_percentile_with_nine_samples_beyond_is_hidden() -> None:
    assert samples_beyond(0.99, 999) == 9
    assert percentile_table(ONE_TO_THOUSAND[:999]).values["p99"] is None
    assert percentile_table(ONE_TO_THOUSAND[:999], min_beyond=9).values["p99"] == 990.0


def test_failures_count_as_never_answered() -> None:
    """100 of 1,000 without an answer: p50 moves up, p99 is infinite, nan is no sample."""
    table = percentile_table([*ONE_TO_THOUSAND[:900], math.nan], unanswered=100)
    assert table.values == {
        "p50": 500.0, "p90": 900.0, "p95": math.inf, "p99": math.inf, "p99.9": None,
    }  # fmt: skip
    assert (table.count, table.max) == (1000, math.inf)


def test_tail_curve_stands_where_the_share_below_ends() -> None:
    places, values = tail_curve([4.0, 1.0, 2.0, 3.0])
    assert values.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert places.tolist() == pytest.approx([1.0, 4 / 3, 2.0, 4.0])  # 0 %, 25 %, 50 %, 75 %
    assert tail_curve([1.0, 2.0], unanswered=2)[0].tolist() == pytest.approx([1.0, 4 / 3])


def test_interval_of_a_real_difference_leaves_out_equality() -> None:
    random = np.random.default_rng(1)
    slow, fast = random.lognormal(1.0, 0.5, 2000), random.lognormal(0.0, 0.5, 2000)
    interval = ratio_interval(slow, fast, 0.99)
    assert interval is not None
    assert interval.clear
    assert interval.low < math.e < interval.high


def test_interval_of_two_draws_from_one_law_holds_equality() -> None:
    random = np.random.default_rng(2)
    interval = ratio_interval(random.exponential(1, 1500), random.exponential(1, 1500), 0.99)
    assert interval is not None
    assert not interval.clear


def test_interval_is_the_same_each_time_and_needs_samples() -> None:
    random = np.random.default_rng(3)
    a, b = random.exponential(1, 300), random.exponential(2, 300)
    assert ratio_interval(a, b, 0.9) == ratio_interval(a, b, 0.9)
    assert ratio_interval(a[:19], b, 0.9) is None


def test_one_bad_stretch_is_one_event() -> None:
    """40 slow requests in a row widen the interval far more than 40 spread out."""
    calm, stretch, spread = np.ones(1600), np.ones(1600), np.ones(1600)
    calm += np.linspace(0, 0.1, 1600)
    stretch[800:840] = 9.0
    spread[::40] = 9.0
    together, apart = (ratio_interval(one, calm, 0.98) for one in (stretch, spread))
    assert together is not None
    assert apart is not None
    p97 = [ratio_interval(one, calm, 0.97) for one in (stretch, spread)]
    assert p97[0] is not None
    assert p97[1] is not None
    assert p97[0].high > 8  # a resample may hold the stretch twice
    assert p97[1].high < 2


def test_a_jam_hides_no_difference_that_each_tenth_of_two_paired_runs_shows() -> None:
    """All slow requests of a run stand in one jam, yet the other run is faster throughout."""
    random = np.random.default_rng(4)
    fast = random.lognormal(0.0, 0.5, 1200)
    slow = 3.0 * fast * random.lognormal(0.0, 0.1, 1200)
    slow[:120] *= 30.0
    interval = ratio_interval(slow, fast, 0.99, paired=True)
    assert interval is not None
    assert 2.0 < interval.low < 4.0
    assert interval.high == math.inf  # no tenth reaches the ratio of the whole runs
    alike = fast * random.lognormal(0.0, 0.1, 1200)
    alike[:120] *= 30.0  # a jam of the one run alone is no evidence
    interval = ratio_interval(alike, fast, 0.99, paired=True)
    assert interval is not None
    assert not interval.clear


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([7.654, 0.4531], ["7.65 s", "0.45 s"]),
        ([0.0703, 0.0604], ["70.3 ms", "60.4 ms"]),
        ([0.812, 0.045], ["812 ms", "45 ms"]),
        ([15.82, 13.21], ["15.8 s", "13.2 s"]),
        ([4.3837, 0.0971], ["4.384 s", "0.097 s"]),
        ([1234.5, 1.5], ["1,234.5 s", "1.5 s"]),
        ([None, math.inf, 0.5], ["–", "never", "500 ms"]),
        ([None], ["–"]),
        ([0.0], ["0.0 ms"]),
    ],
)
def test_durations_share_a_unit(values: list[float | None], texts: list[str]) -> None:
    assert durations(values) == texts


def test_other_numbers_as_text() -> None:
    assert duration(2.0) == "2.00 s"
    assert counts([1920, None]) == ["1,920", "–"]
    assert rates([9.4, 7.1, None]) == ["9.40 /s", "7.10 /s", "–"]
    assert shares([0.9613, None]) == ["96.1 %", "–"]
    assert [ratio(v) for v in (0.0581, 1e-5)] == ["0.058×", "<0.001×"]
    assert [ratio(v) for v in (4.517, 0.2214, 17.06, 120.4, math.inf, None)] == [
        "4.52×", "0.22×", "17.1×", "120×", "∞", "–",
    ]  # fmt: skip
    assert printable("a\x1b[31mb\n") == "a\N{REPLACEMENT CHARACTER}[31mb\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("values", "bounds"),
    [
        ([0.03, 7.9], (0.02, 10.0)),
        ([1.0], (0.5, 2.0)),
        ([0.0, math.inf], (1.0, 10.0)),
        ([0.2, 5.0], (0.2, 5.0)),
    ],
)
def test_log_bounds_are_round_and_hold_the_values(
    values: list[float], bounds: tuple[float, float]
) -> None:
    assert svg.log_domain(values) == pytest.approx(bounds)


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=5))
def test_axis_holds_its_values_and_has_few_ticks(values: list[float]) -> None:
    low, high = svg.log_domain(values)
    assert low <= min(values) * 1.001
    assert high >= max(values) * 0.999
    ticks = svg.log_ticks(low, high)
    assert 1 <= len(ticks) <= 10
    labels = [svg.latency_label(tick) for tick in ticks]
    assert len(set(labels)) == len(labels)


def test_a_tick_of_many_seconds_has_few_digits() -> None:
    """It was 16.667 min."""
    assert [svg.latency_label(tick) for tick in (200.0, 1000.0)] == ["200 s", "16.7 min"]


@pytest.mark.parametrize(
    ("last", "ticks"),
    [(180.0, [0, 30, 60, 90, 120, 150, 180]), (4.5, [0, 1, 2, 3, 4]), (0.3, [0, 0.1, 0.2, 0.3])],
)
def test_time_ticks_are_round(last: float, ticks: list[float]) -> None:
    assert svg.time_ticks(last) == pytest.approx(ticks)


def test_labels_are_escaped() -> None:
    assert (
        svg.text(1, 2, "<b>&")
        == '<text x="1" y="2" class="" text-anchor="middle">&lt;b&gt;&amp;</text>'
    )
    assert 'x="&quot;"' in svg.element("g", x='"')
    assert svg.steps_path([(0.0, 5.0), (2.5, 4.0)]) == "M0 5H2.5V4"
    assert (
        svg.dots_path(np.array([1.2, 0.9]), np.array([2.0, 2.2])) == "M1 2h0"
    )  # the same pixel once


@pytest.mark.parametrize(
    ("last_s", "unit"), [(900.0, "seconds"), (1_800.0, "minutes"), (61_000.0, "hours")]
)
def test_an_axis_of_time_has_a_unit_of_its_length(last_s: float, unit: str) -> None:
    unit_s, name = svg.time_unit(last_s)
    assert name == unit
    assert all(tick / unit_s == round(tick / unit_s, 1) for tick in svg.time_ticks(last_s))


def test_a_number_has_its_noun() -> None:
    numbers = (0, 1, 2, 1_200)
    written = ["0 servers", "1 server", "2 servers", "1,200 servers"]
    assert [numbered(number, "server") for number in numbers] == written
