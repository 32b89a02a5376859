"""How far predictions are off, by how long what was predicted takes."""

import pytest

from forebay.proxy.core.spread import START, Spread


def test_long_prefills_are_known_better_than_short_ones() -> None:
    spread = Spread()
    for _ in range(200):
        spread.observe(0.05, 0.3)
        spread.observe(8.0, -0.05)
    assert spread.at(0.1) == pytest.approx(0.3, rel=0.01)
    assert spread.at(6.0) == pytest.approx(0.05, rel=0.01)


def test_a_class_nobody_was_seen_in_is_as_the_next_shorter() -> None:
    spread = Spread()
    assert {spread.at(seconds) for seconds in (0.0, 0.5, 2.0, 9.0)} == {START}
    spread.observe(0.5, 0.05)
    assert spread.at(0.1) == START
    assert spread.at(0.5) == spread.at(2.0) == spread.at(9.0) == pytest.approx((START + 0.05) / 2)
    spread.observe(2.0, 0.0)
    spread.observe(0.5, 0.15)  # tells nothing of longer ones any more
    assert spread.at(9.0) == spread.at(2.0) < spread.at(0.5)


def test_a_longer_wait_is_not_less_certain_in_proportion() -> None:
    spread = Spread()
    for _ in range(50):
        spread.observe(0.1, 0.1)
        spread.observe(0.5, 0.6)  # a cache that was not what it seemed
    assert spread.at(0.5) == spread.at(0.1) == pytest.approx(0.1, rel=0.1)


def test_the_first_few_count_alike_and_then_the_latest_most() -> None:
    spread = Spread()
    for error in (0.1, 0.04):
        spread.observe(2.0, error)
    assert spread.at(2.0) == pytest.approx((START + 0.1 + 0.04) / 3)
    for _ in range(400):
        spread.observe(2.0, 0.02)
    assert spread.at(2.0) == pytest.approx(0.02)
