"""The queue of waiting requests, and the steps in which prefills wait.

With --scheduler-cls forebay the queue also decides the prefills of each step, in the order and with
the caps of `proxy.core.policy.engine_step`, as inside vLLM. With --kv-offloading-size it loads
blocks from the host's memory.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from forebay.proxy.core.learn.step_cost import Chunk, StepCost
from forebay.proxy.core.policy.engine_queue import StepRequest
from forebay.proxy.core.policy.engine_step import EngineSteps, StepLimits
from forebay.replay.engine.kv_blocks.host_copies import HostCopies
from forebay.replay.engine.kv_blocks.pool import BlockPool
from forebay.replay.engine.kv_blocks.tables import BlockTables
from forebay.replay.engine.limits import SchedulerLimits
from forebay.replay.engine.request import UNCAPPED, EngineRequest


class WaitingQueue:
    """Waiting requests in the order of admission: fcfs, or (priority, arrival, id)."""

    def __init__(self, policy: str) -> None:
        self._by_priority = policy == "priority"
        self._line: deque[EngineRequest] = deque()
        self._heap: list[tuple[int, float, str, int, EngineRequest]] = []
        self._entered = 0

    def __len__(self) -> int:
        return len(self._line) + len(self._heap)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter([entry[-1] for entry in sorted(self._heap)] if self._heap else self._line)

    def head(self) -> EngineRequest | None:
        """Return the next request, None without one."""
        if self._by_priority:
            return self._heap[0][-1] if self._heap else None
        return self._line[0] if self._line else None

    def pop(self) -> EngineRequest:
        return heappop(self._heap)[-1] if self._by_priority else self._line.popleft()

    def append(self, request: EngineRequest) -> None:
        if self._by_priority:
            self._entered += 1
            entry = (request.priority, request.arrival_s, request.id, self._entered, request)
            heappush(self._heap, entry)
        else:
            self._line.append(request)

    def put_back(self, request: EngineRequest) -> None:
        """Return a preempted request to the front (fcfs) or to the place of its priority."""
        if self._by_priority:
            self.append(request)
        else:
            self._line.appendleft(request)

    def remove(self, request: EngineRequest) -> None:
        if self._by_priority:
            self._heap = [entry for entry in self._heap if entry[-1] is not request]
            heapify(self._heap)
        else:
            self._line.remove(request)


class LoadingQueue(WaitingQueue):
    """Waiting requests, some of which wait for blocks from the host's memory.

    A request holds its blocks while they are loaded, and starts before all others when its load has
    ended. Requests that need the same blocks are deferred until a load ends. Iteration leaves out
    requests that hold blocks, and deferred ones.

    Attributes:
        copies: the host's memory.

    Args:
        can_load: the answer for a request, the number of its blocks in the host's memory, and the
            waiting requests that hold blocks.
        count_lookup: counts a request that begins to load, and its tokens in the prefix cache.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        tables: BlockTables,
        pool: BlockPool,
        can_load: Callable[[EngineRequest, int, list[EngineRequest]], bool],
        count_lookup: Callable[[EngineRequest, int], None],
    ) -> None:
        super().__init__(limits.scheduling_policy)
        self.copies = HostCopies(limits)
        self._tables = tables
        self._pool = pool
        self._block_size = limits.block_size
        self._loaded = WaitingQueue(limits.scheduling_policy)  # these start first
        self._deferred: list[EngineRequest] = []
        self._now = 0.0
        self._can_load = can_load
        self._count_lookup = count_lookup

    def __len__(self) -> int:
        return super().__len__() + self.deferred

    @property
    def deferred(self) -> int:
        """Return the number of requests that wait for blocks, or hold theirs."""
        return len(self.holders()) + len(self._deferred)

    def begin(self, now: float) -> None:
        """Begin a step, and take back the requests whose loads have ended."""
        self._now, ended = now, False
        while (request := self.copies.loaded(now)) is not None:
            ended = True
            if request.aborted:
                self._tables.release(request)
            else:
                self._loaded.append(request)
        while ended and self._deferred:
            self.put_back(self._deferred.pop())

    def head(self) -> EngineRequest | None:
        """Return the next request that can start, and begin the loads of requests before it."""
        if (request := self._loaded.head()) is not None:
            self._tables.register(request, request.computed // self._block_size)
            request.computed = min(request.computed, request.tokens - 1)  # the last is computed
            return request
        while (waiting := super().head()) is not None:
            first = self._tables.look_up(waiting)
            run = self.copies.run(waiting, first, waiting.tokens // self._block_size)
            if run is None:
                self._deferred.append(super().pop())
                continue
            if not run:
                return waiting
            if not self._can_load(waiting, len(run), self.holders()):
                return None
            self._load(super().pop(), first, run)
        return None

    def pop(self) -> EngineRequest:
        return self._loaded.pop() if len(self._loaded) else super().pop()

    def remove(self, request: EngineRequest) -> None:
        """Remove a request. A loading request keeps its blocks until its load ends."""
        if request in self._deferred:
            self._deferred.remove(request)
        elif not request.blocks:
            super().remove(request)
        elif request in self._loaded:
            self._loaded.remove(request)
            self._tables.release(request)

    def _load(self, request: EngineRequest, first: int, run: list[int]) -> None:
        self._count_lookup(request, first * self._block_size)
        self._tables.take_hits(request)
        request.blocks += self._pool.allocate(len(run))
        request.offered = len(request.blocks)
        request.computed = request.offered * self._block_size
        if request.cached_tokens < 0:
            request.loaded_tokens = len(run) * self._block_size
        self.copies.load(request, run, self._now)

    def store(self, scheduled: Iterable[EngineRequest]) -> None:
        """Copy the blocks of prompts that a step computes, and those refused before."""
        for request in scheduled:
            if request.offered < request.prompt_tokens // self._block_size:
                self.copies.store(request)

    def holders(self) -> list[EngineRequest]:
        """Return the waiting requests that hold blocks."""
        return [*self._loaded, *self.copies.loading()]


def steps_of(limits: SchedulerLimits) -> EngineSteps:
    """Return the decision for an engine with these limits. It has learned nothing."""
    return EngineSteps(
        StepLimits(
            pause_s=limits.pause_s,
            step_tokens=limits.max_num_batched_tokens,
            block_tokens=limits.block_size,
            by_priority=limits.scheduling_policy == "priority",
        ),
        StepCost(),
    )


class StepLessons:
    """Teaches a `StepCost` the steps of a simulated engine.

    Of steps in a row that only decode it shows the first. An engine that jumps over the others then
    learns the same.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._decodes_are_news = True

    def observe(self, seconds: float, chunks: Sequence[Chunk]) -> None:
        """Learn from a step that has ended, in whole microseconds."""
        if chunks or self._decodes_are_news:
            self._cost.observe(round(seconds * 1e6) / 1e6, chunks)
        self._decodes_are_news = bool(chunks)


class PlannedQueue(WaitingQueue):
    """Waiting requests that start when the decision says so."""

    def __init__(self, limits: SchedulerLimits, tables: BlockTables, pool: BlockPool) -> None:
        super().__init__("fcfs")
        self._steps = steps_of(limits)
        self.lessons = StepLessons(self._steps.cost)
        self._limits = limits
        self._tables = tables
        self._pool = pool
        self._arrived: list[EngineRequest] = []  # since the last plan
        self._admit: list[EngineRequest] = []  # in the present plan, the next one last
        self._capped: list[EngineRequest] = []  # by the present plan
        self._kept_blocks = 0  # that no admission may take

    def __len__(self) -> int:
        return len(self._steps) + len(self._arrived)

    def __iter__(self) -> Iterator[EngineRequest]:
        raise NotImplementedError

    def head(self) -> EngineRequest | None:
        return self._admit[-1] if self._admit else None

    def pop(self) -> EngineRequest:
        request = self._admit.pop()
        self._steps.remove(_step_of(request))
        return request

    def append(self, request: EngineRequest) -> None:
        self._arrived.append(request)

    def put_back(self, request: EngineRequest) -> None:
        self._arrived.append(request)

    def remove(self, request: EngineRequest) -> None:
        if request in self._arrived:
            self._arrived.remove(request)
        else:
            self._steps.remove(_step_of(request))

    def plan(
        self, now: float, running: list[EngineRequest], seats: int, cap: int, kept_blocks: int
    ) -> None:
        """Decide the next step: cap the running prefills, and choose the requests to admit.

        Args:
            running: running requests, in the order of admission.
            seats: how many requests may be admitted.
            cap: most tokens of one request.
            kept_blocks: free blocks that no admission may take.
        """
        # Begin: no caps, and the requests that have come.
        for request in self._capped:
            request.cap = UNCAPPED
        self._capped.clear()
        self._admit.clear()
        self._kept_blocks = kept_blocks
        for request in self._arrived:
            self._add(request)
        self._arrived.clear()
        # Running requests decode, or have prompt tokens left.
        decoding, prefilling = 0, []
        for request in running:
            step, computed = _step_of(request), request.computed
            if computed < step.tokens:
                step.computed = computed
                prefilling.append(step)
                self._cap(request, 0)
            elif not request.ending and computed < self._limits.max_model_len - 1:
                decoding += 1 + request.drafts + self._limits.draft_slots
        if not prefilling and not len(self._steps):
            return
        # A running prefill that the plan leaves out keeps a cap of 0.
        plan = self._steps.plan(now, decoding, prefilling, self._look, seats, cap, self._shared)
        for step, count in plan.running:
            self._cap(step.handle, count)
        for step, count in reversed(plan.admit):
            self._cap(step.handle, count)
            self._admit.append(step.handle)

    def _cap(self, request: EngineRequest, count: int) -> None:
        request.cap = count
        self._capped.append(request)

    def _add(self, request: EngineRequest) -> None:
        computed = self._tables.look_up(request) * self._limits.block_size
        step = request.step
        if step is None:
            step = request.step = StepRequest(
                request, request.queued_s, request.tokens, computed, request.priority
            )
        else:  # it was preempted
            step.tokens, step.computed = request.tokens, computed
        self._steps.add(step)

    def _look(self, step: StepRequest, owed: int) -> int | None:
        request: EngineRequest = step.handle
        step.tokens = request.tokens  # a token may have arrived after a preemption
        computed = self._tables.look_up(request) * self._limits.block_size
        spare = self._pool.free_blocks - self._kept_blocks - -(-owed // self._limits.block_size)
        return computed if self._tables.admissible(request, computed + 1, spare) else None

    def _shared(self, waiting: StepRequest, leader: StepRequest) -> int:
        """Return the leading tokens that two prompts share, in whole blocks."""
        if not self._limits.enable_prefix_caching:
            return 0
        size = self._limits.block_size
        ours, theirs = waiting.handle.hashes, leader.handle.hashes
        low, high = (
            0,
            min(len(ours), len(theirs), (waiting.tokens - 1) // size, leader.tokens // size),
        )
        while low < high:  # equal hashes stand for equal beginnings
            middle = (low + high + 1) // 2
            if ours[middle - 1] == theirs[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low * size


def _step_of(request: EngineRequest) -> StepRequest:
    assert request.step is not None, request
    return request.step


class PrefillInterval:
    """Keeps prefills out of the N - 1 steps after a step with prefills (prefill_schedule_interval).

    Attributes:
        holds: True if the present step computes no prefill.
    """

    def __init__(self, interval: int) -> None:
        self.holds = False
        self._interval = interval
        self._executed = 0  # steps with tokens
        self._prefilled_at = -interval  # the last of these with a prefill
        self._backed_up = False  # the last step that was not held left requests waiting

    def begin(self, running: Iterable[EngineRequest]) -> None:
        """Decide whether prefills are kept out of the step that begins: others decode meanwhile."""
        self.holds = (
            not self._backed_up
            and self._executed + 1 - self._prefilled_at < self._interval
            and any(not request.prefilling for request in running)
        )

    def admitted(self, waiting: int) -> None:
        """Record that the step admits no more, and how many requests still wait."""
        if not self.holds:
            self._backed_up = waiting > 0

    def end(self, prefills: bool) -> None:
        """Record a step with tokens, and whether it prefilled."""
        self._executed += 1
        if prefills:
            self._prefilled_at = self._executed
