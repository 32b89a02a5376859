"""Collections in order: the least of many, sums over the first of many, sums of many ramps."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import fsum, inf
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")


class First(Generic[Key]):
    """Finds the key with the least place among many.

    A place that it keeps may be too low: it is corrected once it is the least. So a key must be
    noted when it is new or its place may have fallen, and not when its place has risen.

    Args:
        place: returns the place of a key, a number or a tuple.
    """

    __slots__ = ("_heap", "_place", "_places")

    def __init__(self, place: Callable[[Key], Any]) -> None:
        self._place = place
        self._places: dict[Key, Any] = {}
        self._heap: list[tuple[Any, Key]] = []

    def note(self, key: Key) -> None:
        """Note a key that is new, or whose place may have fallen."""
        place, old_place = self._place(key), self._places.get(key)
        if old_place is not None and old_place <= place:
            return
        self._places[key] = place
        heappush(self._heap, (place, key))
        if len(self._heap) > 2 * len(self._places):  # most of it is outdated
            self._heap = [(place, key) for key, place in self._places.items()]
            heapify(self._heap)

    def forget(self, key: Key) -> None:
        """Forget a key that no longer counts."""
        self._places.pop(key, None)

    def first(self) -> Key | None:
        """Return the key with the least place."""
        while self._heap:
            least, key = self._heap[0]
            if self._places.get(key) != least:
                heappop(self._heap)
                continue
            place = self._place(key)
            if place == least:
                return key
            self._places[key] = place
            heapreplace(self._heap, (place, key))
        return None


class SortedSums:
    """Entries in the order of their keys, and sums of their values up to any place.

    Entries stand in blocks. A question looks at the sums of all blocks before the place and at the
    entries of one block: of 10,000 entries at 2 to 3 %, in C. The sums of one block are
    exact (`fsum`). With more blocks, the relative error is at most 2 ** -52.

    Args:
        columns: values of each entry.
        block: entries that stand together, up to twice as many. Doubled: a place among 100 entries
            takes 1.3 times as long, among 100,000 half as long.
    """

    __slots__ = ("_block", "_columns", "_keys", "_lasts", "_sizes", "_sums", "_values")

    def __init__(self, columns: int = 1, block: int = 64) -> None:
        self._columns, self._block = range(columns), block
        self._keys: list[list[Any]] = []  # by block
        self._lasts: list[Any] = []  # last key of each block
        self._sizes: list[int] = []
        self._values: list[list[list[float]]] = [[] for _ in self._columns]  # by column and block
        self._sums: list[list[float]] = [[] for _ in self._columns]

    def add(self, key: Any, *values: float) -> None:
        """Add an entry. Keys are tuples, and no two are equal."""
        at = bisect_left(self._lasts, key)
        if not self._lasts:
            self._insert(0, [key], [[value] for value in values])
            return
        if at == len(self._lasts):
            at -= 1
        keys = self._keys[at]
        place = bisect_left(keys, key)
        keys.insert(place, key)
        for column in self._columns:
            self._values[column][at].insert(place, values[column])
        block = self._block
        if len(keys) <= 2 * block:
            self._sum_up(at)
            return
        columns = [self._values[column][at] for column in self._columns]
        self._delete(at)
        self._insert(at, keys[block:], [column[block:] for column in columns])
        self._insert(at, keys[:block], [column[:block] for column in columns])

    def remove(self, key: Any) -> None:
        """Remove the entry of this key, which must be there."""
        at = bisect_left(self._lasts, key)
        keys = self._keys[at]
        place = bisect_left(keys, key)
        assert keys[place] == key, key
        del keys[place]
        if not keys:
            self._delete(at)
            return
        for column in self._columns:
            del self._values[column][at][place]
        self._sum_up(at)

    def first(self) -> Any:
        """Return the least key, or None."""
        return self._keys[0][0] if self._keys else None

    def last(self) -> Any:
        """Return the greatest key, or None."""
        return self._lasts[-1] if self._lasts else None

    def before(self, place: float) -> tuple[int, list[float]]:
        """Return the number of entries whose key begins with at most `place`, and their sums."""
        key = (place, inf)
        at = bisect_left(self._lasts, key)
        here = bisect_left(self._keys[at], key) if at < len(self._lasts) else 0
        sums = []
        for column in self._columns:
            some = self._sums[column][:at]
            if here:
                some += self._values[column][at][:here]
            sums.append(fsum(some))
        return sum(self._sizes[:at]) + here, sums

    def _sum_up(self, at: int) -> None:
        """Sum up a changed block from its entries, so that no rounding error lasts."""
        self._lasts[at] = self._keys[at][-1]
        self._sizes[at] = len(self._keys[at])
        for column in self._columns:
            self._sums[column][at] = fsum(self._values[column][at])

    def _insert(self, at: int, keys: list[Any], values: list[list[float]]) -> None:
        """Insert a block."""
        self._keys.insert(at, keys)
        self._lasts.insert(at, keys[-1])
        self._sizes.insert(at, len(keys))
        for column in self._columns:
            self._values[column].insert(at, values[column])
            self._sums[column].insert(at, fsum(values[column]))

    def _delete(self, at: int) -> None:
        """Delete a block."""
        del self._keys[at], self._lasts[at], self._sizes[at]
        for column in self._columns:
            del self._values[column][at], self._sums[column][at]


class Ramps(Generic[Key]):
    """The sum of many ramps at any place. A ramp rises from 0 at `start` to its height at `end`.

    A ramp has two heights, which rise together: seconds and a number.

    Args:
        origin: a place near all ramps. A sum's error is 2 ** -52 of its distance from there, times
            the sum of all slopes.
    """

    __slots__ = ("_bends", "_origin", "_ramps")

    def __init__(self, origin: float) -> None:
        self._origin = origin
        # A ramp is two bends. The sum at x adds up (x - bend) * change of the slope over all
        # bends before x. Columns: both changes, and both times the place of the bend.
        self._bends = SortedSums(4)
        self._ramps: dict[Key, tuple[float, float]] = {}

    def put(self, key: Key, start: float, end: float, seconds: float, number: float) -> None:
        """Add a ramp, or replace the ramp of this key."""
        self.drop(key)
        start, end = start - self._origin, end - self._origin
        if start >= end:
            return
        self._ramps[key] = start, end
        steep, many = seconds / (end - start), number / (end - start)
        self._bends.add((start, 0, key), steep, steep * start, many, many * start)
        self._bends.add((end, 1, key), -steep, -steep * end, -many, -many * end)

    def drop(self, key: Key) -> None:
        """Remove the ramp of this key, if there is one."""
        if (ends := self._ramps.pop(key, None)) is not None:
            self._bends.remove((ends[0], 0, key))
            self._bends.remove((ends[1], 1, key))

    def at(self, place: float) -> tuple[float, float]:
        """Return the sums of seconds and of numbers at a place, each 0 or more."""
        place -= self._origin
        _, (steep, steeps, many, manies) = self._bends.before(place)
        return max(0.0, steep * place - steeps), max(0.0, many * place - manies)


class ChangeLog(Generic[Key]):
    """The latest changes, for readers that each come back from time to time.

    Args:
        most: changes that are kept. A reader that comes later must look at everything.
    """

    __slots__ = ("_first", "_latest", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._latest: list[Key] = []
        self._first = 0  # number of the oldest change that is kept

    def add(self, key: Key) -> None:
        """Note a change."""
        self._latest.append(key)
        if len(self._latest) > self._most:
            half = self._most // 2
            del self._latest[:half]
            self._first += half

    @property
    def count(self) -> int:
        """Number of all changes so far."""
        return self._first + len(self._latest)

    def since(self, count: int) -> Sequence[Key] | None:
        """Return the changes after the first `count`, or None if some of them are forgotten."""
        return None if count < self._first else self._latest[count - self._first :]
