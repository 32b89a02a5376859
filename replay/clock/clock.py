"""Provide the run's clock: seconds since its start, optionally faster than the wall clock.

With `scale` X, X simulated seconds pass in one wall second. Schedules, deadlines and all reported
times are in simulated seconds. Only this module and the pacer use wall time.
"""

import asyncio
import time
from collections.abc import Callable

from forebay.replay.clock.virtual_loop import VirtualClockLoop


class Clock:
    """Seconds since `restart()`. It must be made inside a running loop."""

    def __init__(self, scale: float = 1.0) -> None:
        loop = asyncio.get_running_loop()
        self.scale = scale
        self.virtual = isinstance(loop, VirtualClockLoop)
        # Not loop.time() on a real loop: uvloop caches it, in whole milliseconds.
        self._read: Callable[[], float] = loop.time if self.virtual else time.monotonic
        self._origin = self._read()

    def restart(self, monotonic_s: float | None = None) -> None:
        """Make this instant second 0, or one of the machine's monotonic clock."""
        self._origin = self._read() if monotonic_s is None else monotonic_s

    def now(self) -> float:
        return (self._read() - self._origin) * self.scale

    def deadline(self, at_s: float) -> float:
        """Convert second `at_s` of the run to the machine's monotonic clock."""
        return self._origin + at_s / self.scale

    def wall(self, seconds: float) -> float:
        """Convert a duration of the run to wall seconds."""
        return seconds / self.scale

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds) / self.scale)
