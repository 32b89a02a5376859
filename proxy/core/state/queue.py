"""Waiting requests: one request, and the bounded queues of one backend.

Questions that every event asks take O(log n) or O(1). `seconds_before` looks at each waiting
request only if a new request would not be last, and `max_queue` bounds the queue.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from math import fsum, inf

from forebay.proxy.core.model import MAJORITY, STANDARD, Request

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
        cold: its prefill counts (`in_flight.counts`): it is no cache hit.
        follows: it waits for a prefill that its backend computes, or will compute for `leader`.
        leader: the waiting request whose prefill it waits for.
        looks_again_at: other backends may take it over from this time on.
    """

    __slots__ = (
        "arrived_at",
        "backend",
        "bucket",
        "cold",
        "deadline",
        "due",
        "excluded",
        "flow",
        "follows",
        "leader",
        "looks_again_at",
        "order",
        "output_tokens",
        "own_rank",
        "paid",
        "rank",
        "request",
        "settled",
        "work_s",
    )

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
        self.cold = True
        self.follows = False
        self.leader: QueuedRequest | None = None
        self.backend = ""
        self.excluded: frozenset[str] = NONE_EXCLUDED
        self.looks_again_at = -inf

    @property
    def key(self) -> tuple[float, int]:
        return self.due, self.order

    @property
    def late_at(self) -> float:
        """When it will have waited long."""
        return self.arrived_at + MAJORITY * (self.deadline - self.arrived_at)


class DueQueue:
    """Waiting requests of one flow, with the first due at the head."""

    def __init__(self) -> None:
        self._by_due: list[tuple[float, int, str]] = []
        self._by_deadline: list[tuple[float, int, str]] = []
        self._waiting: dict[str, QueuedRequest] = {}
        self._last_due = self._last_deadline = -inf
        self.work_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, waiting: QueuedRequest) -> None:
        self._waiting[waiting.request.id] = waiting
        heappush(self._by_due, (*waiting.key, waiting.request.id))
        heappush(self._by_deadline, (waiting.deadline, waiting.order, waiting.request.id))
        self._last_due = max(self._last_due, waiting.due)
        self._last_deadline = max(self._last_deadline, waiting.deadline)
        self.work_s += waiting.work_s

    def head(self) -> QueuedRequest | None:
        """Return the request that is due first."""
        while self._by_due:
            due, order, request_id = self._by_due[0]
            waiting = self._waiting.get(request_id)
            if waiting is not None and waiting.key == (due, order):
                return waiting
            heappop(self._by_due)  # its request was removed or moved: drop the entry now
        return None

    def earliest(self) -> QueuedRequest | None:
        """Return the request with the earliest deadline."""
        while self._by_deadline:
            deadline, order, request_id = self._by_deadline[0]
            waiting = self._waiting.get(request_id)
            if waiting is not None and (waiting.deadline, waiting.order) == (deadline, order):
                return waiting
            heappop(self._by_deadline)
        return None

    def remove(self, request_id: str) -> QueuedRequest | None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self.work_s -= waiting.work_s
            if not self._waiting:
                self._by_due.clear()
                self._by_deadline.clear()
                self._last_due = self._last_deadline = -inf
                self.work_s = 0.0
        return waiting

    def seconds_before(self, due: float) -> float:
        """Return the prefill seconds that leave before a request with this due time."""
        if due >= self._last_due:
            return self.work_s
        return fsum(w.work_s for w in self._waiting.values() if w.due <= due)

    def count_before(self, due: float) -> int:
        """Return the number of requests that leave before a request with this due time."""
        if due >= self._last_due:
            return len(self._waiting)
        return sum(w.due <= due for w in self._waiting.values())

    def urgent(self, deadline: float) -> tuple[float, int]:
        """Return prefill seconds and number of requests with at most this deadline."""
        if deadline >= self._last_deadline:
            return self.work_s, len(self._waiting)
        works = [w.work_s for w in self._waiting.values() if w.deadline <= deadline]
        return fsum(works), len(works)

    def everyone(self) -> list[QueuedRequest]:
        """Return all waiting requests in the order in which they leave."""
        return sorted(self._waiting.values(), key=lambda w: w.key)


class BucketQueue:
    """The queue of one bucket on one backend: a DueQueue for each class and tenant that waits.

    Args:
        turn: a number for each tenant; the tenant with the least is next.

    Attributes:
        flows: exist while a request waits in them.
        count: waiting requests.
        cold: waiting requests that are no cache hits.
    """

    def __init__(self, turn: Callable[[str], float]) -> None:
        self._turn = turn
        self.flows: dict[FlowKey, DueQueue] = {}
        self._only: DueQueue | None = None  # the flow, while there is exactly one
        self.count = self.cold = 0

    def __len__(self) -> int:
        return self.count

    @property
    def work_s(self) -> float:
        return fsum(flow.work_s for flow in self.flows.values())

    def push(self, waiting: QueuedRequest) -> None:
        key = waiting.flow
        flow = self.flows.get(key)
        if flow is None:
            flow = self.flows[key] = DueQueue()
            self._only = flow if len(self.flows) == 1 else None
        flow.push(waiting)
        self.count += 1
        self.cold += waiting.cold

    def remove(self, waiting: QueuedRequest) -> None:
        key = waiting.flow
        flow = self.flows[key]
        flow.remove(waiting.request.id)
        self.count -= 1
        self.cold -= waiting.cold
        if not len(flow):
            del self.flows[key]
            self._only = None
            if len(self.flows) == 1:
                self._only = next(iter(self.flows.values()))

    def heads(self) -> list[QueuedRequest]:
        """Return the next request of each class: of the tenant whose turn it is.

        Of a tenant whose class orders its own requests only, one request of each of its classes.
        """
        if not self.count:
            return []
        if self._only is not None:
            only = self._only.head()
            return [only] if only else []
        best: dict[int, tuple[float, float, int]] = {}
        next_tenant: dict[int, str] = {}
        heads: dict[FlowKey, QueuedRequest] = {}
        for (rank, tenant, own_rank), flow in self.flows.items():
            if head := flow.head():
                heads[rank, tenant, own_rank] = head
                key = (self._turn(tenant), head.due, head.order)
                if rank not in best or key < best[rank]:
                    best[rank], next_tenant[rank] = key, tenant
        return [heads[key] for key in sorted(heads) if key[1] == next_tenant[key[0]]]

    def earliest(self) -> QueuedRequest | None:
        """Return the request with the earliest deadline."""
        if self._only is not None:
            return self._only.earliest()
        first: QueuedRequest | None = None
        for flow in self.flows.values():
            waiting = flow.earliest()
            if waiting and (first is None or waiting.deadline < first.deadline):
                first = waiting
        return first

    def late_at(self) -> float:
        """Return when its earliest request will have waited long, or inf if no request waits."""
        first = self.earliest()
        return inf if first is None else first.late_at

    def seconds_before(self, due: float) -> float:
        """Return the prefill seconds that are due no later than `due`."""
        if self._only is not None:
            return self._only.seconds_before(due)
        if not self.count:
            return 0.0
        return fsum(flow.seconds_before(due) for flow in self.flows.values())

    def count_before(self, due: float) -> int:
        """Return the number of requests that are due no later than `due`."""
        if self._only is not None:
            return self._only.count_before(due)
        return sum(flow.count_before(due) for flow in self.flows.values())

    def urgent(self, deadline: float) -> tuple[float, int]:
        """Return prefill seconds and number of requests with at most this deadline."""
        if self._only is not None:
            return self._only.urgent(deadline)
        parts = [flow.urgent(deadline) for flow in self.flows.values()]
        return fsum(seconds for seconds, _ in parts), sum(count for _, count in parts)

    def of_tenant(self, tenant: str) -> tuple[int, float]:
        """Return the number of waiting requests of the tenant, and their prefill seconds."""
        count, seconds = 0, 0.0
        for (_, name, _), flow in self.flows.items():
            if name == tenant:
                count += len(flow)
                seconds += flow.work_s
        return count, seconds

    def everyone(self) -> list[QueuedRequest]:
        """Return all waiting requests in the order in which they are due."""
        waiting = [w for flow in self.flows.values() for w in flow.everyone()]
        return sorted(waiting, key=lambda w: w.key)
