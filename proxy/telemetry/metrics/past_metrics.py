"""Keep the metrics of the last hour, so that `forebay doctor --since 5m` can look at a window.

A snapshot is the text of /metrics, packed. It is taken twice a minute, at the cost of a scrape, and
an hour of snapshots takes about half a MiB.
"""

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from forebay.traces.ground.event_loop import background

EVERY_S = 30.0
TICK_S = 5.0
AGE = b"forebay_snapshot_age_seconds"
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
        chosen = self._chosen(seconds)
        return zlib.decompress(chosen[1]) if chosen is not None else b""

    def age(self, seconds: float) -> bytes:
        """Return the age of `ago(seconds)` as a metric, or nothing if that is empty."""
        chosen = self._chosen(seconds)
        age_s = 0.0 if chosen is None else self._clock() - chosen[0]
        return b"" if chosen is None else b"# TYPE %s gauge\n%s %.3f\n" % (AGE, AGE, age_s)

    def _chosen(self, seconds: float) -> tuple[float, bytes] | None:
        before = self._clock() - seconds
        chosen = None
        for snapshot in self._kept:
            if snapshot[0] > before and chosen:
                break
            chosen = snapshot
            if snapshot[0] > before:  # the oldest one that is kept is younger
                break
        full = len(self._kept) == self._kept.maxlen
        return None if chosen is None or (chosen[0] > before and not full) else chosen

    def kept(self, *ticks: Callable[[float], None]) -> AbstractAsyncContextManager[None]:
        """Take snapshots while the block runs. `ticks` are called with the time, more often."""
        return background(self._run(ticks))

    async def _run(self, ticks: Sequence[Callable[[float], None]]) -> None:
        taken_at = self._clock()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            if now - taken_at >= EVERY_S - TICK_S / 2:
                taken_at = now
                self.take()
            for tick in ticks:
                tick(now)
