"""Read measured points for a calibration. A point is the time of one isolated piece of work."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import TypeVar

from forebay.traces.ground.errors import InputError
from forebay.traces.reading.containers import table_rows
from forebay.traces.reading.unpack import open_input
from forebay.traces.rows import FileFacts, RowError, SourceRow

KINDS = {
    "ttft": "send to first token of one request alone, over HTTP",
    "itl": "mean seconds between tokens of batch_size equal requests that only decode",
    "tpot": "of one request, seconds from first to last token for each later token, over HTTP",
    "stall": "longest gap of a chat's tokens beside a prompt of prompt_tokens",
    "offline": "batch_size equal requests from submission to the last token, no HTTP",
}
DEFAULT_BATCHED_TOKENS = 8192
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")
_COMMENT = re.compile(rb"(?m)^[ \t]*#.*$")
Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement. `line` is its place in the file, from 1.

    Attributes:
        prompt_tokens: prompt of each request. For itl and tpot the context where decoding starts.
        cached_tokens: prompt tokens found in the prefix cache.
        batch_size: number of equal requests at once.
        output_tokens: output of each request.
        held_out: the point is compared with the model, but not fitted.
        text: the API server read and tokenized a text. False if a TTFT or TPOT has no time for it.
    """

    line: int
    kind: str
    seconds: float
    prompt_tokens: int
    cached_tokens: int = 0
    batch_size: int = 1
    output_tokens: int = 1
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS
    held_out: bool = False
    note: str = ""
    text: bool = True

    def __str__(self) -> str:
        words = f"{self.kind} {self.prompt_tokens:,}"
        if self.cached_tokens:
            words += f", {self.cached_tokens:,} cached"
        if self.output_tokens > 1:
            words += f", {self.output_tokens:,} out"
        if self.batch_size > 1:
            words += f", batch {self.batch_size}"
        if self.max_num_batched_tokens != DEFAULT_BATCHED_TOKENS:
            words += f", chunk {self.max_num_batched_tokens:,}"
        return words


_FIELDS = tuple(field.name for field in fields(Point) if field.name != "line")
_OTHER_NAMES = ("context", "prompt", "output")


def read_points(path: Path, batched_tokens: int = DEFAULT_BATCHED_TOKENS) -> tuple[Point, ...]:
    """Read `path`. `batched_tokens` is the token budget of points that state none.

    Raises InputError that names file, line and key.
    """
    points = parsed_rows(path, lambda row: _point(row, batched_tokens))
    if not points:
        raise InputError(f"{path}: no points; give rows of kind, prompt_tokens, seconds")
    return tuple(points)


def parsed_rows(
    path: Path, parse: Callable[[SourceRow], Parsed], *, skip_bad: bool = False
) -> list[Parsed]:
    """Parse the rows of CSV, JSON or Parquet. In a text, `#` begins a line of comment.

    Args:
        skip_bad: pass over rows that cannot be read, such as half a line after a full disk.

    Raises InputError that names file and line.
    """
    parsed: list[Parsed] = []
    number = 1
    try:
        with open_input(str(path)) as file:
            data = file.read()
        # A comment of a text becomes a blank line, so that the other lines keep their numbers.
        text = data if b"\0" in data else _COMMENT.sub(b"", data)
        for line, item in table_rows(BytesIO(text), FileFacts(str(path))):
            number = line
            if isinstance(item, RowError):
                if skip_bad:
                    continue
                raise item
            parsed.append(parse(item))
    except OSError as error:
        why = f"cannot be read ({error.strerror}); give points, a run folder or results"
        raise InputError(f"{path}: {why}") from error
    except RowError as error:
        raise InputError(f"{path}:{number}: {error}") from error
    return parsed


def _point(row: SourceRow, batched_tokens: int) -> Point:
    # Read the columns.
    for key in row.values:
        if key not in _FIELDS + _OTHER_NAMES:
            raise RowError(f"{key}: unknown column; known are {', '.join(_FIELDS)}")
    point = Point(
        line=row.number,
        kind=str(row.required("kind")),
        seconds=row.seconds("seconds"),
        prompt_tokens=row.whole("prompt_tokens", "prompt", "context", least=1),
        cached_tokens=row.whole_or(0, "cached_tokens") or 0,
        batch_size=row.whole_or(1, "batch_size", least=1) or 1,
        output_tokens=row.whole_or(1, "output_tokens", "output", least=1) or 1,
        max_num_batched_tokens=row.whole_or(batched_tokens, "max_num_batched_tokens", least=1)
        or batched_tokens,
        held_out=_flag(row, "held_out", default=False),
        note=row.text("note") or "",
        text=_flag(row, "text", default=True),
    )
    # Refuse values that no measurement has.
    if point.kind not in KINDS:
        raise RowError(f"kind {point.kind}: give {', '.join(KINDS)}")
    if not point.seconds:
        raise RowError("seconds is 0; give seconds, more than 0")
    if point.kind == "ttft" and point.batch_size != 1:
        raise RowError("a ttft is for one request alone; batch_size is not 1")
    if point.cached_tokens >= point.prompt_tokens:
        raise RowError("cached_tokens must be fewer than prompt_tokens")
    return point


def _flag(row: SourceRow, column: str, *, default: bool) -> bool:
    value = row.get(column)
    word = str(default if value is None else value).strip().lower()
    if word not in _TRUE + _FALSE:
        raise RowError(f"{column} {word}: give true or false")
    return word in _TRUE
