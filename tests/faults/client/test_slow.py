"""Clients that are slow, silent or gone: each wait ends, and all is released."""

import asyncio
import socket

import pytest
from aiohttp import web
from fakes.faulty_backends import streams
from stages.proxy_stage import USAGE, now, on_stage, settle, silent
from stages.raw_client import (
    BODY,
    GOOD,
    HOST,
    LAST,
    LENGTH,
    POST,
    ask,
    before_oracle,
    connected,
    raw,
    responses,
)

from forebay.proxy.http1.server.listen import listen
from forebay.proxy.http1.server.server import HttpServer

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


class TestSlowRequests:
    @pytest.mark.parametrize(
        "start",
        [
            b"P",
            b"POST /v1/comp",
            HEAD,
            HEAD + b"X: y\r\n",
            HEAD + LENGTH + b"\r\n{",
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n5",
            HEAD + b"Content-Length: 16000000\r\n\r\n{",
        ],
        ids=["method", "path", "line", "field", "body", "chunk", "a stated length buys no time"],
    )
    async def test_of_the_first_request(self, start: bytes) -> None:
        async with before_oracle() as (on, oracle):
            began = now()
            answer = await ask(on, start)
            assert (answer.status, answer.error["code"]) == (408, "request_timeout")
            assert answer.closes
            assert now() - began == pytest.approx(10, abs=1 if b"\r\n\r\n" not in start else 2)
            assert not oracle.requests

    async def test_dribbled_for_ever(self) -> None:
        async with before_oracle() as (on, _):
            began = now()
            got = await raw(on, *[b"X" if i else HEAD for i in range(20)], pause_s=1)
            assert responses(got)[0].status == 408
            assert now() - began < 25

    async def test_of_the_second_request_from_its_first_byte(self) -> None:
        async with before_oracle() as (on, oracle):
            began = now()
            got = await raw(on, GOOD, HEAD, pause_s=40)
            assert [r.status for r in responses(got)] == [200, 408]
            assert now() - began == pytest.approx(50, abs=1)
            assert len(oracle.requests) == 1

    async def test_in_time_is_in_time(self) -> None:
        async with before_oracle() as (on, _):
            got = await raw(on, GOOD, LAST[:40], LAST[40:60], LAST[60:], pause_s=4)
            assert [r.status for r in responses(got)] == [200, 200]

    async def test_behind_an_answer_that_is_under_way(self) -> None:
        """The answer goes out whole, then the connection closes; no 408 in the middle of it."""

        async with on_stage(streams(USAGE, b"data: [DONE]\n\n", every_s=30)) as (on, _):
            body = b'{"prompt":"x","stream":true}'
            first = POST + HOST + b"Content-Length: %d\r\n\r\n" % len(body) + body
            got = await raw(on, first, HEAD, pause_s=1)
            (answer,) = responses(got)
            said = answer.body.replace(b": keep-alive\n\n", b"")
            assert said == USAGE + b"data: [DONE]\n\n"

    @pytest.mark.parametrize(("first", "after_s"), [(b"", 10), (GOOD, 75)])
    async def test_silence_is_not_answered(self, first: bytes, after_s: float) -> None:
        async with before_oracle() as (on, _):
            began = now()
            got = await raw(on, first)
            assert [r.status for r in responses(got)] == ([200] if first else [])
            assert now() - began == pytest.approx(after_s, abs=1)


class TestSlowBodies:
    @pytest.mark.parametrize(("pause_s", "status"), [(0.9, 200), (2.0, 408)])
    async def test_the_least_rate(self, pause_s: float, status: int) -> None:
        """100 KB/s, with 10 s to spare."""
        body = b'{"max_tokens":1,"prompt":"' + b"x" * 3_000_000 + b'"}'
        parts = [body[i : i + 100_000] for i in range(0, len(body), 100_000)]
        head = POST + HOST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)

        async with before_oracle(buckets=[{"name": "any", "up_to": 10_000_000}]) as (on, oracle):
            answer = await ask(on, head, *parts, pause_s=pause_s)
            assert answer.status == status
            assert len(oracle.requests) == (status == 200)


class TestGone:
    @pytest.mark.parametrize(
        "sent", [b"", HEAD[:20], HEAD + LENGTH + b"\r\n", HEAD + LENGTH + b"\r\n" + BODY[:9]]
    )
    @pytest.mark.parametrize("how", ["close", "reset", "half-close"])
    async def test_while_asking(self, sent: bytes, how: str) -> None:
        async with before_oracle() as (on, oracle):
            async with connected(on) as (_, writer):
                writer.write(sent)
                await settle()
                leave(writer, how)
                await settle()
            assert not oracle.requests
            assert on.proxy.app.active == 0

    @pytest.mark.parametrize("how", ["close", "reset", "half-close"])
    @pytest.mark.parametrize("behind", [b"", GOOD * 3, HEAD])
    async def test_while_waiting_for_the_answer(self, how: str, behind: bytes) -> None:
        """A half-close too is taken for a client that is gone; pipelined requests hide nothing."""
        async with (
            on_stage(silent) as (on, (backend,)),
            connected(on) as (reader, writer),
        ):
            writer.write(GOOD + behind)
            await settle()
            assert backend.open == 1
            leave(writer, how)
            await settle()
            assert backend.open == 0
            assert len(backend.calls) == 1
            if how == "half-close":
                assert await reader.read() == b""


class TestNeverReading:
    @pytest.mark.parametrize(
        ("request_", "then", "after_s"),
        [
            (LAST, b"", 2),
            (GOOD, b"", 75 + 2),  # kept alive until then
            (GOOD, HEAD, 10 + 2),  # refused, behind what was not taken
        ],
    )
    async def test_a_closed_connection_is_cut(
        self, request_: bytes, then: bytes, after_s: float
    ) -> None:
        """Although what is left is less than writing an answer waits for."""

        async def much(request: web.BaseRequest) -> web.Response:
            assert request.transport is not None
            kernel = request.transport.get_extra_info("socket")
            kernel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            return web.Response(body=b"x" * 60_000)

        server = HttpServer(much, client_write_s=2)
        runner, port = await listen(server, "127.0.0.1", 0)
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port))
        deaf.sendall(request_)
        await settle()
        deaf.sendall(then)
        await asyncio.sleep(after_s - 0.5)
        assert server.open_connections == 1
        await asyncio.sleep(1)
        assert not server.open_connections
        deaf.close()
        await runner.cleanup()


def leave(writer: asyncio.StreamWriter, how: str) -> None:
    match how:
        case "close":
            writer.close()
        case "reset":
            writer.transport.abort()
        case _:
            writer.write_eof()
