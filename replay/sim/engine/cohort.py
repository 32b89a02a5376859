"""Treat all decoding requests as one cohort: the cost of a step, and its next change."""

from heapq import heappop, heappush
from typing import Final

from forebay.replay.sim.engine.request import PREFILLING, SimRequest

# More requests than one engine ever admits, and small enough that compiled code multiplies by it
# in machine words.
RANKS: Final = 1 << 29


class Cohort:
    """Requests that each compute one token in every step.

    Every step adds one token to each of them, so nothing here changes from step to step. Sliding
    layers read at most a window of each: `slide` moves requests that have outgrown it.

    Attributes:
        window: tokens of the window of sliding layers; 0 without any.
        size: number of requests.
        near: number of requests within the window, whose context grows in sliding layers, too.
        offsets: sum of their offsets. At the start of step n they have offsets + size*n tokens.
        phases: number of requests that take a new block at step n, at index n % block_size.
    """

    # Ends are a heap of last step * RANKS + rank: whole numbers compare faster than tuples. An
    # entry is void when no request has that rank any more, because it was preempted.
    __slots__ = (
        "_block_size",
        "_ends",
        "_near_offsets",
        "_outgrow",
        "_ranked",
        "_slid_to",
        "_void",
        "near",
        "offsets",
        "phases",
        "size",
        "window",
    )

    def __init__(self, block_size: int, window: int = 0) -> None:
        self.window = window
        self.size = self.offsets = self.near = self._near_offsets = 0
        self._slid_to = 0  # a request is near if its offset + this is within the window
        self._outgrow: list[int] = []  # the last step within the window, a heap like `_ends`
        self.phases = [0] * block_size
        self._block_size = block_size
        self._ends: list[int] = []
        self._ranked: dict[int, SimRequest] = {}
        self._void = 0

    def join(self, request: SimRequest, step: int) -> None:
        """Add a request whose prompt was completed, and first token sampled, in `step`."""
        request.offset = offset = request.tokens - step
        request.phase = phase = (1 - offset) % self._block_size
        self.size += 1
        self.offsets += offset
        self.phases[phase] += 1
        self._ranked[request.rank] = request
        heappush(self._ends, (request.last - offset) * RANKS + request.rank)
        if offset + self._slid_to <= self.window:
            self.near += 1
            self._near_offsets += offset
            if request.last > self.window:
                heappush(self._outgrow, (self.window - offset) * RANKS + request.rank)

    def leave(self, request: SimRequest) -> None:
        """Remove a preempted request."""
        self._subtract(request)
        request.phase = PREFILLING
        del self._ranked[request.rank]
        self._void += 1

    def next_end(self) -> int:
        """Return the next step that is the last of a request. The cohort must not be empty."""
        while self._void and self._ends[0] % RANKS not in self._ranked:
            heappop(self._ends)
            self._void -= 1
        return self._ends[0] // RANKS

    def ended(self, step: int) -> list[SimRequest]:
        """Remove the requests whose last step was `step`, and return them in order of admission."""
        ended: list[SimRequest] = []
        ends, beyond = self._ends, (step + 1) * RANKS
        while ends and ends[0] < beyond:
            request = self._ranked.pop(heappop(ends) % RANKS, None)
            if request is None:
                self._void -= 1
                continue
            self._subtract(request)
            ended.append(request)
        return ended

    def _subtract(self, request: SimRequest) -> None:
        offset = request.offset
        self.size -= 1
        self.offsets -= offset
        self.phases[request.phase] -= 1
        if offset + self._slid_to <= self.window:
            self.near -= 1
            self._near_offsets -= offset

    def slide(self, step: int) -> None:
        """Move the planned step on to `step`."""
        self._slid_to = step
        outgrow, below = self._outgrow, step * RANKS
        while outgrow and outgrow[0] < below:
            request = self._ranked.get(heappop(outgrow) % RANKS)
            if request is not None:
                self.near -= 1
                self._near_offsets -= request.offset

    def window_context(self, step: int) -> int:
        """Return the tokens that sliding layers read in `step`, no later than `next_outgrown`."""
        return self._near_offsets + self.near * step + (self.size - self.near) * self.window

    def next_outgrown(self) -> int:
        """Return the next step in which a request outgrows the window, or a step never reached."""
        outgrow = self._outgrow
        while outgrow and outgrow[0] % RANKS not in self._ranked:
            heappop(outgrow)
        return outgrow[0] // RANKS if outgrow else RANKS

    def blocks(self, step: int, count: int) -> int:
        """Count the new blocks of the `count` steps from `step`."""
        block_size, phases = self._block_size, self.phases
        begin = step % block_size
        blocks = count // block_size * self.size
        end = begin + count % block_size
        if end <= block_size:
            for phase in range(begin, end):
                blocks += phases[phase]
            return blocks
        for phase in range(end - block_size, begin):
            blocks -= phases[phase]
        return blocks + self.size

    def steps_within(self, step: int, count: int, free: int) -> int:
        """Return the number of the `count` steps from `step` that fit in `free` blocks."""
        block_size, phases = self._block_size, self.phases
        if (count // block_size + 1) * self.size <= free:
            return count
        rounds, free = divmod(free, self.size)  # each takes one block in block_size steps
        steps = rounds * block_size
        while steps < count:
            free -= phases[(step + steps) % block_size]
            if free < 0:
                return steps
            steps += 1
        return count
