"""Which backends are worth a look for a request.

Of a small fleet all are. Of a large one: those that may hold the beginning of the prompt, and
those that will be free first. Pricing every backend for every request would cost more than it
finds.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from math import ceil, inf

from forebay.proxy.core.backend import Backend

LOOK_AT_ALL = 8  # fleets up to this size are looked at whole
LOOK_AT_WARM = 3
LOOK_AT_FREE = 3

Suits = Callable[[Backend], bool]


class Candidates:
    """Finds candidates in a large fleet; `moved` must be told of every change of a backend."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends
        self._moved: set[int] = set()
        self._key_of = [backend.free_order for backend in backends]
        self._order = sorted(self._key_of)
        self._holders: dict[int, int] = {}
        self.all = len(backends) <= LOOK_AT_ALL
        if not self.all:
            for backend in backends:
                backend.prefixes.share(self._holders, 1 << backend.index)

    def moved(self, backend: Backend) -> None:
        """Its backlog, queue or load changed."""
        if not self.all:
            self._moved.add(backend.index)

    def of(self, blocks: Sequence[int], least_match: float, suits: Suits) -> list[Backend]:
        """Those that may hold `least_match` of `blocks`, and those free first that suit."""
        found = self._warm(blocks, least_match, suits) if blocks else []
        free = len(found) + LOOK_AT_FREE
        for backend in self._by_free_order():
            if backend not in found and suits(backend):
                found.append(backend)
                if len(found) == free:
                    break
        return found

    def _warm(self, blocks: Sequence[int], least_match: float, suits: Suits) -> list[Backend]:
        """Backends that hold as much of the prompt as matters; the first free of them."""
        least = max(1, ceil(least_match * len(blocks)))
        # Only blocks at positions 1, 2, 4, 8 ... are entered in `_holders`.
        holders = self._holders.get(blocks[(1 << (least.bit_length() - 1)) - 1], 0)
        warm = []
        while holders:
            index = holders.bit_length() - 1
            holders ^= 1 << index
            if suits(self._backends[index]):
                warm.append(self._backends[index])
        if len(warm) > LOOK_AT_WARM:
            warm.sort(key=lambda backend: backend.free_order)
        return warm[:LOOK_AT_WARM]

    def _by_free_order(self) -> Iterator[Backend]:
        order, key_of = self._order, self._key_of
        for index in self._moved:
            key = self._backends[index].free_order
            if key != key_of[index]:
                del order[bisect_left(order, key_of[index])]
                insort(order, key)
                key_of[index] = key
        self._moved.clear()
        for _ends_at, _load, index in order:
            yield self._backends[index]


class Moments:
    """When the backlog of each backend falls below a limit by itself; kept for `wake_at`."""

    def __init__(self, backends: Sequence[Backend], limit_s: float) -> None:
        self._backends = backends
        self._limit_s = limit_s
        self._at = [-inf] * len(backends)
        self._moved: set[int] = set()

    def moved(self, backend: Backend) -> None:
        self._moved.add(backend.index)

    def next_after(self, now: float) -> float:
        for index in self._moved:
            self._at[index] = self._backends[index].backlog_below_at(self._limit_s)
        self._moved.clear()
        return min((at for at in self._at if at > now), default=inf)
