"""Leaving: whoever was taken gets a whole answer or is told, whatever the last clients do."""

import asyncio
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
from proxy_stage import Call, RawBackend, Stage, answer, settle
from test_fault_upstream_clients import Raw, little_room, until
from test_proxy_http import on_stage
from test_tls import on_tls, trusting


class TestWholeAnswers:
    @pytest.mark.parametrize("size", [60_000, 4 << 20])
    def test_a_slow_reader_gets_all_of_it(self, size: int) -> None:
        """Also what is less than writing waits for."""

        async def large(call: Call) -> None:
            await call.send(answer(200, b'{"x":"' + b"x" * size + b'"}'))

        async def scene(on: Stage, backends: list[RawBackend]) -> None:
            client = await Raw.connect(on, receives=4096)
            await little_room(on)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.post({"prompt": "x"})
            await until(lambda: bool(backends[0].calls) and not backends[0].open)
            await settle()
            drained = asyncio.create_task(on.proxy.drained(30))
            await settle()
            assert not drained.done()
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert b"content-length: %d\r\n" % (size + 8) in head.lower()
            assert await client.reader.readexactly(size + 8)
            assert await drained == 0
            client.writer.close()

        on_stage(scene, large)


SHARED: dict[str, Any] = {"port": 0, "admin_port": 0, "reuse_port": True}


class TestHandover:
    """The drain comes, whoever was just connecting."""

    def test_handshakes_that_fail_or_never_come(self, tmp_path: Path) -> None:
        async def scene(on: Stage, backend: RawBackend) -> None:
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
            assert await on.proxy.drained(2) == 0
            mute.close()
            garbage.close()

        on_tls(scene, tmp_path, listen=SHARED, timeouts={"lame_duck": "1s"})

    @pytest.mark.parametrize("spare", [0, 1, 2])
    def test_without_descriptors(self, spare: int) -> None:
        """For the duplicates of its listening sockets, for those that wait to be accepted."""

        async def scene(on: Stage, backends: list[RawBackend]) -> None:
            host, port = on.url.removeprefix("http://").split(":")
            waiting = [socket.create_connection((host, int(port))) for _ in range(3)]
            next_free = socket.socket()
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_free.fileno() + spare, limits[1]))
            next_free.close()
            try:
                await on.proxy.lame_duck()
                assert await on.proxy.drained(2) == 0
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for each in waiting:
                    each.close()

        on_stage(scene, None, listen=SHARED, timeouts={"lame_duck": "1s"})
