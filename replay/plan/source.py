"""Read the trace of a run twice: before the first request, and again while sending.

Two passes keep memory small: a trace of a million rows keeps only the arrival times. A small file
keeps all rows, which saves the second pass. The first pass also finds the rows that do not fit the
model's context, so that a run does not fail half way. A simulation keeps all rows and reads once.
"""

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from forebay.traces.edit.edit import shortened
from forebay.traces.formats import names, open_trace
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.ground.trace_line import row_bytes

TOO_LONG = ("error", "truncate", "drop")
KEPT_BYTES = 4 << 20  # largest file whose rows stay in memory
KEPT_ROWS = 20_000  # a compressed file may have many more


@dataclass(slots=True)
class Scan:
    """The results of the first pass.

    Attributes:
        arrivals_s: arrival times of the rows that will be sent, without dropped ones.
        needs: context that each of these rows needs, in tokens.
        first_too_long: number (from 1) of the first row beyond the context.
        linked: True if a row waits for the answer to another row.
        sessions: True if a row has a session.
        models, tenants: all names in rows. `models` has None if a row names no model.
    """

    arrivals_s: "array[float]" = field(default_factory=lambda: array("d"))
    needs: "array[int]" = field(default_factory=lambda: array("q"))
    first_too_long: int | None = None
    skipped: int = 0
    dropped: int = 0
    linked: bool = False
    sessions: bool = False
    models: set[str | None] = field(default_factory=set)
    tenants: set[str] = field(default_factory=set)
    _truncated: "array[int]" = field(default_factory=lambda: array("q"))

    def truncated(self, count: int) -> int:
        """Count the shortened requests among the first `count`."""
        return bisect_left(self._truncated, count)

    def limited(self, limit: int, *, drop: bool) -> "Scan":
        """Return the scan for a model with a context of `limit` tokens."""
        scan = replace(self, arrivals_s=array("d"), needs=array("q"), _truncated=array("q"))
        for index, need in enumerate(self.needs):
            if need > limit:
                if scan.first_too_long is None:
                    scan.first_too_long = index + 1
                if drop:
                    scan.dropped += 1
                    continue
                scan._truncated.append(len(scan.arrivals_s))
            scan.arrivals_s.append(self.arrivals_s[index])
            scan.needs.append(need)
        return scan


class TraceSource:
    """A trace file or a sequence of requests, with one rule for rows that are too long."""

    def __init__(
        self,
        trace: Path | Sequence[TraceRequest],
        *,
        format_name: str | None = None,
        skip_bad: bool = False,
        max_model_len: int | None = None,
        too_long: str = "error",
    ) -> None:
        if too_long not in TOO_LONG:
            raise InputError(f"--too-long: {too_long!r} is none of {', '.join(TOO_LONG)}")
        if format_name is not None and format_name not in names():
            raise InputError(f"--format: {format_name!r} is none of {', '.join(names())}")
        self._format = format_name
        self._skip_bad = skip_bad
        self.limit = max_model_len
        self._too_long = too_long
        self._skipped = 0
        self._parts: Sequence[int] | None = None
        self._part = 0
        self.name = str(trace) if isinstance(trace, Path) else "(in memory)"
        self._rows: Sequence[TraceRequest] | None = None
        self._path: Path | None = None
        self._kept: list[TraceRequest] | None = None
        if not isinstance(trace, Path):
            self._rows = trace
        elif trace.is_file():
            self._path = trace
        else:  # standard input and pipes can be read only once, and a missing file fails here
            reader = open_trace(trace, format_name=format_name, skip_bad=skip_bad)
            self._rows = list(reader)
            self._skipped = reader.skipped
        if self._rows is not None and not self._rows:
            raise InputError(f"{self.name}: no requests in this trace")

    def scan(self) -> Scan:
        """Do the first pass (InputError: unreadable)."""
        small = self._path is not None and self._path.stat().st_size <= KEPT_BYTES
        rows: list[TraceRequest] = []

        def keep(request: TraceRequest) -> None:
            nonlocal small
            if small:
                rows.append(request)
                small = len(rows) <= KEPT_ROWS

        result = self._scan(keep)
        self._kept = rows if small else None
        return result

    def rows(self, converted: Callable[[TraceRequest], TraceRequest]) -> list[TraceRequest]:
        """Read all rows to send in one pass, each `converted`, with the errors of two passes.

        A row is converted at once, so texts that are replaced need no memory.
        """
        rows: list[TraceRequest] = []

        def keep(request: TraceRequest) -> None:
            fitted = self._fit(request)
            if fitted is not None:
                rows.append(converted(fitted))

        scan = self._scan(keep)
        self.check(scan, len(rows))
        return rows

    def _scan(self, keep: Callable[[TraceRequest], None]) -> Scan:
        """Read all rows and call `keep` with each."""
        scan = Scan()
        for request in self._read():
            keep(request)
            scan.arrivals_s.append(request.arrival_s)
            scan.needs.append(request.input_tokens + request.output_tokens)
            scan.linked = scan.linked or bool(request.parent or request.waits_for)
            scan.sessions = scan.sessions or request.session is not None
            scan.models.add(request.model)
            if request.tenant is not None:
                scan.tenants.add(request.tenant)
        scan.skipped = self._skipped
        return scan if self.limit is None else self.limit_to(scan, self.limit)

    def limit_to(self, scan: Scan, limit: int) -> Scan:
        """Set the model's context, and return the scan of the rows to send.

        Raises:
            InputError: no row is short enough.
        """
        self.limit = limit
        fitting = scan.limited(limit, drop=self._too_long == "drop")
        if not fitting.arrivals_s:
            raise InputError(
                f"--too-long drop: every row of {self.name} is longer than the model's context of "
                f"{limit} tokens; use --too-long truncate or another trace"
            )
        return fitting

    def requests(self) -> Iterator[TraceRequest]:
        """Read the rows that `scan` counted, or the part of them that `keep` selected."""
        if self._parts is None:
            return self._fitted()
        numbered = zip(self._fitted(), self._parts, strict=False)
        return (request for request, part in numbered if part == self._part)

    def keep(self, parts: Sequence[int], part: int) -> None:
        """Keep only requests with the number `part` in `parts`, which has a number for each."""
        self._parts, self._part = parts, part

    @property
    def rereadable(self) -> Path | Sequence[TraceRequest]:
        """The trace for another process: a file, or the rows of a pipe."""
        return self._path or self._rows or ()

    def _fitted(self) -> Iterator[TraceRequest]:
        fitted = map(self._fit, self._read())
        return (request for request in fitted if request is not None)

    def _fit(self, request: TraceRequest) -> TraceRequest | None:
        return request if self.limit is None else fit(request, self.limit, self._too_long)

    @property
    def may_lack_rows(self) -> bool:
        """True if rows of the file may be left out, so that links to them are broken."""
        return self._skip_bad or self._too_long == "drop"

    def check(self, scan: Scan, count: int) -> None:
        """Raise InputError if any of the first `count` rows is too long, unless that is allowed."""
        if self._too_long != "error" or scan.first_too_long is None or self.limit is None:
            return
        number = scan.first_too_long
        if number > count:
            return
        request = next(islice(self._read(), number - 1, None))
        raise InputError(
            f"{self.name}: row {number} (id {request.id!r}) needs {request.input_tokens} + "
            f"{request.output_tokens} tokens, the model's context is {self.limit}; use "
            "--too-long truncate or --too-long drop"
        )

    def sha256(self) -> str:
        """Hash the file's bytes, or the rows in Forebay's own format."""
        digest = hashlib.sha256()
        if self._path is None:
            for request in self._rows or ():
                digest.update(row_bytes(request))
        else:
            with open(self._path, "rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
        return digest.hexdigest()

    def _read(self) -> Iterator[TraceRequest]:
        """Read all rows. A row without an answer in production gets one token of output."""
        for request in self._recorded():
            yield request if request.output_tokens else replace(request, output_tokens=1)

    def _recorded(self) -> Iterator[TraceRequest]:
        if self._kept is not None or self._path is None:
            yield from self._kept or self._rows or ()
            return
        with open_trace(self._path, format_name=self._format, skip_bad=self._skip_bad) as reader:
            yield from reader
            self._skipped = reader.skipped


def fit(request: TraceRequest, limit: int, too_long: str) -> TraceRequest | None:
    """Return `request` if it fits `limit` tokens, else a shortened request, or None if dropped.

    Under "error" it is shortened, too, but `TraceSource.check` stops the run. A shortened
    prompt keeps its leading blocks, so it still shares them with other prompts. The answer keeps at
    most half of the context, and a prompt at least one token.
    """
    if request.input_tokens + request.output_tokens <= limit:
        return request
    if too_long == "drop":
        return None
    output_tokens = min(request.output_tokens, max(1, limit // 2))
    input_tokens = min(request.input_tokens, max(1, limit - output_tokens))
    if request.messages is not None:  # a chat is sent whole
        return replace(request, input_tokens=input_tokens, output_tokens=output_tokens)
    return shortened(request, input_tokens, output_tokens)
