"""The log: one logger, with lines of text or of JSON.

A line holds configured values and counts, never a prompt, a query, a client's header or a response.
Names that servers and clients chose are cleaned here, so each event is one line.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO
from zlib import crc32

import orjson

from forebay.proxy.config.sections import Logs
from forebay.proxy.log_events import LogEvent, Say, SparseLines
from forebay.proxy.telemetry.logs.log_queue import QueuedLines
from forebay.proxy.telemetry.record import RequestRecord
from forebay.traces.ground.command_line.messages import all_printable, printable

LOGGER = logging.getLogger("forebay.proxy")


def configure_logs(logs: Logs, stream: TextIO | None = None) -> None:
    """Send the log of this process to `stream` (default: standard output), as configured.

    Standard output is written by a thread, which may wait for its reader.
    """
    handler: logging.Handler = logging.StreamHandler(stream or sys.stdout)
    if stream is None:
        with suppress(OSError, ValueError):  # no file is behind it
            handler = QueuedLines(sys.stdout.fileno())
    handler.setFormatter(JsonLines() if logs.format == "json" else ConsoleLines())
    for old in list(LOGGER.handlers):
        LOGGER.removeHandler(old)
        old.close()
    LOGGER.addHandler(handler)
    LOGGER.propagate = False
    set_level(logs)


def set_level(logs: Logs) -> None:
    LOGGER.setLevel(logs.level.upper())


def say(event: LogEvent, message: str, backend: str = "", reason: str = "", /) -> None:
    """Log that something started, stopped or changed, to `backend` if it is given."""
    extra = {"event": event.label, "backend": backend, "reason": reason}
    LOGGER.log(event.level, message, extra=extra)


def _event(line: logging.LogRecord) -> dict[str, object]:
    fields = {key: getattr(line, key, "") for key in ("event", "backend", "reason")}
    return {key: value for key, value in fields.items() if value}


class InternalErrors:
    """Logs unexpected exceptions: each kind at most once a minute, so that no client fills a disk.

    A line has the class and the place, as the text of an exception may quote a prompt.
    """

    def __init__(self, say: Say, clock: Callable[[], float]) -> None:
        self._say = say
        self._clock = clock
        self._lines = SparseLines()  # of the places in the code

    def failed(self, error: BaseException | None) -> None:
        """A request failed by `error`."""
        line = f"internal error: {type(error).__name__}{_place(error)}"
        if (more := self._lines.more(line, self._clock())) is not None:
            self._say(LogEvent.INTERNAL_ERROR, f"{line}{more}")


def _place(error: BaseException | None) -> str:
    """Return where an exception was raised, as ` in FILE:LINE`."""
    step = error.__traceback__ if error is not None else None
    if step is None:
        return ""
    while step.tb_next is not None:
        step = step.tb_next
    return f" in {Path(step.tb_frame.f_code.co_filename).name}:{step.tb_lineno}"


def _fields(line: logging.LogRecord) -> dict[str, object]:
    fields = getattr(line, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _stamp(line: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(line.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JsonLines(logging.Formatter):
    """Formats lines as `{"time": ..., "level": ..., "message": ..., "event": ..., fields}`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_event(record),
            **_fields(record),
        }
        return orjson.dumps(all_printable(line), default=str).decode()


class ConsoleLines(logging.Formatter):
    """Formats lines as `TIME LEVEL message key=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        return printable(f"{_stamp(record)} {record.levelname:<7} {record.getMessage()}{fields}")


class AccessLog:
    """Logs finished requests: all of them at level debug, else a sample at info."""

    def __init__(self, logs: Logs) -> None:
        self._sample = logs.sample

    def reconfigure(self, logs: Logs) -> None:
        self._sample = logs.sample
        set_level(logs)

    def finished(self, record: RequestRecord, status: int, now: float) -> None:
        """A request was answered with `status`, or its client has left (CLIENT_GONE)."""
        debug = LOGGER.isEnabledFor(logging.DEBUG)
        if not debug and not self._sampled(record.id):
            return
        fields: dict[str, object] = {
            "request_id": record.id,
            "status": status,
            "operation": record.operation or "other",
            "bucket": record.bucket,
            "duration_ms": round((now - record.arrived_at) * 1e3, 1),
        }
        for key, seconds in (("queue_ms", record.queued_s), ("ttft_ms", record.ttft_s)):
            if seconds is not None:
                fields[key] = round(seconds * 1e3, 1)
        for key in (
            *("tenant", "service_class", "backend", "reason"),
            *("prompt_tokens", "cached_tokens", "output_tokens", "continued_after"),
        ):
            if value := getattr(record, key):
                fields[key] = value
        request = LogEvent.REQUEST
        extra = {"event": request.label, "fields": fields}
        LOGGER.log(logging.DEBUG if debug else request.level, "request", extra=extra)

    def _sampled(self, id_: str) -> bool:
        """Choose by the id, so that proxies in a chain choose the same requests."""
        return self._sample > 0 and crc32(id_.encode()) < self._sample * 2**32
