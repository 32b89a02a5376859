"""Which backends are worth a look for a request, and when one has room by itself.

Of a small fleet all are worth a look. Of a large one: those that may hold the beginning of the
prompt, and those that will be free first. Pricing every backend for every request would cost more
than it finds.
"""

from collections.abc import Sequence
from math import ceil, inf
from typing import Final

from forebay.proxy.core.state.backend import Backend

LOOK_AT_ALL: Final = 8  # fleets up to this size are looked at whole
LOOK_AT_WARM: Final = 3


class Candidates:
    """Knows of each backend when it will be free; `moved` must be told of every change of one."""

    def __init__(self, backends: Sequence[Backend], dispatch_ahead_s: float) -> None:
        self._backends = list(backends)
        self._dispatch_ahead_s = dispatch_ahead_s
        self._moved: set[int] = set(range(len(self._backends)))
        self._holders: dict[int, int] = {}
        self.all = len(self._backends) <= LOOK_AT_ALL
        for backend in backends:
            backend.prefixes.share(None if self.all else self._holders, 1 << backend.index)

    def moved(self, backend: Backend) -> None:
        """Its backlog, queue or load changed."""
        self._moved.add(backend.index)

    def of(
        self, blocks: tuple[int, ...], least_match: float, usable: Sequence[Backend] | None
    ) -> list[Backend]:
        """Those that may hold `least_match` of `blocks`, and those that will be free first.

        Args:
            usable: of these only; None for any that is up.
        """
        if self._moved:
            self._refresh()
        found = self._warm(blocks, least_match, usable) if blocks else []
        # The two that will be free first, of those not found yet.
        first: Backend | None = None
        second: Backend | None = None
        first_free = second_free = inf
        for backend in self._backends:
            free = backend.rank
            if free >= second_free:
                continue
            if backend.up and (usable is None or backend in usable) and backend not in found:
                if free < first_free:
                    second, second_free = first, first_free
                    first, first_free = backend, free
                else:
                    second, second_free = backend, free
        if first is not None:
            found.append(first)
        if second is not None:
            found.append(second)
        return found

    def room_after(self, now: float) -> float:
        """When some backend may take more by itself; inf for never."""
        if self._moved:
            self._refresh()
        least = inf
        for backend in self._backends:
            if now < backend.room_at < least:
                least = backend.room_at
            if now < backend.silent_at < least:  # it may have filled the limit of its bucket
                least = backend.silent_at
        return least

    def _warm(
        self, blocks: tuple[int, ...], least_match: float, usable: Sequence[Backend] | None
    ) -> list[Backend]:
        """Backends that hold as much of the prompt as matters; the first free of them."""
        least = max(1, ceil(least_match * len(blocks)))
        # Only blocks at positions 1, 2, 4, 8 ... are entered in `_holders`.
        holders = self._holders.get(blocks[(1 << (least.bit_length() - 1)) - 1], 0)
        warm: list[Backend] = []
        while holders:
            index = holders.bit_length() - 1
            holders ^= 1 << index
            backend = self._backends[index]
            if backend.up and (usable is None or backend in usable):
                warm.append(backend)
        if len(warm) > LOOK_AT_WARM:
            warm.sort(key=lambda backend: backend.rank)
        return warm[:LOOK_AT_WARM]

    def _refresh(self) -> None:
        for index in self._moved:
            backend = self._backends[index]
            backend.rank = backend.free_rank
            backend.room_at = backend.backlog_below_at(self._dispatch_ahead_s)
            backend.silent_at = backend.line.silent_ends_at()
        self._moved.clear()
