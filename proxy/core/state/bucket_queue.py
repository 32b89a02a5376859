"""The bounded queues of one backend: within a bucket, classes and tenants take turns.

Buckets and classes have guaranteed shares of prefill time, by deficit round robin (Shreedhar and
Varghese 1995). While requests of a kind wait, every second of prefill that is sent adds that kind's
share to the seconds it is owed. Once a kind is owed as much as its next request takes, that request
goes first. So the guarantee is a lower bound, and the order of the queues decides about the rest.
"""

from collections.abc import Container, Mapping
from math import fsum, inf
from typing import Final

from forebay.proxy.core.model import CLASSES, LOOK_AT_MOST, STANDARD
from forebay.proxy.core.ordered import First
from forebay.proxy.core.state.kv_budget import Holdings
from forebay.proxy.core.state.queue import Crowd, DueQueue, FlowKey, QueuedRequest, keys_of

BUCKETS_SHARE: Final = 0.6
"""Share of the seconds that all buckets with waiting requests get, in equal parts. At 0.8, 74
instead of 82 % are in time at 1.5 times the capacity. It cannot be doubled."""
CLASS_SHARE: Final = 0.05
"""Share of the seconds that each class with waiting requests gets. Doubled: batch takes a tenth of
overload."""

Place = tuple[float, float, int]  # place of a flow among others, the least first


class BucketQueue:
    """The queue of one bucket on one backend: a DueQueue for each class and tenant that waits.

    Args:
        holdings: says whose turn it is. `turn_fell` must be called if the turn of a tenant may
            have come nearer without a change of this queue, and `reorder` if any turn may have.

    Attributes:
        flows: exist while a request waits in them.
        count: waiting requests.
        kv_tokens: KV cache that they will take.
        of_class: waiting requests by the rank of their class within their tenant.
        crowd: exists once more than LOOK_AT_MOST flows wait, until half as many are left.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self.flows: dict[FlowKey, DueQueue] = {}
        self._only: DueQueue | None = None  # the flow, while there is exactly one
        # The orders of the flows, kept while there are several. A rank has two: by counters, and by
        # holdings for the time in which these are scarce. One more is by deadline.
        self._by_turn: dict[int, tuple[First[FlowKey], First[FlowKey]]] = {}
        self._by_deadline = First(self._deadline_place)
        self.crowd: Crowd | None = None
        self.count = 0
        self.of_class = [0] * len(CLASSES)
        self._work_s = self.kv_tokens = 0.0

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
        if self.crowd is not None:
            self.crowd.push(waiting)
        elif len(self.flows) > LOOK_AT_MOST:
            self.crowd = Crowd(self.flows, self._holdings.fairness)
        self.count += 1
        self.of_class[waiting.own_rank] += 1
        self._work_s += waiting.work_s
        self.kv_tokens += waiting.kv_tokens

    def remove(self, waiting: QueuedRequest) -> None:
        key = waiting.flow
        flow = self.flows[key]
        flow.remove(waiting.request.id)
        if self.crowd is not None:
            self.crowd.remove(waiting)
        self.count -= 1
        self.of_class[waiting.own_rank] -= 1
        self._work_s = self._work_s - waiting.work_s if self.count else 0.0
        self.kv_tokens = self.kv_tokens - waiting.kv_tokens if self.count else 0.0
        if not len(flow):
            del self.flows[key]
            self._forget(key)
            if 2 * len(self.flows) <= LOOK_AT_MOST:
                self.crowd = None
            self._only = None
            if len(self.flows) == 1:
                self._only = next(iter(self.flows.values()))

    def turn_fell(self, tenant: str) -> None:
        """Note that a tenant's turn may have come nearer."""
        if len(self.flows) > 1:
            for key in keys_of(tenant):
                if key in self.flows:
                    self._note(key)

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
        if self.crowd is not None:
            return self.crowd.by_due.before(due)[1][0]
        if not self.count:
            return 0.0
        return fsum(flow.seconds_before(due) for flow in self.flows.values())

    def count_before(self, due: float) -> int:
        """Return the number of requests that are due no later than `due`."""
        if self._only is not None:
            return self._only.count_before(due)
        if self.crowd is not None:
            return self.crowd.by_due.before(due)[0]
        return sum(flow.count_before(due) for flow in self.flows.values())

    def urgent(self, deadline: float) -> tuple[float, int]:
        """Return prefill seconds and number of requests with at most this deadline."""
        if self._only is not None:
            return self._only.urgent(deadline)
        if self.crowd is not None:
            sums = [self.crowd.of_rank(rank, deadline) for rank in range(len(CLASSES))]
            return fsum(seconds for seconds, _ in sums), round(sum(count for _, count in sums))
        parts = [flow.urgent(deadline) for flow in self.flows.values()]
        return fsum(seconds for seconds, _ in parts), sum(count for _, count in parts)

    def of_tenant(self, tenant: str) -> tuple[int, float]:
        """Return the number of waiting requests of the tenant, and their prefill seconds."""
        count, seconds = 0, 0.0
        for key in keys_of(tenant):
            if (flow := self.flows.get(key)) is not None:
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


class Shares:
    """Seconds of prefill that one backend owes to each kind of request.

    Args:
        share: guaranteed share of prefill seconds, by kind.
    """

    def __init__(self, share: dict[str, float]) -> None:
        self.share = share
        self._owed = dict.fromkeys(share, 0.0)
        self.owing = False  # whether any kind is owed something

    def clear(self) -> None:
        """Owe nothing: no request waits."""
        self._owed = dict.fromkeys(self.share, 0.0)
        self.owing = False

    def sent(self, kind: str, seconds: float, waiting: Container[str]) -> None:
        """Note a prefill that was sent while requests of the kinds `waiting` wait."""
        self.owing = False
        for name, owed_s in self._owed.items():
            owed_s = owed_s + self.share[name] * seconds if name in waiting else 0.0
            if name == kind:
                owed_s = max(0.0, owed_s - seconds)
            self._owed[name] = owed_s
            self.owing = self.owing or owed_s > 0.0

    def due(self, kind: str, seconds: float) -> bool:
        """True if its next request, which takes `seconds`, goes first."""
        owed_s = self._owed[kind]
        return owed_s > 0.0 and owed_s >= seconds


class Turns:
    """Decides whose turn it is on one backend.

    It keeps the guaranteed shares of each bucket (60 % together) and each class (5 %), and tells
    the queues of changes in the order of tenants.

    Attributes:
        classed: a request of another class than standard has waited.
        ranked: a request has waited whose other class counts among all tenants.
    """

    def __init__(self, queues: Mapping[str, BucketQueue]) -> None:
        self._queues = queues
        self.buckets = Shares(dict.fromkeys(queues, BUCKETS_SHARE / len(queues)))
        self.classes = Shares(dict.fromkeys(CLASSES, CLASS_SHARE))
        self.classed = self.ranked = False

    def joined(self, waiting: QueuedRequest) -> None:
        """Note a request that waits in one of the queues."""
        if waiting.own_rank != STANDARD:
            self.classed = True
            self.ranked = self.ranked or waiting.rank != STANDARD

    def clear(self) -> None:
        """Owe nothing: no request waits."""
        if self.buckets.owing:
            self.buckets.clear()
        if self.classes.owing:
            self.classes.clear()

    def sent(self, bucket: str, rank: int, seconds: float, queued: int) -> None:
        """Note a prefill that was sent while `queued` requests wait."""
        alone = not self.classed and self._queues[bucket].count == queued
        if alone and not self.buckets.owing:
            return  # no other bucket or class waits
        waiting = [name for name, queue in self._queues.items() if queue.count]
        self.buckets.sent(bucket, seconds, waiting)
        if self.classed:
            queues = self._queues.values()
            waiting = [
                name
                for other, name in enumerate(CLASSES)
                if any(queue.of_class[other] for queue in queues)
            ]
            self.classes.sent(CLASSES[rank], seconds, waiting)

    def order_by_counters(self, holdings: Holdings) -> None:
        """Order tenants by their counters, as nothing is scarce."""
        last, holdings.scarce, holdings.last = holdings.last, False, frozenset()
        for tenant in last:
            self.fell(tenant)

    def fell(self, tenant: str) -> None:
        """Note that the turn of a waiting tenant may have come nearer."""
        for queue in self._queues.values():
            queue.turn_fell(tenant)
