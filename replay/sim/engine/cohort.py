"""Treat all decoding requests as one cohort: the cost of a step, and which step changes one."""

from heapq import heappop, heappush
from typing import Final

from forebay.replay.sim.engine.request import PREFILLING, SimRequest

# More requests than one engine ever admits, and small enough that compiled code multiplies by it
# in machine words.
RANKS: Final = 1 << 29


class Cohort:
    """Requests that each compute one token in every step.

    Every step adds one token to each of them, so nothing here changes from step to step.

    Attributes:
        size: number of requests.
        offsets: sum of their offsets. At the start of step n they have offsets + size*n tokens.
        phases: number of requests that take a new block at step n, at index n % block_size.
    """

    # Ends are a heap of last step * RANKS + rank: whole numbers compare faster than tuples. An
    # entry is void when no request has that rank any more, because it was preempted.
    __slots__ = ("_block_size", "_ends", "_ranked", "_void", "offsets", "phases", "size")

    def __init__(self, block_size: int) -> None:
        self.size = self.offsets = 0
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

    def leave(self, request: SimRequest) -> None:
        """Remove a preempted request."""
        self.size -= 1
        self.offsets -= request.offset
        self.phases[request.phase] -= 1
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
            self.size -= 1
            self.offsets -= request.offset
            self.phases[request.phase] -= 1
            ended.append(request)
        return ended

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
