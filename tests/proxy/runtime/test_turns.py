"""Who uses the event loop next: debts of processor time, and turns, in virtual time."""

import asyncio
from collections import Counter
from collections.abc import Awaitable
from math import inf

import pytest
from stages.proxy_stage import now

from forebay.proxy.core.learn.decay import RECENT_S
from forebay.proxy.http1.errors import ApiError
from forebay.proxy.runtime.turns import (
    AT_ONCE,
    IDLE,
    MOST_HOLDERS,
    MOST_WAIT_S,
    PAUSE,
    SHORT_S,
    Debts,
    Line,
    LoopTurns,
)

MIB = 1 << 20


class TestDebts:
    def test_a_body_is_expected_to_take_as_long_as_the_dearest_of_late(self) -> None:
        debts = Debts()
        assert debts.expected_s("a", MIB, 0.0) == SHORT_S
        debts.charge("a", 0.02, 0.0, 200_000)
        debts.charge("a", 0.003, 1.0, 3_000_000)  # a document, cheaper by the byte
        assert debts.expected_s("a", 100_000, 2.0) == pytest.approx(0.01)
        assert debts.expected_s("b", 100_000, 2.0) < SHORT_S
        assert debts.expected_s("a", 100_000, RECENT_S) < SHORT_S

    def test_short_work_says_nothing_about_the_cost_of_bytes(self) -> None:
        debts = Debts()
        debts.charge("a", 0.0002, 0.0, 100)
        assert debts.expected_s("a", 100_000, 0.0) < SHORT_S
        debts.charge("a", 0.008, 0.0, 100)  # a collection of garbage came in between
        assert debts.expected_s("a", 4_000, 0.0) < SHORT_S

    def test_a_share_of_the_loop_is_free_of_debt(self) -> None:
        debts, at = Debts(), 0.0
        for _ in range(1_000):
            debts.charge("fair", 0.003, at)
            debts.charge("evil", 0.007, at)
            at += 0.01
        assert not debts.heavy("fair", at)
        assert debts.heavy("evil", at)
        assert debts.paid_at("evil") > debts.paid_at("fair") > debts.paid_at("nobody") == -inf
        assert not debts.heavy("evil", at + RECENT_S / IDLE)  # it is paid off without work, too
        for _ in range(2_000):
            debts.charge("other", 0.01, at)
        assert not debts.heavy("evil", at)

    def test_little_work_makes_no_debt(self) -> None:
        debts, at = Debts(), 0.0
        for _ in range(1_000):
            debts.charge("alone", 0.004, at)  # of a tenth of a second
            at += 0.1
        assert not debts.heavy("alone", at)

    def test_the_table_is_bounded(self) -> None:
        debts = Debts()
        for number in range(2 * MOST_HOLDERS):
            debts.charge("busy", 1.0, 0.0)
            debts.charge(str(number), 1.0, 0.0)
        assert len(debts) == MOST_HOLDERS
        assert debts.heavy("busy", 0.0)


class TestLine:
    def test_the_holder_with_the_least_debt_goes_first(self) -> None:
        debts = Debts()
        line = Line(debts)
        names = {
            line.wait(holder, lambda: None): holder
            for holder in ("evil", "evil", "gone", "good", "evil", "good")
        }
        next(turn for turn, holder in names.items() if holder == "gone").left = True
        debts.charge("evil", 0.1, 0.0)  # after it began to wait
        order = []
        while turn := line.next():
            order.append(names[turn])
            debts.charge(names[turn], 0.06, 0.0)
        assert order == ["good", "good", "evil", "evil", "evil"]
        assert not line

    def test_equal_holders_take_turns(self) -> None:
        debts = Debts()
        line = Line(debts)
        names = {line.wait(name, lambda: None): name for name in "aaaabbbb"}
        order = ""
        while turn := line.next():
            order += names[turn]
            debts.charge(names[turn], 0.05, 0.0)
        assert order == "abababab"


class Clocked:
    """Turns whose processor time is told by the work, and a record of what began when."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.began: list[tuple[str, float]] = []
        self.loop_turns: list[int] = []
        self._loop_turn = 0
        self.turns = LoopTurns(lambda: self.cpu_s)

    async def _work(self, holder: str, spent_s: float, steps: int) -> str:
        self.began.append((holder, round(now(), 3)))
        self.loop_turns.append(self._loop_turn)
        for step in range(steps):
            if step:
                await asyncio.sleep(0.5)
            self.cpu_s += spent_s / steps
        return holder

    async def count_loop_turns(self) -> None:
        while True:
            self._loop_turn += 1
            await asyncio.sleep(0)

    def take(self, holder: str, size: int, spent_s: float, steps: int = 1) -> Awaitable[str]:
        work = self._work(holder, spent_s, steps)
        return asyncio.ensure_future(self.turns.take(holder, size, work))


async def test_bodies_that_are_dear_to_parse_wait_and_those_of_others_do_not() -> None:
    """Bodies of 0.6 MB took 25 ms each, and all of them were parsed before a chat."""
    on = Clocked()
    began = now()
    evil = [on.take("evil", 600_000, 0.025) for _ in range(4)]
    good = [on.take("good", 200, 0.0001), on.take("good", 100_000, 0.001)]
    assert await asyncio.gather(*evil, *good) == ["evil"] * 4 + ["good"] * 2
    order = [(holder, round(at - began, 2)) for holder, at in on.began]
    # The first was not expected to take long, the second began a line of its own.
    assert order == [
        ("evil", 0.0), ("evil", 0.0), ("good", 0.0), ("good", 0.0), ("evil", 0.1), ("evil", 0.2),
    ]  # fmt: skip


async def test_only_the_steps_of_the_work_itself_are_charged() -> None:
    on = Clocked()
    slow = on.take("slow", 2 * MIB, 0.04, steps=4)
    await asyncio.sleep(0.1)
    on.cpu_s += 5.0  # other tasks, in between
    await slow
    assert on.turns.debts._charged_s == pytest.approx(0.04)


async def test_a_heavy_holder_begins_a_few_short_requests_in_a_turn_of_the_loop() -> None:
    on = Clocked()
    await on.take("good", 100, 0.0001)
    on.turns.debts.charge("evil", 1.0, now())
    counting = asyncio.ensure_future(on.count_loop_turns())
    evil = [on.take("evil", 100, 0.0005) for _ in range(AT_ONCE + 8)]
    good = on.take("good", 100, 0.0001)
    await asyncio.gather(*evil, good)
    counting.cancel()
    order = [holder for holder, _ in on.began[1:]]
    assert order == ["evil"] * AT_ONCE + ["good"] + ["evil"] * 8
    assert max(Counter(on.loop_turns).values()) == AT_ONCE + 1


async def test_a_heavy_holder_that_is_alone_waits_for_nobody() -> None:
    on = Clocked()
    await on.take("busy", 100, 0.0001)
    await asyncio.sleep(2 * RECENT_S)
    on.turns.debts.charge("busy", 1.0, now())
    began = now()
    await asyncio.gather(*(on.take("busy", 100, 0.001) for _ in range(5)))
    assert now() == began


async def test_who_leaves_or_waits_for_too_long_keeps_no_turn() -> None:
    on = Clocked()
    first = on.take("a", 2 * MIB, 0.1, steps=2)
    await asyncio.sleep(0.1)
    gone, late = on.take("b", 2 * MIB, 0.1), on.take("c", 2 * MIB, 100.0)
    await asyncio.sleep(0)
    asyncio.ensure_future(gone).cancel()
    await asyncio.gather(first, late)
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert [holder for holder, _ in on.began] == ["a", "c"]
    began = now()
    with pytest.raises(ApiError, match="overloaded"):  # the pause of 400 s is longer
        await on.take("d", 2 * MIB, 0.1)
    assert now() - began == pytest.approx(MOST_WAIT_S)
    await asyncio.sleep(PAUSE * 100.0)
    assert await on.take("d", 2 * MIB, 0.1) == "d"


async def test_a_cancelled_turn_ends() -> None:
    on = Clocked()
    turn = asyncio.ensure_future(on.take("a", 2 * MIB, 0.1, steps=9))
    await asyncio.sleep(0.1)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await asyncio.sleep(1.0)
    assert await on.take("b", 2 * MIB, 0.1) == "b"


async def test_the_rest_of_an_answer_is_charged_by_its_mean() -> None:
    on = Clocked()
    for _ in range(200):
        await on.take("a", 100, 0.001)
        on.cpu_s += 0.004  # relaying, logging
        on.turns.answered("a")
    assert 0.7 < on.turns.debts._charged_s < 1.0  # the mean begins at nothing


async def test_a_flood_of_errors_takes_a_fifth_of_the_loop_beside_others() -> None:
    """Four began in each turn of the loop, so that others waited for four in each of their own."""
    on = Clocked()
    for _ in range(200):
        await on.take("good", 100, 0.0001)
        on.cpu_s += 0.001
        on.turns.answered("good")  # the mean of an answer
    on.turns.debts.charge("evil", 5.0, now())
    began, at = now(), list[float]()

    async def error(holder: str) -> None:
        await on.turns.pace(holder, 401, body_read=False)
        at.append(now() - began)

    await asyncio.gather(*(error("evil") for _ in range(5)), error("good"))
    assert at == pytest.approx([0.0, 0.0, *(PAUSE * 0.001 * n for n in range(1, 5))], rel=0.1)
    # Who has waited for very long gets its error.
    on.turns.debts.charge("evil", 100.0, now())
    work = on.take("good", 2 * MIB, 100.0)
    await asyncio.gather(work, error("evil"))
    assert at[-1] < 2 * MOST_WAIT_S
