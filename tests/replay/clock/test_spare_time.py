"""replay/clock/spare_time.py: background work takes its steps where they make no arrival late."""

import asyncio

import pytest

from forebay.replay.clock.clock import Clock
from forebay.replay.clock.spare_time import SpareTime


async def taken_at(spare: SpareTime, clock: Clock, turns: int = 1) -> list[float]:
    at_s = []
    for _ in range(turns):
        await spare.turn()
        at_s.append(clock.now())
    return at_s


@pytest.mark.parametrize(
    ("due_s", "reads_s", "taken_s"),
    [
        (0.0010, [0.0005], 0.0005),
        (0.0010, [0.00005, 0.0006], 0.0006),  # the first one comes at once after a send
        (0.0004, [0.0003], 0.02),  # an arrival is due soon, and no other read comes
        (0.0004, [0.0003, 0.0015], 0.0015),  # it has waited for long enough
        (0.1, [0.0003], 0.0003),
    ],
)
async def test_a_step_is_taken_at_a_read_that_is_far_from_sends(
    due_s: float, reads_s: list[float], taken_s: float
) -> None:
    clock = Clock()
    spare = SpareTime(clock)
    spare.wait(due_s, due_s)
    for read_s in reads_s:
        asyncio.get_running_loop().call_later(read_s, spare.offer, read_s)
    assert await taken_at(spare, clock) == pytest.approx([taken_s])


async def test_steps_are_taken_in_a_row_where_nothing_is_due() -> None:
    clock = Clock()
    assert await taken_at(SpareTime(clock), clock, turns=100) == [0.0] * 100


async def test_a_caller_that_was_cancelled_takes_no_turn_from_another() -> None:
    clock = Clock()
    spare = SpareTime(clock)
    spare.wait(0.001, 0.001)
    first, second = (asyncio.ensure_future(spare.turn()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0.0005)
    spare.offer(0.0005)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert second.done()
