"""Give connections with much to read one turn of the event loop after another.

A connection whose peer sends fast can be read all the time: uvloop takes up to 8 MiB from each in
one turn of its loop, and a request that needs little waits for all of it. So a connection pauses
after a large read. One of them goes on in each turn, whoever waits longest.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

LARGE_READ_BYTES: Final = 64 << 10


class ReadTurns:
    """Calls functions in order, one in each turn of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` once it is its turn."""
        self._waiting.append(go_on)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        go_on = self._waiting[0]
        try:
            go_on()
        finally:
            self._waiting.popleft()
            if self._waiting:
                self._loop.call_soon(self._next)
