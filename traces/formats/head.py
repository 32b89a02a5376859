"""The first bytes of a file, by which its format is recognised."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from forebay.traces.reading.columnar import PARQUET, column_names
from forebay.traces.reading.containers import csv_header
from forebay.traces.reading.unpack import read_head
from forebay.traces.rows import RowError


@dataclass(frozen=True, slots=True)
class Head:
    """The first bytes of a file, for the functions that recognise formats.

    Attributes:
        line: the first line, or its beginning.
        columns: the keys of the first row, or all keys in the head of an incomplete document.
        first: the first row, or {} if it is incomplete.
    """

    line: str
    columns: frozenset[str]
    first: dict[str, Any]

    def has(self, *columns: str) -> bool:
        return self.columns.issuperset(columns)

    def has_any(self, *columns: str) -> bool:
        return not self.columns.isdisjoint(columns)


def numbered_result(path: str | Path) -> tuple[Path, int | None]:
    """Split `FILE#2` into file and number of a result, unless a file has that name."""
    whole = Path(path)
    stem, mark, number = whole.name.rpartition("#")
    if mark and stem and number.isdigit() and not whole.exists():
        return whole.with_name(stem), int(number)
    return whole, None


def head_of(path: str | Path) -> Head:
    """Look at the first bytes of `path`. Standard input (`-`) is only peeked at."""
    content = read_head(path)
    if content.startswith(PARQUET):
        return Head("", column_names(path), {})
    text = content.decode("utf-8", "replace").lstrip()
    line = re.split(r"[\r\n]", text, maxsplit=1)[0].strip()
    first: Any = None
    if text[:1] in ("{", "["):
        try:
            first = orjson.loads(line)
        except orjson.JSONDecodeError:
            first = _first_item(text)
        if isinstance(first, list):
            first = first[0] if first else None
        if isinstance(first, dict):
            return Head(line, frozenset(first), first)
        return Head(line, frozenset(re.findall(r'"([^"\\]{1,80})"\s*:', text)), {})
    try:
        return Head(line, frozenset(csv_header(line)[0] if line else ()), {})
    except RowError:  # not a table, which the reader of the rest reports
        return Head(line, frozenset(), {})


def _first_item(text: str) -> Any:
    """Decode the first object of an array over several lines, or return None if incomplete."""
    try:
        return json.JSONDecoder().raw_decode(text.lstrip("[ \t\r\n"))[0]
    except (ValueError, RecursionError):
        return None
