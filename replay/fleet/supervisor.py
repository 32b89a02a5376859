"""Keep the servers of a fleet running until the fleet is stopped.

Each server has a task: start it, wait for /health, watch it, restart it. The first start is not
repeated, because its usual faults (a flag, memory, a model's name) would not go away.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from forebay.replay.fleet.plan import ServerPlan
from forebay.replay.fleet.probe import healthy
from forebay.replay.fleet.restarts import RestartPolicy, Restarts
from forebay.replay.fleet.server_process import ServerProcess, last_line, last_words
from forebay.replay.fleet.state import FleetState, Phase, ServerState, write_state
from forebay.traces.errors import InputError

ASK_EVERY_S = 0.5  # between health checks while a server starts
LOOK_EVERY_S = 5.0  # between health checks once it is up
REPORT_EVERY_S = 10.0  # between reports that a server is still starting
Ends = asyncio.Task[bool] | asyncio.Task[str]  # the fleet is stopped, or the process ended


class StartFailed(Exception):
    """A server's first start failed. The message has its name and the end of its log."""


@dataclass(frozen=True, slots=True)
class _Life:
    """One process of a server.

    Attributes:
        how: its end, as text.
        words: the last error in its log.
        up_s: seconds it was up. None if it never was.
    """

    how: str
    words: str
    up_s: float | None


class Supervisor:
    """Runs the servers of `plans` and keeps `state` up to date in `folder`.

    Args:
        report: receives one line of text for the user.
        when_up: called once, when all servers are up for the first time.

    Attributes:
        stop: set it to stop the fleet. Running answers may finish.
        now: set it to end running answers too.
    """

    def __init__(
        self,
        plans: Mapping[str, ServerPlan],
        state: FleetState,
        folder: Path,
        policy: RestartPolicy,
        report: Callable[[str], None],
        when_up: Callable[[], None],
    ) -> None:
        self._plans = plans
        self._state = state
        self._folder = folder
        self._policy = policy
        self._report = report
        self._when_up = when_up
        self._all_were_up = False
        self._written = True
        self.stop = asyncio.Event()
        self.now = asyncio.Event()

    async def run(self) -> bool:
        """Run until `stop` is set or every server is given up, and leave no process behind.

        Returns True if all servers were well to the end. Raises StartFailed, or InputError for a
        command that cannot be run.
        """
        async with aiohttp.ClientSession() as session:
            stopping = asyncio.create_task(self.stop.wait())
            try:
                async with asyncio.TaskGroup() as group:
                    for server in self._state.servers:
                        group.create_task(self._keep(server, session, stopping))
            except* (StartFailed, InputError) as failed:
                raise failed.exceptions[0] from None
            finally:
                stopping.cancel()
        return all(server.phase == "stopped" for server in self._state.servers)

    async def _keep(
        self,
        server: ServerState,
        session: aiohttp.ClientSession,
        stopping: "asyncio.Task[bool]",
    ) -> None:
        restarts = Restarts(self._policy)
        was_up = False
        while True:
            try:
                life = await self._life(server, session, stopping)
            except InputError as error:
                if not was_up:
                    raise
                # Its log or its command was removed while it ran: keep the other servers.
                life = _Life("could not be started", str(error), None)
            # The server has ended. If it never came up, the fleet ends.
            if stopping.done():
                self._change(server, "stopped")
                return
            how, words, up_s = life.how, life.words, life.up_s or 0.0
            was_up = was_up or life.up_s is not None
            server.last_end = how
            if not was_up:
                raise StartFailed(f"{server.name} {how}: {words} (see {server.log})")
            # Restart it after a while, or give it up.
            wait_s = restarts.died(up_s)
            if wait_s is None:
                self._change(server, "failed")
                self._report(f"{server.name} {how} after {up_s:.0f} s: given up, {words}")
                return
            self._change(server, "waiting")
            tries = f"restart {restarts.in_a_row} of {self._policy.tries}"
            self._report(f"{server.name} {how} after {up_s:.0f} s: {tries} in {wait_s:g} s")
            await asyncio.wait({stopping}, timeout=wait_s)
            if stopping.done():
                self._change(server, "stopped")
                return
            server.restarts += 1

    async def _life(
        self,
        server: ServerState,
        session: aiohttp.ClientSession,
        stopping: "asyncio.Task[bool]",
    ) -> _Life:
        """Run one process of a server until it ends by itself or `stopping` is done."""
        process = await ServerProcess.start(self._plans[server.name])
        ended = asyncio.create_task(process.wait())
        up_s = None
        try:
            server.process = process.identity
            self._change(server, "starting")
            self._report(f"{server.name}: starting as process {process.identity.pid}")
            if await self._starts(server, session, {ended, stopping}):
                up_s = await self._stays(server, session, {ended, stopping})
            if stopping.done():
                return _Life("was stopped", "", up_s)
            if ended.done():
                return _Life(await ended, last_words(Path(server.log)), up_s)
            process.kill()
            await ended
            how = "hung" if up_s is not None else f"was not up in {self._policy.start_s:g} s"
            return _Life(how, last_line(Path(server.log)), up_s)
        finally:
            await self._end(server, process)
            ended.cancel()

    async def _starts(
        self,
        server: ServerState,
        session: aiohttp.ClientSession,
        either: set[Ends],
    ) -> bool:
        """Wait until the server is healthy. False if it ended, is stopped or took too long."""
        started = reported = time.monotonic()
        while not any(task.done() for task in either):
            if await healthy(session, server.url):
                took_s = time.monotonic() - started
                self._report(f"{server.name}: up after {took_s:.1f} s, {server.url}")
                self._change(server, "up")
                return True
            now = time.monotonic()
            if now - started > self._policy.start_s:
                return False
            if now - reported >= REPORT_EVERY_S:
                reported = now
                line = last_line(Path(server.log))
                log = f"; its log: {line}" if line else ""
                self._report(f"{server.name}: not up yet after {now - started:.0f} s{log}")
            await asyncio.wait(either, timeout=ASK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        return False

    async def _stays(
        self,
        server: ServerState,
        session: aiohttp.ClientSession,
        either: set[Ends],
    ) -> float:
        """Wait until the server ends, hangs or is stopped. Returns the seconds that it was up."""
        started = well = time.monotonic()
        while True:
            await asyncio.wait(either, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            now = time.monotonic()
            if any(task.done() for task in either):
                return now - started
            if await healthy(session, server.url):
                well = now
            elif now - well > self._policy.hung_s:
                self._report(f"{server.name}: /health has not answered for {now - well:.0f} s")
                return now - started

    async def _end(self, server: ServerState, process: ServerProcess) -> None:
        """Stop the process if it still runs, even if the change of phase fails."""
        try:
            if self.stop.is_set():
                self._change(server, "stopping")
        finally:
            by_itself = await process.stop(self._state.stop_s, self.now)
        server.process = None
        if not by_itself:
            self._report(f"{server.name}: killed, it had not ended on SIGTERM")
        if self.stop.is_set():
            self._change(server, "stopped")

    def _change(self, server: ServerState, phase: Phase) -> None:
        server.phase, server.since = phase, time.time()
        self._write()
        if not self._all_were_up and all(state.phase == "up" for state in self._state.servers):
            self._all_were_up = True
            self._when_up()

    def _write(self) -> None:
        """Write the state.

        A full disk or a missing folder is reported once and ends no server.
        """
        try:
            write_state(self._folder, self._state)
        except OSError as error:
            if self._written:
                self._report(
                    f"{self._folder}: the state cannot be written ({error.strerror}): `status` and "
                    "`down` see an older state; Ctrl-C or SIGTERM still stop the fleet"
                )
            self._written = False
        else:
            self._written = True
