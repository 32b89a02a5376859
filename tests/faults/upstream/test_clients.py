"""Clients that leave, read slowly or not at all, and the effect on the backend's side."""

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any

import pytest
from fakes.faulty_backends import answers, sends, streams
from stages.proxy_stage import (
    DONE,
    EVENT,
    ONE_SLOT,
    STREAM_HEAD,
    STREAMED,
    Call,
    answer,
    chunk,
    on_stage,
    settle,
    silent,
    whole,
)
from stages.raw_client import Raw, little_room

from forebay.proxy.http1.client.client import Origin

CHUNKS = 1_000


LEAVES = pytest.mark.parametrize("how", ["close", "reset", "half"])


STREAMS = {
    "headers": streams(end="stay"),
    "stalled stream": streams(EVENT, end="stay"),
    "moving stream": streams(*[EVENT] * 100, every_s=0.02),
    "another path": streams(EVENT, end="stay"),
}


async def floods(call: Call) -> None:
    await call.send(STREAM_HEAD)
    while not call.writer.is_closing():
        await call.send(chunk(EVENT * 500))


class TestLeaving:
    """Within a moment all is released and the backend's connection is closed."""

    @LEAVES
    async def test_while_queued(self, how: str) -> None:
        async with on_stage(silent, **ONE_SLOT) as (on, backends):
            first, second = await Raw.connect(on), await Raw.connect(on)
            first.post()
            await asyncio.sleep(0.1)
            second.post()
            await asyncio.sleep(0.1)
            shaper = on.proxy.driver.shaper
            assert shaper.queued("chat") == 1
            second.leave(how)
            await settle()
            assert shaper.queued("chat") == 0
            first.leave(how)
            await settle()
            assert len(backends[0].calls) == 1  # the other was never sent
            assert backends[0].open == 0

    @LEAVES
    @pytest.mark.parametrize("where", [*STREAMS, "prefill", "whole"])
    async def test_while_the_backend_works(self, how: str, where: str) -> None:
        path = "/v1/embeddings" if where == "another path" else "/v1/completions"
        async with on_stage(STREAMS.get(where, silent)) as (on, backends):
            client = await Raw.connect(on)
            client.post({"prompt": "x"} if where == "whole" else STREAMED, path=path)
            await asyncio.sleep(0.1)
            assert backends[0].open == 1
            client.leave(how)
            await settle()
            assert backends[0].open == 0

    @pytest.mark.parametrize("how", ["close", "reset"])
    async def test_with_a_blocked_write(self, how: str) -> None:
        async with on_stage(floods) as (on, backends):
            client = await Raw.connect(on, receives=4096)
            client.post()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(1)
            assert backends[0].open == 1
            client.leave(how)
            await settle()
            assert backends[0].open == 0

    @LEAVES
    async def test_while_it_is_tried_a_second_time(self, how: str) -> None:
        async with on_stage(answers(500, b"{}"), silent) as (on, backends):
            client = await Raw.connect(on)
            client.post()
            await asyncio.sleep(0.1)
            assert [b.open for b in backends] == [0, 1]
            client.leave(how)
            await settle()
            assert [b.open for b in backends] == [0, 0]

    async def test_a_client_that_leaves_is_not_held_against_the_backend(self) -> None:
        async with on_stage(silent) as (on, _):
            for _ in range(10):
                client = await Raw.connect(on)
                client.post()
                await asyncio.sleep(0.1)
                client.leave("reset")
            await settle()
            assert on.proxy.backends.health.state("b0") == "up"


class TestReading:
    @pytest.mark.parametrize("what", ["stream", "whole"])
    async def test_a_slow_reader_gets_all_of_it_through_bounded_buffers(self, what: str) -> None:
        sent, piece = 0, EVENT * 500
        size = CHUNKS * len(piece)

        async def much(call: Call) -> None:
            nonlocal sent
            whole_head = answer(200, b"").replace(b"length: 0", b"length: %d" % size)
            await call.send(STREAM_HEAD if what == "stream" else whole_head)
            for _ in range(CHUNKS):
                await call.send(chunk(piece) if what == "stream" else piece)
                sent += len(piece)
            if what == "stream":
                await call.send(chunk(DONE) + b"0\r\n\r\n")

        async with on_stage(much, limits={"answer": 2 * size}) as (on, _):
            client = await Raw.connect(on)
            client.post(STREAMED if what == "stream" else {"prompt": "x"}, "connection: close")
            transport: Any = client.writer.transport
            transport.pause_reading()
            await asyncio.sleep(5)
            # Kernel buffers and ours; the rest of the 34 MB waits in the backend.
            assert 0 < sent < (12 << 20 if what == "stream" else 20 << 20)
            (watch,) = on.proxy.app._watchdog._watches
            ours: Any = watch.request.transport
            assert ours.get_write_buffer_size() < 1 << 20
            transport.resume_reading()
            got = 0
            while part := await client.reader.read(1 << 20):
                got += part.count(b"data: ")
            assert sent == size
            assert 0.9 * 500 * CHUNKS < got <= 500 * CHUNKS + 1  # reads and chunks cut some in two
            client.writer.close()

    @pytest.mark.parametrize("what", ["stream", "whole"])
    @pytest.mark.parametrize("steady", [True, False], ids=["steady", "a byte now and then"])
    async def test_a_slow_and_steady_reader_is_not_cut_off(self, steady: bool, what: str) -> None:
        """The answer takes it many times `client_write`; each read makes room for the next."""
        size = 8 << 20
        large = {
            "whole": answers(200, b'{"x":"' + b"x" * size + b'"}'),
            "stream": streams(*[EVENT * 500] * (size // (len(EVENT) * 500)), DONE),
        }
        async with on_stage(large[what], timeouts={"client_write": "30s"}) as (on, _):
            host, port = on.url.removeprefix("http://").split(":")
            wire = socket.socket()
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            wire.connect((host, int(port)))
            wire.setblocking(False)
            body = json.dumps(STREAMED if what == "stream" else {"prompt": "x"})
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
            wire.send(f"{head}connection: close\r\n\r\n{body}".encode())
            await asyncio.sleep(0.5)
            got = 0
            with wire:
                for _ in range(3000 if steady else 100):
                    await asyncio.sleep(1.0)
                    with suppress(BlockingIOError):
                        part = wire.recv(1 << 20 if steady else 1)
                        got += len(part)
                        if not part:
                            break
                assert on.proxy.app.active == 0
            assert (got > 0.9 * size) == steady

    @pytest.mark.parametrize("what", ["stream", "whole"])
    async def test_a_reader_that_never_reads_is_cut_off(self, what: str) -> None:
        huge = answers(200, b'{"x":"' + b"x" * (12 << 20) + b'"}')

        async with on_stage(
            floods if what == "stream" else huge, timeouts={"client_write": "2s"}
        ) as (on, backends):
            client = await Raw.connect(on, receives=4096)
            client.post(STREAMED if what == "stream" else {"prompt": "x"})
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(1.5)
            connections = on.proxy.app  # still being written to
            await asyncio.sleep(2)
            assert connections.active == 0
            assert not on.proxy.app._watchdog._watches
            assert backends[0].open == 0 or what == "whole"
            client.writer.transport.abort()

    @pytest.mark.parametrize("header", ["connection: close", "connection: keep-alive"])
    @pytest.mark.parametrize("what", ["stream", "whole"])
    async def test_a_reader_that_never_reads_the_last_of_it_is_cut_off(
        self, what: str, header: str
    ) -> None:
        """The unread rest is smaller than the buffer limit at which writing waits."""
        last = {
            "whole": answers(200, b'{"x":"' + b"x" * 60_000 + b'"}'),
            "stream": streams(EVENT * 800, DONE),
        }
        async with on_stage(last[what], timeouts={"client_write": "2s"}) as (on, _):
            client = await Raw.connect(on, receives=4096)
            await little_room(on)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.post(STREAMED if what == "stream" else {"prompt": "x"}, header)
            await asyncio.sleep(1)
            public = on.proxy.listeners[0][1]
            assert public.open_connections == 1
            on.assert_nothing_held()  # its slot is free already
            await asyncio.sleep(2)
            assert not public.open_connections
            assert not on.proxy.app.active
            client.writer.transport.abort()

    async def test_a_cut_stream_does_not_keep_a_connection_that_nobody_reads(self) -> None:
        async def cut(call: Call) -> None:
            await call.send(STREAM_HEAD)
            for _ in range(400):
                call.writer.write(chunk(EVENT * 500))
                await asyncio.sleep(0)
            call.reset()

        async with on_stage(cut, timeouts={"client_write": "2s"}) as (on, backends):
            client = await Raw.connect(on, receives=4096)
            client.post()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(10)
            assert backends[0].open == 0
            assert not on.proxy.app.active
            client.writer.transport.abort()

    async def test_a_backend_that_does_not_read_is_given_up(self) -> None:
        """The body is larger than its buffers: the time-out for the first event ends it."""
        hold = asyncio.Event()

        async def reads_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await hold.wait()
            writer.close()

        keys: dict[str, Any] = {"timeouts": {"first_token": "5s"}, "health": {"interval": "900s"}}
        async with on_stage(whole, **keys) as (on, _):
            deaf = await asyncio.start_server(reads_nothing, "127.0.0.1", 0, limit=1024)
            link = on.proxy.backends.links["b0"]
            port = deaf.sockets[0].getsockname()[1]
            link.origin = Origin(f"http://127.0.0.1:{port}", 5.0)
            body = {**STREAMED, "user": "x" * (12 << 20)}
            client = await Raw.connect(on)
            client.post(body)
            assert b" 504 " in await client.reader.readline()
            client.writer.close()
            hold.set()
            deaf.close()


async def test_an_early_refusal_of_a_large_body_is_passed_on() -> None:
    """A backend may answer before it has read everything."""

    early = sends(
        answer(413, b'{"error":{"message":"too long"}}', "connection: close"), end="close"
    )

    async with on_stage(early) as (on, _):
        client = await Raw.connect(on)
        client.post({**STREAMED, "user": "x" * (4 << 20)})
        assert b" 413 " in await client.reader.readline()
        client.writer.close()
