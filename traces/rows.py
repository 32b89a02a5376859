"""Read one row of a table: its values by column, as whole numbers, times or text.

A reader of a format gets rows only. The error of a wrong value names its column. The unit of time
and the kind of time zone are the same in all rows of a file.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from math import inf, isfinite
from reprlib import Repr
from typing import Any, Final, TypeVar

import orjson

UNITS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_ISO_REST = re.compile(r"(\.[0-9]{6})[0-9]+")
_LONG_WORD = re.compile(r"(\S{100})\S{20,}")
_Default = TypeVar("_Default")
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_GROUPED = re.compile("[0-9]{1,3}([, \u00a0\u2009\u202f])[0-9]{3}(\\1[0-9]{3})*")
NO_VALUE: Final = frozenset(
    ("", "-", "--", "null", "none", "nil", "undefined", "nan", "n/a", "na", "#n/a", "\\n", "inf",
     "+inf", "-inf", "infinity", "-infinity")
)  # fmt: skip
"""Cells of numbers and names that hold no value, in lower case, as tools and databases write."""


class RowError(ValueError):
    """An error in one row, with its fix. The reader adds file and line.

    A `fatal` error (a wrong header) concerns the whole file and cannot be skipped. Long words are
    shortened, because they are from the file.
    """

    def __init__(self, what: str, *, fatal: bool = False) -> None:
        super().__init__(_LONG_WORD.sub(r"\1...", what))
        self.fatal = fatal


SHAPE_ERRORS: Final = (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError,
                       RecursionError)  # fmt: skip
"""Raised by a reader that meets a list where its format has text, and the like. A reader, also one
of a plug-in, gets any JSON value. The callers of readers turn these errors into RowErrors."""


def is_missing(value: object) -> bool:
    """True for a cell that holds no number and no name, in every reader."""
    if isinstance(value, str):
        return value.strip().lower() in NO_VALUE
    return value is None or (type(value) is float and not isfinite(value))


def ungrouped(text: str) -> str:
    """Return a number without the sign between its thousands: 1,200 and 1 200 become 1200."""
    text = text.strip()
    return re.sub("[^0-9]", "", text) if _GROUPED.fullmatch(text) else text


def shape_error(error: Exception) -> RowError:
    """Say that a row does not have the shape of its format."""
    return RowError(
        f"a value is not of this format ({type(error).__name__}: {str(error)[:80]}); correct the "
        "row, or name another format"
    )


class NotARequestError(Exception):
    """A row that is not an LLM request, such as a health check. The reader counts it by reason."""


@dataclass(slots=True)
class FileFacts:
    """Properties of one file that its rows share, filled in while it is read.

    Attributes:
        path: the file as given.
        decimal_comma: numbers may be written as 0,5 (CSV with semicolons).
        units: the unit of each column of times, as its first row has it.
        zoned: True if times have a UTC offset, None before the first time.
        notes: missing or dropped values, each with its number of rows.
        last_input_tokens: prompt length of the last row that has it.
        places: 0, 1, 2 ... for requests of a file that has neither times nor names for them.
        memory: values that the reader of a format keeps for later rows, such as the last turn.
    """

    path: str = ""
    decimal_comma: bool = False
    units: dict[str, str] = field(default_factory=dict)
    zoned: bool | None = None
    notes: Counter[str] = field(default_factory=Counter)
    last_input_tokens: int = 1
    places: Iterator[int] = field(default_factory=count)
    memory: dict[Any, Any] = field(default_factory=dict)


class SourceRow:
    """One row: values by column, which may be dotted paths (`usage.prompt_tokens`).

    Attributes:
        number: line or index in the file, from 1.
        values: the columns. A line of text has the one column `line`.
        facts: properties of the whole file.
    """

    __slots__ = ("facts", "number", "values")

    def __init__(self, number: int, values: dict[str, Any], facts: FileFacts) -> None:
        self.number = number
        self.values = values
        self.facts = facts

    def with_values(self, values: dict[str, Any]) -> "SourceRow":
        """Return a row of the same place with other values."""
        return SourceRow(self.number, values, self.facts)

    def inside(self, column: str) -> "SourceRow":
        """Return the object under `column` as a row, or this row if it has no such object."""
        value = self.values.get(column)
        return self.with_values(value) if isinstance(value, dict) else self

    def note(self, what: str) -> None:
        """Count a missing or dropped value, which the command prints with its number of rows."""
        self.facts.notes[what] += 1

    def second(self) -> float:
        """Return the time of the next request of a file without times: 0, 1, 2 ... seconds."""
        self.note("requests without a time, which arrive a second apart; a replay sets its --rate")
        return float(next(self.facts.places))

    def turn_before(self, session: str | None, name: str) -> str | None:
        """Return the last turn of `session`, which `name` is from now on."""
        if session is None:
            return None
        before = self.facts.memory.get(session)
        self.facts.memory[session] = name
        return before

    def get(self, *columns: str) -> Any:
        """Return the first of `columns` that is present and not empty, or None."""
        for column in columns:
            value = self.values.get(column)
            if value is None and "." in column:
                value = _dotted(self.values, column)
            if value is not None and value != "":
                return value
        return None

    def cell(self, *columns: str) -> Any:
        """Return the first of `columns` that holds a number or a name, or None."""
        return next(
            (value for column in columns if not is_missing(value := self.get(column))), None
        )

    def required(self, *columns: str) -> Any:
        """Return the value that `cell` or else `get` returns (RowError: no value)."""
        value = self.cell(*columns)
        if value is None:
            value = self.get(*columns)
        if value is None:
            raise RowError(f"{columns[0]}: no such column in this row, or nothing in it")
        return value

    def whole(self, *columns: str, least: int = 0) -> int:
        """Read a whole number of `least` or more (RowError: another value, or no value)."""
        value = self.values.get(columns[0])
        if type(value) is int and value >= least:  # nearly always: long traces take less time
            return value
        value = self.required(*columns)
        if type(value) is int and value >= least:
            return value
        if type(value) is float and value.is_integer() and value >= least:
            return int(value)
        text = ""
        if type(value) is str and not (self.facts.decimal_comma and "," in value):
            text = ungrouped(value)
        if text.isdecimal() and least <= int(text) < 10**12:
            return int(text)
        if re.fullmatch(r"[0-9]+\.0*", text) and float(text) >= least:
            return int(float(text))
        raise RowError(
            f"{_named(self, columns)}: {shown(value)} is not a whole number of {least} or more"
        )

    def whole_or(self, default: _Default, *columns: str, least: int = 0) -> int | _Default:
        """Read a whole number like `whole`, or return `default` if no column has a value."""
        return default if self.cell(*columns) is None else self.whole(*columns, least=least)

    def number_of(self, *columns: str) -> float:
        """Read a finite number (RowError: another value, or no value)."""
        value = self.required(*columns)
        if type(value) is str:
            text = value.strip()
            if self.facts.decimal_comma and "." not in text:
                text = text.replace(",", ".", 1)
            text = ungrouped(text)
            value = float(text) if _NUMBER.fullmatch(text) else value
        if type(value) in (int, float) and isfinite(value):
            return float(value)
        raise RowError(f"{_named(self, columns)}: {shown(value)} is not a number")

    def number_or(self, default: _Default, *columns: str) -> float | _Default:
        """Read a finite number, or return `default` if no column has a value."""
        return default if self.cell(*columns) is None else self.number_of(*columns)

    def seconds(self, *columns: str, unit: str = "s") -> float:
        """Read a time or duration of 0 or more in `unit`, and return seconds."""
        raw: Any = self.values.get(columns[0])
        if type(raw) in (int, float) and 0 <= raw < inf:
            return _in_seconds(float(raw), unit)
        raw = self.required(*columns)
        try:
            value = self.number_of(*columns)
        except RowError:
            value = -1.0
        if value < 0:
            raise RowError(f"{_named(self, columns)}: {shown(raw)} is not a time of 0 or more")
        return _in_seconds(value, unit)

    def moment(self, *columns: str, unit: str = "auto") -> float:
        """Read a point in time: seconds from any fixed origin.

        Args:
            unit: s, ms, us or ns for numbers, iso8601 for dates. auto finds it in the first row.

        Raises:
            RowError: the value is not a time, or its unit or kind of time zone differs from the
                rows before.
        """
        value = self.required(*columns)
        column = _named(self, columns)
        if isinstance(value, datetime):
            return self._from_date(column, value)
        text = value.strip() if type(value) is str else None
        if text is not None and (unit == "iso8601" or not _looks_numeric(text)):
            return self._from_date(column, _date(column, text))
        if unit == "iso8601":
            raise RowError(f"{column}: {shown(value)} is not a time like 2026-11-16T18:17:03Z")
        number = self.number_of(column)
        if number < 0:
            raise RowError(f"{column}: {shown(value)} is not a time of 0 or more")
        return _in_seconds(number, unit if unit in UNITS else self._unit(column, number))

    def text(self, *columns: str) -> str | None:
        """Return the first of `columns` that holds a name as text, or None."""
        value = self.cell(*columns)
        return None if value is None else value if type(value) is str else str(value)

    def object(self, *columns: str) -> dict[str, Any]:
        """Return the first of `columns` that is an object or its JSON, else {}."""
        for column in columns:
            value = decoded(self.get(column))
            if isinstance(value, dict):
                return value
        return {}

    def _from_date(self, column: str, when: datetime) -> float:
        zoned = when.tzinfo is not None
        if self.facts.zoned is None:
            self.facts.zoned = zoned
        elif self.facts.zoned != zoned:
            here, before = ("has", "had none") if zoned else ("has no", "had one")
            raise RowError(
                f"{column}: {when.isoformat()} {here} UTC offset, the rows before {before}; write "
                "all times with an offset"
            )
        return (when if zoned else when.replace(tzinfo=UTC)).timestamp()

    def _unit(self, column: str, number: float) -> str:
        """Return the unit of an epoch time (RowError: another unit than in the rows before)."""
        unit = unit_of(number)
        before = self.facts.units.setdefault(column, unit)
        if unit != before and (number > 1e8 or "s" not in (unit, before)):
            raise RowError(
                f"{column}: {number:.15g} looks like {unit}, the rows before are in {before}; "
                "convert them to one unit"
            )
        return before


def _in_seconds(value: float, unit: str) -> float:
    return value / 1000 if unit == "ms" else value * UNITS[unit]  # x / 1000 is exact, x * 1e-3 not


def decoded(value: Any) -> Any:
    """Return `value`, decoded if it is the JSON of an object or a list."""
    if type(value) is str and value[:1] in ("{", "["):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value


def unit_of(number: float) -> str:
    """Return the unit of an epoch time by its size. A smaller number is seconds."""
    for unit, least in (("ns", 1e17), ("us", 1e14), ("ms", 1e11)):
        if abs(number) >= least:
            return unit
    return "s"


class _ShortRepr(Repr):
    """Writes any value in one line, even with long numbers or deep nesting."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = 80

    def repr_int(self, x: int, level: int) -> str:
        few = x.bit_length() <= 128  # Python refuses to write more than 4,300 digits
        return repr(x) if few else f"a number of {x.bit_length() * 3 // 10:,} digits"


_short = _ShortRepr().repr


def shown(value: object) -> str:
    """Format `value`, short enough for one line of an error."""
    if value is None:
        return "nothing"
    text = repr(value[:80]) if isinstance(value, str | bytes) else _short(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _named(row: SourceRow, columns: tuple[str, ...]) -> str:
    for find in (row.cell, row.get):
        for column in columns:
            if find(column) is not None:
                return column
    return columns[0]


def _dotted(values: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(values, list) and part.isdecimal():
            values = values[int(part)] if int(part) < len(values) else None
        else:
            values = values.get(part) if isinstance(values, dict) else None
        values = decoded(values)
        if values is None:
            return None
    return values


def _looks_numeric(text: str) -> bool:
    return _NUMBER.fullmatch(text.replace(",", ".", 1)) is not None


def _date(column: str, text: str) -> datetime:
    try:
        return datetime.fromisoformat(_ISO_REST.sub(r"\1", text.replace(" UTC", "Z")))
    except ValueError:
        raise RowError(
            f"{column}: {text[:60]!r} is not a time like 2023-11-16 18:17:03.9799600"
        ) from None
