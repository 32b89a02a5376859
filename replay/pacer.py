"""Wait until an absolute instant of the run, to a fraction of a millisecond, never early.

Event loops round timers up to whole milliseconds (both uvloop and epoll). At 2,000 arrivals a
second that is two arrivals. On Linux a timerfd with the absolute deadline wakes the loop through
its selector instead. Other systems, and virtual time, use a plain sleep. Deadlines are absolute: a
late wake-up makes one arrival late and moves none of the others.
"""

import asyncio
import ctypes
import os
import sys
from types import TracebackType
from typing import Any, Self

from forebay.replay.clock import Clock

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = os.O_NONBLOCK if hasattr(os, "O_NONBLOCK") else 0
_TFD_CLOEXEC = os.O_CLOEXEC if hasattr(os, "O_CLOEXEC") else 0
_TFD_TIMER_ABSTIME = 1
_CLOSE_ENOUGH_S = 1e-9  # a float deadline may not be reachable by float additions


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Timer(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


class Pacer:
    """Lets one caller at a time wait; use it in `async with`, which closes the descriptor."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._descriptor: int | None = None
        self._libc: Any = None
        self._fired: asyncio.Future[None] | None = None
        self._woken = False
        self._setting = _Timer(_Timespec(0, 0), _Timespec(0, 0))

    async def __aenter__(self) -> Self:
        if sys.platform == "linux" and not self._clock.virtual:
            libc = ctypes.CDLL(None, use_errno=True)
            if hasattr(libc, "timerfd_create"):  # os.timerfd_create needs Python 3.13
                descriptor = libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
                if descriptor >= 0:
                    self._libc, self._descriptor = libc, descriptor
                    self._loop.add_reader(descriptor, self._fire)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    async def until(self, at_s: float) -> bool:
        """Return True at second `at_s` of the run; if that is past, after one turn of the loop.

        Returns False at once when `wake` is called before.
        """
        left = at_s - self._clock.now()
        if left <= 0:
            await asyncio.sleep(0)  # in a burst, too, the loop must get turns to send
        self._woken = False
        while left > _CLOSE_ENOUGH_S:
            if self._descriptor is None:
                await self._sleep(left)
            else:
                await self._timer(self._descriptor, self._clock.deadline(at_s))
            if self._woken:
                return False
            left = at_s - self._clock.now()
        return True

    def wake(self) -> None:
        """Let the caller of `until` choose another time."""
        self._woken = True
        self._resolve()

    async def _sleep(self, seconds: float) -> None:
        self._fired = self._loop.create_future()
        timer = self._loop.call_later(self._clock.wall(seconds), self._resolve)
        try:
            await self._fired
        finally:
            timer.cancel()
            self._fired = None

    async def _timer(self, descriptor: int, deadline: float) -> None:
        whole, fraction = divmod(max(deadline, 1e-9), 1.0)
        setting, first = self._setting, self._setting.first
        first.seconds, first.nanoseconds = int(whole), int(fraction * 1e9) + 1  # 0 would disarm it
        if self._libc.timerfd_settime(descriptor, _TFD_TIMER_ABSTIME, ctypes.byref(setting), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        self._fired = self._loop.create_future()
        try:
            await self._fired
        finally:
            self._fired = None

    def _fire(self) -> None:
        try:
            os.read(self._descriptor or 0, 8)
        except BlockingIOError:  # set again since: a spurious wake-up
            return
        self._resolve()

    def _resolve(self) -> None:
        if self._fired is not None and not self._fired.done():
            self._fired.set_result(None)
