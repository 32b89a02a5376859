"""One `vllm serve` process in a group of its own: start it, watch it, end exactly it."""

import asyncio
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from forebay.replay.fleet.plan import ServerPlan
from forebay.replay.fleet.state import Process, began
from forebay.traces.errors import InputError

LOG_TAIL = 50_000  # bytes
_PREAMBLE = re.compile(r"^(\(.*? pid=\d+\) )?([A-Z]+ \d\d-\d\d [\d:]+ (\[\S+\] )?|INFO: +)?")
_ERROR = re.compile(r"^(?!.*\bWARNING\b).*?(\b\w*(?:Error|Exception): .+|\berror: .+)")


class ServerProcess:
    """Started; `wait` tells how it ended."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.identity = Process(process.pid, began(process.pid))

    @classmethod
    async def start(cls, plan: ServerPlan) -> "ServerProcess":
        """Start it, its output appended to its log; raises InputError where it cannot be run."""
        try:
            with plan.log.open("ab", buffering=0) as log:  # nothing is left to fail when it closes
                log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {plan.shell}\n".encode())
                return cls(await _run(plan, log))
        except OSError as error:
            raise InputError(f"{plan.log}: {error.strerror}; give another --dir") from error

    async def wait(self) -> str:
        """How it ended, once it has. What it left in its group is killed: an API server that dies
        leaves its engine behind, and that the GPU's memory."""
        status = await self._process.wait()
        self._kill_group()
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    async def stop(self, patience_s: float, now: asyncio.Event) -> bool:
        """SIGTERM to the server, which ends its engine; SIGKILL to what is left after `patience_s`
        seconds or when `now` is set. Whether it ended by itself."""
        if self._process.returncode is not None:
            return True
        with suppress(ProcessLookupError):
            self._process.terminate()
        ended, asked = asyncio.create_task(self.wait()), asyncio.create_task(now.wait())
        try:
            await asyncio.wait(
                {ended, asked}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            willing = ended.done()
            if not willing:
                self._kill_group()
            await ended
        finally:
            asked.cancel()
            self.kill()  # where this is cancelled
            await self._process.wait()
        return willing

    def kill(self) -> None:
        """At once, with its engine."""
        if self._process.returncode is None:
            self._kill_group()

    def _kill_group(self) -> None:
        # The group has the number of its first process; while any of it lives, nobody else has it.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


async def _run(plan: ServerPlan, log: IO[bytes]) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *plan.command,
            env={**os.environ, **plan.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # its engine is in its group; Ctrl-C does not reach it
        )
    except OSError as error:
        raise InputError(f"{plan.command[0]}: {error.strerror}") from error


def last_words(log: Path) -> str:
    """The line of the log that says best what went wrong: the last exception, or the last line."""
    lines = _tail(log)
    told = [found[1] for line in lines if (found := _ERROR.search(line))]
    return shorten((told or lines or ["it said nothing"])[-1])


def last_line(log: Path) -> str:
    """What it said last, without the logger's preamble."""
    lines = _tail(log)
    return shorten(_PREAMBLE.sub("", lines[-1])) if lines else ""


def shorten(line: str, most: int = 160) -> str:
    return line if len(line) <= most else line[: most - 1] + "…"


def _tail(log: Path) -> list[str]:
    """The last lines of this start that say something."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LOG_TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    text = text.rpartition("\n--- ")[2].partition("\n")[2] if "--- " in text else text
    parts = (part.rpartition("\r")[2].strip() for part in text.splitlines())
    return [part for part in parts if part]
