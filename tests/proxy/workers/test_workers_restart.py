"""The parent of `--workers` outlives whatever ends a worker, and keeps the other workers serving.

Workers are stand-ins that end when told; sockets to them are real, time is virtual.
"""

import asyncio
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import orjson
import pytest
from aiohttp import web

from forebay.proxy.http1.server.listen import listen
from forebay.proxy.http1.server.server import HttpServer
from forebay.proxy.log_events import LogEvent
from forebay.proxy.share.hub import BEAT, BEAT_S, HELLO, Hub, HubLink
from forebay.proxy.workers.serve_workers import _hold
from forebay.proxy.workers.workers import BAD_INPUT, WorkerPool, again_in_s
from forebay.traces.ground.errors import InputError


class Process:
    """A worker's process: it greets if told to, and lives until a signal or `end`."""

    def __init__(self, end: int, greets: bool) -> None:
        self.returncode: int | None = None
        self.pid = 1
        self.signals: list[int] = []
        self._ended = asyncio.Event()
        self._end = socket.socket(fileno=os.dup(end))
        self.hangs = False
        if greets:
            self._end.send(HELLO + orjson.dumps({"admin_url": "http://127.0.0.1:1"}))
            self._beat()

    def _beat(self) -> None:
        if self.returncode is None:
            if not self.hangs:
                self._end.send(BEAT)
            asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def end(self, status: int) -> None:
        self.returncode = status
        self._end.close()
        self._ended.set()

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self.end(0)

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode


class Parent:
    """Workers under a parent.

    Attributes:
        processes: all that were ever started, in order.
        greet: whether those that start now come to listen.
        trouble: raised instead of starting one.
    """

    def __init__(self, count: int) -> None:
        self.processes: list[Process] = []
        self.greet = True
        self.trouble: OSError | None = None
        self.said: list[str] = []
        self._news = asyncio.Event()
        self.workers = WorkerPool(["worker"], count, self._say)

    def _say(self, event: LogEvent, line: str, *_: str) -> None:
        self.said.append(line)
        self._news.set()

    async def start(self, *words: str, pass_fds: list[int], env: Any) -> Process:
        if self.trouble is not None:
            raise self.trouble
        process = Process(pass_fds[0], self.greet)
        self.processes.append(process)
        self._news.set()
        return process

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until `true` holds; look again at each start and each message."""
        while not true():
            self._news.clear()
            await self._news.wait()

    async def listening(self) -> None:
        """Until all listen, again."""
        self.workers.all_listen.clear()
        await self.workers.all_listen.wait()


@asynccontextmanager
async def parent(
    monkeypatch: pytest.MonkeyPatch, count: int = 2
) -> AsyncIterator[tuple[Parent, asyncio.Task[int]]]:
    on = Parent(count)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", on.start)
    task = asyncio.create_task(on.workers.run(lambda: None, lambda: 1.0))
    try:
        async with asyncio.timeout(60):  # of virtual time: a parent that gave up would never say so
            yield on, task
    finally:
        on.workers.stop.set()
        await asyncio.wait([task])


async def test_a_configuration_that_went_bad_later_ends_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with parent(monkeypatch) as (on, task):
        await on.listening()
        first, other = on.processes
        on.greet = False
        first.end(-signal.SIGKILL)
        await on.until(lambda: len(on.processes) == 3)
        on.processes[-1].end(BAD_INPUT)
        on.greet = True  # the file is good again
        await on.listening()
        assert len(on.processes) == 4
        assert not other.signals
        assert on.said == [
            "worker 0 died (SIGKILL); restart in 0.5 s",
            "worker 0 died (bad configuration); restart in 1 s",
        ]
        on.workers.stop.set()
        assert await task == 0


async def test_a_worker_that_hangs_is_said_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with parent(monkeypatch) as (on, _):
        await on.listening()
        await asyncio.sleep(20)
        first, other = on.processes
        assert not on.said
        first.hangs = True
        await asyncio.sleep(5)
        assert [worker.silent for worker in on.workers.workers] == [True, False]
        first.hangs = False  # a debugger, perhaps
        await asyncio.sleep(20)
        first.hangs = True
        await on.listening()
        assert first.signals == [signal.SIGKILL]
        assert not other.signals
        assert on.said == [
            "worker 0 does not respond",
            "worker 0 responds again",
            "worker 0 does not respond",
            "worker 0 hangs: it is killed and started again",
            "worker 0 died (exit status 0); restart in 0.5 s",
        ]
        assert not on.workers.workers[0].silent


async def test_a_heartbeat_needs_nothing_but_the_loop() -> None:
    """Reports may fail by a fault of ours: that is no reason to kill a worker."""

    heard: list[int] = []
    hub = Hub(lambda index, data: None, heard.append)
    with closing(HubLink(hub.new_end(0))) as link, closing(hub):
        async with link.listen(lambda data: None):
            await asyncio.sleep(10 * BEAT_S)
    assert 10 <= len(heard) <= 11


async def test_a_configuration_that_is_bad_from_the_start_ends_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with parent(monkeypatch) as (on, task):
        on.greet = False
        await on.until(lambda: len(on.processes) == 2)
        on.processes[1].end(BAD_INPUT)
        assert await task == BAD_INPUT
        assert on.processes[0].signals == [signal.SIGTERM]


@pytest.mark.parametrize("what", ["process", "socket"])
async def test_a_worker_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    trouble = OSError(errno.EAGAIN, "Resource temporarily unavailable")

    def refuse(*_: object) -> socket.socket:
        raise trouble

    async with parent(monkeypatch) as (on, task):
        await on.listening()
        first, other = on.processes
        with monkeypatch.context() as patch:
            if what == "process":
                on.trouble = trouble
            else:
                patch.setattr(Hub, "new_end", refuse)
            first.end(1)
            await on.until(lambda: len(on.said) == 2)
            on.trouble = None
        await on.listening()
        assert on.said[:2] == [
            "worker 0 died (exit status 1); restart in 0.5 s",
            "worker 0 died (not started: Resource temporarily unavailable); restart in 1 s",
        ]
        assert not other.signals
        on.workers.stop.set()
        assert await task == 0


@pytest.mark.parametrize(
    ("quick_deaths", "again_in"),
    [
        (0, 0.0),  # it had lived long enough
        (1, 0.5),
        (2, 1.0),
        (6, 16.0),
        (7, 30.0),
        (5000, 30.0),  # half a day of them
    ],
)
def test_how_soon_it_is_started_again(quick_deaths: int, again_in: float) -> None:
    assert again_in_s(quick_deaths) == again_in


def test_a_port_whose_last_process_has_just_ended_can_be_held() -> None:
    """Its connections stay in TIME_WAIT for a minute, on the side that closed first."""
    with socket.create_server(("127.0.0.1", 0)) as single:
        port = single.getsockname()[1]
        with pytest.raises(InputError, match="cannot listen"):
            _hold("127.0.0.1", port)  # it still listens
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = single.accept()
            accepted.close()
            assert client.recv(1) == b""

    async def worker() -> None:
        runner, _ = await listen(HttpServer(never), "127.0.0.1", port, reuse_port=True)
        await runner.cleanup()

    async def never(_: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError

    with _hold("127.0.0.1", port):
        asyncio.run(worker())


async def test_a_thousand_reloads_are_one_line() -> None:
    said: list[str] = []
    workers = WorkerPool(["worker"], 2, lambda event, line, *_: said.append(line))
    for _ in range(1_000):
        workers.reload()
    assert said == ["reloading 2 workers"]
    workers.hub.close()
