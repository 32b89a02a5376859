"""Guess which columns of a table hold times and lengths, from names and values of first rows."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Final

from forebay.traces.errors import InputError
from forebay.traces.formats.columns import MappedColumn, Mapping, check_map
from forebay.traces.formats.totals import AGGREGATES, only_totals, refuse_totals
from forebay.traces.formats.usage import BESIDE, PARTS_OF_PROMPT
from forebay.traces.reading.containers import table_rows
from forebay.traces.reading.unpack import open_input
from forebay.traces.rows import FileFacts, RowError, SourceRow, decoded, unit_of

SAMPLE_ROWS: Final = 200

IN: Final = {"prompt", "input", "in", "request", "context", "prefill", "query", "question"}
OUT: Final = {"completion", "output", "out", "response", "generated", "generation", "decode",
              "answer", "gen", "reply", "produced"}  # fmt: skip
SIZES: Final = {"token", "tokens", "tok", "toks", "len", "length", "size", "count", "n", "num"}
NOT_SIZES: Final = {"cached", "cache", "cost", "price", "bytes", "max", "limit", "latency", "time",
                    "ms", "id", "reasoning", "rate", "budget", "kb", "usd"}  # fmt: skip
STARTS: Final = {"timestamp", "ts", "time", "start", "started", "created", "received", "arrival",
                 "arrived", "date", "datetime", "begin", "submitted", "enqueued", "requested",
                 "when", "at"}  # fmt: skip
ENDS: Final = {"end", "ended", "finish", "finished", "complete", "completed", "logged", "done"}
# What is counted over many requests or over time is no length and no time of one request.
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
        """Return the values as numbers, None if one is not a finite one."""
        found = []
        for value in self.values:
            try:
                found.append(float(value))
            except (TypeError, ValueError, OverflowError):
                return None
        return found if all(map(isfinite, found)) else None

    def all(self, test: Callable[[Any], bool]) -> bool:
        return all(map(test, self.values))


def sample(path: str | Path) -> list[Sampled]:
    """Read the columns of the first rows of a table; InputError if it is none."""
    columns: dict[str, list[Any]] = {}
    why: object = "no table in it; name its format (forebay traces formats)"
    try:
        with open_input(str(path)) as file:
            facts = FileFacts(path=str(path))
            for _, row in islice(table_rows(file, facts), SAMPLE_ROWS):
                if isinstance(row, RowError):
                    why = row
                else:
                    for name, value in _flat(row.values):
                        if facts.decimal_comma and re.fullmatch(r"[0-9]+,[0-9]+", str(value)):
                            value = value.replace(",", ".")
                        columns.setdefault(name, []).append(value)
    except RowError as error:
        raise InputError(f"{path}: {error}") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    if not columns:
        raise InputError(f"{path}: {why}")
    return [Sampled(name, _words(name), values) for name, values in columns.items()]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        value = decoded(value)
        name = f"{prefix}{key}"
        if isinstance(value, dict) and len(prefix) < 80:
            yield from _flat(value, f"{name}.")
        elif value is not None and value != "":
            yield name, value


def _words(path: str) -> tuple[str, ...]:
    last = path.rpartition(".")[2]
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).lower()
    return tuple(word for word in re.split(r"[^a-z0-9]+", split) if word)


def guess(path: str | Path) -> Mapping:
    """Guess the mapping of a table from names and values of its first rows.

    Raises:
        InputError: no column can be a time or a prompt; the message lists the columns.
    """
    refuse_totals(path)
    columns = sample(path)
    found: Mapping = {}
    taken: set[str] = set()
    _guess_times(columns, found, taken)
    for target, candidates in _candidates(columns):
        if target in REPLACED_BY and REPLACED_BY[target] in found:
            continue
        best = next((one for one in candidates if one.path not in taken), None)
        if best is not None:
            taken.add(best.path)
            found[target] = MappedColumn(best.path)
    _add_up(columns, found)
    try:
        check_map(found, str(path))
    except InputError as error:
        if sum(bool(AGGREGATES & set(one.words)) for one in columns) > 1:
            remedy = "give the file of the same run that has a row for each request"
            raise InputError(f"{path}: {only_totals('', remedy)}") from None
        listed = ", ".join(one.path for one in columns)[:300]
        raise InputError(f"{error} with --map; the columns are {listed}") from None
    return found


def _add_up(columns: list[Sampled], found: Mapping) -> None:
    """Take the whole usage where cached tokens stand beside the column that was found."""
    prompt = found.get("input")
    if prompt is None:
        return
    above, _, name = prompt.path.rpartition(".")
    beside = (one.path.rpartition(".") for one in columns)
    if name in PARTS_OF_PROMPT and any(
        place == above and BESIDE.fullmatch(last) for place, _, last in beside
    ):
        for target in ("input", "output", "total"):
            found.pop(target, None)
        found["usage"] = MappedColumn(above or "*")


def _candidates(columns: list[Sampled]) -> Iterator[tuple[str, Iterable[Sampled]]]:
    """List the columns that fit each target, the best first."""
    yield "input", _lengths(columns, IN)
    yield "output", _lengths(columns, OUT)
    yield "total", _lengths(columns, {"total"})
    yield "messages", (one for one in columns if one.all(_is_messages))
    yield "text", filter(_is_prompt, columns)
    yield "id", _by_names(columns, ("request", "req", "call", "trace", "event", ""), _unique)
    yield "parent", (one for one in columns if {"parent", "previous"} & set(one.words))
    for target, words in NAMED.items():
        yield target, _by_names(columns, words, _is_name)
    yield "status", filter(_is_status, columns)
    flags = ("true", "false", "0", "1")
    yield (
        "stream",
        (
            one
            for one in columns
            if {"stream", "streaming", "streamed"} & set(one.words)
            and one.all(lambda value: str(value).lower() in flags)
        ),
    )
    classes = ("interactive", "standard", "batch")
    yield "class", (one for one in columns if one.all(lambda value: value in classes))


def _guess_times(columns: list[Sampled], found: Mapping, taken: set[str]) -> None:
    """Find an arrival, or else an end; and the duration, which also orders turns of a session."""
    times = [one for one in columns if not NOT_STARTS & set(one.words) and _is_time(one)]
    ends = [one for one in times if ENDS & set(one.words)]
    starts = [one for one in times if STARTS & set(one.words) and one not in ends]
    for target, ranked in (("arrival", starts), ("end", ends)):
        if ranked and not found:
            best = min(ranked, key=lambda one: (not _ascends(one), _rank(one)))
            taken.add(best.path)
            found[target] = MappedColumn(best.path, _time_unit(best))
    if found:
        _guess_duration(columns, found, taken)


def _guess_duration(columns: list[Sampled], found: Mapping, taken: set[str]) -> None:
    for one in columns:
        if one.path not in taken and _is_duration(one):
            taken.add(one.path)
            found["duration"] = MappedColumn(one.path, _duration_unit(one))
            return


def _rank(one: Sampled) -> tuple[int, int]:
    """Prefer words of an arrival over words of any time, and short names over long ones."""
    first = {"arrival", "arrived", "received", "start", "started", "request", "requested"}
    return (0 if first & set(one.words) else 1, len(one.path))


def _is_time(one: Sampled) -> bool:
    numbers = one.numbers
    if numbers is not None:
        return min(numbers) >= 0 and not any(isinstance(value, bool) for value in one.values)
    row = SourceRow(1, {}, FileFacts())
    try:
        for value in one.values:
            row.values["t"] = value
            row.moment("t", unit="auto" if not isinstance(value, str) else "iso8601")
    except RowError:
        return False
    return True


def _ascends(one: Sampled) -> bool:
    values: list[Any] = one.numbers or [str(value) for value in one.values]
    steps = list(pairwise(values))
    return sum(1 for a, b in steps if a <= b) >= 0.6 * len(steps)


def _time_unit(one: Sampled) -> str:
    numbers = one.numbers
    if numbers is None:
        return "iso8601"
    by_name = next((SUFFIXES[word] for word in reversed(one.words) if word in SUFFIXES), None)
    by_size = unit_of(numbers[0])
    return by_size if numbers[0] > 1e8 else by_name or by_size


def _is_duration(one: Sampled) -> bool:
    words = set(one.words)
    named = DURATIONS & words or {"total", "time"} <= words or {"response", "time"} <= words
    return bool(named) and one.numbers is not None and not {"first", "ttft", "queue"} & words


def _duration_unit(one: Sampled) -> str:
    by_name = next((SUFFIXES[word] for word in reversed(one.words) if word in SUFFIXES), None)
    if by_name is not None:
        return by_name
    numbers = sorted(one.numbers or [0.0])
    return "ms" if numbers[len(numbers) // 2] > 100 else "s"


def _lengths(columns: list[Sampled], side: set[str]) -> Iterator[Sampled]:
    """Rank the columns of whole numbers whose name says this side and a size."""
    ranked = []
    for one in columns:
        words = set(one.words)
        glued = "".join(one.words)
        over_many = NOT_OF_ONE - SIZES | (set() if "total" in side else {"total"})
        if (NOT_SIZES | over_many) & words or not side & (words | _split_glued(glued)):
            continue
        if "total" in side and (IN | OUT) & words:
            continue
        numbers = one.numbers
        if numbers is None or any(n < 0 or n != int(n) for n in numbers):
            continue
        named = SIZES & (words | _split_glued(glued))
        ranked.append((0 if {"tokens", "token", "tok", "toks"} & named else 1 if named else 2, one))
    ranked.sort(key=lambda pair: pair[0])
    return (one for _, one in ranked)


def _split_glued(name: str) -> set[str]:
    """Split `ntokensin` or `tokensout`, whose words are not separated."""
    for part in ("tokens", "token", "tok"):
        if part in name:
            rest = name.replace(part, " ").replace("num", " ").split()
            return {part, *rest, *(one.removeprefix("n") for one in rest)}
    return set()


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and "role" in one for one in value)


def _is_prompt(one: Sampled) -> bool:
    named = {"prompt", "text", "input", "query", "question", "content"} & set(one.words)
    return bool(named) and one.numbers is None and one.all(lambda value: isinstance(value, str))


def _by_names(
    columns: list[Sampled], names: tuple[str, ...], fits: Callable[[Sampled], bool]
) -> Iterator[Sampled]:
    """List fitting columns in the order of `names`; a name may be followed by id or name."""
    for name in names:
        for one in columns:
            rest = tuple(word for word in one.words if word not in ("id", "name", "uuid", "hash"))
            wanted = (name,) if name else ()
            if (rest == wanted or (name and rest[:1] == wanted)) and fits(one):
                yield one


def _unique(one: Sampled) -> bool:
    ids = {"id", "uuid"} & set(one.words)
    return bool(ids) and len(set(map(str, one.values))) == len(one.values)


def _is_name(one: Sampled) -> bool:
    return one.all(lambda value: isinstance(value, str | int) and len(str(value)) <= 200)


def _is_status(one: Sampled) -> bool:
    named = {"status", "code"} & set(one.words)
    numbers = one.numbers
    return bool(named) and numbers is not None and all(100 <= n < 600 for n in numbers)
