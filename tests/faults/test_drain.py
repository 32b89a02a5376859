"""Draining: an admitted request gets a whole answer or an error, whatever the last clients do."""

import asyncio
import json
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from fakes.certificates import on_tls, trusting
from fakes.faulty_backends import answers, sends
from stages.proxy_stage import (
    ONE_SLOT,
    STREAMED,
    WHOLE,
    Call,
    Stage,
    answer,
    error_of,
    on_stage,
    settle,
    silent,
    until,
)
from stages.raw_client import Raw, little_room

from forebay.proxy.http1.server import handover

Told = tuple[int, Any]


async def ask(on: Stage) -> Told:
    async with on.post(STREAMED) as response:
        return response.status, orjson.loads(await response.read())["error"]["code"]


class TestPatienceOver:
    """503 `draining` for all that has no answer yet, and no backend is asked any more."""

    async def test_queued_requests_are_told_and_never_sent(self) -> None:
        async with on_stage(silent, **ONE_SLOT) as (on, backends):
            tasks = [asyncio.create_task(ask(on)) for _ in range(3)]
            await until(lambda: on.proxy.driver.shaper.queued("chat") == 2)
            assert await on.proxy.drain(2) == 3
            assert await asyncio.gather(*tasks) == [(503, "draining")] * 3
            assert len(backends[0].calls) == 1

    async def test_a_request_that_waits_for_its_retry(self) -> None:
        async def fails(call: Call) -> None:
            if b"first" not in call.body:
                await first_is_there.wait()
                await call.send(answer(500, b"{}"))
            else:
                await call.hung_up()

        first_is_there = asyncio.Event()
        async with on_stage(fails, fails, **ONE_SLOT) as (on, backends):
            holding = asyncio.create_task(on.post({**STREAMED, "user": "first"}).__aenter__())
            await until(lambda: sum(b.open for b in backends) == 1)
            task = asyncio.create_task(ask(on))
            await until(lambda: sum(b.open for b in backends) == 2)
            first_is_there.set()
            await until(lambda: on.proxy.driver.shaper.queued("chat") == 1)
            assert await on.proxy.drain(2) == 2
            assert await task == (503, "draining")
            held = await holding
            assert held.status == 503
            held.release()
            assert sum(len(b.calls) for b in backends) == 2

    async def test_a_request_whose_body_came_late(self) -> None:
        async with on_stage(None) as (on, backends):
            client = await Raw.connect(on)
            client.post(sent=10)
            await until(lambda: on.proxy.app.active == 1)
            drained = asyncio.create_task(on.proxy.drain(0.0))
            await until(lambda: on.proxy.app._attempts.draining)
            client.writer.write(json.dumps(STREAMED).encode()[10:])
            assert b" 503 " in await client.reader.readline()
            assert await drained == 1
            assert not backends[0].calls
            client.writer.close()

    @pytest.mark.parametrize("begun", [False, True])
    async def test_paths_that_are_not_shaped(self, begun: bool) -> None:
        tokenize = sends(*[answer(200, WHOLE)[:-9]] * begun)
        async with on_stage(tokenize, tokenize) as (on, backends):
            task = asyncio.create_task(on.post(path="/tokenize").__aenter__())
            await until(lambda: sum(b.open for b in backends) == 1)
            assert await on.proxy.drain(2) == 1
            response = await task
            assert response.status == 503
            assert (await error_of(response))["code"] == "draining"
            assert sum(len(b.calls) for b in backends) == 1


class TestWholeAnswers:
    @pytest.mark.parametrize("size", [60_000, 4 << 20])
    async def test_a_slow_reader_gets_all_of_it(self, size: int) -> None:
        """Also what is less than writing waits for."""

        async with on_stage(answers(200, b'{"x":"' + b"x" * size + b'"}')) as (on, backends):
            client = await Raw.connect(on, receives=4096)
            await little_room(on)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.post({"prompt": "x"})
            await until(lambda: bool(backends[0].calls) and not backends[0].open)
            await settle()
            drained = asyncio.create_task(on.proxy.drain(30))
            await settle()
            assert not drained.done()
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert b"content-length: %d\r\n" % (size + 8) in head.lower()
            assert await client.reader.readexactly(size + 8)
            assert await drained == 0
            client.writer.close()


SHARED: dict[str, Any] = {"port": 0, "admin_port": 0, "reuse_port": True}


class TestHandover:
    """The drain starts while clients are connecting."""

    async def test_handshakes_that_fail_or_never_come(self, tmp_path: Path) -> None:
        async with on_tls(tmp_path, listen=SHARED, timeouts={"lame_duck": "1s"}) as (on, _):
            host, port = on.url.removeprefix("https://").split(":")
            # In one turn of the loop: the proxy has accepted none of them.
            mute, garbage, good = [socket.create_connection((host, int(port))) for _ in range(3)]
            garbage.sendall(b"GET / HTTP/1.1\r\n\r\n")
            good.setblocking(False)

            async def asks() -> bytes:
                reader, writer = await asyncio.open_connection(
                    sock=good, ssl=trusting(), server_hostname="127.0.0.1"
                )
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                line = await reader.readline()
                writer.transport.abort()
                return line

            asked = asyncio.create_task(asks())
            await on.proxy.lame_duck()
            assert b"HTTP/1.1 503" in await asked  # it is leaving, and says so
            assert await on.proxy.drain(2) == 0
            mute.close()
            garbage.close()

    @pytest.mark.parametrize("spare", [0, 1, 2])
    async def test_without_descriptors(self, spare: int) -> None:
        """For the duplicates of its listening sockets, for those that wait to be accepted."""
        async with on_stage(None, listen=SHARED, timeouts={"lame_duck": "1s"}) as (on, _):
            host, port = on.url.removeprefix("http://").split(":")
            waiting = [socket.create_connection((host, int(port))) for _ in range(3)]
            next_free = socket.socket()
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_free.fileno() + spare, limits[1]))
            next_free.close()
            try:
                await on.proxy.lame_duck()
                assert await on.proxy.drain(2) == 0
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for each in waiting:
                    each.close()

    @pytest.mark.skipif(sys.platform != "linux", reason="the filter is one of Linux")
    async def test_a_connection_after_the_last_accept(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Is not reset: its SYN goes unheard, and the next one, a second later, to the new one."""
        late: list[socket.socket] = []

        async with on_stage(None, listen=SHARED, timeouts={"lame_duck": "1s"}) as (on, _):
            port = int(on.url.rpartition(":")[2])

            def accepted(listening: socket.socket) -> Iterator[socket.socket]:
                yield from handover_accepted(listening)
                if late:
                    return  # this is the admin port
                for _ in range(8):  # the kernel gives about half of them to the old one
                    late.append(socket.socket())
                    late[-1].setblocking(False)
                    late[-1].connect_ex(("127.0.0.1", port))

            handover_accepted = handover._accepted
            monkeypatch.setattr(handover, "_accepted", accepted)
            with socket.socket() as new:
                new.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                new.bind(("127.0.0.1", port))
                new.listen()
                await on.proxy.lame_duck()
                new.settimeout(10)
                for _ in late:
                    with new.accept()[0] as connection:
                        connection.send(b"hello")
                for each in late:
                    with each:
                        each.settimeout(10)
                        assert each.recv(9) == b"hello"
        assert len(late) == 8
