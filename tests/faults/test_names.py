"""A name server that is slow for one backend's name: nobody else notices, in real time."""

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from threading import Event, Timer
from typing import Any

import pytest
from stages.proxy_stage import RawBackend, Stage, stage

from forebay.proxy.http1.client import dns_cache as names
from forebay.proxy.http1.client.backend_errors import NameFault
from forebay.proxy.http1.client.client import Origin

pytestmark = pytest.mark.real_time

real = socket.getaddrinfo


class NameServer:
    """Answers for names that end in .test; `slow` ones are answered once `released` is set."""

    def __init__(self) -> None:
        self.slow: set[str] = set()
        self.unknown: set[str] = set()
        self.released = Event()
        self.under_way: list[str] = []
        self.asked: list[str] = []

    def look_up(self, host: Any, *words: Any, **options: Any) -> Any:
        if not str(host).endswith(".test"):
            return real(host, *words, **options)
        self.asked.append(host)
        if host in self.slow:
            self.under_way.append(host)
            self.released.wait()
            self.under_way.remove(host)
        if host in self.unknown:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return real("127.0.0.1", *words, **options)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    made = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", made.look_up)
    monkeypatch.setattr(names, "FRESH_S", 0.0)
    rescue = Timer(20.0, made.released.set)  # so that a failing test ends
    rescue.start()
    yield made
    rescue.cancel()
    made.released.set()


def forget_connections(on: Stage) -> None:
    for link in on.proxy.backends.links.values():
        while link.origin._idle:
            link.origin._idle.pop().close()


async def ask(on: Stage) -> None:
    assert await on.status() == 200


async def test_a_slow_name_hurts_no_other_backend_and_holds_no_end(server: NameServer) -> None:
    server.slow.add("slow.test")

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(RawBackend().running())
        port = backend.url.rpartition(":")[2]
        urls = [f"http://{name}.test:{port}" for name in ("slow", "good", "fine")]
        probes = {"interval": "100ms", "timeout": "200ms"}
        on = await stack.enter_async_context(stage(urls, wait_up=2, health=probes))
        for _ in range(10):
            forget_connections(on)
            await ask(on)
        assert server.under_way == ["slow.test"]  # one look-up at a time
        assert not any("is down" in line for line in on.said)
        assert server.asked.count("slow.test") == 1
    assert not server.released.is_set()


@pytest.mark.parametrize("how", ["slow", "unknown"])
async def test_the_last_good_addresses_stay_in_use(server: NameServer, how: str) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(RawBackend().running())
        url = f"http://good.test:{backend.url.rpartition(':')[2]}"
        on = await stack.enter_async_context(stage([url]))
        getattr(server, how).add("good.test")
        before = len(server.asked)
        for _ in range(5):
            forget_connections(on)
            await ask(on)
        assert len(server.asked) > before
        assert not any("is down" in line for line in on.said)
    assert not server.released.is_set()


async def test_a_name_that_becomes_known_is_used(server: NameServer) -> None:
    async with RawBackend().running() as backend:
        origin = Origin(f"http://new.test:{backend.url.rpartition(':')[2]}", 5.0)
        server.unknown.add("new.test")
        with pytest.raises(NameFault):
            await origin.ask("GET", "/health", {})
        server.unknown.clear()
        response = await origin.ask("GET", "/health", {})
        assert response.status == 200
        response.close()
        origin.close()
