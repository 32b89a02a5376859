"""The error of predictions, by predicted duration."""

import pytest

from forebay.proxy.core.learn.cost import OF_ALL, UNPROVEN, PredictionError


def learned(*seen: tuple[float, float], times: int = 1) -> PredictionError:
    """A model that has seen pairs of predicted seconds and relative error."""
    spread = PredictionError()
    for _ in range(times):
        for predicted_s, error in seen:
            spread.observe(predicted_s, error)
    return spread


def test_long_prefills_are_known_better_than_short_ones() -> None:
    spread = learned((0.05, 0.3), (0.05, -0.3), (0.05, 0.3), (8.0, -0.05), times=200)
    assert spread.at(6.0) == pytest.approx(0.05, rel=0.01)
    assert spread.at(0.1) == pytest.approx(OF_ALL * 0.2375, rel=0.05)  # three quarters of the mean


def test_before_anything_was_seen() -> None:
    new = PredictionError()
    assert {new.at(seconds) for seconds in (0.0, 0.5, 2.0, 9.0)} == {OF_ALL * UNPROVEN}


def test_a_class_nobody_was_seen_in_is_as_the_next_shorter() -> None:
    spread = learned((0.5, 0.05), times=3)
    assert spread.at(0.5) == spread.at(2.0) == spread.at(9.0) == pytest.approx(0.1)
    assert spread.at(0.1) > spread.at(0.5)
    spread.observe(2.0, 0.0)
    before = spread.at(9.0)
    spread.observe(0.5, 0.05)  # tells nothing of longer ones any more
    assert spread.at(9.0) == spread.at(2.0) == before < spread.at(0.5)


def test_a_longer_wait_is_not_less_certain_in_proportion() -> None:
    """At half a second: a cache that was not what it seemed."""
    spread = learned((0.1, 0.1), (0.5, 0.6), times=50)
    assert spread.at(0.5) == spread.at(0.1) == pytest.approx(0.1, rel=0.1)


def test_the_first_few_count_alike_and_then_the_latest_most() -> None:
    spread = learned((2.0, 0.1), (2.0, 0.04))
    assert spread.at(2.0) == pytest.approx((UNPROVEN + 0.1 + 0.04) / 3)
    for _ in range(400):
        spread.observe(2.0, 0.02)
    assert spread.at(2.0) == pytest.approx(OF_ALL * 0.02)
