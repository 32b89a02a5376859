"""A proxy that runs out of descriptors or ports reports it, and blames no backend."""

import asyncio
import errno
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from stages.proxy_processes import proxies, ready, write
from stages.proxy_stage import (
    STREAMED,
    WHOLE,
    RawBackend,
    Stage,
    answer,
    by_request,
    error_of,
    on_stage,
    stage,
)

from forebay.proxy.http1.client.backend_errors import ConnectFault, LocalShortage
from forebay.proxy.http1.client.client import Origin
from forebay.proxy.runtime import load_shedding as protection
from forebay.traces.ground.event_loop import fast_runner
from forebay.traces.ground.hlog import read_hlog

resource = pytest.importorskip("resource")
NO_ADDRESS = OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
ASKED_IN_VAIN = "cannot be probed"


class Short:
    """The loop as a backend's connections see it: new ones fail with one error after another."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *errors: OSError) -> None:
        self._loop = loop
        self._errors = errors
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    async def create_connection(self, *_: object, **__: object) -> Any:
        self.asked += 1
        raise self._errors[(self.asked - 1) % len(self._errors)]


def run_short(on: Stage, error: OSError) -> Short:
    """From now on no connection to a backend can be made; those that are kept are closed."""
    short = Short(asyncio.get_running_loop(), error)
    for link in on.proxy.backends.links.values():
        while link.origin._idle:
            link.origin._idle.pop().close()
        link.origin._loop = short  # type: ignore[assignment]
    return short


@pytest.mark.parametrize(
    ("errors", "fault"),
    [
        ([OSError(errno.EMFILE, "Too many open files")], LocalShortage),
        ([OSError(errno.ENFILE, "Too many open files in system")], LocalShortage),
        ([OSError(errno.ENOBUFS, "No buffer space available")], LocalShortage),
        ([OSError(errno.ENOMEM, "Cannot allocate memory")], LocalShortage),
        ([NO_ADDRESS], LocalShortage),
        ([OSError(errno.EBUSY, "Device or resource busy")], LocalShortage),  # of a look-up
        ([NO_ADDRESS, NO_ADDRESS], LocalShortage),
        # A machine without IPv6, and a backend on localhost that is down.
        ([NO_ADDRESS, ConnectionRefusedError(errno.ECONNREFUSED, "refused")], ConnectFault),
        ([ConnectionRefusedError(errno.ECONNREFUSED, "refused")], ConnectFault),
        ([OSError(errno.EHOSTUNREACH, "No route to host")], ConnectFault),
        ([TimeoutError()], ConnectFault),
        ([OSError("something")], ConnectFault),
    ],
)
@pytest.mark.real_time
async def test_whose_fault_it_is(errors: list[OSError], fault: type[Exception]) -> None:
    origin = Origin("http://127.0.0.1:1", 1.0)
    origin._name.known = [f"127.0.0.{at}" for at in range(1, len(errors) + 1)]
    origin._loop = Short(origin._loop, *errors)  # type: ignore[assignment]
    with pytest.raises(fault) as raised:
        await origin.ask("GET", "/health", {})
    assert type(raised.value) is fault


@pytest.mark.parametrize("host", ["gpu0..svc", "a" * 64])
def test_a_name_that_cannot_be_looked_up_is_no_connection(host: str) -> None:
    async def main() -> None:
        with pytest.raises(ConnectFault):
            await Origin(f"http://{host}:1", 1.0).ask("GET", "/health", {})

    for runner in (asyncio.Runner(), fast_runner()):
        with runner:
            runner.run(main())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EADDRNOTAVAIL])
async def test_no_backend_is_blamed(number: int) -> None:
    """Neither by requests nor by probes; none is asked in its place; then all is as before."""
    async with on_stage(by_request, by_request) as (on, _):
        short = run_short(on, OSError(number, os.strerror(number)))
        for body in [STREAMED, None] * 3:
            asked = short.asked
            async with on.post(body) as response:
                assert response.status == 503
                error = await error_of(response)
                assert (error["code"], error["type"]) == ("overloaded", "server_error")
                assert int(response.headers["retry-after"]) >= 1
            assert short.asked == asked + 1
        async with on.client.get(on.url + "/v1/models") as response:
            assert response.status == 503
            assert (await error_of(response))["code"] == "overloaded"
        await asyncio.sleep(10)  # many probes
        assert all(u.up for u in on.proxy.backends.links.values())
        assert not any("is down" in line for line in on.said)
        # Once for each backend, not at every probe.
        assert sum(ASKED_IN_VAIN in line for line in on.said) == 2
        assert 'kind="shortage"' in on.proxy.metrics.text().decode()
        for link in on.proxy.backends.links.values():
            link.origin._loop = asyncio.get_running_loop()
        assert await on.status() == 200


async def test_a_start_without_descriptors_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that could not be asked yet are taken in as soon as they can be."""
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(RawBackend().running())
        real = Origin._connect

        async def none_left(origin: Origin) -> Any:
            raise LocalShortage

        monkeypatch.setattr(Origin, "_connect", none_left)
        on = await stack.enter_async_context(stage([backend.url], wait_up=0))
        await asyncio.sleep(5)
        assert not any("is unreachable" in line for line in on.said)
        monkeypatch.setattr(Origin, "_connect", real)
        await asyncio.sleep(2)
        assert await on.status() == 200


def test_none_left_to_look_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all are in use: not "unknown", which would end the shedding."""

    def listdir(_: str) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "listdir", listdir)
    assert protection.descriptor_share() == 1.0


LIMIT = 64


@asynccontextmanager
async def process(backend: str, path: Path, said: list[str]) -> AsyncIterator[tuple[int, str]]:
    """`forebay proxy` with LIMIT descriptors, configured for more connections than that."""
    # The limit of the loop's lag: other tests may keep the machine busy.
    limits = {"connections": 1000, "loop_lag": "10s"}
    write(path, backend, listen={"port": 0, "admin_port": 0}, limits=limits)
    async with proxies(path) as all_:
        proxy, url, admin = await all_.start()
        await ready(admin)
        resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))

        async def read() -> None:
            assert proxy.stdout is not None
            async for line in proxy.stdout:
                said.append(line.decode())

        reading = asyncio.create_task(read())
        yield proxy.pid, url
        assert proxy.returncode is None
        proxy.terminate()
        assert await proxy.wait() == 0
        await reading


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def never_kept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A backend that answers well and closes: every request needs a connection of its own."""
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"POST"):
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    writer.write(answer(200, WHOLE, "connection: close"))
    writer.close()


def port_of(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and prlimit")
@pytest.mark.real_time
async def test_a_process_without_descriptors_lives_and_recovers(tmp_path: Path) -> None:
    """Idle clients hold all of them: real limits, real sockets, the loop of production."""
    said: list[str] = []

    async def ask(client: aiohttp.ClientSession, url: str) -> tuple[int, str]:
        body = json.dumps({"prompt": "hello"}).encode()
        async with client.post(f"{url}/v1/completions", data=body) as response:
            error = (await response.json()).get("error", {})
            return response.status, error.get("code", "")

    async def served(client: aiohttp.ClientSession, url: str) -> bool:
        try:
            return await ask(client, url) == (200, "")
        except aiohttp.ClientConnectionError:  # not let in yet
            return False

    async with (
        await asyncio.start_server(never_kept, "127.0.0.1", 0) as backend,
        process(f"http://127.0.0.1:{port_of(backend)}", tmp_path / "f.yaml", said) as (pid, url),
        aiohttp.ClientSession() as client,
    ):
        assert await ask(client, url) == (200, "")
        host, port = url.removeprefix("http://").split(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(2 * LIMIT)]
        while len(os.listdir(f"/proc/{pid}/fd")) < LIMIT:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        before, began = cpu_s(pid), time.monotonic()
        statuses = set()
        while time.monotonic() - began < 4 or not any(ASKED_IN_VAIN in line for line in said):
            statuses.add(await ask(client, url))  # on the connection it has
            await asyncio.sleep(0.25)
        assert statuses == {(503, "overloaded")}
        assert cpu_s(pid) - before < (time.monotonic() - began) / 2  # it does not spin
        for _, writer in idle:
            writer.close()
        async with aiohttp.ClientSession() as newcomer:
            while not await served(newcomer, url):  # noqa: ASYNC110 - one class more a second
                await asyncio.sleep(0.25)
    assert not any(" is down" in line for line in said), said


class TestHistogramLog:
    """The disk of the log is full: the proxy goes on serving, and stops normally."""

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
    @pytest.mark.real_time
    async def test_a_drain_ends_well(self, tmp_path: Path) -> None:
        path = tmp_path / "proxy.yaml"
        async with RawBackend().running() as backend, proxies(path) as all_:
            listen = {"port": 0, "admin_port": 0}
            write(path, backend.url, listen=listen, metrics={"hlog": "/dev/full"})
            process, _, admin = await all_.start()
            await ready(admin)
            process.send_signal(signal.SIGTERM)
            told, _ = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 0
        says = "metrics.hlog: /dev/full cannot be written (No space left on device); trying again"
        assert sum(says in line for line in told.decode().splitlines()) == 1

    async def test_the_log_goes_on_whole_once_there_is_room(self, tmp_path: Path) -> None:
        path, rng, recorded = tmp_path / "ttft.hlog", random.Random(1), 0
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

        async with on_stage(None, metrics={"hlog": str(path)}) as (on, _):

            async def interval() -> None:
                nonlocal recorded
                log = on.proxy.metrics.log
                assert log is not None
                for tag in ("one", "another", "third"):
                    log.record_each(tag, [10 ** rng.uniform(-4, 2) for _ in range(2_000)])
                recorded += 3 * 2_000
                await asyncio.sleep(1)

            await interval()
            await interval()
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, hard))
            try:  # the disk of the whole process, for as short as can be
                await interval()
                await interval()
                await interval()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            await interval()
            assert len([line for line in on.said if "hlog" in line]) == 1
        found = [one for intervals in read_hlog(path).values() for one in intervals]
        assert sum(one.histogram.get_total_count() for one in found) == recorded
