"""Waiting requests: one request, and the bounded queues of one backend.

Questions that every event asks take O(log n) or O(1), also in the number of tenants that wait.
`seconds_before` looks at each waiting request only if a new request would not be last, and
`max_queue` bounds the queue.
"""

from heapq import heappop, heappush
from math import fsum, inf

from forebay.proxy.core.model import CLASSES, MAJORITY, STANDARD, Request
from forebay.proxy.core.ordered import First
from forebay.proxy.core.state.kv_budget import Holdings

NONE_EXCLUDED: frozenset[str] = frozenset()

FlowKey = tuple[int, str, int]  # rank among all tenants, tenant, rank among its own requests
Place = tuple[float, float, int]  # of a flow among others, the least first


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
        holdings: says whose turn it is. `turn_fell` must be called if the turn of a tenant may
            have come nearer without a change of this queue, and `reorder` if any turn may have.

    Attributes:
        flows: exist while a request waits in them.
        count: waiting requests.
        cold: waiting requests that are no cache hits.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self.flows: dict[FlowKey, DueQueue] = {}
        self._only: DueQueue | None = None  # the flow, while there is exactly one
        # The orders of the flows, kept while there are several. A rank has two: by counters, and by
        # holdings for the time in which these are scarce. One more is by deadline.
        self._by_turn: dict[int, tuple[First[FlowKey], First[FlowKey]]] = {}
        self._by_deadline = First(self._deadline_place)
        self.count = self.cold = 0
        self._work_s = 0.0

    def __len__(self) -> int:
        return self.count

    @property
    def work_s(self) -> float:
        return self._work_s if self._only is None else self._only.work_s

    def push(self, waiting: QueuedRequest) -> None:
        key = waiting.flow
        flow = self.flows.get(key)
        if new := flow is None:
            flow = self.flows[key] = DueQueue()
            self._only = flow if len(self.flows) == 1 else None
        flow.push(waiting)
        if new and len(self.flows) == 2:
            self.reorder()  # nothing was noted while there was one
        elif self._only is None:
            self._note(key)
        self.count += 1
        self.cold += waiting.cold
        self._work_s += waiting.work_s

    def remove(self, waiting: QueuedRequest) -> None:
        key = waiting.flow
        flow = self.flows[key]
        flow.remove(waiting.request.id)
        self.count -= 1
        self.cold -= waiting.cold
        self._work_s = self._work_s - waiting.work_s if self.count else 0.0
        if not len(flow):
            del self.flows[key]
            self._forget(key)
            self._only = None
            if len(self.flows) == 1:
                self._only = next(iter(self.flows.values()))

    def turn_fell(self, tenant: str) -> None:
        """Note that a tenant's turn may have come nearer."""
        if len(self.flows) > 1:
            for rank in range(len(CLASSES)):
                for own_rank in range(len(CLASSES)):
                    if (rank, tenant, own_rank) in self.flows:
                        self._note((rank, tenant, own_rank))

    def reorder(self) -> None:
        """Note that the turn of any tenant may have come nearer."""
        if len(self.flows) > 1:
            for key in self.flows:
                self._note(key)

    def heads(self) -> list[QueuedRequest]:
        """Return the next request of each class: of the tenant whose turn it is.

        Of a tenant whose class orders its own requests only, one request of each of its classes.
        """
        if not self.count:
            return []
        if self._only is not None:
            only = self._only.head()
            return [only] if only else []
        heads = []
        for rank in sorted(self._by_turn):
            by_counter, by_holding = self._by_turn[rank]
            order = by_holding if self._holdings.scarce else by_counter
            if (first := order.first()) is None:
                continue
            for own_rank in range(len(CLASSES)):
                flow = self.flows.get((rank, first[1], own_rank))
                if flow is not None and (head := flow.head()):
                    heads.append(head)
        return heads

    def earliest(self) -> QueuedRequest | None:
        """Return the request with the earliest deadline."""
        if self._only is not None:
            return self._only.earliest()
        key = self._by_deadline.first() if self.flows else None
        return None if key is None else self.flows[key].earliest()

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

    # The orders of several flows.

    def _note(self, key: FlowKey) -> None:
        """Note a flow whose place in an order may have fallen."""
        rank = key[0]
        if rank not in self._by_turn:
            self._by_turn[rank] = First(self._counter_place), First(self._holding_place)
        for order in self._by_turn[rank]:
            order.note(key)
        self._by_deadline.note(key)

    def _forget(self, key: FlowKey) -> None:
        """Forget a flow in which no request waits any more."""
        self._by_deadline.forget(key)
        for order in self._by_turn.get(key[0], ()):
            order.forget(key)

    def _counter_place(self, key: FlowKey) -> Place:
        return self._turn_place(key, self._holdings.turn_by_counter(key[1]))

    def _holding_place(self, key: FlowKey) -> Place:
        return self._turn_place(key, self._holdings.turn_by_holding(key[1]))

    def _turn_place(self, key: FlowKey, turn: float) -> Place:
        head = self.flows[key].head()
        return (inf, inf, 0) if head is None else (turn, head.due, head.order)

    def _deadline_place(self, key: FlowKey) -> Place:
        first = self.flows[key].earliest()
        return (inf, inf, 0) if first is None else (first.deadline, 0.0, first.order)
