"""Cut a file of any container into numbered rows: CSV, JSON, JSON lines, Parquet or lines of text.

The first bytes decide the container, then the suffix of the name. Else the file is text. Byte
order marks, delimiters and decimal commas are settled here. One row is kept at a time.
"""

import codecs
import csv
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

from forebay.traces.reading.columnar import (
    ARROW,
    ARROW_STREAM,
    PARQUET,
    check_columns,
    columnar_rows,
)
from forebay.traces.reading.unpack import BOM, FOREIGN, HEAD_BYTES, Prefixed
from forebay.traces.rows import SHAPE_ERRORS, FileFacts, RowError, SourceRow, shape_error, shown

MAX_LINE_BYTES: Final = 64 * 1024 * 1024
"""A longer line is an error: no prompt is that long, and a file without newlines fills memory."""
MAX_DOCUMENT_BYTES: Final = 4 * MAX_LINE_BYTES  # one JSON document, which is parsed as a whole
MOST_JSON_VALUES: Final = 10_000_000
"""More values in a line or document need gigabytes when they are decoded."""
START_BYTES: Final = 16
DELIMITERS: Final = ",;\t|"
csv.field_size_limit(MAX_LINE_BYTES)

Rows = Callable[[BinaryIO, FileFacts], Iterator[tuple[int, Any]]]
"""Reads a file as numbered items. An item is a row, bytes, or a RowError in its place."""


def raw_lines(
    file: BinaryIO, facts: FileFacts, *, whole: bool = False
) -> Iterator[tuple[int, Any]]:
    """Number the lines that are not blank, without line ends. With `whole`, keep every byte."""
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
    """Read CSV, JSON lines, a JSON array, one JSON document, Parquet or Arrow, by the first bytes.

    Raises:
        RowError: the file is of another kind, or differs from its suffix.
    """
    # Files that are not text.
    start = file.read(START_BYTES)
    if start.startswith((PARQUET, ARROW, ARROW_STREAM)):
        yield from columnar_rows(file, start, facts)
        return
    if why := _not_text(start, Path(facts.path).suffix.lower()):
        raise RowError(why, fatal=True)
    # The first sign that is not blank decides between JSON and CSV.
    start = start.removeprefix(BOM)
    more = start
    while not more.strip(b" \t\r\n"):
        more = file.read(START_BYTES)
        if not more:
            return
        start += more
        if len(start) > HEAD_BYTES:
            raise RowError(f"no text in the first {HEAD_BYTES:,} bytes", fatal=True)
    rest = Prefixed(start, file)
    match start.lstrip()[:1]:
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


def _not_text(start: bytes, suffix: str) -> str:
    """Return the reason why a file that begins with `start` is not text, or ""."""
    for magic, what in FOREIGN:
        if start.startswith(magic):
            return f"this is {what}; convert it to Parquet, CSV or JSON lines"
    if start.startswith(b"PARE"):
        return "this Parquet file is encrypted; write it without a key"
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "this is text in UTF-16; convert it with iconv -f UTF-16 -t UTF-8"
    if start.startswith(b"version https://"):
        return "this is a pointer of Git LFS, not the file itself; run git lfs pull"
    if b"\0" in start:
        return "this is a binary file of an unknown kind; convert it to Parquet, CSV or JSON lines"
    if suffix in (".parquet", ".pq", ".arrow", ".feather") and start[:1] not in b"<{[":
        return f"named {suffix}, but the file does not begin as such files do; copy it again"
    return ""


def _json_rows(file: BinaryIO, facts: FileFacts) -> Iterator[tuple[int, Any]]:
    lines = raw_lines(file, facts)
    for number, line in lines:
        if isinstance(line, RowError):
            yield number, line
            continue
        try:
            values = json_value(line)
        except ValueError as error:
            if number == 1 and line[-1:] in b"{[,":  # one document over several lines
                whole = line + file.read(MAX_DOCUMENT_BYTES)
                yield 1, _document(whole, facts)
                return
            why = f"not JSON ({str(error)[:120]}); each line must hold one JSON object"
            yield number, RowError(why)
            continue
        yield number, _row(number, values, facts)


def _document(whole: bytes, facts: FileFacts) -> Any:
    if len(whole) > MAX_DOCUMENT_BYTES:
        return RowError(f"one JSON document over {MAX_DOCUMENT_BYTES >> 20} MiB", fatal=True)
    try:
        return _row(1, json_value(whole), facts)
    except ValueError as error:
        return RowError(f"not JSON ({str(error)[:120]}); is the file whole?", fatal=True)


def json_value(data: bytes) -> Any:
    """Decode JSON, and NaN and Infinity, which Python's own encoder writes.

    Raises:
        ValueError: not JSON, nested too deeply, or too many values.
    """
    check_values(data)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        if b"NaN" not in data and b"Infinity" not in data:
            raise
    try:
        values = json.loads(data)
        orjson.dumps(values)  # raises TypeError for a value that a trace cannot store
    except (RecursionError, TypeError) as error:
        raise ValueError(str(error)) from error
    return values


def check_values(data: bytes | str) -> None:
    """Raise ValueError if `data` has more than `MOST_JSON_VALUES` values."""
    if len(data) > MOST_JSON_VALUES:
        signs = (b",", b"[", b"{") if isinstance(data, bytes) else (",", "[", "{")
        if sum(map(data.count, signs)) > MOST_JSON_VALUES:  # type: ignore[arg-type]
            raise ValueError(f"more than {MOST_JSON_VALUES:,} values")


def _row(number: int, values: Any, facts: FileFacts) -> Any:
    if not isinstance(values, dict):
        return RowError(f"{shown(values)} is not a JSON object; each row must be one")
    try:
        check_columns(len(values))
    except RowError as error:
        return error
    return SourceRow(number, values, facts)


def _array_rows(file: BinaryIO, facts: FileFacts) -> Iterator[tuple[int, Any]]:
    """Read the objects of one JSON array, a piece of the file at a time."""
    decode = json.JSONDecoder().raw_decode
    text_of = codecs.getincrementaldecoder("utf-8")("replace").decode
    buffer = text_of(file.read(HEAD_BYTES)).lstrip().removeprefix("[")
    at = number = 0
    while True:
        # Skip to the next item, or find the end of the array.
        while at < len(buffer) and buffer[at] in " \t\r\n,":
            at += 1
        if buffer[at : at + 1] == "]":
            return
        # Decode the item. A negative `at` means that the buffer ends inside it.
        start = at
        try:
            check_values(buffer)
            at = decode(buffer, at)[1] if at < len(buffer) else -1
        except json.JSONDecodeError:
            at = -1 - at
        except (RecursionError, ValueError) as error:
            raise RowError(f"item {number + 1}: not JSON ({error})", fatal=True) from error
        if at >= 0:
            number += 1
            yield number, _item(number, buffer[start:at], facts)
            continue
        # Read on, and try the same item again.
        buffer = buffer[-1 - at :]
        at = 0
        more = file.read(max(HEAD_BYTES, len(buffer)))  # doubles, so that long items stay linear
        if not more or len(buffer) > MAX_LINE_BYTES:
            why = "the array ends inside it" if not more else f"over {MAX_LINE_BYTES} bytes"
            raise RowError(f"item {number + 1}: not JSON ({why}); is the file whole?", fatal=True)
        buffer += text_of(more)


def _item(number: int, text: str, facts: FileFacts) -> Any:
    """Decode an item by the rules of all other JSON: a number of 400 digits is an error."""
    try:
        return _row(number, json_value(text.encode()), facts)
    except ValueError as error:
        return RowError(f"not JSON ({str(error)[:120]}); correct the item")


def csv_header(line: str) -> tuple[list[str], str]:
    """Split the first line of a CSV file into columns, and return them with the delimiter.

    Raises:
        RowError: the line is not a header.
    """
    delimiter = max(DELIMITERS, key=line.count)
    check_columns(line.count(delimiter) + 1)
    if "\0" in line:
        raise RowError("this is a binary file, not a table; name its format", fatal=True)
    try:
        return [name.strip() for name in next(csv.reader([line], delimiter=delimiter))], delimiter
    except csv.Error as error:
        raise RowError(f"not CSV ({error}) in the header", fatal=True) from error


def _lines_of_any_end(file: BinaryIO, facts: FileFacts) -> Iterator[tuple[int, Any]]:
    """Number the lines of a file whose lines end with LF, CR LF or CR alone (old Macs)."""
    number = 0
    for _, line in raw_lines(file, facts, whole=True):
        for piece in line.splitlines(keepends=True) if isinstance(line, bytes) else [line]:
            number += 1
            yield number, piece


def _csv_rows(file: BinaryIO, facts: FileFacts) -> Iterator[tuple[int, Any]]:
    # The header is the first line that is not blank.
    broken: list[tuple[int, RowError]] = []
    source = _lines_of_any_end(file, facts)
    first: Any = b""
    while isinstance(first, bytes) and not first.strip():
        first = next(source)[1]  # `table_rows` has seen text
    if isinstance(first, RowError):
        raise first
    header, delimiter = csv_header(first.decode("utf-8", "replace").strip())
    facts.decimal_comma = delimiter == ";"
    fed = 0

    def lines() -> Iterator[str]:
        """Feed the CSV reader, which joins the lines of a quoted field."""
        nonlocal fed
        for number, line in source:
            if isinstance(line, RowError):
                broken.append((number, line))
                yield ""
                continue
            numbers.append(number)
            fed += len(line)
            if fed > MAX_LINE_BYTES:
                raise RowError(
                    f"row over {MAX_LINE_BYTES} bytes; is a quote left open?", fatal=True
                )
            yield line.decode("utf-8", "replace")

    # A row has the number of its first line.
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
        fed = 0
        yield from broken
        broken.clear()
        if why:
            yield number, RowError(why, fatal="limit" in why)  # the rest is not read
        elif fields and len(fields) == len(header):
            yield number, SourceRow(number, dict(zip(header, fields, strict=True)), facts)
        elif fields and any(map(str.strip, fields)):  # else a blank line
            shown_header = ", ".join(header)[:60]
            why = f"{len(fields)} fields, the header has {len(header)} ({shown_header})"
            yield number, RowError(why)


def unpacked(
    rows: Iterable[tuple[int, Any]],
    unpack: Callable[[dict[str, Any]], Iterable[dict[str, Any]]],
    facts: FileFacts,
) -> Iterator[tuple[int, Any]]:
    """Replace each row by the rows inside it, which keep its number."""
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
