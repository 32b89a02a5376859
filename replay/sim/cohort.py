"""All decoding requests as one: what a step costs and when anything happens to one of them."""

from heapq import heappop, heappush

from forebay.replay.sim.request import PREFILLING, SimRequest


class Cohort:
    """Requests that each compute one token in every step.

    Every step adds one to all their lengths, so nothing here changes from step to step.

    Attributes:
        size: how many.
        offsets: sum of their offsets; at the start of step n they have offsets + size*n tokens.
        phases: how many take a new block at step n, under n % block_size.
        ends: heap of (last step, rank, request); void where the rank has changed since, by a
            preemption.
    """

    __slots__ = ("_block_size", "ends", "offsets", "phases", "size")

    def __init__(self, block_size: int) -> None:
        self.size = self.offsets = 0
        self.phases = [0] * block_size
        self._block_size = block_size
        self.ends: list[tuple[int, int, SimRequest]] = []

    def join(self, request: SimRequest, step: int) -> None:
        """Its prompt was completed, and its first token sampled, in `step`."""
        request.offset = offset = request.tokens - step
        request.phase = phase = (1 - offset) % self._block_size
        self.size += 1
        self.offsets += offset
        self.phases[phase] += 1
        heappush(self.ends, (request.last - offset, request.rank, request))

    def leave(self, request: SimRequest) -> None:
        """It was preempted."""
        self.size -= 1
        self.offsets -= request.offset
        self.phases[request.phase] -= 1
        request.phase = PREFILLING

    def next_end(self) -> int:
        """The next step that is somebody's last; there must be somebody."""
        ends = self.ends
        while ends[0][1] != ends[0][2].rank:
            heappop(ends)
        return ends[0][0]

    def ended(self, step: int) -> list[SimRequest]:
        """Those whose last step was `step`, in the order of their admission; they leave."""
        ended: list[SimRequest] = []
        ends = self.ends
        while ends and ends[0][0] <= step:
            _step, rank, request = heappop(ends)
            if rank == request.rank:
                self.size -= 1
                self.offsets -= request.offset
                self.phases[request.phase] -= 1
                ended.append(request)
        return ended

    def blocks(self, step: int, count: int) -> int:
        """New blocks that they take in the `count` steps from `step`."""
        block_size = self._block_size
        begin = step % block_size
        if count == 1:
            return self.phases[begin]
        blocks = count // block_size * self.size
        end = begin + count % block_size
        if end <= block_size:
            return blocks + sum(self.phases[begin:end])
        return blocks + self.size - sum(self.phases[end - block_size : begin])

    def steps_within(self, step: int, count: int, free: int) -> int:
        """How many of the `count` steps from `step` can be made with `free` blocks."""
        block_size, phases = self._block_size, self.phases
        if (count // block_size + 1) * self.size <= free:
            return count
        rounds, free = divmod(free, self.size)  # each takes one in block_size steps
        steps = rounds * block_size
        while steps < count:
            free -= phases[(step + steps) % block_size]
            if free < 0:
                return steps
            steps += 1
        return count
