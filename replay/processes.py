"""Send a replay from several processes, and merge what they measured into one run folder.

Each process runs a whole replay of its part of the trace into a folder of its own, from a start
that all have in common. Rows and histograms are added up, so every figure is what one process
would have measured from the same answers.
"""

import asyncio
import base64
import pickle
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
from hdrh.histogram import HdrHistogram

from forebay.proxy.telemetry.hlog import HIGHEST_US
from forebay.replay.clock import Clock
from forebay.replay.ending import Stop
from forebay.replay.merge import Measured, merge_parts
from forebay.replay.options import ReplayOptions
from forebay.replay.output import RunFolder
from forebay.replay.part import PartJob
from forebay.replay.recorder import Live, interval_s
from forebay.replay.summary import RunTotals
from forebay.replay.target import Served
from forebay.replay.watching import Progress
from forebay.traces.errors import InputError

START_IN_S = 0.05  # from the message to the start, so that all processes have it before
MOST_LINE_BYTES = 1 << 20


async def replay_in_processes(
    options: ReplayOptions,
    served: Served,
    run_id: str,
    requests: int,
    clock: Clock,
    folder: RunFolder,
    totals: RunTotals,
    comments: Sequence[str],
    progress: Progress | None,
    stop: Stop,
) -> Measured:
    """Run all parts and merge them; raises InputError if one of them fails.

    Args:
        requests: number of requests of the whole, for the progress line.
    """
    with TemporaryDirectory(dir=folder.path, prefix=".parts-") as parts:
        places = [Path(parts, str(number)) for number in range(options.processes)]
        live = _LiveSum(options.processes)
        running: list[_Child] = []
        shown: asyncio.Task[None] | None = None
        try:
            for number, place in enumerate(places):
                job = PartJob(
                    replace(options, out=place, quiet=True, warmup=0, metrics=()),
                    number,
                    options.processes,
                    served,
                    f"{run_id}-{number}",
                    progress is not None,
                )
                running.append(await _Child.begin(job, live))
            await _all(child.ready() for child in running)
            started_s = time.monotonic() + START_IN_S
            started_unix_s = time.time() + START_IN_S
            clock.restart(started_s)
            for child in running:
                child.order(repr(started_s))
            if progress is not None:
                shown = asyncio.create_task(progress(live, requests, clock))
            ended = await _until_ended(running, stop)
        finally:
            if shown is not None:
                shown.cancel()
                await asyncio.gather(shown, return_exceptions=True)
            for child in running:
                await child.kill()
        return await merge_parts(
            places, ended, started_unix_s, interval_s(clock.scale), folder, totals, comments
        )


async def _until_ended(running: Sequence["_Child"], stop: Stop) -> str:
    """Pass on each request to stop; returns how the run as a whole ended."""

    async def pass_on() -> None:
        for event in (stop.sending, stop.waiting):
            await event.wait()
            for child in running:
                child.order("stop")

    passing = asyncio.create_task(pass_on())
    try:
        ends = set(await _all(child.ended() for child in running))
    finally:
        passing.cancel()
        await asyncio.gather(passing, return_exceptions=True)
    return next((end for end in ("interrupted", "drain timeout") if end in ends), "complete")


async def _all(waits: Any) -> list[Any]:
    """Wait for all; the first error ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait) for wait in waits]
    except* InputError as errors:
        raise InputError(str(errors.exceptions[0])) from None
    return [task.result() for task in tasks]


class _LiveSum(Live):
    """The live figures of all processes together."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._latest: list[dict[str, Any]] = [{}] * count

    def update(self, number: int, figures: dict[str, Any]) -> None:
        self._latest[number] = figures
        for name in ("sent", "done", "rejected", "failed"):
            setattr(self, name, sum(one.get(name, 0) for one in self._latest))
        self.ttft = HdrHistogram(1, HIGHEST_US, 2)
        for one in self._latest:
            if one:
                self.ttft.decode_and_add(one["ttft"])


class _Child:
    """A process that replays one part."""

    def __init__(self, job: PartJob, live: _LiveSum, process: asyncio.subprocess.Process) -> None:
        self._name = f"process {job.number + 1} of {job.count}"
        self._number = job.number
        self._live = live
        self._process = process

    @classmethod
    async def begin(cls, job: PartJob, live: _LiveSum) -> "_Child":
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
        child = cls(job, live, process)
        child.order(base64.b64encode(pickle.dumps(job)).decode("ascii"))
        return child

    def order(self, line: str) -> None:
        """Write a line to the process; one that has ended is noticed elsewhere."""
        assert self._process.stdin is not None
        with suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(f"{line}\n".encode("ascii"))

    async def ready(self) -> None:
        await self._message("ready")

    async def ended(self) -> str:
        ended: str = await self._message("ended")
        await self._process.wait()
        return ended

    async def _message(self, wanted: str) -> Any:
        """Wait for a message; raises InputError if the process fails before it."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message = orjson.loads(line)
            if "live" in message:
                self._live.update(self._number, message["live"])
            elif "error" in message:
                raise InputError(f"--processes: {self._name}: {message['error']}")
            elif wanted in message:
                return message[wanted]
        status = await self._process.wait()
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        raise InputError(
            f"--processes: {self._name} {how}; the run was stopped and nothing of it is kept"
        )

    async def kill(self) -> None:
        """End the process if it still runs."""
        with suppress(ProcessLookupError):
            if self._process.returncode is None:
                self._process.kill()
        await self._process.wait()
