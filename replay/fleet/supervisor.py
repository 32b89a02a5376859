"""Keep the servers of a fleet running until told to stop.

One task a server: start, wait for /health, watch, start again. At the first start nothing is tried
again: what is wrong then (a flag, memory, a model's name) would be wrong again.
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

ASK_EVERY_S = 0.5  # while it starts
LOOK_EVERY_S = 5.0  # once it is up
TALK_EVERY_S = 10.0
Ends = asyncio.Task[bool] | asyncio.Task[str]  # told to stop; ended


class StartFailed(Exception):
    """A server did not come up the first time; the message says which, and what it said last."""


@dataclass(frozen=True, slots=True)
class _Life:
    """How a process ended, what it said last, and how long it was up, None: it never was."""

    how: str
    words: str
    up_s: float | None


class Supervisor:
    """Runs `plans`; `state` is kept up to date in `folder`.

    Args:
        say: one line for people.
        when_up: called once, when all servers are up for the first time.
    """

    def __init__(
        self,
        plans: Mapping[str, ServerPlan],
        state: FleetState,
        folder: Path,
        policy: RestartPolicy,
        say: Callable[[str], None],
        when_up: Callable[[], None],
    ) -> None:
        self._plans = plans
        self._state = state
        self._folder = folder
        self._policy = policy
        self._say = say
        self._when_up = when_up
        self._all_were_up = False
        self._written = True
        self.stop = asyncio.Event()  # let running answers finish
        self.now = asyncio.Event()  # and no longer

    async def run(self) -> bool:
        """Until `stop` is set or every server is given up; whether all were well to the end.

        Raises StartFailed, or InputError for a command that cannot be run; whichever way it ends,
        no process is left.
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
                # Its log or its command is gone by now: no reason to end the others.
                life = _Life("could not be started", str(error), None)
            if stopping.done():
                self._change(server, "stopped")
                return
            how, words, up_s = life.how, life.words, life.up_s or 0.0
            was_up = was_up or life.up_s is not None
            server.last_end = how
            if not was_up:
                raise StartFailed(f"{server.name} {how}: {words} (see {server.log})")
            wait_s = restarts.died(up_s)
            if wait_s is None:
                self._change(server, "failed")
                self._say(f"{server.name} {how} after {up_s:.0f} s: given up, {words}")
                return
            self._change(server, "waiting")
            tries = f"restart {restarts.in_a_row} of {self._policy.tries}"
            self._say(f"{server.name} {how} after {up_s:.0f} s: {tries} in {wait_s:g} s")
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
        """One process of it, from start to end, of its own or because `stopping` is done."""
        process = await ServerProcess.start(self._plans[server.name])
        ended = asyncio.create_task(process.wait())
        up_s = None
        try:
            server.process = process.identity
            self._change(server, "starting")
            self._say(f"{server.name}: starting as process {process.identity.pid}")
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
        """Whether it came up before it ended, was told to stop, or took too long."""
        begun = said = time.monotonic()
        while not any(task.done() for task in either):
            if await healthy(session, server.url):
                self._say(f"{server.name}: up after {time.monotonic() - begun:.1f} s, {server.url}")
                self._change(server, "up")
                return True
            now = time.monotonic()
            if now - begun > self._policy.start_s:
                return False
            if now - said >= TALK_EVERY_S:
                said = now
                line = last_line(Path(server.log))
                saying = f", at: {line}" if line else ""
                self._say(f"{server.name}: not up yet after {now - begun:.0f} s{saying}")
            await asyncio.wait(either, timeout=ASK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        return False

    async def _stays(
        self,
        server: ServerState,
        session: aiohttp.ClientSession,
        either: set[Ends],
    ) -> float:
        """How long it was up, s, until it ended, hung, or was told to stop."""
        begun = well = time.monotonic()
        while True:
            await asyncio.wait(either, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            now = time.monotonic()
            if any(task.done() for task in either):
                return now - begun
            if await healthy(session, server.url):
                well = now
            elif now - well > self._policy.hung_s:
                self._say(f"{server.name}: /health has not answered for {now - well:.0f} s")
                return now - begun

    async def _end(self, server: ServerState, process: ServerProcess) -> None:
        """Stop it if it still runs, whatever becomes of the books."""
        try:
            if self.stop.is_set():
                self._change(server, "stopping")
        finally:
            willing = await process.stop(self._state.stop_s, self.now)
        server.process = None
        if not willing:
            self._say(f"{server.name}: killed, it had not ended on SIGTERM")
        if self.stop.is_set():
            self._change(server, "stopped")

    def _change(self, server: ServerState, phase: Phase) -> None:
        server.phase, server.since = phase, time.time()
        self._write()
        if not self._all_were_up and all(one.phase == "up" for one in self._state.servers):
            self._all_were_up = True
            self._when_up()

    def _write(self) -> None:
        """Servers do not hang on the file: a full disk or a folder that is gone is said, once."""
        try:
            write_state(self._folder, self._state)
        except OSError as error:
            if self._written:
                self._say(
                    f"{self._folder}: the state cannot be written ({error.strerror}): `status` and "
                    "`down` know what was before; Ctrl-C or SIGTERM still stop the fleet"
                )
            self._written = False
        else:
            self._written = True
