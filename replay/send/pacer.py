"""Wait until an absolute instant of the run, to a fraction of a millisecond, never early.

Event loops round timers up to whole milliseconds (both uvloop and epoll). At 2,000 arrivals a
second that is two arrivals. On Linux a timerfd with the absolute deadline wakes the loop through
its selector instead. Other systems, and virtual time, use a plain sleep. Deadlines are absolute: a
late wake-up makes one arrival late and moves no other arrival.
"""

import asyncio
import ctypes
import os
import sys
from contextlib import suppress
from typing import Any, Self

from forebay.replay.clock.clock import Clock
from forebay.replay.clock.spare_time import SpareTime

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = os.O_NONBLOCK if hasattr(os, "O_NONBLOCK") else 0
_TFD_CLOEXEC = os.O_CLOEXEC if hasattr(os, "O_CLOEXEC") else 0
_TFD_TIMER_ABSTIME = 1
MOST_IN_A_ROW = 4  # a loop that never gets a turn does not read
_CLOSE_ENOUGH_S = 1e-9  # a float deadline may not be reachable by float additions


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Timer(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


class Pacer:
    """Lets one caller at a time wait, inside `async with`, which closes the descriptor.

    While it waits, `spare` can give turns to other work.
    """

    def __init__(self, clock: Clock, spare: SpareTime) -> None:
        self._clock = clock
        self._spare = spare
        self._loop = asyncio.get_running_loop()
        self._descriptor: int | None = None
        self._libc: Any = None
        self._fired: asyncio.Future[None] | None = None
        self._woken = False
        self._in_a_row = 0  # callers that did not wait
        self._setting = _Timer(_Timespec(0, 0), _Timespec(0, 0))
        self._new = ctypes.byref(self._setting)

    async def __aenter__(self) -> Self:
        if sys.platform == "linux" and not self._clock.virtual:
            libc = ctypes.CDLL(None, use_errno=True)
            if hasattr(libc, "timerfd_create"):  # os.timerfd_create needs Python 3.13
                descriptor = libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
                if descriptor >= 0:
                    self._libc, self._descriptor = libc, descriptor
                    self._loop.add_reader(descriptor, self._fire)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    async def until(self, at_s: float) -> bool:
        """Return True at second `at_s` of the run, or at once if that is past.

        In a burst the loop gets a turn after each `MOST_IN_A_ROW` calls. Returns False at once when
        `wake` is called before.
        """
        self._woken, waited = False, False
        while (left := at_s - self._clock.now()) > _CLOSE_ENOUGH_S:
            self._spare.wait(at_s, left)
            self._fired = self._loop.create_future()
            timer = self._set(at_s, left)
            try:
                await self._fired
            finally:
                self._fired = None
                self._spare.end()
                if timer is not None:
                    timer.cancel()
            if self._woken:
                return False
            waited = True
        self._in_a_row = 0 if waited else self._in_a_row + 1
        if self._in_a_row == MOST_IN_A_ROW:
            self._in_a_row = 0
            self._spare.give_all()
            await asyncio.sleep(0)
        return True

    def wake(self) -> None:
        """Let the caller of `until` choose another time."""
        self._woken = True
        self._resolve()

    def _set(self, at_s: float, left_s: float) -> asyncio.TimerHandle | None:
        """Let `_resolve` be called at second `at_s`, which is `left_s` from now."""
        if self._descriptor is None:
            return self._loop.call_later(self._clock.wall(left_s), self._resolve)
        deadline, first = max(self._clock.deadline(at_s), 1e-9), self._setting.first
        first.seconds = int(deadline)
        first.nanoseconds = int(deadline % 1 * 1e9) + 1  # 0 would disarm it
        if self._libc.timerfd_settime(self._descriptor, _TFD_TIMER_ABSTIME, self._new, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        return None

    def _fire(self) -> None:
        if not self._resolve():  # else setting the timer again makes the descriptor unreadable
            with suppress(BlockingIOError):
                os.read(self._descriptor or 0, 8)

    def _resolve(self) -> bool:
        """End the wait. False if no caller waits."""
        if self._fired is None or self._fired.done():
            return False
        self._fired.set_result(None)
        return True
