"""Run background work in turns of the event loop in which no arrival is due soon.

Such work is done in steps of about a tenth of a millisecond, each of which asks for a turn. Between
arrivals that follow each other closely, a turn follows a network read, as the process is awake
then. No turn directly follows a send: on a machine with few cores the server would not read the
request before the step is over.
"""

import asyncio
import math
from collections import deque

from forebay.replay.clock.clock import Clock

SOON_S = 0.000_2  # an arrival that is due within this time would be late by a step
SETTLED_S = 0.000_1  # by then the server has read the request
LONG_S = 0.002  # left of a gap: room for many steps, which take half of the time in a row
MOST_S = 0.001  # after this long a step is taken at the next read, even if an arrival is due
WITHOUT_READS_S = 0.02  # after this long it is taken even if nothing was read


class SpareTime:
    """The turns of one run. The pacer reports when arrivals are due.

    Attributes:
        wanted: the futures of callers that wait for a turn.
    """

    def __init__(self, clock: Clock) -> None:
        self.wanted: deque[asyncio.Future[None]] = deque()
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._from_s, self._until_s = -math.inf, math.inf  # when turns may be given
        self._latest_s = math.inf
        self._timer: asyncio.TimerHandle | None = None

    async def turn(self) -> None:
        """Return when the caller may take a step."""
        if self._from_s < self._clock.now() < self._until_s - LONG_S * self._clock.scale:
            await asyncio.sleep(0)
            return
        if not self.wanted:
            self._latest_s = self._clock.now() + MOST_S * self._clock.scale
        turn = self._loop.create_future()
        self.wanted.append(turn)
        if self._timer is None:  # one for all: to make one takes longer than a turn
            self._timer = self._loop.call_later(WITHOUT_READS_S, self._ring)
        await turn

    def wait(self, due_s: float, left_s: float) -> None:
        """Note that a request was just sent. The next is due at second `due_s`, in `left_s`."""
        scale = self._clock.scale
        self._from_s = due_s - left_s + SETTLED_S * scale
        self._until_s = due_s - SOON_S * scale

    def end(self) -> None:
        """Note that the time of the next arrival is unknown."""
        self._until_s = math.inf

    def offer(self, now_s: float) -> None:
        """Give a turn, unless an arrival is due soon or a request was sent just now."""
        if self._from_s < now_s < self._until_s or now_s > self._latest_s:
            self._give()

    def give_all(self) -> None:
        """Let all callers take their steps in the next turn of the loop: there are no gaps."""
        while self.wanted:
            self._give()

    def _ring(self) -> None:
        self._timer = None
        self.give_all()

    def _give(self) -> None:
        while self.wanted:
            turn = self.wanted.popleft()
            if not turn.done():
                turn.set_result(None)
                return
