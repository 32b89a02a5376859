"""`forebay proxy --workers N`: a parent process that keeps N workers listening on one port.

The kernel spreads connections over them (SO_REUSEPORT); each is a whole proxy with its own shaper,
and they tell each other what they have under way through the parent (`hub.py`). The parent relays
no traffic. It starts a worker that died again, ever more slowly if it dies at once, hands SIGHUP
on, and on SIGTERM has all of them drain.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

from forebay.proxy.config.schema import Config
from forebay.proxy.http1.server import HttpServer, listen
from forebay.proxy.runtime import systemd as notify
from forebay.proxy.share.hub import Hub
from forebay.proxy.share.worker import worker_environment
from forebay.traces.errors import InputError

MOST_WORKERS = 256
RESTART_S, RESTART_MOST_S = 0.5, 30.0
STEADY_S = 10.0  # a worker that lived so long is started again at once
GRACE_S = 5.0  # beyond `timeouts.lame_duck` and `timeouts.drain`, for a worker to end by itself
BAD_INPUT = 2  # exit status: as long as the configuration is what it is, no restart will help


@dataclass(slots=True)
class Worker:
    """One worker as the parent sees it."""

    index: int
    process: asyncio.subprocess.Process | None = None
    greeting: Mapping[str, Any] | None = None  # what it said once it listened
    started_at: float = 0.0
    starts: int = 0
    reload: bool = False  # asked for before it could hear it

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def admin_url(self) -> str | None:
        """Where its admin port is; None while it does not listen."""
        return self.greeting["admin_url"] if self.greeting else None

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


@dataclass(slots=True)
class WorkerPool:
    """All of them; `run` until `stop` is set."""

    command: Sequence[str]  # what starts one, without its own index and socket
    count: int
    say: Callable[[str], None]
    workers: list[Worker] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: bool = False
    refused: bool = False  # a worker found its configuration bad
    all_listen: asyncio.Event = field(default_factory=asyncio.Event)
    hub: Hub = field(init=False)

    def __post_init__(self) -> None:
        self.hub = Hub(self._greeted)
        self.workers = [Worker(index) for index in range(self.count)]

    def signal(self, number: int) -> None:
        """Hand a signal on to every worker."""
        for worker in self.workers:
            worker.signal(number)

    def reload(self) -> None:
        """Every worker reads the configuration again; one that is starting, once it listens."""
        notify.reloading()
        for worker in self.workers:
            if worker.greeting is None:
                worker.reload = True  # SIGHUP would end it
            else:
                worker.signal(signal.SIGHUP)
        told = f"reload: told {self.count} workers"
        self.say(told)
        notify.ready(told)

    async def run(self, listening: Callable[[], None], patience_s: Callable[[], float]) -> int:
        """Until told to stop and all have ended; the exit status.

        Args:
            listening: called once when every worker listens.
            patience_s: how long workers may take to end, asked when they are told to.
        """
        try:
            async with asyncio.TaskGroup() as group:
                keepers = [group.create_task(self._keep(worker)) for worker in self.workers]
                first = group.create_task(self._once_all_listen(listening))
                await self.stop.wait()
                first.cancel()
                self.stopping = True
                self.signal(signal.SIGTERM)
                wait_s = patience_s() + GRACE_S
                draining = f"draining: {self.count} workers, up to {wait_s:g} s"
                self.say(draining)
                notify.stopping(draining)
                _, late = await asyncio.wait(keepers, timeout=wait_s)
                if late:
                    self.say(f"gave up on {len(late)} workers")
                    self.signal(signal.SIGKILL)
        finally:
            self.hub.close()
        return BAD_INPUT if self.refused else 0

    async def _keep(self, worker: Worker) -> None:
        """Start it, and start it again when it dies."""
        quick_deaths = 0
        while not self.stopping:
            worker.started_at = time.monotonic()
            try:
                how = await self._live(worker)
            except OSError as error:  # no memory, process or descriptor left: the others serve on
                how = f"not started: {error.strerror}"
            if self.stopping or self.refused:
                return
            lived_s = time.monotonic() - worker.started_at
            quick_deaths = quick_deaths + 1 if lived_s < STEADY_S else 0
            wait_s = again_in_s(quick_deaths)
            self.say(f"worker {worker.index} died ({how}); again in {wait_s:g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), wait_s)
                return

    async def _live(self, worker: Worker) -> str:
        """Start it and wait until it has ended; how it did. Raises OSError if it cannot start."""
        worker.greeting = None
        worker.starts += 1
        try:
            with self.hub.new_end(worker.index) as end:
                words = [*self.command, "--worker", f"{worker.index}:{end.fileno()}"]
                worker.process = await asyncio.create_subprocess_exec(
                    *words, pass_fds=[end.fileno()], env=worker_environment(os.environ)
                )
            if self.stopping:  # told so while it was being started
                worker.signal(signal.SIGTERM)
            status = await worker.process.wait()
            listened, worker.greeting = worker.greeting is not None, None
        finally:
            self.hub.close_end(worker.index)
        if status == BAD_INPUT and not listened:
            if worker.starts == 1 and not self.stopping:
                self.refused = True
                self.stop.set()
            # Later the file has been changed since: those that run go on with what they took.
            return "it finds the configuration bad"
        return _how(status)

    async def _once_all_listen(self, listening: Callable[[], None]) -> None:
        await self.all_listen.wait()
        listening()

    def _greeted(self, index: int, data: bytes) -> None:
        worker = self.workers[index]
        worker.greeting = orjson.loads(data)
        if worker.reload:
            worker.reload = False
            worker.signal(signal.SIGHUP)
        if all(worker.greeting for worker in self.workers):
            self.all_listen.set()


async def serve_with_workers(
    config: Config,
    count: int,
    words: Sequence[str],
    say: Callable[[str], None],
    load: Callable[[], Config],
) -> int:
    """Run `forebay proxy` with `words` in `count` processes on one port; the exit status.

    `load` reads the configuration again: workers may have reloaded it.

    Raises InputError when a port cannot be had.
    """
    from forebay.proxy.share.workers_admin import WorkersAdmin

    if not hasattr(socket, "SO_REUSEPORT"):
        raise InputError("--workers: this system cannot share a port between processes")
    if not 1 <= count <= MOST_WORKERS:
        raise InputError(f"--workers {count}: give 1 to {MOST_WORKERS}")
    host, admin_host = config.listen.host, config.listen.asked_at
    async with AsyncExitStack() as stack:
        # Held and never listened on: it fixes the port, and fails now if somebody else has it.
        holder = stack.enter_context(_hold(host, config.listen.port))
        port = holder.getsockname()[1]
        # fmt: off
        workers = WorkerPool(
            [
                sys.executable, "-m", "forebay.proxy", "proxy", *words,
                "--host", host, "--port", str(port), "--admin-port", "0",
            ],
            count,
            say,
        )
        # fmt: on
        admin = await stack.enter_async_context(WorkersAdmin(workers))
        try:
            runner, admin_port = await listen(
                HttpServer(admin.handle),
                admin_host,
                config.listen.admin_port,
                reuse_port=config.listen.reuse_port,
            )
        except OSError as error:
            raise InputError(
                f"listen.admin_port: cannot listen on {admin_host}:{config.listen.admin_port} "
                f"({error.strerror})"
            ) from error
        stack.push_async_callback(runner.cleanup)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, workers.stop.set)
        loop.add_signal_handler(signal.SIGHUP, workers.reload)

        def listening() -> None:
            where = (
                f"listening on http://{_bracketed(host)}:{port}, "
                f"admin on http://{_bracketed(admin_host)}:{admin_port}, "
                f"{count} workers"
            )
            say(where)
            notify.ready(where)

        return await workers.run(listening, lambda: patience_s(config, load))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def patience_s(config: Config, load: Callable[[], Config]) -> float:
    """How long a worker may take to end, by what it started with or has reloaded since."""
    known = [config.timeouts]
    with suppress(InputError):  # then no worker has taken it either
        known.append(load().timeouts)
    return max(timeouts.lame_duck + timeouts.drain for timeouts in known)


def again_in_s(quick_deaths: int) -> float:
    """How long to wait before a worker that died is started again, by how often it died at once."""
    if not quick_deaths:
        return 0.0
    # Doubled without end it would be past what a float can say, after some hours.
    return float(min(RESTART_MOST_S, RESTART_S * 2 ** min(quick_deaths - 1, 8)))


def _hold(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        holder = socket.socket(family, kind, protocol)
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(address)
        except OSError:
            holder.close()
            raise
    except OSError as error:
        raise InputError(
            f"listen.port: cannot listen on {host}:{port} ({error.strerror})"
        ) from error
    return holder


def _how(status: int) -> str:
    if status < 0:
        with suppress(ValueError):
            return signal.Signals(-status).name
    return f"exit status {status}"
