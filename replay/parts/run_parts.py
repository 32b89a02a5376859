"""Send a replay from several processes, and merge their measurements into one run folder.

The processes are on this machine, or on the machines of a Ray cluster. Each of them runs a whole
replay of its part of the trace into a folder of its own, from a start that all have in common. Rows
and histograms are added up, so every figure is what one process would have measured from the same
answers.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
from hdrh.histogram import HdrHistogram

from forebay.replay.clock.clock import Clock
from forebay.replay.parts.divide import PartJob
from forebay.replay.parts.ray_part import Machines, RayPart
from forebay.replay.plan.plan import ReplayPlan
from forebay.replay.results.folder import RunFolder
from forebay.replay.results.merge import Measured, merge_parts
from forebay.replay.results.progress import Progress
from forebay.replay.results.recorder import LIVE_COUNTS, LIVE_REASONS, Live, interval_s
from forebay.replay.results.summary import RunTotals
from forebay.replay.send.drain import Stop
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.hlog import HIGHEST_US

START_IN_S = 0.05  # time after the message, so that all processes have it before the start
START_ON_NODES_IN_S = 1.0
MOST_LINE_BYTES = 1 << 20


async def replay_in_processes(
    plan: ReplayPlan,
    clock: Clock,
    folder: RunFolder,
    totals: RunTotals,
    progress: Progress | None,
    stop: Stop,
) -> Measured:
    """Run all parts of a plan and merge them (InputError: a part fails)."""
    options = replace(plan.options, trace=plan.source.rereadable)
    with TemporaryDirectory(dir=folder.path, prefix=".parts-") as parts:
        machines = None if options.ray is None else await Machines.connect(options)
        count = options.processes * (1 if machines is None else len(machines.nodes))
        places = [Path(parts, str(number)) for number in range(count)]
        live = _LiveSum(count)
        running: list[_Child] = []
        shown: asyncio.Task[None] | None = None
        try:
            # Each part has a folder of its own, and no part writes to the terminal.
            for number, place in enumerate(places):
                job = PartJob(
                    replace(options, out=place, quiet=True, warmup=0, metrics=(), ray=None),
                    number,
                    count,
                    plan.served,
                    f"{plan.run_id}-{number}",
                    progress is not None,
                )
                begin = _LocalPart.begin if machines is None else machines.begin
                running.append(_Child(number, await begin(job), live))
            # All parts start at one moment, which lies after the message to the last of them.
            await _all(child.ready() for child in running)
            start_in_s = START_IN_S if machines is None else START_ON_NODES_IN_S
            started_s = time.monotonic() + start_in_s
            started_unix_s = time.time() + start_in_s
            clock.restart(started_s)
            for child in running:
                child.part.order(child.part.start_at(started_s))
            if progress is not None:
                shown = asyncio.create_task(progress(live.total, plan, clock))
            ended = await _until_ended(running, stop)
        finally:
            if shown is not None:
                shown.cancel()
                await asyncio.gather(shown, return_exceptions=True)
            for child in running:
                await child.part.kill()
            if machines is not None:
                machines.leave()
        # Their rows and histograms become one run.
        measured = await merge_parts(
            places, ended, started_unix_s, interval_s(clock.scale), folder, totals, plan.comments()
        )
        return measured if machines is None else replace(measured, nodes=machines.clocks)


async def _until_ended(running: Sequence["_Child"], stop: Stop) -> str:
    """Pass on each request to stop, and return how the run as a whole ended."""

    async def pass_on() -> None:
        for event in (stop.sending, stop.waiting):
            await event.wait()
            for child in running:
                child.part.order("stop")

    passing = asyncio.create_task(pass_on())
    try:
        ends = set(await _all(child.ended() for child in running))
    finally:
        passing.cancel()
        await asyncio.gather(passing, return_exceptions=True)
    return next((end for end in ("interrupted", "drain timeout") if end in ends), "complete")


async def _all(waits: Any) -> list[Any]:
    """Wait for all. The first error ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait) for wait in waits]
    except* InputError as errors:
        raise InputError(str(errors.exceptions[0])) from None
    return [task.result() for task in tasks]


class _LiveSum:
    """Keeps `total`, the live figures of all processes together."""

    def __init__(self, count: int) -> None:
        self.total = Live()
        self._latest: list[dict[str, Any]] = [{}] * count

    def update(self, number: int, figures: dict[str, Any]) -> None:
        self._latest[number] = figures
        for name in LIVE_COUNTS:
            setattr(self.total, name, sum(latest.get(name, 0) for latest in self._latest))
        for name in LIVE_REASONS:
            of_all = Counter[str]()
            for latest in self._latest:
                of_all.update(latest.get(name, {}))
            setattr(self.total, name, of_all)
        self.total.ttft = HdrHistogram(1, HIGHEST_US, 2)
        for latest in self._latest:
            if latest:
                self.total.ttft.decode_and_add(latest["ttft"])


class _LocalPart:
    """A process of this machine that replays one part. `option` asked for it."""

    def __init__(self, job: PartJob, process: asyncio.subprocess.Process) -> None:
        self.option = "--processes"
        self.name = f"process {job.number + 1} of {job.count}"
        self._process = process

    @classmethod
    async def begin(cls, job: PartJob) -> "_LocalPart":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a module in the current folder must not take the place of ours
            "-m",
            "forebay.replay.part_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MOST_LINE_BYTES,
            start_new_session=True,  # Ctrl-C reaches only the process that passes it on
        )
        part = cls(job, process)
        part.order(job.line())
        return part

    def start_at(self, monotonic_s: float) -> str:
        """Return the line that starts the part when our clock shows `monotonic_s`."""
        return repr(monotonic_s)

    def order(self, line: str) -> None:
        """Send a line to the part. That a part has ended is noticed elsewhere."""
        assert self._process.stdin is not None
        with suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(f"{line}\n".encode("ascii"))

    async def line(self) -> bytes:
        """Wait for a line of the part, b"" when it has ended."""
        assert self._process.stdout is not None
        return await self._process.stdout.readline()

    async def status(self) -> str:
        """Return the end of the part as text."""
        status = await self._process.wait()
        return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"

    async def finish(self) -> None:
        """Wait until the part's files are in its folder."""
        await self._process.wait()

    async def kill(self) -> None:
        """End the part if it still runs."""
        with suppress(ProcessLookupError):
            if self._process.returncode is None:
                self._process.kill()
        await self._process.wait()


@dataclass
class _Child:
    """A part of the run in progress, and its messages."""

    number: int
    part: _LocalPart | RayPart
    live: _LiveSum

    async def ready(self) -> None:
        await self._message("ready")

    async def ended(self) -> str:
        ended: str = await self._message("ended")
        await self.part.finish()
        return ended

    async def _message(self, key: str) -> Any:
        """Wait for a message (InputError: the part fails before it)."""
        while line := await self.part.line():
            message = orjson.loads(line)
            if "live" in message:
                self.live.update(self.number, message["live"])
            elif "error" in message:
                raise InputError(f"{self.part.option}: {self.part.name}: {message['error']}")
            elif key in message:
                return message[key]
        raise InputError(
            f"{self.part.option}: {self.part.name} {await self.part.status()}; the run was "
            "stopped and nothing of it is kept"
        )
