"""Read a file of any container as numbered rows: CSV, JSON, JSON lines, Parquet or lines of text.

Gzip, byte order marks, delimiters and decimal commas are settled here. One row is kept at a time.
"""

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

from forebay.traces.errors import InputError
from forebay.traces.rows import (
    SHAPE_ERRORS,
    FileFacts,
    RowError,
    SourceRow,
    shape_error,
    shown,
)

MAX_LINE_BYTES: Final = 64 * 1024 * 1024
"""A longer line is an error: no prompt is that long, and a file without newlines fills memory."""
MAX_DOCUMENT_BYTES: Final = 4 * MAX_LINE_BYTES  # one JSON document, which is parsed as a whole
HEAD_BYTES: Final = 1 << 16
BOM: Final = b"\xef\xbb\xbf"
DELIMITERS: Final = ",;\t|"
csv.field_size_limit(MAX_LINE_BYTES)

Rows = Callable[[BinaryIO, FileFacts], Iterator[tuple[int, Any]]]
"""Reads a file as numbered items; an item is a row, bytes, or a RowError in its place."""


@contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """Open `path` for reading bytes, unpacked if it is gzip; `-` is standard input.

    Raises:
        InputError: the gzip stream is cut short or damaged.
    """
    name = "standard input" if path == "-" else path
    raw = sys.stdin.buffer if path == "-" else open(path, "rb", buffering=1 << 20)  # noqa: SIM115
    try:
        peek = getattr(raw, "peek", None)
        packed = peek is not None and peek(2)[:2] == b"\x1f\x8b"
        yield gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[misc]
    except EOFError as error:
        raise InputError(
            f"{name}: the gzip file is cut short; copy it again, or keep what is there with "
            f"zcat {'FILE' if path == '-' else name} > part and read that with --skip-bad"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{name}: damaged gzip file ({error}); copy it again") from error
    finally:
        if path != "-":
            raw.close()


def read_head(path: str | Path) -> bytes:
    """Return the first bytes of `path`, unpacked; of a pipe or `-`, nothing is consumed."""
    if str(path) == "-":
        peek = getattr(sys.stdin.buffer, "peek", None)  # a replaced standard input may lack it
        head = peek(HEAD_BYTES)[:HEAD_BYTES] if peek else b""
    elif Path(path).is_file():  # reading here would take bytes from a pipe
        try:
            with open(path, "rb") as file:
                head = file.read(HEAD_BYTES)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    else:
        head = b""
    if head[:2] == b"\x1f\x8b":
        with gzip.GzipFile(fileobj=BytesIO(head)) as file:
            head = b""
            try:
                while len(head) < HEAD_BYTES and (more := file.read1(HEAD_BYTES)):
                    head += more
            except (EOFError, OSError, zlib.error):
                pass  # the head of a file ends where it was cut
    return head.removeprefix(BOM)


def raw_lines(
    file: BinaryIO, facts: FileFacts, *, whole: bool = False
) -> Iterator[tuple[int, Any]]:
    """Number the lines that are not blank, without their ends; or `whole`, as they are."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
            yield number, RowError(f"line over {MAX_LINE_BYTES} bytes; is this one request a line?")
            continue
        if number == 1:
            line = line.removeprefix(BOM)
        if whole or (line := line.strip()):
            yield number, line


def text_rows(file: BinaryIO, facts: FileFacts) -> Iterator[tuple[int, Any]]:
    """Read lines of text as rows of the one column `line`."""
    for number, line in raw_lines(file, facts):
        if isinstance(line, bytes):
            line = SourceRow(number, {"line": line.decode("utf-8", "replace")}, facts)
        yield number, line


def table_rows(file: BinaryIO, facts: FileFacts) -> Iterator[tuple[int, Any]]:
    """Read CSV, JSON lines, a JSON array, one JSON document or Parquet, by the first byte."""
    start = b""
    while not start.strip(b" \t\r\n"):
        more = file.read(4)
        if not more:
            return
        start += more
        start = start.removeprefix(BOM)
    rest = _Prefixed(start, file)
    match start.lstrip()[:1]:
        case b"P" if start == b"PAR1":
            yield from _parquet_rows(rest, facts)
        case b"[":
            yield from _array_rows(rest, facts)
        case b"{":
            yield from _json_rows(rest, facts)
        case b"<":
            raise RowError(
                "this is an HTML page, not a trace; download the file again (is a login needed?)",
                fatal=True,
            )
        case _:
            yield from _csv_rows(rest, facts)


class _Prefixed(BytesIO):
    """A file whose first bytes were already read."""

    def __init__(self, start: bytes, file: BinaryIO) -> None:
        super().__init__()
        self._start = start
        self._file = file

    def readline(self, size: int | None = -1, /) -> bytes:
        start, self._start = self._start, b""
        if b"\n" in start:
            line, end, self._start = start.partition(b"\n")
            return line + end
        return start + self._file.readline(-1 if size is None else size)

    def read(self, size: int | None = -1, /) -> bytes:
        start, self._start = self._start, b""
        if size is None or size < 0:
            return start + self._file.read()
        return start + self._file.read(max(size - len(start), 0))


def _json_rows(file: BinaryIO, facts: FileFacts) -> Iterator[tuple[int, Any]]:
    lines = raw_lines(file, facts)
    for number, line in lines:
        if isinstance(line, RowError):
            yield number, line
            continue
        try:
            values = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if number == 1 and line[-1:] in b"{[,":  # one document over several lines
                whole = line + file.read(MAX_DOCUMENT_BYTES)
                yield 1, _document(whole, facts)
                return
            yield number, RowError(f"not JSON ({error}); each line must hold one JSON object")
            continue
        yield number, _row(number, values, facts)


def _document(whole: bytes, facts: FileFacts) -> Any:
    if len(whole) > MAX_DOCUMENT_BYTES:
        return RowError(f"one JSON document over {MAX_DOCUMENT_BYTES >> 20} MiB", fatal=True)
    try:
        return _row(1, orjson.loads(whole), facts)
    except orjson.JSONDecodeError as error:
        return RowError(f"not JSON ({error}); is the file whole?", fatal=True)


def _row(number: int, values: Any, facts: FileFacts) -> Any:
    if isinstance(values, dict):
        return SourceRow(number, values, facts)
    return RowError(f"{shown(values)} is not a JSON object; each row must be one")


def _array_rows(file: BinaryIO, facts: FileFacts) -> Iterator[tuple[int, Any]]:
    """Read the objects of one JSON array, a piece of the file at a time."""
    decode = json.JSONDecoder().raw_decode
    buffer = file.read(HEAD_BYTES).decode("utf-8", "replace").lstrip().removeprefix("[")
    pending, at, number = b"", 0, 0
    while True:
        while at < len(buffer) and buffer[at] in " \t\r\n,":
            at += 1
        if buffer[at : at + 1] == "]":
            return
        try:
            values, at = decode(buffer, at) if at < len(buffer) else (None, -1)
        except json.JSONDecodeError:
            values, at = None, -1 - at
        if at >= 0:
            number += 1
            yield number, _row(number, values, facts)
            continue
        buffer = buffer[-1 - at :]
        at = 0
        more = file.read(max(HEAD_BYTES, len(buffer)))  # doubles, so that long items stay linear
        if not more or len(buffer) > MAX_LINE_BYTES:
            why = "the array ends inside it" if not more else f"over {MAX_LINE_BYTES} bytes"
            raise RowError(f"item {number + 1}: not JSON ({why}); is the file whole?", fatal=True)
        pending += more
        text = pending.decode("utf-8", "ignore")
        pending = pending[len(text.encode()) :] if pending[-1] >= 0x80 else b""
        buffer += text


def _csv_rows(file: BinaryIO, facts: FileFacts) -> Iterator[tuple[int, Any]]:
    broken: list[tuple[int, RowError]] = []
    first = next(raw_lines(file, facts), (1, b""))[1]
    if isinstance(first, RowError):
        raise first
    header_text = first.decode("utf-8", "replace")
    delimiter = max(DELIMITERS, key=header_text.count)
    facts.decimal_comma = delimiter == ";"
    header = [one.strip() for one in next(csv.reader([header_text], delimiter=delimiter))]

    def lines() -> Iterator[str]:
        """Feed the CSV reader, which joins the lines of a quoted field."""
        for number, line in raw_lines(file, facts, whole=True):
            if isinstance(line, RowError):
                broken.append((number + 1, line))
                yield ""
            else:
                numbers.append(number + 1)
                yield line.decode("utf-8", "replace")

    numbers: list[int] = []
    rows = csv.reader(lines(), delimiter=delimiter, strict=True)
    ended = False
    while not ended:
        why, fields = "", None
        try:
            fields = next(rows, None)
            ended = fields is None
        except csv.Error as error:
            why = f"not CSV ({error}); is a quotation mark left open or not doubled?"
        number = numbers[0] if numbers else 1
        numbers.clear()
        yield from broken
        broken.clear()
        if why:
            yield number, RowError(why, fatal="limit" in why)  # what follows is not read
        elif fields and len(fields) == len(header):
            yield number, SourceRow(number, dict(zip(header, fields, strict=True)), facts)
        elif fields and any(map(str.strip, fields)):  # else a blank line
            shown_header = ", ".join(header)[:60]
            why = f"{len(fields)} fields, the header has {len(header)} ({shown_header})"
            yield number, RowError(why)


def _parquet_rows(file: BinaryIO, facts: FileFacts) -> Iterator[tuple[int, Any]]:
    from pyarrow import ArrowInvalid, BufferReader
    from pyarrow.parquet import ParquetFile

    try:  # its index is at the end: a file in a pipe has to be in memory
        table = ParquetFile(BufferReader(file.read()))
        number = 0
        for batch in table.iter_batches():
            for values in batch.to_pylist():
                number += 1
                yield number, SourceRow(number, values, facts)
    except ArrowInvalid as error:
        raise RowError(f"not Parquet ({error}); is the file whole?", fatal=True) from error


def unpacked(
    rows: Iterable[tuple[int, Any]],
    unpack: Callable[[dict[str, Any]], Iterable[dict[str, Any]]],
    facts: FileFacts,
) -> Iterator[tuple[int, Any]]:
    """Replace each row by the rows inside it; they keep its number."""
    for number, row in rows:
        if isinstance(row, RowError):
            yield number, row
            continue
        try:
            for values in unpack(row.values):
                yield number, SourceRow(number, values, facts)
        except RowError as error:
            yield number, error
        except SHAPE_ERRORS as error:
            yield number, shape_error(error)
