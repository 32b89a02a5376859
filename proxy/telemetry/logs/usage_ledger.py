"""Write the use of each tenant: a JSON line for each request that a backend served.

A thread writes, so that a slow disk never blocks the loop. Unwritten lines wait in memory, for an
hour of a busy proxy. The file may be moved away at any time: it is opened again. Several processes
may write one file, as each write ends with a whole line. A disk that fills up may take the
beginning of a line: it stays as a line that is no JSON, and the whole line follows.
"""

import errno
import os
import queue
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import orjson

from forebay.proxy.log_events import LogEvent, Say
from forebay.proxy.telemetry.record import RequestRecord
from forebay.traces.ground.errors import InputError

MOST_WAITING: Final = 100_000  # lines, of about 300 bytes each
MOST_TOGETHER: Final = 1_000
RETRY_S: Final = 1.0
CLOSE_S: Final = 5.0
UNREACHED: Final = ("no_backend_available", "overloaded")  # it got a slot, but no connection
MOST_NAME: Final = 200  # characters of a model's name, which clients choose


class UsageLedger:
    """Use as a context. Raises InputError if the file cannot be opened.

    Attributes:
        written: lines.
        dropped: lines for which there was no room any more.
    """

    def __init__(self, path: Path, say: Say) -> None:
        self.written = self.dropped = 0
        self._path = path
        self._say = say
        self._trouble = ""  # why it cannot be written now
        self._closing = threading.Event()
        self._queue: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        try:
            self._file = _opened(path)
            self._torn = _ends_torn(path)  # the file ends with the beginning of a line
        except OSError as error:
            raise InputError(f"usage.path: cannot write {path} ({why_not(error)})") from error
        if self._torn:
            line = f"usage: {path} ends with half a line, as a process was killed while it wrote"
            self._say(LogEvent.USAGE_FAILED, f"{line}; that line is lost, and a new line follows")
        self._thread = threading.Thread(target=self._write_all, name="usage", daemon=True)

    def __enter__(self) -> "UsageLedger":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Write the waiting lines, within a time limit."""
        self._closing.set()
        with suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    def status(self) -> dict[str, object]:
        return {
            "path": str(self._path),
            "written": self.written,
            "dropped": self.dropped,
            "stopped": self._trouble or None,
        }

    def finished(self, record: RequestRecord, status: int, now: float) -> None:
        """Enter a request that has ended, unless it reached no backend."""
        unserved = not record.written or record.reason in UNREACHED
        if unserved or (record.request is None and not record.path):
            return
        try:
            self._queue.put_nowait(_line(record, status, now))
        except queue.Full:
            if not self.dropped:
                line = f"usage: {self._path} is not written: lines are dropped"
                self._say(LogEvent.USAGE_DROPS, line)
            self.dropped += 1

    def _write_all(self) -> None:
        last = False
        while not last:
            lines = [self._queue.get()]
            with suppress(queue.Empty):
                while len(lines) < MOST_TOGETHER:
                    lines.append(self._queue.get_nowait())
            last = lines[-1] is None
            left = b"".join(line for line in lines if line is not None)
            while left := self._written(left):
                if self._closing.is_set():
                    line = f"usage: {self._path} lacks lines: it could not be written at the end"
                    self._say(LogEvent.USAGE_DROPS, line)
                    break
                self._closing.wait(RETRY_S)
        os.close(self._file)

    def _written(self, data: bytes) -> bytes:
        """Write to the file that has the name now. Returns the unwritten rest."""
        try:
            if not _is_file(self._file, self._path):
                before, self._file = self._file, _opened(self._path)
                os.close(before)
                self._torn = _ends_torn(self._path)
            while data:
                if self._torn:
                    os.write(self._file, b"\n")
                    self._torn = False
                count = os.write(self._file, data)
                whole = data.rfind(b"\n", 0, count) + 1
                self._torn = whole < count
                self.written += data.count(b"\n", 0, whole)
                data = data[whole:]
        except OSError as error:
            why = error.strerror or str(error)
            if not self._trouble:
                line = f"usage: {self._path} cannot be written ({why}); trying again"
                self._say(LogEvent.USAGE_FAILED, line)
            self._trouble = why
        else:
            self._trouble = ""
        return data


def open_at_once(path: Path, flags: int) -> int:
    """Open a file to write, which others may not read: it tells who asks for what, and how much.

    Raises OSError for a pipe without a reader, which would hang us.
    """
    return os.open(path, flags | os.O_NONBLOCK, 0o640)


def why_not(error: OSError) -> str:
    """Return why a file cannot be opened, in words."""
    pipe = error.errno == errno.ENXIO
    return "it is a pipe that nobody reads" if pipe else error.strerror or str(error)


def _opened(path: Path) -> int:
    return open_at_once(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _ends_torn(path: Path) -> bool:
    """True if the last line of a file has no end. Raises OSError."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _is_file(file: int, path: Path) -> bool:
    """True if the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _line(record: RequestRecord, status: int, now: float) -> bytes:
    counted, shaped = record.prompt_tokens > 0, record.request
    estimated = record.estimated_tokens if shaped is None else shaped.prompt_tokens
    row = {
        "time": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds"),
        "request_id": record.id,
        "tenant": record.tenant,
        "model": record.model[:MOST_NAME],
        "operation": record.path or record.operation,
        "bucket": record.bucket,
        "backend": record.backend,
        "status": status,
        "counted": counted,
        "prompt_tokens": record.prompt_tokens if counted else estimated,
        "cached_tokens": record.cached_tokens if counted else None,
        "output_tokens": record.output_tokens if counted else None,
        "queue_ms": _ms(record.queued_s),
        "ttft_ms": _ms(record.ttft_s),
        "duration_ms": _ms(now - record.arrived_at),
    }
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)
