"""Collections in order: the least of many."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
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
