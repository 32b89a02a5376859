"""Write the traffic as a trace for `forebay replay` and `simulate`, without text and names.

Each shaped request is a row, even if rejected, in order of arrival. The first arrives at 0. A
prompt becomes its length and the hashes of its blocks, keyed by a secret salt. So the file shows
that two prompts begin alike, but no prompt can be guessed from it. Tenants are keyed hashes too.
Lengths are the engine's counts where the response reported them. Otherwise the prompt's length is
estimated, and the output's is the requested limit. A row has the times of the answer, too.

All blocks of text in a file stand for the same number of tokens, by `tokens.bytes_per_token`. The
end of a prompt that does not fill a block is new in every row.
"""

import os
import queue
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from forebay.proxy.api.body import BYTES_PER_TOKEN_ID
from forebay.proxy.config.schema import Config
from forebay.proxy.config.sections import CaptureConfig
from forebay.proxy.core.model import Request
from forebay.proxy.log_events import LogEvent, Say
from forebay.proxy.runtime.memory import request_bytes
from forebay.proxy.telemetry.logs.usage_ledger import open_at_once
from forebay.proxy.telemetry.record import RequestRecord
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.ground.trace_line import row_bytes

SALT: Final = "FOREBAY_CAPTURE_SALT"
LEAST_SALT: Final = 16  # characters
MOST_PENDING: Final = 10_000  # rows that wait for an earlier request to end
MOST_QUEUED: Final = 2 * MOST_PENDING  # rows that wait for the disk: two such bursts
ROW_BYTES: Final = 1_000
BLOCK_BYTES: Final = 44  # an integer of 64 bits, and its place in a tuple
MOST_FILES: Final = 10_000
PART_BYTES: Final = 8 << 20
CLOSE_S: Final = 5.0


class Due(NamedTuple):
    """The values of one row that can be written, as all rows before it can.

    They are copied for the writing thread: the record of a request that still runs changes.
    """

    number: int
    arrival_s: float
    request: Request
    token_ids: bool
    tenant: str
    prompt_tokens: int
    output_tokens: int
    status: int
    observed: dict[str, float | str]


class Rows:
    """Puts finished requests into order of arrival, and makes rows of them. No I/O.

    `row` does the hashing and changes nothing, so that another thread can call it: the end of one
    long request may make thousands of rows due.
    """

    def __init__(
        self, salt: bytes, block_bytes: int, bytes_per_token: float, most_bytes: float = inf
    ) -> None:
        """`most_bytes`: of the rows that wait for an earlier request to end."""
        self._key = blake2b(salt, digest_size=32).digest()
        self._text_tokens = max(1, round(block_bytes / bytes_per_token))
        self._id_tokens = max(1, block_bytes // BYTES_PER_TOKEN_ID)
        self._first_at = inf
        # In order of arrival. In a plain dict, finding the first key is linear in the deletions.
        self._pending: OrderedDict[int, RequestRecord] = OrderedDict()
        self._ended: dict[int, tuple[int, float]] = {}  # status, and when
        self._most_bytes = most_bytes
        self._ended_bytes = 0
        self._due = 0

    def started(self, record: RequestRecord) -> None:
        """A request has arrived. Call `finished` when it ends."""
        self._pending[id(record)] = record

    def finished(self, record: RequestRecord, status: int, now: float) -> list[Due]:
        """A request has ended with `status`. Returns the rows that can be written now."""
        if id(record) in self._pending:
            self._ended[id(record)] = status, now
            self._ended_bytes += memory_of(record.request)
        return self._ready(MOST_PENDING)

    def rest(self) -> list[Due]:
        """Return the rows of all remaining requests, ended or not."""
        return self._ready(0)

    def _ready(self, most_pending: int) -> list[Due]:
        due = []
        while self._pending:
            # Rows leave in order of arrival, so a running request holds back the requests after it,
            # until there are too many.
            first = next(iter(self._pending))
            ended = self._ended.get(first)
            many = len(self._pending) > most_pending or self._ended_bytes > self._most_bytes
            if ended is None and not many:
                break
            record = self._pending.pop(first)
            if ended is not None:
                del self._ended[first]
                self._ended_bytes -= memory_of(record.request)
            if record.request is None:
                continue  # its body could not be parsed
            self._due += 1
            self._first_at = min(self._first_at, record.arrived_at)
            due.append(
                Due(
                    self._due,
                    round(record.arrived_at - self._first_at, 6),
                    record.request,
                    record.token_ids,
                    record.tenant,
                    record.prompt_tokens,
                    record.output_tokens,
                    ended[0] if ended is not None else 0,
                    observed(record, ended[1] if ended is not None else None),
                )
            )
        return due

    def row(self, due: Due) -> TraceRequest:
        """Make the row. May be called from another thread."""
        request = due.request
        block_tokens = self._id_tokens if due.token_ids else self._text_tokens
        input_tokens = due.prompt_tokens or request.prompt_tokens
        count = -(-input_tokens // block_tokens)
        blocks = [self._hash(block.to_bytes(8, "little")) for block in request.blocks[:count]]
        for number in range(len(blocks), count):
            blocks.append(self._hash(b"end %d of %d" % (number, due.number)))
        tenant = None
        if due.tenant:
            tenant = f"t-{self._hash(b'tenant ' + due.tenant.encode()):016x}"
        return TraceRequest(
            id=f"captured-{due.number}",
            arrival_s=due.arrival_s,
            input_tokens=input_tokens,
            output_tokens=due.output_tokens or request.output_tokens,
            blocks=tuple(blocks),
            block_tokens=block_tokens,
            tenant=tenant,
            service_class=None if request.service_class == "standard" else request.service_class,
            status=due.status or None,
            observed=due.observed or None,
        )

    def _hash(self, data: bytes) -> int:
        return int.from_bytes(blake2b(data, key=self._key, digest_size=8).digest(), "little")


def observed(record: RequestRecord, ended_at: float | None) -> dict[str, float | str]:
    """Return the times of the answer in seconds after arrival, its backend and cached tokens.

    Cached tokens are left out if the response has no usage: lengths are estimates and limits then.

    Args:
        ended_at: None for a request that has not ended.
    """
    times = {"sent_s": record.sent_at, "ttft_s": record.first_token_at, "e2e_s": ended_at}
    fields: dict[str, float | str] = {
        name: round(at - record.arrived_at, 6) for name, at in times.items() if at is not None
    }
    if record.backend:
        fields["backend"] = record.backend
    if record.prompt_tokens:  # the backend has counted
        fields["cached_tokens"] = record.cached_tokens
    return fields


def memory_of(request: Request | None) -> int:
    """Return about how many bytes a row keeps in memory: nearly all are its block hashes."""
    return ROW_BYTES + (BLOCK_BYTES * len(request.blocks) if request is not None else 0)


class Capture:
    """Writes rows to the file in a thread, so that hashing and a slow disk never block the loop.

    Attributes:
        bytes, written: size of the file, and its rows.
        stopped: why nothing is written any more; "" while rows are written.
    """

    def __init__(
        self,
        rows: Rows,
        path: Path,
        file: BinaryIO,
        most_bytes: float,
        say: Say,
        most_waiting_bytes: float = inf,
    ) -> None:
        self.path = path
        self.bytes = self.written = 0
        self.dropped = 0
        self.stopped = ""
        self._rows = rows
        self._file = file
        self._most_bytes = most_bytes
        self._most_waiting_bytes = most_waiting_bytes
        self._put_bytes = self._taken_bytes = 0  # one is counted by each thread
        self._say = say
        self._queue: queue.Queue[Due | None] = queue.Queue(MOST_QUEUED)
        self._thread = threading.Thread(target=self._write, name="capture", daemon=True)
        self._thread.start()

    def started(self, record: RequestRecord) -> None:
        if not self.stopped:
            self._rows.started(record)

    def finished(self, record: RequestRecord, status: int, now: float) -> None:
        for due in self._rows.finished(record, status, now):
            self._put(due)

    def part(self, offset: int) -> bytes:
        """Return the bytes of the file from `offset` on, at most PART_BYTES. Blocks on the disk."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(PART_BYTES)

    def close(self) -> None:
        """Write the remaining rows, within a time limit."""
        for due in self._rows.rest():
            self._put(due)
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return  # the disk hangs; a daemon thread may stay behind
        self._thread.join(CLOSE_S)

    def status(self) -> dict[str, object]:
        return {
            "path": str(self.path),
            "bytes": self.bytes,
            "written": self.written,
            "dropped": self.dropped,
            "stopped": self.stopped or None,
        }

    def _put(self, due: Due) -> None:
        if self.stopped:
            self.dropped += 1
            return
        size = memory_of(due.request)
        try:
            if self._put_bytes - self._taken_bytes + size > self._most_waiting_bytes:
                raise queue.Full
            self._queue.put_nowait(due)
            self._put_bytes += size
        except queue.Full:
            if not self.dropped:
                line = f"capture: {self.path} is written too slowly: rows are dropped"
                self._say(LogEvent.CAPTURE_DROPS, line)
            self.dropped += 1

    def _write(self) -> None:
        try:
            with self._file as file:
                self._write_rows(file)
        except OSError as error:  # closing flushes the last rows
            if not self.stopped:
                self._stop(f"it cannot be written ({error.strerror})")
        except Exception as error:
            # Our own fault, or an impossible count of a backend: the thread must not die silently.
            self._stop(f"internal error: {type(error).__name__}")

    def _write_rows(self, file: BinaryIO) -> None:
        while (due := self._queue.get()) is not None:
            self._taken_bytes += memory_of(due.request)
            if self.stopped:
                self.dropped += 1
                continue
            line = row_bytes(self._rows.row(due))
            if self.bytes + len(line) > self._most_bytes:
                self._stop("it has reached capture.max_size")
                self.dropped += 1
                continue
            try:
                file.write(line)
                if self._queue.empty():
                    file.flush()
            except OSError as error:
                self._stop(f"it cannot be written ({error.strerror})")
                self.dropped += 1
                continue
            self.bytes += len(line)
            self.written += 1

    def _stop(self, why: str) -> None:
        self.stopped = why
        self._say(LogEvent.CAPTURE_STOPPED, f"capture: {self.path} stopped: {why}")


def capture_salt(environ: Mapping[str, str]) -> bytes:
    """Return the salt of the hashes. Raises InputError without a good salt."""
    salt = environ.get(SALT, "")
    if len(salt) < LEAST_SALT:
        raise InputError(
            f"capture.path: set {SALT} to a secret of {LEAST_SALT} characters or more, e.g. "
            f"export {SALT}=$(openssl rand -hex 16)"
        )
    return salt.encode()


@asynccontextmanager
async def capturing(
    config: Config, environ: Mapping[str, str], say: Say
) -> AsyncIterator[Capture | None]:
    """Run the capture that the configuration asks for. Raises InputError."""
    if config.capture.path is None:
        yield None
        return
    salt = capture_salt(environ)
    path, file = _new_file(config.capture)
    waiting = request_bytes(config.limits) / 2  # before and in the queue for the disk
    rows = Rows(salt, config.affinity.block_bytes, config.tokens.bytes_per_token, waiting)
    capture = Capture(rows, path, file, config.capture.max_size, say, waiting)
    say(LogEvent.CAPTURE_STARTED, f"capturing traffic in {path}")
    try:
        yield capture
    finally:
        capture.close()


def _new_file(config: CaptureConfig) -> tuple[Path, BinaryIO]:
    """Open `path`, or `name.2.jsonl` and so on: a start never overwrites an earlier capture."""
    path = config.path
    assert path is not None
    for number in range(1, MOST_FILES):
        at = path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")
        try:
            return at, os.fdopen(open_at_once(at, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"capture.path: cannot write {at} ({error.strerror})") from error
    raise InputError(f"capture.path: {path} and {MOST_FILES} more exist; move them away")
