"""Guess which columns of a table have times and lengths, from names and values of first rows."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Final

from forebay.traces.formats.columns import MappedColumn, Mapping, check_map
from forebay.traces.formats.totals import AGGREGATES, only_totals, refuse_without_requests
from forebay.traces.formats.usage import EXCLUDED, PARTS_OF_PROMPT
from forebay.traces.ground.errors import InputError, reading
from forebay.traces.reading.containers import table_rows
from forebay.traces.reading.unpack import open_input
from forebay.traces.rows import (
    FileFacts,
    RowError,
    SourceRow,
    decoded,
    is_missing,
    ungrouped,
    unit_of,
)

SAMPLE_ROWS: Final = 200
MOST_NAME: Final = 100  # a longer name of a column is a line of a log

IN: Final = {"prompt", "input", "in", "request", "context", "prefill", "query", "question"}
OUT: Final = {"completion", "output", "out", "response", "generated", "generation", "decode",
              "answer", "gen", "reply", "produced"}  # fmt: skip
TOKENS: Final = {"token", "tokens", "tok", "toks"}
SIZES: Final = {*TOKENS, "len", "length", "count", "n", "num"}
NOT_SIZES: Final = {"cached", "cache", "cost", "price", "bytes", "max", "limit", "latency", "time",
                    "ms", "id", "reasoning", "rate", "budget", "kb", "usd", "size", "chars",
                    "characters", "words", "type", "status", "code"}  # fmt: skip
# Lengths of these are bytes of HTTP, unless the name says tokens.
OF_HTTP: Final = {"request", "response", "content", "body", "req", "resp"}
NOT_TEXT: Final = {*SIZES, *NOT_SIZES, "format", "name", "hash", "language", "lang", "role", "url",
                   "path", "model"}  # fmt: skip
STARTS: Final = {"timestamp", "ts", "time", "start", "started", "created", "received", "arrival",
                 "arrived", "date", "datetime", "begin", "submitted", "enqueued", "requested",
                 "when", "at"}  # fmt: skip
ENDS: Final = {"end", "ended", "finish", "finished", "complete", "completed", "logged", "done"}
# Words of totals and rates, which are not a length or a time of one request.
NOT_OF_ONE: Final = {*AGGREGATES, "rate", "per", "second", "sum", "count", "min", "max",
                     "concurrency"}  # fmt: skip
NOT_STARTS: Final = {*NOT_OF_ONE, "num", "requests", "tokens", "total",
                     "first", "ttft", "latency", "duration", "elapsed", "took", "last", "updated",
                     "queue", "expires", "prefill", "decode", "itl", "tpot"}  # fmt: skip
DURATIONS: Final = {"latency", "duration", "elapsed", "took", "rt", "runtime"}
SUFFIXES: Final = {"ms": "ms", "millis": "ms", "msec": "ms", "us": "us", "micros": "us",
                   "ns": "ns", "nanos": "ns", "nano": "ns", "s": "s", "sec": "s", "secs": "s",
                   "seconds": "s"}  # fmt: skip
REPLACED_BY: Final = {"total": "output", "text": "messages"}
NAMED: Final[dict[str, tuple[str, ...]]] = {
    "session": ("session", "conversation", "conv", "thread", "chat", "dialog", "dialogue"),
    "tenant": ("tenant", "team", "org", "organization", "organisation", "customer", "account",
               "workspace", "project", "client", "app", "user", "key"),
    "model": ("model", "deployment", "engine"),
    "document": ("document", "doc", "file"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sampled:
    """A column of the first rows: its path, the words of its name, its values."""

    path: str
    words: tuple[str, ...]
    values: list[Any]

    @property
    def numbers(self) -> list[float] | None:
        """Return the values as numbers, or None if a value is not a finite number."""
        numbers = []
        for value in self.values:
            try:
                numbers.append(float(value))
            except (TypeError, ValueError, OverflowError):
                return None
        return numbers if all(map(isfinite, numbers)) else None

    def all(self, test: Callable[[Any], bool]) -> bool:
        return all(map(test, self.values))


def sample(path: str | Path) -> list[Sampled]:
    """Read the columns of the first rows of a table (InputError: not a table)."""
    columns: dict[str, list[Any]] = {}
    why: object = "no table in it; name its format (forebay traces formats)"
    try:
        with reading(path), open_input(str(path)) as file:
            facts = FileFacts(path=str(path))
            for _, row in islice(table_rows(file, facts), SAMPLE_ROWS):
                if isinstance(row, RowError):
                    why = row
                else:
                    for name, value in _flat(row.values):
                        if facts.decimal_comma and re.fullmatch(r"[0-9]+,[0-9]+", str(value)):
                            value = value.replace(",", ".")
                        if isinstance(value, str):
                            value = ungrouped(value)
                        columns.setdefault(name, []).append(value)
    except RowError as error:
        raise InputError(f"{path}: {error}") from error
    if not columns:
        raise InputError(f"{path}: {why}")
    return [Sampled(name, _words(name), values) for name, values in columns.items()]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        value = decoded(value)
        name = f"{prefix}{key}"
        if isinstance(value, dict) and len(prefix) < 80:
            yield from _flat(value, f"{name}.")
        elif not is_missing(value):
            yield name, value


def _words(path: str) -> tuple[str, ...]:
    last = path.rpartition(".")[2]
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).lower()
    return tuple(word for word in re.split(r"[^a-z0-9]+", split) if word)


def guess(path: str | Path) -> Mapping:
    """Guess the mapping of a table from names and values of its first rows.

    Raises:
        InputError: no column can be a time or a prompt. The message lists the columns.
    """
    refuse_without_requests(path)
    columns = sample(path)
    mapping: Mapping = {}
    taken: set[str] = set()
    _guess_times(columns, mapping, taken)
    for target, candidates in _candidates(columns):
        if target in REPLACED_BY and REPLACED_BY[target] in mapping:
            continue
        best = next((column for column in candidates if column.path not in taken), None)
        if best is not None:
            taken.add(best.path)
            unsaid = target in ("input", "output", "total") and not TOKENS & _said(best)
            mapping[target] = MappedColumn(best.path, guessed=unsaid)
    _add_up(columns, mapping)
    try:
        check_map(mapping, str(path))
    except InputError as error:
        raise InputError(_why_not(path, columns, mapping, error)) from None
    return mapping


def _why_not(path: str | Path, columns: list[Sampled], mapping: Mapping, error: InputError) -> str:
    """Return the error for a table whose columns could not be guessed."""
    if sum(bool(AGGREGATES & set(column.words)) for column in columns) > 1:
        remedy = "give the file of the same run that has a row for each request"
        return f"{path}: {only_totals('', remedy)}"
    if any(len(column.path) > MOST_NAME for column in columns):
        return (
            f"{path}: lines of text, and no table with a header; name their format (forebay "
            "traces formats), or log times and lengths as CSV or JSON lines"
        )
    paths = ", ".join(column.path for column in columns)[:300]
    timeless = {"text", "messages"} & mapping.keys() and not {"arrival", "end"} & mapping.keys()
    remedy = "; prompts without times: traces import prompts" if timeless else ""
    return f"{error} with --map; the columns are {paths}{remedy}"


def _add_up(columns: list[Sampled], mapping: Mapping) -> None:
    """Map the whole usage object if cached tokens are in it next to the input column."""
    prompt = mapping.get("input")
    if prompt is None:
        return
    above, _, name = prompt.path.rpartition(".")
    beside = (column.path.rpartition(".") for column in columns)
    if name in PARTS_OF_PROMPT and any(
        place == above and EXCLUDED.fullmatch(last) for place, _, last in beside
    ):
        for target in ("input", "output", "total"):
            mapping.pop(target, None)
        mapping["usage"] = MappedColumn(above or "*")


def _candidates(columns: list[Sampled]) -> Iterator[tuple[str, Iterable[Sampled]]]:
    """Yield each target with the columns that fit it, the best first."""
    yield "input", _lengths(columns, IN)
    yield "output", _lengths(columns, OUT)
    yield "total", _lengths(columns, {"total"})
    yield "messages", (column for column in columns if column.all(_is_messages))
    yield "text", filter(_is_prompt, columns)
    yield "id", _by_names(columns, ("request", "req", "call", "trace", "event", ""), _unique)
    yield "parent", (column for column in columns if {"parent", "previous"} & set(column.words))
    for target, words in NAMED.items():
        yield target, _by_names(columns, words, _is_name)
    yield "status", filter(_is_status, columns)
    yield "stream", filter(_is_stream, columns)
    classes = ("interactive", "standard", "batch")
    yield "class", (column for column in columns if column.all(lambda value: value in classes))


def _guess_times(columns: list[Sampled], mapping: Mapping, taken: set[str]) -> None:
    """Map an arrival, or else an end. Map a duration too, which also orders turns of a session."""
    times = [
        column for column in columns if not NOT_STARTS & set(column.words) and _is_time(column)
    ]
    ends = [column for column in times if ENDS & set(column.words)]
    starts = [column for column in times if STARTS & set(column.words) and column not in ends]
    for target, ranked in (("arrival", starts), ("end", ends)):
        if ranked and not mapping:
            best = min(ranked, key=lambda column: (not _ascends(column), _rank(column)))
            taken.add(best.path)
            unit, guessed = _time_unit(best)
            mapping[target] = MappedColumn(best.path, unit, guessed=guessed)
    if mapping:
        _guess_duration(columns, mapping, taken)


def _guess_duration(columns: list[Sampled], mapping: Mapping, taken: set[str]) -> None:
    left = (column for column in columns if column.path not in taken)
    if (column := next(filter(_is_duration, left), None)) is not None:
        taken.add(column.path)
        unit, guessed = _duration_unit(column)
        mapping["duration"] = MappedColumn(column.path, unit, guessed=guessed)


def _rank(column: Sampled) -> tuple[int, int]:
    """Prefer words of an arrival over words of any time, and short names over long ones."""
    first = {"arrival", "arrived", "received", "start", "started", "request", "requested"}
    return (0 if first & set(column.words) else 1, len(column.path))


def _is_time(column: Sampled) -> bool:
    numbers = column.numbers
    if numbers is not None:
        return min(numbers) >= 0 and not any(isinstance(value, bool) for value in column.values)
    row = SourceRow(1, {}, FileFacts())
    try:
        for value in column.values:
            row.values["t"] = value
            row.moment("t", unit="auto" if not isinstance(value, str) else "iso8601")
    except RowError:
        return False
    return True


def _ascends(column: Sampled) -> bool:
    values: list[Any] = column.numbers or [str(value) for value in column.values]
    steps: list[bool] = [a <= b for a, b in pairwise(values)]
    return sum(steps) >= 0.6 * len(steps)


def _unit_in_name(column: Sampled) -> str | None:
    return next((SUFFIXES[word] for word in reversed(column.words) if word in SUFFIXES), None)


def _time_unit(column: Sampled) -> tuple[str, bool]:
    """Return the unit of a time, and True if neither its name nor its size tells it."""
    numbers = column.numbers
    if numbers is None:
        return "iso8601", False
    by_name, by_size = _unit_in_name(column), unit_of(numbers[0])
    return (by_size, False) if numbers[0] > 1e8 else (by_name or by_size, by_name is None)


def _is_duration(column: Sampled) -> bool:
    words = set(column.words)
    named = DURATIONS & words or {"total", "time"} <= words or {"response", "time"} <= words
    return bool(named) and column.numbers is not None and not {"first", "ttft", "queue"} & words


def _duration_unit(column: Sampled) -> tuple[str, bool]:
    """Return the unit of a duration, and True if only its size tells it."""
    by_name = _unit_in_name(column)
    if by_name is not None:
        return by_name, False
    numbers = sorted(column.numbers or [0.0])
    middle = numbers[len(numbers) // 2]
    return "ns" if middle > 1e8 else "ms" if middle > 100 else "s", True


def _lengths(columns: list[Sampled], side: set[str]) -> Iterator[Sampled]:
    """Rank the columns of whole numbers whose name has a word of this side and of a size.

    A name that says tokens may have odd cells, which the reader reports by row.
    """
    ranked = []
    for column in columns:
        words, said = set(column.words), _said(column)
        over_many = NOT_OF_ONE - SIZES | (set() if "total" in side else {"total"})
        if (NOT_SIZES | over_many) & words or not side & said:
            continue
        if "total" in side and (IN | OUT) & words:
            continue
        tokens, named = TOKENS & said, SIZES & said
        if not tokens and named and OF_HTTP & words:
            continue
        least = len(column.values) * (0.5 if tokens else 1.0)
        if sum(map(_is_whole, column.values)) < least:
            continue
        ranked.append((0 if tokens else 1 if named else 2, column))
    ranked.sort(key=lambda pair: pair[0])
    return (column for _, column in ranked)


def _said(column: Sampled) -> set[str]:
    """Return the words of a name. Words that are run together are split."""
    return {*column.words, *_split_glued("".join(column.words))}


def _is_whole(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and float(value) >= 0 and float(value).is_integer()
    except (TypeError, ValueError, OverflowError):
        return False


def _split_glued(name: str) -> set[str]:
    """Split `ntokensin` or `tokensout`, whose words are not separated."""
    for part in ("tokens", "token", "tok"):
        if part in name:
            rest = name.replace(part, " ").replace("num", " ").split()
            return {part, *rest, *(word.removeprefix("n") for word in rest)}
    return set()


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and "role" in message for message in value
    )


def _is_prompt(column: Sampled) -> bool:
    named = {"prompt", "text", "input", "query", "question", "content"} & set(column.words)
    return (
        bool(named - NOT_TEXT)
        and not NOT_TEXT & _said(column)
        and column.numbers is None
        and column.all(lambda value: isinstance(value, str))
    )


def _by_names(
    columns: list[Sampled], names: tuple[str, ...], fits: Callable[[Sampled], bool]
) -> Iterator[Sampled]:
    """Yield fitting columns in the order of `names`. A column may add id or name to a name."""
    added = ("id", "name", "uuid", "hash")
    for name in names:
        for column in columns:
            first = next((word for word in column.words if word not in added), "")
            if first == name and fits(column):
                yield column


def _unique(column: Sampled) -> bool:
    ids = {"id", "uuid"} & set(column.words)
    return bool(ids) and len(set(map(str, column.values))) == len(column.values)


def _is_name(column: Sampled) -> bool:
    return column.all(lambda value: isinstance(value, str | int) and len(str(value)) <= 200)


def _is_stream(column: Sampled) -> bool:
    flags = ("true", "false", "0", "1")
    named = {"stream", "streaming", "streamed"} & set(column.words)
    return bool(named) and column.all(lambda value: str(value).lower() in flags)


def _is_status(column: Sampled) -> bool:
    named = {"status", "code"} & set(column.words)
    numbers = column.numbers
    return bool(named) and numbers is not None and all(100 <= n < 600 for n in numbers)
