"""Read the trace of a run twice: once before anything is sent, and again while sending.

Two passes keep memory small: of a million rows only the arrival times are kept. Of a small file all
rows are kept, which saves the second pass. The first pass also finds the rows that do not fit the
model's context, so that no error comes up half way. A simulation keeps all rows and reads once.
"""

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from forebay.traces.errors import InputError
from forebay.traces.formats import names, open_trace
from forebay.traces.reading.jsonl import row_bytes
from forebay.traces.schema import TraceRequest

TOO_LONG = ("error", "truncate", "drop")
KEPT_BYTES = 4 << 20  # of a file whose rows stay in memory
KEPT_ROWS = 20_000  # a compressed file may have many more


@dataclass(slots=True)
class Scan:
    """The results of the first pass.

    Attributes:
        arrivals_s: arrival times of the rows that will be sent, without dropped ones.
        needs: context that each of these rows needs, in tokens.
        first_too_long: number (from 1) of the first row beyond the context.
        linked: some row waits for the answer to another.
        sessions: some row has a session.
        models, tenants: all that rows name; None in `models` for rows without one.
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
        """Count the shortened ones among the first `count` requests."""
        return bisect_left(self._truncated, count)

    def limited(self, limit: int, *, drop: bool) -> "Scan":
        """Return the scan for a model whose context is `limit` tokens."""
        found = replace(self, arrivals_s=array("d"), needs=array("q"), _truncated=array("q"))
        for index, need in enumerate(self.needs):
            if need > limit:
                if found.first_too_long is None:
                    found.first_too_long = index + 1
                if drop:
                    found.dropped += 1
                    continue
                found._truncated.append(len(found.arrivals_s))
            found.arrivals_s.append(self.arrivals_s[index])
            found.needs.append(need)
        return found


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
        else:  # standard input and pipes can be read only once; a missing file fails here
            reader = open_trace(trace, format_name=format_name, skip_bad=skip_bad)
            self._rows = list(reader)
            self._skipped = reader.skipped
        if self._rows is not None and not self._rows:
            raise InputError(f"{self.name}: no requests in this trace")

    def scan(self) -> Scan:
        """Do the first pass; raises InputError for anything that cannot be read."""
        small = self._path is not None and self._path.stat().st_size <= KEPT_BYTES
        kept: list[TraceRequest] = []

        def keep(request: TraceRequest) -> None:
            nonlocal small
            if small:
                kept.append(request)
                small = len(kept) <= KEPT_ROWS

        found = self._scan(keep)
        self._kept = kept if small else None
        return found

    def rows(self, converted: Callable[[TraceRequest], TraceRequest]) -> list[TraceRequest]:
        """Read all rows to send in one pass, each `converted`; raises InputError as the two do.

        A row is converted as soon as it is read, so texts that this replaces take no memory.
        """
        rows: list[TraceRequest] = []

        def keep(request: TraceRequest) -> None:
            fitted = self._fit(request)
            if fitted is not None:
                rows.append(converted(fitted))

        found = self._scan(keep)
        self.check(found, len(rows))
        return rows

    def _scan(self, keep: Callable[[TraceRequest], None]) -> Scan:
        """Read all rows and call `keep` with each."""
        found = Scan()
        for request in self._read():
            keep(request)
            found.arrivals_s.append(request.arrival_s)
            found.needs.append(request.input_tokens + request.output_tokens)
            found.linked = found.linked or bool(request.parent or request.waits_for)
            found.sessions = found.sessions or request.session is not None
            found.models.add(request.model)
            if request.tenant is not None:
                found.tenants.add(request.tenant)
        found.skipped = self._skipped
        return found if self.limit is None else self.limit_to(found, self.limit)

    def limit_to(self, scan: Scan, limit: int) -> Scan:
        """Set the model's context; returns the scan of the rows that are then sent.

        Raises InputError if none is left.
        """
        self.limit = limit
        found = scan.limited(limit, drop=self._too_long == "drop")
        if not found.arrivals_s:
            raise InputError(
                f"--too-long drop: every row of {self.name} is longer than the model's context of "
                f"{limit} tokens; use --too-long truncate or another trace"
            )
        return found

    def requests(self) -> Iterator[TraceRequest]:
        """Read the rows to send: the ones that `scan` counted, or `keep` kept of them."""
        if self._parts is None:
            return self._fitted()
        numbered = zip(self._fitted(), self._parts, strict=False)
        return (request for request, part in numbered if part == self._part)

    def keep(self, parts: Sequence[int], part: int) -> None:
        """Keep only the requests whose number in `parts`, one for each, is `part`."""
        self._parts, self._part = parts, part

    @property
    def rereadable(self) -> Path | Sequence[TraceRequest]:
        """The trace as another process can read it: a file, or the rows of what was a pipe."""
        return self._path or self._rows or ()

    def _fitted(self) -> Iterator[TraceRequest]:
        for request in self._read():
            fitted = self._fit(request)
            if fitted is not None:
                yield fitted

    def _fit(self, request: TraceRequest) -> TraceRequest | None:
        return request if self.limit is None else fit(request, self.limit, self._too_long)

    @property
    def may_lack_rows(self) -> bool:
        """Whether rows of the file may be left out, so that links to them lead nowhere."""
        return self._skip_bad or self._too_long == "drop"

    def check(self, scan: Scan, count: int) -> None:
        """Raise InputError if one of the first `count` rows is too long, unless that is allowed."""
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
        """Hash the file's bytes, or the rows as Forebay's own format writes them."""
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
        """Read all rows; one that got no answer in production asks for one token of output."""
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
    """Return `request` itself if it fits `limit` tokens; else shortened, or None if dropped.

    Under "error" it is shortened, too, but `TraceSource.check` then stops the run. A shortened
    prompt keeps its leading blocks, so it still shares them with other prompts. The answer keeps at
    most half of the context, and a prompt at least one token.
    """
    if request.input_tokens + request.output_tokens <= limit:
        return request
    if too_long == "drop":
        return None
    output_tokens = min(request.output_tokens, max(1, limit // 2))
    input_tokens = min(request.input_tokens, max(1, limit - output_tokens))
    blocks, text = request.blocks, request.text
    if blocks is not None:
        blocks = blocks[: -(-input_tokens // request.block_tokens)]
    if text is not None:
        text = text[: len(text) * input_tokens // request.input_tokens]
    return replace(
        request, input_tokens=input_tokens, output_tokens=output_tokens, blocks=blocks, text=text
    )
