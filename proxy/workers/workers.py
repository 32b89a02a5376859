"""The workers of `forebay proxy --workers N`, as their parent process sees them.

The kernel spreads connections over the workers (SO_REUSEPORT). Each worker is a whole proxy with
its own shaper, and they exchange their state through the parent (`hub.py`). The parent relays no
traffic. It restarts workers that die, with growing delays if they die at once, and kills workers
that hang: the kernel still gives them connections. It passes SIGHUP on, and on SIGTERM it lets all
workers drain.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

from forebay.proxy.log_events import LogEvent, Say, SparseLines
from forebay.proxy.runtime import systemd
from forebay.proxy.share.hub import BEAT_S, Hub
from forebay.proxy.workers.worker import worker_environment

RESTART_S, RESTART_MOST_S = 0.5, 30.0
STEADY_S = 10.0  # a worker that ran this long is restarted at once
SILENT_TICKS, HUNG_TICKS = 3, 10  # heartbeats missed until a worker is called silent, and killed
GRACE_S = 5.0  # time for a worker to end, beyond timeouts.lame_duck and timeouts.drain
BAD_INPUT = 2  # exit status of a bad configuration: a restart does not help


@dataclass(slots=True)
class Worker:
    """One worker process.

    Attributes:
        greeting: its URLs, which it sends once it listens.
        reload: a reload was requested before the worker could handle SIGHUP.
        missed: heartbeats that have not come since the worker was last heard.
    """

    index: int
    process: asyncio.subprocess.Process | None = None
    greeting: Mapping[str, Any] | None = None
    started_at: float = 0.0
    starts: int = 0
    reload: bool = False
    missed: int = 0

    @property
    def silent(self) -> bool:
        """True while it listens and its event loop does not run: new connections wait for it."""
        return self.greeting is not None and self.missed >= SILENT_TICKS

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def admin_url(self) -> str | None:
        """Address of its admin port, or None while it does not listen."""
        return self.greeting["admin_url"] if self.greeting else None

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


@dataclass(slots=True)
class WorkerPool:
    """All workers. Call `run`, and set `stop` to end it.

    Attributes:
        command: the words that start a worker, without its index and socket.
        config_rejected: a worker found the configuration bad at the start.
    """

    command: Sequence[str]
    count: int
    say: Say
    workers: list[Worker] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: bool = False
    config_rejected: bool = False
    all_listen: asyncio.Event = field(default_factory=asyncio.Event)
    hub: Hub = field(init=False)
    _lines: SparseLines = field(default_factory=SparseLines)

    def __post_init__(self) -> None:
        self.hub = Hub(self._greeted, self._heard)
        self.workers = [Worker(index) for index in range(self.count)]

    def signal(self, number: int) -> None:
        """Send a signal to every worker."""
        for worker in self.workers:
            worker.signal(number)

    def reload(self) -> None:
        """Let every worker reload its configuration, as soon as it listens."""
        systemd.reloading()
        for worker in self.workers:
            if worker.greeting is None:
                worker.reload = True  # SIGHUP would kill it
            else:
                worker.signal(signal.SIGHUP)
        text = f"reloading {self.count} workers"
        if (more := self._lines.more("reload", time.monotonic())) is not None:
            self.say(LogEvent.WORKERS_RELOADING, f"{text}{more}")
        systemd.ready(text)

    async def run(self, listening: Callable[[], None], patience_s: Callable[[], float]) -> int:
        """Run until `stop` is set and all workers have ended. Returns the exit status.

        Args:
            listening: called once when every worker listens.
            patience_s: returns how long workers may take to end; called when they must.
        """
        try:
            async with asyncio.TaskGroup() as group:
                keepers = [group.create_task(self._keep(worker)) for worker in self.workers]
                first = group.create_task(self._once_all_listen(listening))
                watch = group.create_task(self._watch_heartbeats())
                await self.stop.wait()
                first.cancel()
                watch.cancel()
                self.stopping = True
                self.signal(signal.SIGTERM)
                wait_s = patience_s() + GRACE_S
                draining = f"draining: {self.count} workers, up to {wait_s:g} s"
                self.say(LogEvent.DRAINING, draining)
                systemd.stopping(draining)
                _, late = await asyncio.wait(keepers, timeout=wait_s)
                if late:
                    line = f"killed {len(late)} workers that took too long"
                    self.say(LogEvent.REQUESTS_CUT, line)
                    self.signal(signal.SIGKILL)
        finally:
            self.hub.close()
        return BAD_INPUT if self.config_rejected else 0

    async def _keep(self, worker: Worker) -> None:
        """Start a worker, and restart it when it dies."""
        quick_deaths = 0
        while not self.stopping:
            worker.started_at = time.monotonic()
            try:
                how = await self._run_once(worker)
            except OSError as error:  # no memory, process or descriptor left
                how = f"not started: {error.strerror}"
            if self.stopping or self.config_rejected:
                return
            lived_s = time.monotonic() - worker.started_at
            quick_deaths = quick_deaths + 1 if lived_s < STEADY_S else 0
            wait_s = again_in_s(quick_deaths)
            line = f"worker {worker.index} died ({how}); restart in {wait_s:g} s"
            self.say(LogEvent.WORKER_DIED, line)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), wait_s)
                return

    async def _run_once(self, worker: Worker) -> str:
        """Start a worker, wait for its end, and return how it ended. Raises OSError."""
        worker.greeting, worker.missed = None, 0
        worker.starts += 1
        try:
            with self.hub.new_end(worker.index) as end:
                words = [*self.command, "--worker", f"{worker.index}:{end.fileno()}"]
                worker.process = await asyncio.create_subprocess_exec(
                    *words, pass_fds=[end.fileno()], env=worker_environment(os.environ)
                )
            if self.stopping:  # `stop` was set during the start
                worker.signal(signal.SIGTERM)
            status = await worker.process.wait()
            listened, worker.greeting = worker.greeting is not None, None
        finally:
            self.hub.close_end(worker.index)
        if status == BAD_INPUT and not listened:
            if worker.starts == 1 and not self.stopping:
                self.config_rejected = True
                self.stop.set()
            # At a later start the file has changed; running workers keep their configuration.
            return "bad configuration"
        return _how(status)

    async def _once_all_listen(self, listening: Callable[[], None]) -> None:
        await self.all_listen.wait()
        listening()

    async def _watch_heartbeats(self) -> None:
        """Kill workers that hang. `_keep` starts them again.

        Heartbeats are counted, not seconds: a machine that stood still misses none.
        """
        while True:
            await asyncio.sleep(BEAT_S)
            for worker in self.workers:
                if worker.greeting is None:
                    continue
                worker.missed += 1
                if worker.missed == SILENT_TICKS:
                    self.say(LogEvent.WORKER_HANGS, f"worker {worker.index} does not respond")
                elif worker.missed == HUNG_TICKS:
                    line = f"worker {worker.index} hangs: it is killed and started again"
                    self.say(LogEvent.WORKER_HANGS, line)
                    worker.signal(signal.SIGKILL)

    def _heard(self, index: int) -> None:
        worker = self.workers[index]
        if worker.silent:
            self.say(LogEvent.WORKER_RESPONDS, f"worker {index} responds again")
        worker.missed = 0

    def _greeted(self, index: int, data: bytes) -> None:
        worker = self.workers[index]
        worker.greeting = orjson.loads(data)
        if worker.reload:
            worker.reload = False
            worker.signal(signal.SIGHUP)
        if all(worker.greeting for worker in self.workers):
            self.all_listen.set()


def again_in_s(quick_deaths: int) -> float:
    """Return the delay of a restart, by the number of quick deaths in a row."""
    if not quick_deaths:
        return 0.0
    # Bounded, because doubling without end would overflow a float after some hours.
    return float(min(RESTART_MOST_S, RESTART_S * 2 ** min(quick_deaths - 1, 8)))


def _how(status: int) -> str:
    if status < 0:
        with suppress(ValueError):
            return signal.Signals(-status).name
    return f"exit status {status}"
