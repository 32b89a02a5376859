"""Let connections with much to read or write go on one after another.

A connection whose peer sends fast can be read all the time: uvloop takes up to 8 MiB from each in
one turn of its loop, and a request that needs little waits for all of it. Hundreds that send slowly
are ready in the same turn, and a small read costs nearly as much as a large read. So a connection
pauses after a read of a body: for one turn of the loop if it is alone. Of several, the connection
that has waited longest goes on each millisecond. With more than 200 connections, several go on at
once, so that each is read at least five times a second.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

LARGE_READ_BYTES: Final = 64 << 10
TURN_S: Final = 0.001
AT_ONE_BY_ONE: Final = 200


class ReadTurns:
    """Calls functions in order: one each millisecond, but at once while there is only one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._next_at = 0.0

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` once it is its turn."""
        self._waiting.append(go_on)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._first)

    def _first(self) -> None:
        """Go on at once if no other connection waits: in between, the loop has done other work."""
        if len(self._waiting) == 1:
            self._waiting.popleft()()
        else:
            self._loop.call_at(self._next_at, self._next)

    def _next(self) -> None:
        self._next_at = self._loop.time() + TURN_S
        for _ in range(1 + len(self._waiting) // AT_ONE_BY_ONE):
            self._loop.call_soon(self._waiting.popleft())
        if self._waiting:
            self._loop.call_at(self._next_at, self._next)
