"""Thousands of requests to three backends that do everything wrong at random: nothing leaks."""

import asyncio
import os
import random
from collections import Counter

import aiohttp
import pytest
from fakes.faulty_backends import busy, cuts, fails, faults, malformed, malformed_whole
from stages.proxy_stage import (
    DONE,
    EVENT,
    Call,
    RawBackend,
    Stage,
    on_stage,
    settle,
    silent,
    stream,
    whole,
)

REQUESTS, AT_ONCE = 2_000, 25
SLOW = {"event without end", "comments without end", "header of 128 KiB"}  # megabytes each


class Mean:
    """Does the right thing half of the time, and anything else otherwise."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        wrong = {**malformed(), **malformed_whole(), **faults(), **cuts()}
        self.wrong = [serve for name, serve in wrong.items() if name not in SLOW]
        self.wrong += [fails, busy, busy, silent]

    async def __call__(self, call: Call) -> None:
        await asyncio.sleep(self.dice.random() * 0.2)
        if self.dice.random() < 0.5:
            await (stream if b'"stream": true' in call.body else whole)(call)
        else:
            await self.dice.choice(self.wrong)(call)


async def one(on: Stage, dice: random.Random, outcomes: Counter[str]) -> None:
    """One client: it may leave at any moment; a stream it is given is whole or visibly not."""
    streams = dice.random() < 0.7
    body = {"prompt": "x" * dice.choice([5, 500]), "stream": streams}
    try:
        async with asyncio.timeout(dice.choice([0.01, 0.1, 0.5, 600, 600, 600, 600])):
            async with on.post(body) as response:
                got = await response.read()
                if response.status == 200 and streams:
                    assert got.endswith(DONE)
                outcomes[str(response.status)] += 1
    except TimeoutError:
        outcomes["left"] += 1
    except aiohttp.ClientPayloadError:
        outcomes["cut"] += 1


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def proxy_tasks() -> list[str]:
    """Tasks that do not serve a kept connection, on either side of the proxy."""
    tasks = [str(task.get_coro()) for task in asyncio.all_tasks()]
    return [t for t in tasks if "RawBackend" not in t and "RequestHandler" not in t]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
async def test_nothing_is_left_over() -> None:
    dice = random.Random(1)
    outcomes: Counter[str] = Counter()

    async def flap(backend: RawBackend) -> None:
        while True:
            backend.healthy = dice.choice([True, True, True, False, None])
            await asyncio.sleep(dice.random() * 5)

    async def worker(on: Stage, left: list[None]) -> None:
        while left:
            left.pop()
            await one(on, dice, outcomes)
            await asyncio.sleep(dice.random() * 0.05)

    before = descriptors()
    times = {"idle": "3s", "first_token": "5s", "answer": "5s", "client_write": "2s"}
    async with on_stage(*(Mean(10 + i) for i in range(3)), timeouts=times) as (on, backends):
        tasks_before = len(proxy_tasks())
        flapping = [asyncio.create_task(flap(b)) for b in backends]
        left: list[None] = [None] * REQUESTS
        await asyncio.gather(*(worker(on, left) for _ in range(AT_ONCE)))
        for task in flapping:
            task.cancel()
        await asyncio.gather(*flapping, return_exceptions=True)
        for backend in backends:
            backend.healthy, backend.serve = True, stream
        await asyncio.sleep(100)  # kept connections close, whoever is out comes back
        await settle()
        on.assert_nothing_held()
        assert on.proxy.app.active == 0
        assert not on.proxy.app._watchdog._watches
        assert not on.proxy.driver._granted
        assert not on.proxy.driver._waiting
        assert all(b.connections <= 1 for b in backends)  # one is kept, for the next probe
        # The probes of three backends keep a connection each, at most.
        assert [b.open for b in backends] == [0, 0, 0]
        for _ in range(9):
            assert (await on.read({"prompt": "x", "stream": True})).endswith(EVENT[-2:] + DONE)
        await asyncio.sleep(100)
        assert len(proxy_tasks()) <= tasks_before
    await settle()
    assert len(asyncio.all_tasks()) == 1
    assert descriptors() <= before + 1  # the loop's own may be counted once more
    assert sum(outcomes.values()) == REQUESTS
    for outcome in ("200", "502", "503", "504", "cut", "left"):
        assert outcomes[outcome] > 0, outcomes
