"""Read and write Forebay's own trace format: one JSON object a line, in order of arrival.

    {"id": "a", "arrival_s": 0.0, "input_tokens": 1500, "output_tokens": 64, "blocks": [0, 1, 2],
     "session": "user-1", "tenant": "acme", "document": "report.pdf"}

| key | type | |
| --- | --- | --- |
| `id` | string | unique within the trace |
| `arrival_s` | number | seconds from the start, 0 or more, ascending |
| `input_tokens` | integer | 1 or more |
| `output_tokens` | integer | 0 or more |
| `blocks` | integers | optional; ceil(input_tokens / block_tokens) ids in [0, 2^64) |
| `block_tokens` | integer | optional; left out when 512 |
| `text` | string | optional; the prompt itself; at most one of `text`, `messages` and `blocks` |
| `session`, `tenant`, `document` | string | optional |
| `service_class` | string | optional; `interactive`, `standard` or `batch` |
| `parent` | string | optional; id of the turn before |
| `waits_for` | strings | optional; ids of further requests whose answers come first |
| `think_s` | number | optional; seconds from the last answer it waits for to this request |
| `messages`, `tools` | objects | optional; of the chat API |
| `model` | string | optional |
| `stream` | boolean | optional; left out when true |
| `parameters` | object | optional; other fields of the request body, such as `stop` |
| `deadline_s` | number | optional; seconds after arrival when the client gave up |
| `status` | integer | optional; HTTP status of the original answer, 100 to 599 |
| `observed` | object | optional; times of the original answer, as a capture has them |

Keys are written in this order. Null and empty values are left out. An unknown key is an error, so
that a misspelt key is not silently lost. Equal requests give equal bytes.
"""

from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from sys import maxsize
from typing import Any, BinaryIO

import orjson

from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.ground.trace_line import FIRST_TEXT, LATER_KEYS, row_bytes
from forebay.traces.ground.whole_file import whole_file
from forebay.traces.reading.containers import check_values
from forebay.traces.reading.reader import Order, TraceReader, time_text
from forebay.traces.rows import RowError, shown

_KEYS = frozenset(TraceRequest.__slots__)
_OPTIONAL_TEXT = (*FIRST_TEXT, "parent", "model")
_FIRST_KEYS = frozenset(TraceRequest.__slots__[:11])
_CLASSES = (None, "interactive", "standard", "batch")
MAX_BLOCK_ID = 2**64 - 1


def read_trace(
    path: str | Path, *, skip_bad: bool = False, sort: bool = False, doubt: str = ""
) -> TraceReader:
    """Open `path` (`-`: standard input) as a stream of requests. `TraceReader` lists the errors."""
    order = Order(held=maxsize if sort else 0)
    return TraceReader(path, parse_row, skip_bad=skip_bad, order=order, doubt=doubt)


def parse_row(line: bytes) -> TraceRequest:
    """Read one line of the format (RowError: not a request)."""
    row = parse_object(line)
    few = _FIRST_KEYS.issuperset(row)
    if not few and not _KEYS.issuperset(row):
        unknown = next(key for key in row if key not in _KEYS)
        raise RowError(f"unknown key {unknown!r}; the keys are {', '.join(TraceRequest.__slots__)}")
    # Names and class.
    identity = row.get("id")
    if type(identity) is not str or not identity:
        raise _wrong("id", identity, "a string of at least one character")
    for key in _OPTIONAL_TEXT:
        value = row.get(key)
        if value is not None and type(value) is not str:
            raise RowError(f"{key}: {shown(value)} is not a string; quote it or leave it out")
    if (service_class := row.get("service_class")) not in _CLASSES:
        raise RowError(
            f"service_class: {shown(service_class)} is not interactive, standard or batch"
        )
    # Lengths and prompt.
    input_tokens = whole_number(row, "input_tokens", least=1)
    block_tokens = BLOCK_TOKENS
    if row.get("block_tokens") is not None:
        block_tokens = whole_number(row, "block_tokens", least=1)
    blocks = None
    if row.get("blocks") is not None:
        if row.get("text") is not None:
            raise RowError("both text and blocks; a prompt is one or the other")
        blocks = block_ids(row, "blocks", input_tokens, block_tokens)
    # Most rows have no later keys, so they are not looked up.
    more = {} if few else _later_values(row)
    return TraceRequest(
        id=identity,
        arrival_s=seconds(row, "arrival_s"),
        input_tokens=input_tokens,
        output_tokens=whole_number(row, "output_tokens", least=0),
        blocks=blocks,
        block_tokens=block_tokens,
        text=row.get("text"),
        session=row.get("session"),
        tenant=row.get("tenant"),
        document=row.get("document"),
        service_class=service_class,
        **more,
    )


def _later_values(row: dict[str, Any]) -> dict[str, Any]:
    """Read the keys that few traces have (RowError: a wrong value)."""
    values = {key: row[key] for key in LATER_KEYS if row.get(key) is not None}
    if "messages" in values and not (row.get("text") is None and row.get("blocks") is None):
        raise RowError("messages beside text or blocks; a prompt is one of them")
    for key in ("messages", "tools"):
        if key in values:
            values[key] = _list_of(row, key, dict, "objects")
    if "waits_for" in values:
        values["waits_for"] = _list_of(row, "waits_for", str, "ids")
    for key in ("think_s", "deadline_s"):
        if key in values:
            values[key] = seconds(row, key)
    if type(values.get("stream", True)) is not bool:
        raise RowError(f"stream: {shown(row['stream'])} is not true or false")
    if type(values.get("parameters", {})) is not dict:
        raise RowError(f"parameters: {shown(row['parameters'])} is not an object")
    _check_observed(values.get("observed", {}))
    if "status" in values and whole_number(row, "status", least=100) > 599:
        raise RowError(f"status: {row['status']} is not an HTTP status (100 to 599)")
    return values


def _check_observed(observed: object) -> None:
    """Raise RowError unless it is an object whose times are times."""
    if not isinstance(observed, dict):
        raise RowError(f"observed: {shown(observed)} is not an object")
    for key in observed:
        if key.endswith("_s"):
            seconds(observed, key)


def _list_of(row: dict[str, Any], key: str, kind: type[Any], words: str) -> tuple[Any, ...]:
    value = row[key]
    if not isinstance(value, list) or any(type(item) is not kind for item in value):
        raise RowError(f"{key}: {shown(value)} is not a list of {words}")
    return tuple(value)


def parse_object(line: bytes) -> dict[str, Any]:
    """Read one line as a JSON object (RowError: another value)."""
    try:
        check_values(line)
        row = orjson.loads(line)
    except ValueError as error:
        raise RowError(f"not JSON ({error}); each line must hold one JSON object") from error
    if not isinstance(row, dict):
        raise RowError(f"{shown(row)} is not a JSON object; each line must hold one")
    return row


def _wrong(key: str, value: object, form: str) -> RowError:
    if value is None:
        return RowError(f"{key}: missing; give {form}")
    return RowError(f"{key}: {shown(value)} is not {form}")


def whole_number(row: dict[str, Any], key: str, *, least: int) -> int:
    value = row.get(key)
    if type(value) is not int or value < least:  # not isinstance, which accepts True
        raise _wrong(key, value, f"a whole number of {least} or more")
    return value


def seconds(row: dict[str, Any], key: str) -> float:
    """Read the time of 0 or more under `key`, in the unit of the file."""
    value: Any = row.get(key)
    if type(value) not in (int, float) or not isfinite(value) or value < 0:
        raise _wrong(key, value, "a time of 0 or more")
    return float(value)


def block_ids(
    row: dict[str, Any], key: str, input_tokens: int, block_tokens: int
) -> tuple[int, ...]:
    """Read the ids under `key`, as many as `input_tokens` needs."""
    ids = row.get(key)
    if not isinstance(ids, list):
        raise RowError(f"{key}: {shown(ids)} is not a list of block ids")
    # Four passes in C are several times faster than one loop in Python, and traces are long.
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > MAX_BLOCK_ID):
        wrong = next(
            block for block in ids if type(block) is not int or not 0 <= block <= MAX_BLOCK_ID
        )
        raise RowError(f"{key}: {shown(wrong)} is not a block id (a whole number in [0, 2^64))")
    needed = -(-input_tokens // block_tokens)
    if len(ids) != needed:
        raise RowError(
            f"{key}: {len(ids)} ids for {input_tokens} tokens; blocks of {block_tokens} tokens "
            f"make {needed}"
        )
    return tuple(ids)


def write_trace(path: str | Path, rows: Iterable[TraceRequest]) -> int:
    """Write all `rows` or no file to `path` (`-`: standard output), and return their number.

    Raises:
        InputError: arrival times go back, which no reader accepts, or `path` cannot be written.
    """
    with whole_file(path) as file:
        return write_rows(file, rows, path)


def write_rows(file: BinaryIO, rows: Iterable[TraceRequest], path: str | Path) -> int:
    """Write `rows` to `file` like `write_trace`. Errors call it `path`."""
    count = 0
    last_s = 0.0
    for request in rows:
        if request.arrival_s < last_s:
            raise InputError(
                f"{path}: time goes back from {time_text(last_s)} s to "
                f"{time_text(request.arrival_s)} s at request {request.id[:60]!r}; "
                "sort them by arrival"
            )
        last_s = request.arrival_s
        try:
            file.write(row_bytes(request))
        except TypeError as error:  # orjson refuses JSON with over 254 levels, for example
            raise InputError(
                f"{path}: request {request.id[:60]!r} cannot be written ({error}); correct its row"
            ) from error
        count += 1
    file.flush()
    return count
