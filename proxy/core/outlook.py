"""What is predicted: how long a request would wait on each backend, and whether it may start.

Reads the books, changes none of them, except its own of who came and who was refused lately.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf

from forebay.proxy.core.backend import Backend
from forebay.proxy.core.model import Bucket
from forebay.proxy.core.partition import FLOWING_S, crowded_out, may_take_last_at
from forebay.proxy.core.queueing import Waiting
from forebay.proxy.core.routing import Option

REFUSED_GAIN = 0.002  # smoothing of the share of requests refused: over the last 500 or so
OVERTAKEN_MOST = 0.8  # of the engine: how much of it those who overtake are assumed to take
MATCH_SLACK_S = 1e-9  # float rounding: a timer set for the moment a backlog ends must find it so


class Outlook:
    def __init__(
        self,
        backends: Mapping[str, Backend],
        buckets: Mapping[str, Bucket],
        dispatch_ahead_s: float,
    ) -> None:
        self._backends = backends
        self._buckets = buckets
        self._dispatch_ahead_s = dispatch_ahead_s
        self._usable = {
            bucket.name: [
                b for b in backends.values() if not bucket.backends or b.name in bucket.backends
            ]
            for bucket in buckets.values()
        }
        self._last_arrival = dict.fromkeys(buckets, -inf)
        self._refused_share = dict.fromkeys(buckets, 0.0)

    # Who came and what became of them.

    def arrived(self, bucket: str, now: float) -> None:
        self._last_arrival[bucket] = now

    def decided(self, bucket: str, *, refused: bool) -> None:
        """A newcomer was refused or taken."""
        share = self._refused_share[bucket]
        self._refused_share[bucket] = share + REFUSED_GAIN * (refused - share)

    # What a request would meet.

    def usable(self, waiting: Waiting) -> Iterator[Backend]:
        """The backends that may take the request, up and not tried yet."""
        for backend in self._usable[waiting.bucket]:
            if backend.up and backend.name not in waiting.excluded:
                yield backend

    def options(self, waiting: Waiting, now: float) -> list[Option]:
        return [self._option(backend, waiting, now) for backend in self.usable(waiting)]

    def has_room(self, backend: Backend, now: float) -> bool:
        """Late binding: up, a slot free, and next to nothing left to prefill."""
        return (
            backend.up
            and len(backend.flights) < backend.spec.max_concurrency
            and backend.backlog_s(now) < self._dispatch_ahead_s + MATCH_SLACK_S
        )

    def may_start(self, backend: Backend, waiting: Waiting, now: float) -> bool:
        """Whether the request, were it next, may be sent to this backend now."""
        if not self.has_room(backend, now):
            return False
        bucket = self._buckets[waiting.bucket]
        if backend.prefills_of[bucket.name] >= bucket.prefills_per_backend:
            return False
        request = waiting.request
        if not backend.kv_fits(request):
            return False
        prefill_s = backend.prefill_s(request, backend.matched_tokens(request))
        return self._clear_at(backend, waiting, prefill_s, now) <= now

    def moments(self, heads: Iterable[Waiting]) -> Iterator[float]:
        """When a head may be able to start without an event; what is past has had its effect."""
        for head in heads:
            max_wait_s = self._buckets[head.bucket].max_wait_s
            yield may_take_last_at(head.arrived_at, max_wait_s, inf, 0.0)
            yield may_take_last_at(head.arrived_at, max_wait_s, inf, 1.0)
        for backend in self._backends.values():
            yield backend.backlog_below_at(self._dispatch_ahead_s)
        for arrived_at in self._last_arrival.values():
            yield arrived_at + FLOWING_S

    def _option(self, backend: Backend, waiting: Waiting, now: float) -> Option:
        request = waiting.request
        matched = backend.matched_tokens(request)
        prefill_s = backend.prefill_s(request, matched)
        cold_s = backend.prefill_s(request, 0) if matched else prefill_s
        deadline = min(waiting.deadline, now + self._buckets[waiting.bucket].max_wait_s)
        ahead_s = sum(queue.ahead_s(deadline) for queue in backend.queues.values())
        ahead = backend.queued
        if waiting.backend == backend.name:
            ahead_s, ahead = max(0.0, ahead_s - waiting.work_s), ahead - 1
        wait_s = backend.backlog_s(now)
        if ahead:
            wait_s += ahead_s / (1.0 - self._overtaken(backend, waiting.bucket, now))
        wait_s = max(
            wait_s + backend.slots_wait_s(waiting.bucket, ahead),
            backend.kv_wait_s(request, waiting.bucket),
            self._clear_at(backend, waiting, prefill_s, now) - now,
            self._crowd_s(waiting, prefill_s, deadline, now),
        )
        margin_s = backend.margin_s(wait_s, ahead_s)
        return Option(backend.name, wait_s, margin_s, prefill_s, cold_s, matched, backend.load(now))

    def _overtaken(self, backend: Backend, bucket: str, now: float) -> float:
        """Share of the engine that more urgent buckets take while this one waits.

        A queued request waits 1/(1 - share) times the work before it (M/G/1 with priorities).
        """
        max_wait_s = self._buckets[bucket].max_wait_s
        share = sum(
            backend.worked_share(other.name, now)
            for other in self._buckets.values()
            if other.max_wait_s < max_wait_s
        )
        return min(OVERTAKEN_MOST, share)

    # Long prefills (partition.py).

    def _shorter(self, bucket: str, now: float) -> list[Bucket]:
        """The buckets with less patience in which requests come in now."""
        max_wait_s = self._buckets[bucket].max_wait_s
        return [
            b
            for b in self._buckets.values()
            if b.max_wait_s < max_wait_s and now - self._last_arrival[b.name] < FLOWING_S
        ]

    def _clear_at(self, backend: Backend, waiting: Waiting, prefill_s: float, now: float) -> float:
        """When the request may start here without taking the last engine clear of long prefills."""
        shorter = self._shorter(waiting.bucket, now)
        long_s = min((b.max_wait_s for b in shorter), default=inf)
        others = [b for b in self._backends.values() if b.up and b is not backend]
        if prefill_s <= long_s or not others or any(not b.prefills_longer(long_s) for b in others):
            return now
        flowing_until = max(self._last_arrival[b.name] for b in shorter) + FLOWING_S
        refused = max(self._refused_share[b.name] for b in shorter)
        max_wait_s = self._buckets[waiting.bucket].max_wait_s
        return may_take_last_at(waiting.arrived_at, max_wait_s, flowing_until, refused)

    def _crowd_s(self, waiting: Waiting, prefill_s: float, deadline: float, now: float) -> float:
        """The wait of a long prefill while one engine less than all take turns at them."""
        shorter = self._shorter(waiting.bucket, now)
        long_s = min((b.max_wait_s for b in shorter), default=inf)
        if prefill_s <= long_s or not crowded_out(
            max(self._refused_share[b.name] for b in shorter)
        ):
            return 0.0
        up = [b for b in self._backends.values() if b.up]
        ahead_s = sum(b.backlog_s(now) for b in up if b.prefills_longer(long_s))
        ahead_s += sum(b.queues[waiting.bucket].ahead_s(deadline) for b in up)
        if waiting.backend:
            ahead_s -= waiting.work_s
        # Work comes in lumps that are not interrupted: reckon with one more like this one.
        return (max(0.0, ahead_s) + prefill_s) / max(1, len(up) - 1)


def heads_of(backends: Iterable[Backend]) -> Sequence[Waiting]:
    """The most urgent of each queue."""
    return [head for b in backends for queue in b.queues.values() if (head := queue.head())]
