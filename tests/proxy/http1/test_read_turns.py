"""Connections with much to read take turns: one goes on each millisecond."""

import asyncio
import gc
from collections import Counter
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from forebay.proxy.http1.client.connection import Connection
from forebay.proxy.http1.server import server as http_server
from forebay.proxy.http1.server.read_turns import AT_ONE_BY_ONE, LARGE_READ_BYTES, TURN_S, ReadTurns
from forebay.proxy.http1.server.server import HttpServer
from forebay.replay.clock.virtual_loop import run

pytestmark = pytest.mark.real_time

MANY = 16
READ = b"x" * (256 << 10)  # what uvloop reads at once
POST = b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that notes whether it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = True

    def pause_reading(self) -> None:
        self.read = False

    def resume_reading(self) -> None:
        self.read = True

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


async def read_whole(request: web.BaseRequest) -> web.StreamResponse:
    while await request.content.readany():
        pass
    return web.Response()


class Clock:
    """The time of an event loop; stands still until it is told to pass."""

    def __init__(self) -> None:
        self.now = 100.0
        self.loop = asyncio.get_running_loop()
        self.loop.time = lambda: self.now  # type: ignore[method-assign]
        self.turns = ReadTurns(self.loop)

    async def ready(self) -> None:
        """Let everything run that is due."""
        for _ in range(4):
            await asyncio.sleep(0)

    async def turn(self) -> None:
        self.now += TURN_S
        await self.ready()


async def test_a_turn_resumes_the_next_connection_in_order() -> None:
    clock, went = Clock(), list[int]()
    for number in range(5):
        clock.turns.wait(partial(went.append, number))
    await clock.ready()
    for number in range(5):
        assert went == list(range(number + 1))
        await clock.turn()


async def test_many_go_on_together() -> None:
    """Each of a thousand slow uploads is read every 0.2 s or so."""

    clock, went = Clock(), list[int]()
    for number in range(5 * AT_ONE_BY_ONE):
        clock.turns.wait(partial(went.append, number))
    for _ in range(3 * AT_ONE_BY_ONE):
        await clock.turn()
    assert went == list(range(5 * AT_ONE_BY_ONE))


async def test_a_fault_of_one_keeps_nobody_else_waiting() -> None:
    clock, went = Clock(), list[int]()
    clock.loop.set_exception_handler(lambda *_: None)
    clock.turns.wait(partial(went.remove, 0))
    clock.turns.wait(partial(went.append, 1))
    await clock.turn()
    await clock.turn()
    assert went == [1]


async def test_a_body_is_read_whole_and_a_small_rest_at_once() -> None:
    """Small reads of a body that is far from its end wait for their turn."""
    got = list[int]()

    async def take(request: web.BaseRequest) -> web.StreamResponse:
        got.append(len(await request.content.read()))
        return web.Response()

    clock, server = Clock(), HttpServer(take)
    protocol, wire = server(), Wire()
    protocol.connection_made(wire)
    size, sent = 3 * LARGE_READ_BYTES, 0
    protocol.data_received(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
    await clock.ready()
    while sent < size:
        assert wire.read
        protocol.data_received(READ[:8192])
        sent += 8192
        assert wire.read is (size - sent <= LARGE_READ_BYTES)
        await clock.turn()
    await clock.ready()
    assert got == [size]
    protocol.connection_lost(None)
    await server.shutdown(0)


async def test_uploads_are_parsed_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All have sent 256 KiB: after the first part of each, one turn parses a part of one."""
    parsed: Counter[int] = Counter()  # bytes in each turn
    turn = 0
    receive = http_server._Protocol._received

    def received(self: Any, data: bytes) -> None:
        parsed[turn] += len(data)
        receive(self, data)

    monkeypatch.setattr(http_server._Protocol, "_received", received)

    clock, server = Clock(), HttpServer(read_whole)
    uploads = [(server(), Wire()) for _ in range(MANY)]
    for protocol, wire in uploads:
        protocol.connection_made(wire)
        protocol.data_received(POST)
    await asyncio.sleep(0)
    for turn in range(1, 4 * MANY):
        for protocol, wire in uploads:
            if wire.read and turn > 1:  # there is more whenever it is read
                protocol.data_received(READ)
        await clock.turn()
    assert sum(parsed.values()) > MANY * len(READ)
    assert max(parsed[one] for one in range(MANY, turn)) <= 4 * LARGE_READ_BYTES
    for protocol, _ in uploads:
        protocol.connection_lost(None)
    await server.shutdown(0)


async def test_answers_are_read_one_at_a_time() -> None:
    clock, wires = Clock(), []
    for _ in range(MANY):
        connection, wire = Connection(clock.loop, lambda _: None, clock.turns), Wire()
        connection.connection_made(wire)
        response = connection.send(b"GET / HTTP/1.1\r\n\r\n", b"")
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n")
        connection.data_received(READ[:LARGE_READ_BYTES])
        assert response.status == 200
        wires.append(wire)
    assert not any(wire.read for wire in wires)
    await clock.ready()
    for count in range(1, MANY + 1):
        assert [wire.read for wire in wires] == [True] * count + [False] * (MANY - count)
        await clock.turn()


async def test_a_turn_does_not_resume_a_response_that_nobody_wants_more_of() -> None:
    clock = Clock()
    connection, wire = Connection(clock.loop, lambda _: None, clock.turns), Wire()
    connection.connection_made(wire)
    connection.send(b"GET / HTTP/1.1\r\n\r\n", b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n")
    connection.data_received(READ)
    connection.pause(True)
    await clock.turn()
    assert not wire.read
    connection.pause(False)
    assert wire.read


def test_a_closed_connection_leaves_nothing_to_collect() -> None:
    """References in a ring would wait for a garbage collection, which takes 0.1 s for many."""

    async def refuse(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=429)

    def connections() -> set[int]:
        return {id(one) for one in gc.get_objects() if isinstance(one, http_server._Protocol)}

    async def main() -> None:
        before = connections()
        server, wire = HttpServer(refuse), Wire()
        protocol = server()
        protocol.connection_made(wire)
        protocol.data_received(POST + b"x")
        for _ in range(8):
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        del protocol
        for _ in range(8):
            await asyncio.sleep(0)
        assert connections() <= before
        await server.shutdown(0)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_a_body_alone_waits_for_no_timer() -> None:
    """A body of 400 KB comes in six reads: at one each millisecond it waited for 3 ms."""

    async def read(bodies: int) -> float:
        loop = asyncio.get_running_loop()
        turns, began = ReadTurns(loop), loop.time()
        for _ in range(6):
            went_on = [loop.create_future() for _ in range(bodies)]
            for future in went_on:
                turns.wait(partial(future.set_result, None))
            await asyncio.gather(*went_on)
        return loop.time() - began

    assert run(read(1)) == 0.0
    assert run(read(2)) == pytest.approx(11 * TURN_S)
