"""A client that leaves at the worst moment releases exactly the resources of its request."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from forebay.proxy.core.model import Action, BackendSpec, Bucket, Reject, Request, Send
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.driver import Driver, Grant, Rejected

BUCKETS = [Bucket("chat", 5_000, max_queue=9, max_wait_s=50.0)]


class Scene:
    """One driver, a journal, and clients that hold their slot for a second."""

    def __init__(self, slots: dict[str, int]) -> None:
        self.journal: list[Action] = []
        specs = [BackendSpec(name, n) for name, n in slots.items()]
        self.driver = Driver(Shaper(specs, BUCKETS), lambda _, action: self.journal.append(action))
        for name in slots:
            self.driver.backend_up(name)

    async def hold(self, name: str, meanwhile: Callable[[Grant], Awaitable[object]]) -> None:
        async with self.driver.slot(Request(name, 1)) as grant:
            await meanwhile(grant)

    def assert_empty(self) -> None:
        shaper = self.driver.shaper
        assert not list(shaper.waiting())
        assert all(b.idle and b.kv.tokens == 0 for b in shaper.backends.values())
        assert not self.driver._granted
        assert not self.driver._waiting


async def a_second(grant: Grant) -> None:
    await asyncio.sleep(1.0)


@pytest.mark.parametrize("turns", range(5))
async def test_cancelled_some_turns_after_the_grant(turns: int) -> None:
    scene = Scene({"a": 1})
    async with scene.driver.slot(Request("first", 1)):
        second = asyncio.create_task(scene.hold("second", a_second))
        await asyncio.sleep(0.5)
    # `second` is granted the slot, but its task has not run since.
    for _ in range(turns):
        await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    scene.assert_empty()


async def test_an_error_of_the_shaper_concerns_its_request_only() -> None:
    """On arrival, or when it asks for a slot once more."""

    def fails(request_id: str, now: float) -> list[Action]:
        raise ArithmeticError

    scene = Scene({"a": 1})

    async def asks_again(grant: Grant) -> None:
        scene.driver.ask(grant.send.request.id, fails)

    with pytest.raises(ArithmeticError):
        scene.driver.ask("arrives", fails)
    with pytest.raises(ArithmeticError):
        await scene.hold("runs", asks_again)
    scene.assert_empty()
    await scene.hold("second", a_second)
    scene.driver.end_waiting(RuntimeError)
    scene.assert_empty()


async def test_granted_between_the_cancellation_and_the_turn_that_sees_it() -> None:
    scene = Scene({"a": 1})
    async with scene.driver.slot(Request("first", 1)):
        second = asyncio.create_task(scene.hold("second", a_second))
        third = asyncio.create_task(scene.hold("third", a_second))
        await asyncio.sleep(0.5)
        second.cancel()  # its future is cancelled now; the shaper does not know yet
    with pytest.raises(asyncio.CancelledError):
        await second
    await third
    scene.assert_empty()
    assert [a.request.id for a in scene.journal] == ["first", "second", "third"]


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("others", [0, 1])
async def test_cancelled_some_turns_after_asking_for_a_retry(turns: int, others: int) -> None:
    scene = Scene({"a": 1, "b": 1})
    tasks = [asyncio.create_task(scene.hold(f"busy{i}", a_second)) for i in range(others)]
    await asyncio.sleep(0.1)

    async def fail_once(grant: Grant) -> None:
        await grant.retry(refused=False)
        await asyncio.sleep(1.0)

    task = asyncio.create_task(scene.hold("r", fail_once))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.gather(*tasks)
    scene.assert_empty()


async def test_a_retry_with_nowhere_to_go_is_refused_and_holds_nothing() -> None:
    scene = Scene({"a": 1})
    with pytest.raises(Rejected) as refused:
        await scene.hold("r", lambda grant: grant.retry(refused=False))
    assert refused.value.action.reason == "no_backend_available"
    scene.assert_empty()


async def test_a_retry_goes_to_the_other_backend() -> None:
    scene = Scene({"a": 1, "b": 1})
    await scene.hold("r", lambda grant: grant.retry(refused=False))
    assert [getattr(a, "backend", None) for a in scene.journal] == ["a", "b"]
    scene.assert_empty()


class Over(Exception):
    pass


@pytest.mark.parametrize("turns", range(3))
async def test_waiting_requests_are_ended_and_so_are_later_ones(turns: int) -> None:
    scene = Scene({"a": 1})
    async with scene.driver.slot(Request("first", 1)):
        second, third, fourth = [
            asyncio.create_task(scene.hold(name, a_second)) for name in ("2", "3", "4")
        ]
        await asyncio.sleep(0.5)
        second.cancel()  # its future is cancelled now; the shaper does not know yet
        scene.driver.end_waiting(Over)
        for _ in range(turns):
            await asyncio.sleep(0)
        fourth.cancel()
        with pytest.raises(Over):
            await scene.hold("later", a_second)
    for task, error in ((second, asyncio.CancelledError), (third, Over)):
        with pytest.raises(error):
            await task
    with pytest.raises((asyncio.CancelledError, Over)):
        await fourth
    scene.assert_empty()
    assert [a.request.id for a in scene.journal] == ["first"]


async def test_the_timer_refuses_whoever_waited_too_long() -> None:
    scene = Scene({"a": 1})
    async with scene.driver.slot(Request("first", 1)):
        second = asyncio.create_task(scene.hold("second", a_second))
        await asyncio.sleep(60.0)
    with pytest.raises(Rejected):
        await second
    scene.assert_empty()
    assert isinstance(scene.journal[0], Send)
    assert isinstance(scene.journal[1], Reject)
    assert scene.journal[1].queued_s == pytest.approx(50.0)


async def test_an_exception_in_the_block_frees_the_slot() -> None:
    scene = Scene({"a": 1})

    async def fail(grant: Grant) -> None:
        grant.first_token()
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        await scene.hold("r", fail)
    scene.assert_empty()
