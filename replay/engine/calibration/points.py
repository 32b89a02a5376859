"""Read measured points for a calibration from CSV, JSON lines or the folder of a replay run.

A point is the time of one isolated piece of work. Of a run only requests that were alone on their
server count, because the times of the others include work of their neighbours.
"""

import csv
import io
import math
from collections import defaultdict
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from forebay.traces.errors import InputError

KINDS = {
    "ttft": "send to first token of one request alone, over HTTP",
    "itl": "mean seconds between tokens of batch_size equal requests that only decode",
    "tpot": "of one request, seconds from first to last token for each later token, over HTTP",
    "stall": "longest gap of a chat's tokens beside a prompt of prompt_tokens",
    "offline": "batch_size equal requests from submission to the last token, no HTTP",
}
DEFAULT_BATCHED_TOKENS = 8192
LEAST_DECODED = 8  # output tokens: fewer give no rate
ALONE_SLACK_S = 1e-3


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


_NAMES = {"context": "prompt_tokens", "prompt": "prompt_tokens", "output": "output_tokens"}
_FIELDS = tuple(field.name for field in fields(Point) if field.name != "line")


@dataclass(frozen=True, slots=True)
class Points:
    """Points and, in `used`, a sentence on which parts of the input became points."""

    points: tuple[Point, ...]
    used: str


def read_points(path: Path, batched_tokens: int = DEFAULT_BATCHED_TOKENS) -> Points:
    """Read `path`. `batched_tokens` is the token budget of points that state none.

    Raises InputError that names file, line and key.
    """
    if path.is_dir():
        return _read_run(path, batched_tokens)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InputError(f"{path}: cannot be read ({reason})") from error
    rows = _json_rows(path, text) if text.lstrip().startswith("{") else _csv_rows(path, text)
    points = tuple(_point(path, line, row, batched_tokens) for line, row in rows)
    if not points:
        raise InputError(f"{path}: no points; give rows of kind, prompt_tokens, seconds")
    return Points(points, f"{len(points)} points of {path.name}")


def _json_rows(path: Path, text: str) -> list[tuple[int, dict[str, Any]]]:
    rows = []
    for line, raw in enumerate(text.splitlines(), 1):
        if not raw.strip():
            continue
        try:
            row = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise InputError(f"{path}:{line}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}:{line}: not an object")
        rows.append((line, row))
    return rows


def _csv_rows(path: Path, text: str) -> list[tuple[int, dict[str, Any]]]:
    """Return rows under the header's names, without blank cells and `#` comment lines."""
    lines = [(n, raw) for n, raw in enumerate(text.splitlines(), 1)
            if raw.strip() and not raw.lstrip().startswith("#")]  # fmt: skip
    if not lines:
        return []
    names, *rows = csv.reader(io.StringIO("\n".join(raw for _, raw in lines)))
    named = []
    for (line, _), cells in zip(lines[1:], rows, strict=True):
        if len(cells) != len(names):
            raise InputError(f"{path}:{line}: {len(cells)} cells under {len(names)} headings")
        row = {k.strip(): v.strip() for k, v in zip(names, cells, strict=True) if v.strip()}
        named.append((line, dict(row)))
    return named


def _point(path: Path, line: int, row: dict[str, Any], batched_tokens: int) -> Point:
    values: dict[str, Any] = {"max_num_batched_tokens": batched_tokens}
    for key, value in row.items():
        name = _NAMES.get(key, key)
        if name not in _FIELDS:
            raise InputError(
                f"{path}:{line}: {key}: unknown column; known are {', '.join(_FIELDS)}"
            )
        if value is not None:
            values[name] = _value(path, line, name, value)
    for needed in ("kind", "prompt_tokens", "seconds"):
        if needed not in values:
            raise InputError(f"{path}:{line}: {needed} is missing")
    point = Point(line=line, **values)
    if point.kind not in KINDS:
        raise InputError(f"{path}:{line}: kind {point.kind}: give {', '.join(KINDS)}")
    if point.kind == "ttft" and point.batch_size != 1:
        raise InputError(f"{path}:{line}: a ttft is for one request alone; batch_size is not 1")
    if point.cached_tokens >= point.prompt_tokens:
        raise InputError(f"{path}:{line}: cached_tokens must be fewer than prompt_tokens")
    return point


def _value(path: Path, line: int, name: str, value: Any) -> Any:
    if name in ("kind", "note"):
        return str(value)
    if name in ("held_out", "text"):
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if str(value).lower() not in words:
            raise InputError(f"{path}:{line}: {name} {value}: give true or false")
        return words[str(value).lower()]
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    least = 0 if name == "cached_tokens" else 1
    if name == "seconds":
        if not 0 < number < math.inf:
            raise InputError(f"{path}:{line}: seconds {value}: give seconds, more than 0")
        return number
    if not (number >= least and number == int(number)):
        raise InputError(f"{path}:{line}: {name} {value}: give a whole number of {least} or more")
    return int(number)


def _read_run(path: Path, batched_tokens: int) -> Points:
    """Return service TTFT and TPOT of the requests of a run that were alone on their server."""
    table = path / "requests.parquet"
    columns = ("backend", "sent_s", "done_s", "outcome", "prompt_tokens", "cached_tokens",
               "output_tokens", "ttft_service_s", "tpot_s")  # fmt: skip
    try:
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(str(table), columns=list(columns)).to_pylist()
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: not a run folder: {table.name} cannot be read") from error
    # The times of requests that shared their server include work of their neighbours.
    sent = [row for row in rows if row["sent_s"] is not None and row["done_s"] is not None]
    alone = [row for row in _alone(sent) if row["outcome"] == "ok" and row["prompt_tokens"]]
    if not alone:
        raise InputError(
            f"{path}: no request was alone on its server, and the times of the others include "
            "work of their neighbours; replay with --arrivals closed:1"
        )
    # Requests of equal lengths make one point.
    points = tuple(
        Point(line, kind, median(times), prompt, cached, 1, output, batched_tokens,
              note=f"median of {len(times)}")
        for line, ((kind, prompt, cached, output), times) in enumerate(_groups(alone), 1)
    )  # fmt: skip
    return Points(
        points,
        f"{len(alone)} of {len(rows)} requests of {path.name} were alone on their server; their "
        f"service TTFT and TPOT give {len(points)} points (median of equal lengths)",
    )


def _groups(rows: list[dict[str, Any]]) -> list[tuple[tuple[str, int, int, int], list[float]]]:
    """Return (kind, prompt, cached and output tokens) and the measured seconds, sorted."""
    groups: dict[tuple[str, int, int, int], list[float]] = defaultdict(list)
    for row in rows:
        prompt, cached = row["prompt_tokens"], row["cached_tokens"] or 0
        output = row["output_tokens"] or 1
        if row["ttft_service_s"] and cached < prompt:
            groups["ttft", prompt, cached, 1].append(row["ttft_service_s"])
        if row["tpot_s"] and output >= LEAST_DECODED:
            groups["tpot", prompt, 0, output].append(row["tpot_s"])
    return sorted(groups.items())


def _alone(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the requests that overlap no other request on the same backend."""
    by_backend: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: float(row["sent_s"])):
        by_backend[row["backend"]].append(row)
    alone = []
    for mine in by_backend.values():
        busy_until = -math.inf
        for row, after in zip(mine, [*mine[1:], None], strict=True):
            free = busy_until <= row["sent_s"] + ALONE_SLACK_S
            last = after is None or row["done_s"] <= after["sent_s"] + ALONE_SLACK_S
            if free and last:
                alone.append(row)
            busy_until = max(busy_until, row["done_s"])
    return alone
