"""Read a file of one request a line as a stream, whatever its format.

The reader numbers lines and checks the rules of all formats. A bad row becomes one clear error or,
if asked, is skipped and counted. The reader keeps one line at a time, so a trace can have any size.
It never repairs a row. It does not look for duplicate ids, which would take memory that grows with
the trace.
"""

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from forebay.traces.errors import InputError
from forebay.traces.schema import TraceRequest

MAX_LINE_BYTES = 64 * 1024 * 1024
"""A longer line is an error: no prompt is that long, and a file without newlines fills memory."""


class RowError(ValueError):
    """An error in one row, with its fix; the reader adds file and line.

    A `fatal` error (a wrong header) concerns the whole file and cannot be skipped.
    """

    def __init__(self, what: str, *, fatal: bool = False) -> None:
        super().__init__(what)
        self.fatal = fatal


ParseRow = Callable[[bytes, int], TraceRequest | None]
"""Takes a line without its end, and its number from 1; returns None for a header."""


class TraceReader(Iterator[TraceRequest]):
    """An iterator over the requests of one file; use it once.

    Attributes:
        path: the file as given; `-` is standard input.
        rows: requests read so far.
        skipped: bad rows skipped so far (only with `skip_bad`).

    Raises (while iterating, or at once for a missing file):
        InputError: unreadable file, bad row, arrival times going back, or no request at all.
    """

    def __init__(self, path: str | Path, parse: ParseRow, *, skip_bad: bool = False) -> None:
        self.path = str(path)
        self.rows = 0
        self.skipped = 0
        self._parse = parse
        self._skip_bad = skip_bad
        if self.path != "-":
            if not Path(path).exists():
                raise InputError(f"{path}: no such file; check the path")
            if Path(path).is_dir():
                raise InputError(f"{path}: is a directory; name the trace file in it")
        # A generator owns the open file, so a reader that is abandoned half way closes it.
        self._requests = self._read()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TraceRequest:
        return next(self._requests)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._requests.close()

    def _read(self) -> Generator[TraceRequest]:
        name = "standard input" if self.path == "-" else self.path
        last_s = 0.0
        try:
            with open_input(self.path) as file:
                for number, line in _lines(file):
                    try:
                        if line is None:
                            raise RowError(
                                f"line over {MAX_LINE_BYTES} bytes; is this one request a line?"
                            )
                        request = self._parse(line, number)
                        if request is None:
                            continue
                        if request.arrival_s < last_s:
                            raise RowError(
                                f"time goes back from {last_s:.6f} s to {request.arrival_s:.6f} s; "
                                "sort the rows by arrival"
                            )
                    except RowError as error:
                        if not self._skip_bad or error.fatal:
                            raise InputError(f"{name}:{number}: {error}") from error
                        self.skipped += 1
                        continue
                    last_s = request.arrival_s
                    self.rows += 1
                    yield request
        except OSError as error:
            raise InputError(f"{name}: cannot be read ({error.strerror})") from error
        if not self.rows:
            bad = f" ({self.skipped} bad rows skipped)" if self.skipped else ""
            raise InputError(
                f"{name}: no requests in this trace{bad}; check that it is the right file"
            )


def open_input(path: str) -> "BinaryIO | nullcontext[BinaryIO]":
    """Open `path` for reading bytes; `-` is standard input, which stays open."""
    if path == "-":
        return nullcontext(sys.stdin.buffer)
    return open(path, "rb", buffering=1 << 20)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Number the lines that are not blank, without their ends; None stands for a too long line."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
            yield number, None
            continue
        line = line.strip()
        if line:
            yield number, line
