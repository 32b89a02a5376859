"""Which work goes before a request on one backend, and which is computed alongside it?

With one class and one tenant, requests that are due earlier go first in a bucket, and earlier
deadlines between buckets. With several, the prediction follows the order of `order.py` and the
tenants' counters: a light tenant does not wait for a heavy tenant's queue, and a heavy tenant's
own queue moves only as fast as the other tenants leave it room.
"""

from collections.abc import Mapping
from math import exp, fsum, inf

from forebay.proxy.core.learn.cost import FULL_STEP_TOKENS
from forebay.proxy.core.learn.decay import RECENT_S
from forebay.proxy.core.model import CLASSES, FULL, SLACK, Bucket
from forebay.proxy.core.policy.order import STRETCH
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.bucket_queue import BUCKETS_SHARE, BucketQueue
from forebay.proxy.core.state.queue import Crowd, DueQueue, FlowKey, QueuedRequest, keys_of
from forebay.proxy.core.state.tenants import Fairness


class Before:
    """The waiting work that goes before one request on one backend.

    Attributes:
        seconds, count: prefill seconds and requests.
        overtaken: share of the engine that later, more urgent arrivals will take.
        kv_tokens: KV cache that this work will take.
        in_order: hardly anything else can get in between, so errors of predictions cancel out.
        shorter_s: prefill seconds of its bucket that may arrive later and go first.
    """

    __slots__ = ("count", "in_order", "kv_tokens", "overtaken", "seconds", "shorter_s")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.count = 0.0
        self.overtaken = 0.0
        self.kv_tokens = 0.0
        self.in_order = False
        self.shorter_s = 0.0

    def add(self, queue: BucketQueue | DueQueue, seconds: float, count: float) -> None:
        """Add seconds and requests of a queue. Each is taken to need the same KV cache."""
        self.seconds += seconds
        if count:
            self.count += count
            self.kv_tokens += queue.kv_tokens * min(1.0, count / len(queue))


class Precedence:
    """The order between classes, tenants and buckets, as predictions need it.

    Attributes:
        on: a request has named a tenant or another class than standard.
    """

    def __init__(
        self, backends: Mapping[str, Backend], buckets: Mapping[str, Bucket], fairness: Fairness
    ) -> None:
        self._backends = backends
        self._buckets = buckets
        self.fairness = fairness
        self.on = False
        self._classed = False
        self._rate = [0.0] * len(CLASSES)  # prefill seconds per second at time `_rate_at`
        self._rate_at = [0.0] * len(CLASSES)

    def tell_classes_apart(self) -> None:
        """Note a request of another class than standard."""
        self.on = self._classed = True

    def sent(self, waiting: QueuedRequest, prefill_s: float, now: float) -> None:
        """Charge a request that is sent to its tenant and class."""
        if self.fairness.on:
            self.fairness.charge(waiting.request.tenant, prefill_s, now)
        if self._classed:
            rank = waiting.rank
            self._rate[rank] = self._rate_now(rank, now) + prefill_s / RECENT_S
            self._rate_at[rank] = now

    def before(
        self, backend: Backend, waiting: QueuedRequest, deadline: float, due: float, now: float
    ) -> Before:
        """Return the work that goes before a request with this deadline and due time."""
        bucket, work = waiting.bucket, Before()
        work.overtaken = self.overtaken(backend, bucket, now)
        if self.on:
            self._of_flows(work, backend, waiting, deadline, due)
            work.overtaken = either(work.overtaken, self._overtaken_by_flows(waiting, now))
        else:
            for name, queue in backend.queues.items():
                if name == bucket:
                    work.add(queue, queue.seconds_before(due), queue.count_before(due))
                elif queue.count and not self._passes(backend, bucket, name):
                    work.add(queue, *queue.urgent(deadline))
            work.shorter_s = shorter_s(backend, bucket, due, now)
            owed_s = self._owed_s(backend, bucket, work.seconds, deadline, now)
            work.seconds += owed_s
            work.in_order = work.overtaken < SLACK and owed_s == 0.0
        if waiting.backend == backend.name:
            work.seconds = max(0.0, work.seconds - waiting.work_s)
            work.count -= 1
            work.kv_tokens = max(0.0, work.kv_tokens - waiting.kv_tokens)
        return work

    def overtaken(self, backend: Backend, bucket: str, now: float) -> float:
        """Return the share of the engine that more urgent buckets take while this bucket waits.

        A waiting request waits 1 / (1 - share) times the work before it (M/G/1 with priorities).
        """
        patience_s = self._buckets[bucket].patience_s
        share = fsum(
            worked_share(backend, other.name, now)
            for other in self._buckets.values()
            if other.patience_s < patience_s
        )
        return min(FULL, share)

    def elsewhere_s(
        self, backend: Backend, waiting: QueuedRequest, before_s: float, now: float
    ) -> float:
        """Return the wait for work that waits at other proxies for this backend and goes first.

        Args:
            before_s: seconds of the work waiting here that goes first.
        """
        assert backend.elsewhere is not None
        queued_s, bucket = backend.elsewhere.queued_s, waiting.bucket
        overtaken = self.overtaken(backend, bucket, now)
        if self.on:
            # Reports do not name tenants. Connections are spread by chance, so the other proxies'
            # queues are taken to be made up like this proxy's. Where no request waits here, only a
            # tenant that was given no less than the others waits for them.
            overtaken = either(overtaken, self._overtaken_by_flows(waiting, now))
            if backend.queued_s > 0.0:
                share = min(1.0, before_s / backend.queued_s)
            else:
                share = float(self.fairness.behind_s(waiting.request.tenant) == 0.0)
            return share * fsum(queued_s.values()) / (1.0 - overtaken)
        patience_s = self._buckets[bucket].patience_s
        theirs_s = fsum(
            seconds
            for name, seconds in queued_s.items()
            if name not in self._buckets or self._buckets[name].patience_s <= patience_s
        )
        return theirs_s / (1.0 - overtaken)

    def beside_s(
        self, backend: Backend, bucket: str, uncached_tokens: float, before_s: float, now: float
    ) -> float:
        """Return the extra margin for chunks of longer prefills, computed alongside `before_s`.

        Full steps carry a chunk of each longer prefill until it ends. Waiting prefills follow if
        they will have waited long by then.
        """
        queue = backend.prefill_queue
        least = max(uncached_tokens, queue.chunk_tokens)
        longer = [sent for sent in queue.prefills.values() if sent.uncached_tokens > least]
        if not longer or before_s <= 0.0:
            return 0.0
        left = max(queue.chunk_tokens, FULL_STEP_TOKENS - len(longer) * queue.chunk_tokens)
        chunks_s = fsum(s.prefill_s * queue.chunk_tokens / s.uncached_tokens for s in longer)
        all_s = fsum(sent.prefill_s for sent in longer)
        for name, other in backend.queues.items():
            if self._passes(backend, bucket, name) and other.late_at() <= now + before_s:
                all_s += other.work_s
        return min(all_s, before_s * chunks_s / backend.cost.predict_s(left, left))

    def _of_flows(
        self, work: Before, backend: Backend, waiting: QueuedRequest, deadline: float, due: float
    ) -> None:
        """Add the work that goes first where classes or tenants wait."""
        engines = self._engines()
        for name, queue in backend.queues.items():
            same = name == waiting.bucket
            place = due if same else deadline
            if queue.crowd is not None:
                more_s, more = self._of_crowd(queue, queue.crowd, waiting, place, same, engines)
                work.add(queue, more_s, more)
                continue
            for key, flow in queue.flows.items():
                before_s = self._of_flow(key, flow, waiting, place, same, engines)
                kv_tokens = work.kv_tokens
                work.add(flow, before_s, part_of(flow, before_s))
                # While KV cache is scarce, the tenant that holds least of it takes it first.
                if backend.holdings.holds_less(waiting.request.tenant, key[1]):
                    work.kv_tokens = kv_tokens
        # A part of a request counts as a whole request.
        work.count = float(max(1, round(work.count))) if work.seconds > 0.0 else 0.0

    def _of_flow(
        self,
        key: FlowKey,
        flow: DueQueue,
        waiting: QueuedRequest,
        place: float,
        same: bool,
        engines: int,
    ) -> float:
        """Return the prefill seconds of one flow that go before a request.

        Args:
            place: its due time in its own bucket, its deadline in another.
            same: the flow waits in the bucket of the request.
        """
        rank, tenant, own_rank = waiting.flow
        other_rank, other, theirs = key
        if other_rank > rank or (other == tenant and theirs > own_rank):
            return 0.0
        if other_rank < rank or (other == tenant and theirs < own_rank):
            return flow.work_s
        if not same:
            return flow.urgent(place)[0]
        if other == tenant:
            return flow.seconds_before(place)
        return self.fairness.seconds_before(tenant, other, flow.work_s, engines)

    def _of_crowd(
        self,
        queue: BucketQueue,
        crowd: Crowd,
        waiting: QueuedRequest,
        place: float,
        same: bool,
        engines: int,
    ) -> tuple[float, float]:
        """Return the same as `_of_flow` for all flows of a queue, from sums over all of them.

        Rounded to nanoseconds, as differences of sums have errors. In other buckets, requests are
        counted one by one, not as parts of their flows.
        """
        rank, tenant, _ = waiting.flow
        sums = [crowd.of_rank(other, inf) for other in range(rank)]
        if same:
            sums.append(crowd.of_lighter(rank, tenant, engines))
        else:
            sums.append(crowd.of_rank(rank, place))
        # The flows of the same tenant have other rules.
        for key in keys_of(tenant):
            flow = queue.flows.get(key)
            if flow is None or key[0] > rank:
                continue
            if key[0] < rank:
                sums.append((-flow.work_s, -len(flow)))
            elif not same:
                counted_s, counted = flow.urgent(place)
                sums.append((-counted_s, -counted))
            before_s = self._of_flow(key, flow, waiting, place, same, engines)
            sums.append((before_s, part_of(flow, before_s)))
        return (
            max(0.0, round(fsum(seconds for seconds, _ in sums), 9)),
            max(0.0, fsum(count for _, count in sums)),
        )

    def _overtaken_by_flows(self, waiting: QueuedRequest, now: float) -> float:
        """Return the share of the engines that other classes and tenants will take meanwhile."""
        engines = self._engines()
        share = sum(self._rate_now(rank, now) for rank in range(waiting.rank)) / engines
        if self.fairness.on:
            share += self.fairness.others_share(waiting.request.tenant, engines, now)
        return min(FULL, share)

    def _owed_s(
        self, backend: Backend, bucket: str, before_s: float, deadline: float, now: float
    ) -> float:
        """Return the work of other buckets with later deadlines that goes first by its share.

        While `before_s` is computed, each other bucket in which a request has waited long by then
        gets its share of the seconds.
        """
        share, due_s = BUCKETS_SHARE / len(backend.queues), 0.0
        for name, queue in backend.queues.items():
            if name == bucket or not queue.count or self._passes(backend, bucket, name):
                continue
            if queue.late_at() <= now + before_s:
                theirs_s = min(queue.work_s, share * before_s / (1.0 - share))
                due_s += max(0.0, theirs_s - queue.urgent(deadline)[0])
        return due_s

    def _passes(self, backend: Backend, bucket: str, other: str) -> bool:
        """True if prefills of `bucket` pass the longer prefills of `other` in the engine."""
        return backend.prefill_queue.chunked and (
            self._buckets[bucket].up_to < self._buckets[other].up_to
        )

    def _rate_now(self, rank: int, now: float) -> float:
        return self._rate[rank] * exp((self._rate_at[rank] - now) / RECENT_S)

    def _engines(self) -> int:
        return max(1, sum(backend.up for backend in self._backends.values()))


def part_of(flow: DueQueue, before_s: float) -> float:
    """Return the number of requests of a flow in `before_s` of its seconds."""
    return len(flow) * min(1.0, before_s / flow.work_s) if flow.work_s > 0.0 else 0.0


def shorter_s(backend: Backend, bucket: str, due: float, now: float) -> float:
    """Return the work of later, shorter requests of the bucket that will be due before `due`.

    They are assumed to arrive at the recent rate of the bucket's work, each with the mean prefill
    of its waiting requests. A request that arrives more than STRETCH times this before `due` goes
    first. A short queue shows that no stream of them flows, so they bring no more work than waits
    now.
    """
    queue = backend.queues[bucket]
    if not queue.count:
        return 0.0
    work_s = queue.work_s
    window_s = due - now - STRETCH * work_s / queue.count
    return min(work_s, max(0.0, window_s) * worked_share(backend, bucket, now))


def either(share: float, other: float) -> float:
    """Return the share of the engine taken by two kinds of work that overlap by chance."""
    return min(FULL, 1.0 - (1.0 - share) * (1.0 - other))


def worked_share(backend: Backend, bucket: str, now: float) -> float:
    """Return the share of recent time that the engine spent on prefills of one bucket."""
    share = backend.worked[bucket].rate(now)
    others = backend.elsewhere
    return share if others is None else share + others.worked.get(bucket, 0.0)
