"""Read a file of requests of any format as a stream.

The reader checks the rules of all formats. A bad row becomes one clear error or, if asked, is
skipped and counted. A row that is not a request is counted by its reason. The reader never repairs
a row. It keeps one row at a time, so a trace can have any size. Only ids that come from the file
need 16 to 32 bytes each, to find ids that occur twice.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple, Self

from xxhash import xxh3_64_intdigest

from forebay.traces.ground.errors import InputError, reading
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.containers import Rows, raw_lines
from forebay.traces.reading.unpack import open_input
from forebay.traces.rows import SHAPE_ERRORS, FileFacts, NotARequestError, RowError, shape_error

REORDER_ROWS = 50_000
"""Rows of a log in order of completion that are held back to sort them by arrival."""
MOST_TOKENS = 10**9
LONGEST_GAP_S = 366 * 86_400.0


class Ended(NamedTuple):
    """A request of a log, with the end of its answer in seconds, or None if not logged.

    The reader finds the turn before it: the last turn of its session whose answer had ended.
    """

    request: TraceRequest
    end_s: float | None


Parsed = TraceRequest | Ended | Iterable[TraceRequest] | None
ParseRow = Callable[[Any], Parsed]
"""Converts one item of the file to its request, to several requests, or to None for a header."""


@dataclass(frozen=True, slots=True)
class Order:
    """How the reader treats times.

    Attributes:
        rebase: times count from any origin, and the first request arrives at 0.
        held: rows held back to sort them. 0 if the rows must be in order of arrival.
    """

    rebase: bool = False
    held: int = 0


class TraceReader(Iterator[TraceRequest]):
    """An iterator over the requests of one file, to be used once.

    Attributes:
        path: the file as given, or `-` for standard input.
        rows: requests read so far.
        skipped: bad rows skipped so far (only with `skip_bad`).
        first_skipped: the error of the first bad row, or "".
        ignored: rows that are not requests, by reason.
        notes: missing or dropped values, each with its number of rows.

    Raises (while iterating, or at once for a missing file):
        InputError: unreadable file, bad row, arrival times going back, an id that occurs twice, or
            no request at all.
    """

    def __init__(
        self,
        path: str | Path,
        parse: ParseRow,
        *,
        rows: Rows = raw_lines,
        skip_bad: bool = False,
        order: Order = Order(),
        own_ids: bool = True,
        doubt: str = "",
    ) -> None:
        """Append `doubt` to the error of a bad row if no row before it was good."""
        self.path = str(path)
        self.rows = 0
        self.skipped = 0
        self.first_skipped = ""
        self.ignored: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self._parse = parse
        self._items = rows
        self._skip_bad = skip_bad
        self._order = order
        self._ids = SeenIds() if own_ids else None
        self._doubt = doubt
        if self.path != "-":
            if not Path(path).exists():
                raise InputError(f"{path}: no such file; check the path")
            if Path(path).is_dir():
                raise InputError(f"{path}: is a directory; name the trace file in it")
        # A generator owns the open file, so a reader that is abandoned half way closes it.
        plain = (request for request, _ in self._sorted())
        self._requests = self._rebased() if order.rebase else plain

    def __next__(self) -> TraceRequest:
        return next(self._requests)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._requests.close()

    @property
    def name(self) -> str:
        return "standard input" if self.path == "-" else self.path

    def _rebased(self) -> Generator[TraceRequest]:
        start_s: float | None = None
        turns = _Turns()
        for request, end_s in self._sorted():
            if end_s is not None:
                turns.link(request, None if end_s < 0 else end_s)
            if start_s is None:
                start_s = request.arrival_s
            # Times since 1970 leave 0.24 us of a double: the microsecond is the last true digit.
            # `replace` would take as long as parsing the row. Nothing else has this request yet.
            object.__setattr__(request, "arrival_s", round(request.arrival_s - start_s, 6))
            yield request

    def _sorted(self) -> Generator[Ended]:
        if not self._order.held:
            yield from self._checked(None)
            return
        heap: list[tuple[float, int, Ended]] = []
        emitted = [float("-inf")]
        for number, entry in enumerate(self._checked(emitted)):
            heappush(heap, (entry.request.arrival_s, number, entry))
            if len(heap) > self._order.held:
                emitted[0], _, first = heappop(heap)
                yield first
        while heap:
            yield heappop(heap)[2]

    def _checked(self, emitted: list[float] | None) -> Generator[Ended]:
        """Read requests that obey the rules. `emitted` has the last time that the heap gave out."""
        last_s: float | None = None
        with reading(self.name), open_input(self.path) as file:
            facts = FileFacts(path=self.path, notes=self.notes)
            items = self._items(file, facts)
            number = 0
            while True:
                try:
                    numbered = next(items, None)
                    if numbered is None:
                        break
                    number, item = numbered
                    # A row may have several requests, each with its own check.
                    for entry in self._parsed(item):
                        request = entry.request
                        least_s = last_s if emitted is None else emitted[0]
                        self._check(request, least_s)
                        last_s = request.arrival_s
                        self.rows += 1
                        yield entry
                # Other records are counted. A bad row is an error, unless it may be skipped.
                except NotARequestError as why:
                    self.ignored[str(why)] += 1
                except RowError as error:
                    where = f"{self.name}:{max(number, 1)}: {error}"
                    if not self._skip_bad or error.fatal:
                        raise InputError(where) from error
                    self.first_skipped = self.first_skipped or where
                    self.skipped += 1
        if not self.rows:
            raise InputError(f"{self.name}: no requests in this trace{self._why_none()}")

    def _parsed(self, item: Any) -> Iterable[Ended]:
        if isinstance(item, RowError):
            raise item
        try:
            parsed = self._parse(item)
            if isinstance(parsed, TraceRequest):
                return (Ended(parsed, None),)
            if isinstance(parsed, Ended):
                return (parsed._replace(end_s=-1.0) if parsed.end_s is None else parsed,)
            return () if parsed is None else [Ended(request, None) for request in parsed]
        except RowError as error:
            if self.rows or not self._doubt:
                raise
            raise RowError(f"{error}{self._doubt}", fatal=error.fatal) from error
        except SHAPE_ERRORS as error:
            raise shape_error(error) from error

    def _check(self, request: TraceRequest, least_s: float | None) -> None:
        if least_s is not None and request.arrival_s < least_s:
            back = f"from {time_text(least_s)} s to {time_text(request.arrival_s)} s"
            raise RowError(
                f"time goes back {back}; sort the rows by arrival (traces import --sort)"
            )
        if (
            self._order.rebase
            and least_s is not None
            and request.arrival_s - max(least_s, 0.0) > LONGEST_GAP_S
            and self.rows
            and not self._order.held
        ):
            raise RowError(
                f"{_days(request.arrival_s - least_s)} days after the row before; are "
                "units of time mixed? convert them to one"
            )
        if max(request.input_tokens, request.output_tokens) > MOST_TOKENS:
            raise RowError(f"more than {MOST_TOKENS:,} tokens; are columns or units mixed?")
        if self._ids is not None and not self._ids.add(request.id):
            raise RowError(f"id {request.id[:60]!r} occurs twice; give each request its own")

    def _why_none(self) -> str:
        if self.skipped:
            return f" ({self.skipped} bad rows skipped); the first: {self.first_skipped}"
        if self.ignored:
            reasons = ", ".join(f"{count} {why}" for why, count in self.ignored.most_common(3))
            return f": {reasons}; check that it is the right file"
        return "; check that it is the right file"


def time_text(moment_s: float) -> str:
    """Write a time to the microsecond, or in short form if it is absurdly large."""
    return f"{moment_s:.6f}" if abs(moment_s) < 1e12 else f"{moment_s:.6g}"


def _days(gap_s: float) -> str:
    return f"{gap_s / 86_400:,.0f}" if gap_s < 1e15 else f"{gap_s / 86_400:.3g}"


class _Turns:
    """Finds the turn before each request of a log. Requests of one session may overlap."""

    def __init__(self) -> None:
        self._sessions: dict[str, list[tuple[float | None, str]]] = {}

    def link(self, request: TraceRequest, end_s: float | None) -> None:
        """Set parent and think time of `request`, which nothing else has yet."""
        if request.session is None or request.parent is not None:
            return
        turns = self._sessions.setdefault(request.session, [])
        ended = [turn for turn in turns if turn[0] is None or turn[0] <= request.arrival_s]
        if ended:
            last_s, parent = max(ended, key=lambda turn: turn[0] or 0.0)
            object.__setattr__(request, "parent", parent)
            if last_s is not None:
                object.__setattr__(request, "think_s", round(request.arrival_s - last_s, 6))
            turns[:] = [turn for turn in turns if turn not in ended or turn[1] == parent]
        turns.append((end_s, request.id))


class SeenIds:
    """A set of ids as 64-bit hashes in one array: 16 to 32 bytes an id, a Python set needs 100.

    Two ids of a trace of ten million have equal hashes with a probability of 3e-6.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 << 10))
        self._count = 0

    def add(self, identity: str) -> bool:
        """Add `identity`. False if it is already there."""
        if not self._put(_key(identity)):
            return False
        self._count += 1
        if 2 * self._count > len(self._slots):
            old, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
            for key in old:
                if key:
                    self._put(key)
        return True

    def __contains__(self, identity: object) -> bool:
        key = _key(identity) if isinstance(identity, str) else 0
        return key != 0 and self._slots[self._place(key)] == key

    def _put(self, key: int) -> bool:
        at = self._place(key)
        if self._slots[at]:
            return False
        self._slots[at] = key
        return True

    def _place(self, key: int) -> int:
        """Return the slot of `key`, or the empty slot where it belongs."""
        slots = self._slots
        mask = len(slots) - 1
        at = key & mask
        while slots[at] and slots[at] != key:
            at = (at + 1) & mask
        return at


def _key(identity: str) -> int:
    return xxh3_64_intdigest(identity.encode("utf-8", "surrogatepass")) or 1
