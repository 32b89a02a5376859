"""Give work in the background turns of the event loop in which no arrival is due soon.

Such work is done in steps of about a tenth of a millisecond, each of which asks for a turn. Steps
are spread over the gaps between arrivals. A long row of them makes arrivals late even where it
stops in time: a program that runs for milliseconds without a pause loses its processor to another.
"""

import asyncio
import math

from forebay.replay.clock import Clock

SOON_S = 0.000_15  # an arrival that is due within this time would be late by a step
LONG_S = 0.005  # of a gap between arrivals: steps need not be spread
MOST_S = 0.05  # no step waits longer, whatever is due


class SpareTime:
    """The turns of one run, for one caller at a time; the pacer says when arrivals are due."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._due_s = math.inf
        self._turn: asyncio.Future[None] | None = None

    async def turn(self) -> None:
        """Return when the caller may take a step."""
        if self._clock.wall(self._due_s - self._clock.now()) > LONG_S:
            await asyncio.sleep(0)
            return
        self._turn = self._loop.create_future()
        timer = self._loop.call_later(MOST_S, self.give)
        try:
            await self._turn
        finally:
            timer.cancel()

    def wait(self, due_s: float, left_s: float) -> None:
        """Nothing is due before second `due_s`, which is `left_s` from now."""
        self._due_s = due_s
        if self._clock.wall(left_s) > SOON_S:
            self.give()

    def end(self) -> None:
        """The arrival is due, and nothing is known of the next one."""
        self._due_s = math.inf

    def give(self) -> None:
        """Let the caller take its step in the next turn of the loop."""
        turn, self._turn = self._turn, None
        if turn is not None and not turn.done():
            turn.set_result(None)
