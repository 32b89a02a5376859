"""Behaviour by which routers are compared: limits, leaving clients, rejecting backends.

Real sockets and misbehaving backends in virtual time;
`tests/bench/routers/bench_behaviour.py` asks the same of other routers.
"""

import asyncio
from collections import Counter
from typing import Any

import pytest
from fakes.faulty_backends import answers
from stages.proxy_stage import (
    DONE,
    EVENT,
    STREAM_HEAD,
    STREAMED,
    USAGE,
    WHOLE,
    Call,
    Stage,
    answer,
    by_request,
    chunk,
    now,
    on_stage,
)

SERVES_S = 5.0
PLAIN = {key: value for key, value in STREAMED.items() if key != "stream"}
MODES = pytest.mark.parametrize("body", [STREAMED, PLAIN], ids=["stream", "whole"])


class Counting:
    """A backend that takes its time, and how many were there together."""

    def __init__(self, both: list[int]) -> None:
        self.most = 0
        self._here = 0
        self._both = both  # there now and at most, of all backends

    async def serve(self, call: Call) -> None:
        self._here += 1
        self._both[0] += 1
        self.most = max(self.most, self._here)
        self._both[1] = max(self._both)
        try:
            if b'"stream": true' in call.body:
                # The slot is held to the last byte, not to the first.
                await call.send(STREAM_HEAD + chunk(EVENT))
                await asyncio.sleep(SERVES_S)
                await call.send(chunk(USAGE) + chunk(DONE) + b"0\r\n\r\n")
            else:
                await asyncio.sleep(SERVES_S)
                await call.send(answer(200, WHOLE))
        finally:
            self._here -= 1
            self._both[0] -= 1


async def asks(on: Stage, body: Any, count: int) -> list[tuple[int, float, bool]]:
    """Status, seconds, and presence of Retry-After, for many requests at once."""

    async def ask() -> tuple[int, float, bool]:
        start = now()
        async with on.post(body) as response:
            await response.read()
            return response.status, now() - start, "retry-after" in response.headers

    return await asyncio.gather(*(ask() for _ in range(count)))


def bucket(max_queue: int, max_wait: str) -> list[dict[str, Any]]:
    return [{"name": "chat", "up_to": 5000, "max_queue": max_queue, "max_wait": max_wait}]


class TestALimitOfEight:
    @MODES
    @pytest.mark.parametrize("slots", [(8,), (4, 4), (6, 2)])
    async def test_of_24_at_once_exactly_eight_are_served(
        self, body: dict[str, Any], slots: tuple[int, ...]
    ) -> None:
        both = [0, 0]
        counting = [Counting(both) for _ in slots]

        async with on_stage(
            *(one.serve for one in counting), slots=slots, buckets=bucket(4, "1s")
        ) as (on, _):
            got = await asks(on, body, 24)
            assert Counter(status for status, _, _ in got) == {200: 8, 429: 16}
            refused = [(round(took, 1), told) for status, took, told in got if status == 429]
            # Four had a place in the queue and waited in vain; twelve were told at once.
            assert Counter(refused) == {(0.0, True): 12, (1.0, True): 4}
            assert both[1] == 8
            assert [one.most for one in counting] == list(slots)

    @MODES
    async def test_with_room_in_the_queue_all_are_served_eight_at_a_time(
        self, body: dict[str, Any]
    ) -> None:
        both = [0, 0]
        counting = Counting(both)

        async with on_stage(counting.serve, slots=8, buckets=bucket(64, "60s")) as (on, _):
            got = await asks(on, body, 24)
            assert [status for status, _, _ in got] == [200] * 24
            assert both[1] == 8
            assert sorted(round(took) for _, took, _ in got) == [5] * 8 + [10] * 8 + [15] * 8


class TestAFleetThatRefuses:
    """Every backend answers every request with the same error."""

    @pytest.mark.parametrize("status", [429, 500, 503])
    @pytest.mark.parametrize("together", [True, False], ids=["at once", "in turn"])
    async def test_is_asked_once_for_each_request(self, status: int, together: bool) -> None:
        body = b'{"error":{"message":"no","type":"x","param":null,"code":null}}'

        refuses = answers(status, body)

        async with on_stage(refuses, refuses) as (on, backends):
            got: list[tuple[int, float, bool]] = []
            if together:
                got = await asks(on, STREAMED, 20)
            else:
                for _ in range(20):
                    got += await asks(on, STREAMED, 1)
                    await asyncio.sleep(5.0)  # longer than a backend that is full is left alone
            assert [s for s, _, _ in got] == [status] * 20
            assert all(told for _, _, told in got) or status == 500
            # The first of all finds out that the other one refuses too.
            assert sum(len(b.calls) for b in backends) <= 21
            assert all(b.calls for b in backends)

    async def test_a_backend_that_serves_again_is_asked_for_requests_that_the_other_refuses(
        self,
    ) -> None:
        serves: list[Any] = [busy, busy]

        def nth(index: int) -> Any:
            async def serve(call: Call) -> None:
                await serves[index](call)

            return serve

        async with on_stage(nth(0), nth(1)) as (on, backends):
            assert [s for s, _, _ in await asks(on, STREAMED, 2)] == [503, 503]
            serves[1] = by_request
            got: list[int] = []
            for _ in range(8):  # all within the time in which its refusal is held against it
                await asyncio.sleep(1.0)
                got += [s for s, _, _ in await asks(on, STREAMED, 1)]
            first = got.index(200)
            assert got[first:] == [200] * (8 - first)
            assert len(backends[0].calls) > 2  # refused there, and then served by the other one


busy = answers(503, b'{"error":"busy"}')
