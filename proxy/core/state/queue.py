"""Waiting requests: one request, a flow of them in order, sums over flows, and many by prefix.

Questions take O(log n) or O(1), also in the number of tenants that wait, but for sums over a part
of a queue: these add up one number for each 64 requests (`ordered.py`).

A prefill that many requests share is computed once (single-flight). Its leader is a waiting request
with a long prompt. Which request follows which is decided in `policy/coalesce.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from forebay.proxy.core.learn.prefix_index import common_run
from forebay.proxy.core.model import CLASSES, MAJORITY, STANDARD, Request
from forebay.proxy.core.ordered import Ramps, SortedSums
from forebay.proxy.core.state.in_flight import STEP_TOKENS
from forebay.proxy.core.state.tenants import Fairness

NONE_EXCLUDED: frozenset[str] = frozenset()

FlowKey = tuple[int, str, int]  # rank among all tenants, tenant, rank among its own requests


class QueuedRequest:
    """A request that waits in the queue of `backend`, or waited there before it was sent.

    Attributes:
        order: number of its arrival; breaks ties.
        rank: rank of its service class among the requests of all tenants.
        own_rank: rank of its service class among the requests of its own tenant.
        flow: key of the sub-queue in which it waits.
        settled: its tenant's quota needs no correction: the engine has counted its prompt, or
            nothing was charged.
        output_tokens: expected length of its answer.
        paid: its tokens count against its tenant's quota, and it was not sent yet.
        work_s: predicted seconds of its prefill.
        kv_tokens: KV cache that it will take (`policy/kv_wait.py`).
        follows: it waits for a prefill that its backend computes, or will compute for `leader`.
        leader: the waiting request whose prefill it waits for.
        looks_again_at: other backends may take it over from this time on.
        leaves_at: when it leaves, unless its queue is a burst: at its deadline, or later.
        gives_up_at: it waits no longer than until then.
    """

    def __init__(
        self,
        request: Request,
        bucket: str,
        arrived_at: float,
        deadline: float,
        order: int,
        work_s: float = 0.0,
        rank: int = STANDARD,
        own_rank: int = STANDARD,
    ) -> None:
        self.request = request
        self.rank = rank
        self.own_rank = own_rank
        self.flow = (rank, request.tenant, own_rank)
        self.output_tokens = request.output_tokens
        self.paid = self.settled = False
        self.bucket = bucket
        self.arrived_at = arrived_at
        self.deadline = deadline
        self.due = deadline
        self.order = order
        self.work_s = work_s
        self.kv_tokens = 0.0
        self.follows = False
        self.leader: QueuedRequest | None = None
        self.backend = ""
        self.excluded: frozenset[str] = NONE_EXCLUDED
        self.looks_again_at = -inf
        self.leaves_at = self.gives_up_at = inf

    def go_on(self, rest: Request, now: float, most_s: float) -> None:
        """Ask for the rest of an answer, before requests that came later and within `most_s`."""
        done = rest.prompt_tokens - self.request.prompt_tokens
        self.request = rest
        self.output_tokens = max(1, self.output_tokens - done)
        self.deadline, self.arrived_at = self.arrived_at, now
        self.leaves_at = self.gives_up_at = now + most_s

    @property
    def key(self) -> tuple[float, int]:
        return self.due, self.order

    @property
    def by_due(self) -> tuple[float, int, str]:
        return self.due, self.order, self.request.id

    @property
    def by_deadline(self) -> tuple[float, int, str]:
        return self.deadline, self.order, self.request.id

    @property
    def late_at(self) -> float:
        """When it will have waited long."""
        return self.arrived_at + MAJORITY * (self.deadline - self.arrived_at)


class DueQueue:
    """Waiting requests of one flow, with the first due at the head."""

    def __init__(self) -> None:
        self._by_due = SortedSums()
        self._by_deadline = SortedSums()
        self._waiting: dict[str, QueuedRequest] = {}
        self._last_due = self._last_deadline = -inf
        self.work_s = self.kv_tokens = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, waiting: QueuedRequest) -> None:
        self._waiting[waiting.request.id] = waiting
        self._by_due.add(waiting.by_due, waiting.work_s)
        self._by_deadline.add(waiting.by_deadline, waiting.work_s)
        self._last_due = max(self._last_due, waiting.due)
        self._last_deadline = max(self._last_deadline, waiting.deadline)
        self.work_s += waiting.work_s
        self.kv_tokens += waiting.kv_tokens

    def head(self) -> QueuedRequest | None:
        """Return the request that is due first."""
        first = self._by_due.first()
        return None if first is None else self._waiting[first[-1]]

    def earliest(self) -> QueuedRequest | None:
        """Return the request with the earliest deadline."""
        first = self._by_deadline.first()
        return None if first is None else self._waiting[first[-1]]

    def remove(self, request_id: str) -> QueuedRequest | None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._by_due.remove(waiting.by_due)
            self._by_deadline.remove(waiting.by_deadline)
            self.work_s -= waiting.work_s
            self.kv_tokens -= waiting.kv_tokens
            if not self._waiting:
                self._last_due = self._last_deadline = -inf
                self.work_s = self.kv_tokens = 0.0
        return waiting

    def seconds_before(self, due: float) -> float:
        """Return the prefill seconds that leave before a request with this due time."""
        return self.work_s if due >= self._last_due else self._by_due.before(due)[1][0]

    def count_before(self, due: float) -> int:
        """Return the number of requests that leave before a request with this due time."""
        return len(self._waiting) if due >= self._last_due else self._by_due.before(due)[0]

    def urgent(self, deadline: float) -> tuple[float, int]:
        """Return prefill seconds and number of requests with at most this deadline."""
        if deadline >= self._last_deadline:
            return self.work_s, len(self._waiting)
        count, (seconds,) = self._by_deadline.before(deadline)
        return seconds, count

    def everyone(self) -> list[QueuedRequest]:
        """Return all waiting requests in the order in which they leave."""
        return sorted(self._waiting.values(), key=lambda w: w.key)


class Crowd:
    """Sums over the flows of one queue, kept while many flows wait.

    Attributes:
        by_due: all requests, with their seconds.
    """

    def __init__(self, flows: Mapping[FlowKey, DueQueue], fairness: Fairness) -> None:
        self._flows = flows
        self._fairness = fairness
        self.by_due = SortedSums()
        self._by_deadline = [SortedSums() for _ in CLASSES]
        # For each rank, the work of each tenant that goes before a tenant with this counter.
        self._gaps: list[Ramps[FlowKey]] = []
        self._engines = 0
        self._outdated: set[FlowKey] = set()
        self._read = 0  # changes of counters
        for flow in flows.values():
            for waiting in flow.everyone():
                self.push(waiting)

    def push(self, waiting: QueuedRequest) -> None:
        self.by_due.add(waiting.by_due, waiting.work_s)
        self._by_deadline[waiting.rank].add(waiting.by_deadline, waiting.work_s)
        self._outdated.add(waiting.flow)

    def remove(self, waiting: QueuedRequest) -> None:
        self.by_due.remove(waiting.by_due)
        self._by_deadline[waiting.rank].remove(waiting.by_deadline)
        self._outdated.add(waiting.flow)

    def of_rank(self, rank: int, deadline: float) -> tuple[float, float]:
        """Return seconds and number of the requests of a rank with at most this deadline."""
        count, (seconds,) = self._by_deadline[rank].before(deadline)
        return seconds, count

    def of_lighter(self, rank: int, tenant: str, engines: int) -> tuple[float, float]:
        """Return seconds and number of others' requests of a rank that go before a tenant's.

        The same as a sum of `Fairness.seconds_before` over all flows.
        """
        self._refresh(engines)
        return self._gaps[rank].at(self._fairness.counter(tenant))

    def _refresh(self, engines: int) -> None:
        """Bring the ramps of flows up to date whose work or counter has changed."""
        fairness = self._fairness
        moved = fairness.moved.since(self._read)
        self._read = fairness.moved.count
        if engines != self._engines or moved is None:
            self._engines = engines
            self._gaps = [Ramps(fairness.highest_sent) for _ in CLASSES]
            self._outdated = set(self._flows)
        else:
            for tenant in moved:
                self._outdated.update(key for key in keys_of(tenant) if key in self._flows)
        for key in self._outdated:
            flow = self._flows.get(key)
            if flow is None:
                self._gaps[key[0]].drop(key)
                continue
            counter = fairness.counter(key[1])
            end = counter + flow.work_s * engines / fairness.weight(key[1])
            self._gaps[key[0]].put(key, counter, end, flow.work_s, len(flow))
        self._outdated.clear()


def keys_of(tenant: str) -> list[FlowKey]:
    """Return the keys of all flows that a tenant may have."""
    return [(rank, tenant, own) for rank in range(len(CLASSES)) for own in range(len(CLASSES))]


class ByPrefix:
    """Waiting requests of one backend by their prompts' blocks at positions 1, 2, 4, 8 ...

    Block hashes are chained: prompts that are equal in one block are equal in all before it.

    Attributes:
        by_id: all of them.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, QueuedRequest] = {}
        self._by_block: dict[int, dict[str, QueuedRequest]] = {}

    def add(self, waiting: QueuedRequest) -> None:
        """Add a request."""
        request_id = waiting.request.id
        self.by_id[request_id] = waiting
        for block in _marks(waiting.request.blocks):
            self._by_block.setdefault(block, {})[request_id] = waiting

    def drop(self, request_id: str) -> bool:
        """Remove a request. True if it was there."""
        waiting = self.by_id.pop(request_id, None)
        if waiting is None:
            return False
        for block in _marks(waiting.request.blocks):
            group = self._by_block.get(block)
            if group is not None:
                group.pop(request_id, None)
                if not group:
                    del self._by_block[block]
        return True

    def near(self, blocks: Sequence[int], place: int) -> Iterable[QueuedRequest]:
        """Return all requests that share the block at a place, and some that share earlier blocks.

        Args:
            place: number of the block, 0 for the first. The prompt must have it.
        """
        mark = (1 << ((place + 1).bit_length() - 1)) - 1
        return self._by_block.get(blocks[mark], _NONE).values()

    def longest_run(self, request: Request, above: int) -> tuple[int, QueuedRequest | None]:
        """Find the prompt that shares the most leading blocks with a request.

        Args:
            above: only longer runs than this count.

        Returns:
            The length of the run in blocks and the other request, or `above` and None.
        """
        blocks, most, best = request.blocks, above, None
        if len(blocks) > above:
            next_block = blocks[above]
            for other in self.near(blocks, above):
                theirs = other.request.blocks
                same = len(theirs) > above and theirs[above] == next_block
                if same and other.request is not request:
                    run = common_run(blocks, theirs, above + 1)
                    if run > most:
                        most, best = run, other
        return most, best


class Leaders(ByPrefix):
    """Requests that wait for one backend with a long prompt and follow no other request."""

    def add(self, waiting: QueuedRequest) -> None:
        """Add a request, unless its prompt is too short for others to wait for it."""
        if waiting.request.prompt_tokens > STEP_TOKENS:
            super().add(waiting)


_NONE: dict[str, QueuedRequest] = {}


def _marks(blocks: Sequence[int]) -> list[int]:
    return [blocks[(1 << power) - 1] for power in range(len(blocks).bit_length())]
