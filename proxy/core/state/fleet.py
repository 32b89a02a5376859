"""All backends together: which requests wait for which, and which backends are worth a look."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil, fsum, inf
from typing import Final

from forebay.proxy.core.model import CLASSES, LOOK_AT_MOST, Bucket
from forebay.proxy.core.ordered import First, SortedSums
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.queue import FlowKey, QueuedRequest, keys_of

APART: Final = 1e12
"""Seconds beyond any clock: ranks idle backends before busy backends, and full backends last.
Doubled: the same."""


class FullQueue:
    """The requests of one bucket and model on all backends, while their queue is full.

    Says which of them is the last of a class or tenant.

    Attributes:
        held: requests of each tenant.
        made_of: number of requests when the queue was full.
    """

    def __init__(self, everyone: Iterable[QueuedRequest]) -> None:
        self._waiting: dict[str, QueuedRequest] = {}
        self._of_rank = [SortedSums(0) for _ in CLASSES]
        self._of_flow: dict[FlowKey, SortedSums] = {}
        self.held = Counter[str]()
        self._most = First(self._place)
        for waiting in everyone:
            self.enter(waiting)
        self.made_of = len(self._waiting)

    def enter(self, waiting: QueuedRequest) -> None:
        tenant = waiting.request.tenant
        self._waiting[waiting.request.id] = waiting
        self._of_rank[waiting.rank].add(waiting.by_due)
        if waiting.flow not in self._of_flow:
            self._of_flow[waiting.flow] = SortedSums(0)
        self._of_flow[waiting.flow].add(waiting.by_due)
        self.held[tenant] += 1
        self._most.note(tenant)

    def leave(self, waiting: QueuedRequest) -> None:
        tenant, flow = waiting.request.tenant, self._of_flow[waiting.flow]
        del self._waiting[waiting.request.id]
        self._of_rank[waiting.rank].remove(waiting.by_due)
        flow.remove(waiting.by_due)
        if flow.last() is None:
            del self._of_flow[waiting.flow]
        self.held[tenant] -= 1
        if not self.held[tenant]:
            del self.held[tenant]
            self._most.forget(tenant)

    def last(self) -> QueuedRequest | None:
        """Return the last request of the least urgent class."""
        for line in reversed(self._of_rank):
            if (key := line.last()) is not None:
                return self._waiting[key[-1]]
        return None

    def last_of(self, flows: Iterable[FlowKey]) -> QueuedRequest | None:
        """Return the last request of these flows."""
        last = [self._of_flow[flow].last() for flow in flows if flow in self._of_flow]
        return self._waiting[max(last)[-1]] if last else None

    def least_urgent_of(self, tenant: str) -> QueuedRequest | None:
        """Return the last request of a tenant's least urgent class."""
        for own_rank in reversed(range(len(CLASSES))):
            flows = [key for key in keys_of(tenant) if key[2] == own_rank]
            if (last := self.last_of(flows)) is not None:
                return last
        return None

    def heaviest(self) -> str:
        """Return the tenant with most requests. A request must be waiting."""
        tenant = self._most.first()
        assert tenant is not None
        return tenant

    def _place(self, tenant: str) -> int:
        return -self.held[tenant]


class FleetQueues:
    """The queues of all backends together.

    Attributes:
        waiting: all waiting requests by id, in the order of entering.
        backends: backends that a request waits for.
        count: waiting requests by bucket.
        of_model: the same by bucket and model.
        held: the same by bucket, model and tenant.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, QueuedRequest] = {}
        self.backends: dict[str, Backend] = {}
        self.count: dict[str, int] = {}
        self.of_model: Counter[tuple[str, str]] = Counter()
        self.held: Counter[tuple[str, str, str]] = Counter()
        self._queued_since: dict[tuple[str, str], float] = {}
        self._overflowed: set[tuple[str, str]] = set()
        self._leaving = First(self._leaves_at)
        self._heads: list[QueuedRequest] | None = None  # as found last, until a queue changes
        # By bucket and model: made when a queue is full, until half of it is left.
        self._full: dict[tuple[str, str], FullQueue] = {}

    def enter(self, waiting: QueuedRequest, backend: Backend) -> None:
        """Let a request wait for this backend."""
        backend.enqueue(waiting)
        self.waiting[waiting.request.id] = waiting
        self._leaving.note(waiting.request.id)
        self.backends[backend.name] = backend
        self.count[waiting.bucket] += 1
        key = waiting.bucket, waiting.request.model
        if not self.of_model[key]:
            self._queued_since[key] = waiting.arrived_at
        self.of_model[key] += 1
        self.held[*key, waiting.request.tenant] += 1
        if key in self._full:
            self._full[key].enter(waiting)
        self._heads = None

    def leave(self, waiting: QueuedRequest, backend: Backend) -> None:
        """Take a request out of this backend's queue."""
        del self.waiting[waiting.request.id]
        self._leaving.forget(waiting.request.id)
        backend.dequeue(waiting)
        if not backend.queued:
            del self.backends[backend.name]
        self.count[waiting.bucket] -= 1
        key = waiting.bucket, waiting.request.model
        self.of_model[key] -= 1
        holder = *key, waiting.request.tenant
        self.held[holder] -= 1
        if not self.held[holder]:
            del self.held[holder]
        if key in self._full:
            if 2 * self.of_model[key] > self._full[key].made_of:
                self._full[key].leave(waiting)
            else:
                del self._full[key]
        if not self.of_model[key]:
            del self.of_model[key], self._queued_since[key]
            self._overflowed.discard(key)
        self._heads = None

    def full(self, bucket: str, model: str) -> FullQueue:
        """Return the requests of a bucket and model, whose queue is full."""
        key = bucket, model
        if not self.of_model[key]:
            return FullQueue(())
        if key not in self._full:
            everyone = (w for w in self.waiting.values() if (w.bucket, w.request.model) == key)
            self._full[key] = FullQueue(everyone)
        return self._full[key]

    def queued_s(self, bucket: str, model: str, now: float) -> float:
        """Return for how long such requests have waited without a break."""
        return now - self._queued_since.get((bucket, model), now)

    def overflow(self, bucket: str, model: str) -> None:
        """Note a request that was rejected because such requests wait too long."""
        if self.of_model[bucket, model]:
            self._overflowed.add((bucket, model))

    def has_overflowed(self, bucket: str, model: str) -> bool:
        """True if one was rejected since the queue was last empty."""
        return (bucket, model) in self._overflowed

    def rebucket(self, buckets: Iterable[str]) -> None:
        """Set the buckets while no request waits."""
        assert not self.waiting
        self.count = dict.fromkeys(buckets, 0)

    def reorder(self) -> None:
        """Find the heads again, because the order of tenants has changed."""
        self._heads = None

    def turn_fell(self, tenant: str) -> None:
        """Note that a tenant's turn may have come nearer."""
        for backend in self.backends.values():
            backend.turns.fell(tenant)
        self._heads = None

    def reorder_all(self) -> None:
        """Note that the turn of any tenant may have come nearer."""
        for backend in self.backends.values():
            for queue in backend.queues.values():
                queue.reorder()
        self._heads = None

    def heads(self) -> list[QueuedRequest]:
        """Return the heads of all queues, the most urgent first."""
        if self._heads is None:
            self._heads = sorted(
                heads_of(self.backends.values()), key=lambda w: (w.rank, w.deadline, w.order)
            )
        return self._heads

    def first_leaves_at(self) -> float:
        """Return the earliest `leaves_at` of all waiting requests, or inf."""
        first = self._leaving.first()
        return inf if first is None else self._leaves_at(first)

    def next_to_leave(self, now: float) -> QueuedRequest | None:
        """Return a request whose `leaves_at` is over, or None."""
        first = self._leaving.first()
        return self.waiting[first] if first is not None and self._leaves_at(first) <= now else None

    def _leaves_at(self, request_id: str) -> float:
        return self.waiting[request_id].leaves_at


def heads_of(backends: Iterable[Backend]) -> list[QueuedRequest]:
    """Return the next request of each queue and class."""
    queues = [queue for b in backends for queue in b.queues.values() if queue.count]
    return [head for queue in queues for head in queue.heads()]


class Shortlist:
    """The backends that are worth pricing for a request, and when a backend gets room by itself.

    In a small fleet all are. In a large fleet: backends that may hold the beginning of the prompt,
    and the two that will be free first. Pricing all of them would cost more than it finds. `moved`
    must be called after every change of a backend.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        buckets: Sequence[Bucket],
        dispatch_ahead_s: float,
        beside_others_s: float,
    ) -> None:
        """Take the backlogs below which requests are sent: usually, and with other tenants."""
        self._backends = list(backends)
        # Waiting requests with more patience go later, so they do not count.
        self._first = {
            b.name: [other.name for other in buckets if other.patience_s <= b.patience_s]
            for b in buckets
        }
        self._dispatch_ahead_s = dispatch_ahead_s
        self._beside_others_s = beside_others_s
        self._moved: set[int] = set(range(len(self._backends)))
        self._holders: dict[int, int] = {}
        self.all = len(self._backends) <= LOOK_AT_MOST
        for backend in backends:
            backend.cache.prefixes.share(None if self.all else self._holders, 1 << backend.index)

    def moved(self, backend: Backend) -> None:
        """Note a change of the backend's backlog, queue or load."""
        self._moved.add(backend.index)

    def of(
        self,
        blocks: tuple[int, ...],
        bucket: str,
        least_match: float,
        usable: Sequence[Backend] | None,
    ) -> list[Backend]:
        """Return backends that may hold `least_match` of `blocks`, and two that will be free first.

        Args:
            usable: only these; None for any that is up.
        """
        if self._moved:
            self._refresh()
        shortlist = self._warm(blocks, bucket, least_match, usable) if blocks else []
        # Find the two backends that will be free first among the others.
        first: Backend | None = None
        second: Backend | None = None
        first_free = second_free = inf
        for backend in self._backends:
            free = backend.ranks[bucket]
            if free >= second_free:
                continue
            if backend.up and (usable is None or backend in usable) and backend not in shortlist:
                if free < first_free:
                    second, second_free = first, first_free
                    first, first_free = backend, free
                else:
                    second, second_free = backend, free
        if first is not None:
            shortlist.append(first)
        if second is not None:
            shortlist.append(second)
        return shortlist

    def room_after(self, now: float, *, beside_others: bool) -> float:
        """Return the next time at which a backend may take more without an event, or inf.

        `beside_others`: several tenants are active.
        """
        if self._moved:
            self._refresh()
        least = inf
        for backend in self._backends:
            room_at = backend.room_beside_at if beside_others else backend.room_at
            if now < room_at < least:
                least = room_at
            # Where a prefill passes the backlog, only the texts before it keep it back.
            texts_at = backend.api_server.room_at
            if now < texts_at < least:
                least = texts_at
            if now < backend.silent_at < least:  # it may have used up its bucket's prefill limit
                least = backend.silent_at
        return least

    def _warm(
        self,
        blocks: tuple[int, ...],
        bucket: str,
        least_match: float,
        usable: Sequence[Backend] | None,
    ) -> list[Backend]:
        """Return the backends that may hold enough of the prompt, the first free if too many."""
        least = max(1, ceil(least_match * len(blocks)))
        # `_holders` has only blocks at positions 1, 2, 4, 8 ...
        holders = self._holders.get(blocks[(1 << (least.bit_length() - 1)) - 1], 0)
        warm: list[Backend] = []
        while holders:
            index = holders.bit_length() - 1
            holders ^= 1 << index
            backend = self._backends[index]
            if backend.up and (usable is None or backend in usable):
                warm.append(backend)
        if len(warm) > LOOK_AT_MOST:
            warm.sort(key=lambda backend: backend.ranks[bucket])
        return warm[:LOOK_AT_MOST]

    def _refresh(self) -> None:
        for index in self._moved:
            backend = self._backends[index]
            if backend.queued:
                for bucket, first in self._first.items():
                    queued_s = fsum([backend.queues[name].work_s for name in first])
                    backend.ranks[bucket] = free_rank(backend, queued_s)
            else:
                backend.ranks = dict.fromkeys(self._first, free_rank(backend, 0.0))
            texts_at, queue = backend.api_server.room_at, backend.prefill_queue
            backend.room_at = max(queue.below_at(self._dispatch_ahead_s), texts_at)
            backend.room_beside_at = max(queue.below_at(self._beside_others_s), texts_at)
            backend.silent_at = backend.prefill_queue.silent_ends_at()
        self._moved.clear()


def free_rank(backend: Backend, queued_s: float) -> float:
    """Return a number that orders backends by when they will be free, and idle backends by load.

    The order does not change by time alone. `queued_s`: seconds of the waiting work that counts.
    """
    queue, elsewhere = backend.prefill_queue, backend.elsewhere
    full = backend.running >= backend.spec.max_concurrency
    if elsewhere is not None and (others_s := elsewhere.prefill_s(elsewhere.since)):
        own_s = queue.total_s + queued_s
        free_at = max(queue.head_since, elsewhere.since) + own_s + others_s
    elif backend.prefills or backend.queued:
        free_at = queue.head_since + queue.total_s + queued_s
    else:
        free_at = backend.load.rank if backend.load.amount else 0.0
        if not full:
            return free_at - APART
    return free_at + APART if full else free_at
