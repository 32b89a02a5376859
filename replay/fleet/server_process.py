"""Start, watch and end one `vllm serve` process and its process group."""

import asyncio
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from forebay.replay.fleet.plan import ServerPlan
from forebay.replay.fleet.state import Process, start_time
from forebay.traces.errors import InputError

LOG_TAIL = 50_000  # bytes
_PREAMBLE = re.compile(r"^(\(.*? pid=\d+\) )?([A-Z]+ \d\d-\d\d [\d:]+ (\[\S+\] )?|INFO: +)?")
_ERROR = re.compile(r"^(?!.*\bWARNING\b).*?(\b\w*(?:Error|Exception): .+|\berror: .+)")


class ServerProcess:
    """A started server. `wait` returns how it ended."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.identity = Process(process.pid, start_time(process.pid))

    @classmethod
    async def start(cls, plan: ServerPlan) -> "ServerProcess":
        """Start a server that appends to its log (InputError: it cannot be run)."""
        try:
            with plan.log.open("ab", buffering=0) as log:  # unbuffered, so closing cannot fail
                log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {plan.shell}\n".encode())
                return cls(await _run(plan, log))
        except OSError as error:
            raise InputError(f"{plan.log}: {error.strerror}; give another --dir") from error

    async def wait(self) -> str:
        """Wait for the end, kill the rest of the process group, and return how the server ended.

        An API server that dies leaves its engine running, which still occupies the GPU's memory.
        """
        status = await self._process.wait()
        self._kill_group()
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    async def stop(self, patience_s: float, now: asyncio.Event) -> bool:
        """Send SIGTERM to the server, which ends its engine. Then send SIGKILL to the group.

        SIGKILL follows after `patience_s` seconds or when `now` is set. Returns True if the server
        ended by itself.
        """
        if self._process.returncode is not None:
            return True
        with suppress(ProcessLookupError):
            self._process.terminate()
        ended, hurried = asyncio.create_task(self.wait()), asyncio.create_task(now.wait())
        try:
            await asyncio.wait(
                {ended, hurried}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            by_itself = ended.done()
            if not by_itself:
                self._kill_group()
            await ended
        finally:
            hurried.cancel()
            self.kill()  # if this task is cancelled
            await self._process.wait()
        return by_itself

    def kill(self) -> None:
        """Kill the server and its engine at once."""
        if self._process.returncode is None:
            self._kill_group()

    def _kill_group(self) -> None:
        # The group's number is its first process's number. The kernel does not give it to another
        # process while a member of the group lives.
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
            start_new_session=True,  # its engine joins the group, and Ctrl-C does not reach it
        )
    except OSError as error:
        raise InputError(f"{plan.command[0]}: {error.strerror}") from error


def last_words(log: Path) -> str:
    """Return the last exception in the log, or its last line."""
    lines = _tail(log)
    errors = [match[1] for line in lines if (match := _ERROR.search(line))]
    return shorten((errors or lines or ["its log is empty"])[-1])


def last_line(log: Path) -> str:
    """Return the last line of the log without the logger's preamble."""
    lines = _tail(log)
    return shorten(_PREAMBLE.sub("", lines[-1])) if lines else ""


def shorten(line: str, most: int = 160) -> str:
    return line if len(line) <= most else line[: most - 1] + "…"


def _tail(log: Path) -> list[str]:
    """Return the last non-empty lines of the log since the last start."""
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
