"""What a step of an engine costs, learned from its steps."""

import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.proxy.core.learn.step_cost import StepCost

positive = st.floats(1e-7, 1e-2)


@given(positive, st.floats(1.0, 1e6), st.floats(0.0, 10.0), st.integers(0, 130_000))
def test_tokens_within_is_the_inverse_of_chunk_s(
    token_s: float, slope: float, seconds: float, place: int
) -> None:
    cost = StepCost(0.01, token_s, slope)
    tokens = cost.tokens_within(seconds, place)
    assert cost.chunk_s(tokens, place) <= seconds * (1 + 1e-9)
    assert cost.chunk_s(tokens + 1, place) >= seconds * (1 - 1e-9)


def play(
    cost: StepCost, true: StepCost, steps: int, pause_s: float = 0.1, noise: float = 0.0,
    outliers: float = 0.0, seed: int = 0,
) -> None:  # fmt: skip
    """Compute documents in chunks that `cost` sizes for the pause, as an engine does."""
    dice, place = random.Random(seed), 0
    for number in range(steps):
        chunks = []
        if number % 4:
            count = max(16, min(8_192, cost.tokens_within(pause_s - cost.base_s, place)))
            chunks = [(count, place)]
            place = (place + count) % 120_000
        seconds = true.step_s(chunks) * (1 + noise * dice.uniform(-1, 1))
        if dice.random() < outliers:
            seconds *= 100
        cost.observe(seconds, chunks)


def error_of(cost: StepCost, true: StepCost, pause_s: float = 0.1) -> float:
    """Return the largest ratio of true and wanted seconds of a step that fills the pause."""
    ratios = []
    for place in range(0, 120_000, 10_000):
        count = cost.tokens_within(pause_s - cost.base_s, place)
        ratios.append(true.step_s([(count, place)]) / pause_s)
    return max(max(ratios), 1 / min(ratios))


@pytest.mark.parametrize("factor", [0.01, 0.3, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("slope", [8_000.0, 30_000.0, 200_000.0])
def test_an_engine_of_any_speed_is_learned(factor: float, slope: float) -> None:
    """From a guess for a GPU, to a faster one or to a CPU: the pauses scale with it."""
    true = StepCost(0.008 * factor, 2.3e-5 * factor, slope)
    cost = StepCost()
    play(cost, true, 450, 0.1 * factor, noise=0.03)
    assert error_of(cost, true, 0.1 * factor) < 1.2


def test_all_steps_as_long_as_the_pause_do_not_hide_what_a_token_costs() -> None:
    """The bound makes every step equally long, which a fit with an intercept could not explain."""
    true, cost = StepCost(0.008, 2.3e-5, 25_000.0), StepCost()
    play(cost, true, 3_000, noise=0.05)
    assert error_of(cost, true) < 1.1


def test_steps_that_take_100_times_as_long_change_little() -> None:
    true, cost = StepCost(0.008, 2.3e-5, 25_000.0), StepCost()
    play(cost, true, 300, noise=0.03)
    play(cost, true, 3_000, noise=0.03, outliers=0.01)
    assert error_of(cost, true) < 1.25


def test_a_gpu_that_throttles_is_followed_and_forgotten() -> None:
    true, slow, cost = StepCost(0.008, 2.3e-5), StepCost(0.016, 4.6e-5), StepCost()
    play(cost, true, 300)
    play(cost, slow, 120)
    assert error_of(cost, slow) < 1.3
    play(cost, true, 120)
    assert error_of(cost, true) < 1.3


@given(
    st.lists(
        st.tuples(
            st.one_of(st.floats(1e-6, 1e3), st.sampled_from([0.0, -1.0, inf, float("nan")])),
            st.lists(st.tuples(st.integers(1, 16_384), st.integers(0, 10**6)), max_size=3),
        ),
        max_size=60,
    )
)
def test_any_steps_leave_a_cost_that_can_be_used(
    seen: list[tuple[float, list[tuple[int, int]]]],
) -> None:
    cost = StepCost()
    for seconds, chunks in seen:
        cost.observe(seconds, chunks)
        assert 0.0 < cost.base_s < inf
        assert 0.0 < cost.token_s < inf
        assert cost.slope > 0.0
        assert cost.tokens_within(0.1, 100_000) >= 0
