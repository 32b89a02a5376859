"""Keep the metrics of the last hour, so that `forebay doctor --since 5m` can look at a window.

A snapshot is the text of /metrics, packed. It is taken twice a minute, at the cost of a scrape, and
an hour of snapshots takes about half a MiB.
"""

import asyncio
import contextlib
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

EVERY_S = 30.0
KEPT_S = 3_600.0


class PastMetrics:
    """The snapshots of one process, oldest first."""

    def __init__(self, text: Callable[[], bytes], clock: Callable[[], float]) -> None:
        """`text` returns the metrics of now."""
        self._text = text
        self._clock = clock
        self._kept: deque[tuple[float, bytes]] = deque(maxlen=int(KEPT_S / EVERY_S) + 1)

    def take(self) -> None:
        """Keep the metrics of this moment."""
        self._kept.append((self._clock(), zlib.compress(self._text(), 1)))

    def ago(self, seconds: float) -> bytes:
        """Return the metrics of at least `seconds` ago, as late as they are kept.

        They are the oldest ones if the hour is over, and empty if the process is younger.
        """
        before = self._clock() - seconds
        chosen = b""
        for at, text in self._kept:
            if at > before and chosen:
                break
            chosen = text
            if at > before:  # the oldest snapshot that is kept is younger
                break
        full = len(self._kept) == self._kept.maxlen
        if not chosen or (self._kept[0][0] > before and not full):
            return b""
        return zlib.decompress(chosen)

    @contextlib.asynccontextmanager
    async def kept(self, *ticks: Callable[[float], None]) -> AsyncIterator[None]:
        """Take snapshots while the block runs. `ticks` are called with the time of each."""
        taking = asyncio.create_task(self._run(ticks))
        try:
            yield
        finally:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)

    async def _run(self, ticks: Sequence[Callable[[float], None]]) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self.take()
            for tick in ticks:
                tick(self._clock())
