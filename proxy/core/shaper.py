"""Decide when and where each request goes.

The shaper does no I/O, reads no clock and rolls no dice. Every method that can change a decision
takes `now` and returns the actions to carry out, in order. The proxy carries them out on sockets,
the simulator on an event heap, the tests on nothing at all.

The rules:
 1. A request belongs to the first length bucket that holds it, and is meant for the backend that
    `route` picks (`routing.py`).
 2. It is refused on arrival if it cannot make its deadline (`admission.py`), else sent or queued.
 3. Queues leave earliest deadline first. A backend is sent the next request while its predicted
    backlog is short (late binding: the engine's own queue stays almost empty, so that order and
    cancellation stay ours), a slot and KV cache are free, and the bucket's prefill limit allows.
 4. A long prefill does not take the last engine that is clear of them (`partition.py`).
 5. A backend with room and nobody waiting takes the head of another's queue, if `route` now
    prefers it.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from forebay.proxy.core.admission import attainable, refuse, retry_after_s
from forebay.proxy.core.backend import Backend
from forebay.proxy.core.model import (
    Action,
    BackendSpec,
    Bucket,
    Reject,
    RejectReason,
    Request,
    Send,
)
from forebay.proxy.core.partition import FLOWING_S, may_take_last_at
from forebay.proxy.core.queueing import Waiting
from forebay.proxy.core.routing import Affinity, Option, Route, warm_or_least_work

DISPATCH_AHEAD_S = 0.3
"""A backend is sent more while its predicted backlog is below this (the default): enough that it
never waits for us, too little for its own queue to matter."""

OVERTAKEN_MOST = 0.8  # of the engine: how much of it those who overtake are assumed to take
MATCH_SLACK_S = 1e-9  # float rounding: a timer set for the moment a backlog ends must find it so


class Shaper:
    def __init__(
        self,
        backends: Iterable[BackendSpec],
        buckets: Sequence[Bucket],
        *,
        route: Route = warm_or_least_work,
        affinity: Affinity | None = None,
        dispatch_ahead_s: float = DISPATCH_AHEAD_S,
    ) -> None:
        self.buckets = {b.name: b for b in sorted(buckets, key=lambda b: b.up_to)}
        self.backends = {spec.name: Backend(spec, buckets) for spec in backends}
        self.affinity = affinity or Affinity()
        self._route = route
        self._dispatch_ahead_s = dispatch_ahead_s
        self._usable = {
            bucket.name: [
                b
                for b in self.backends.values()
                if not bucket.backends or b.name in bucket.backends
            ]
            for bucket in buckets
        }
        self._waiting: dict[str, tuple[Backend, Waiting]] = {}
        self._running: dict[str, tuple[Backend, Waiting]] = {}
        self._queued = dict.fromkeys(self.buckets, 0)
        self._last_arrival = dict.fromkeys(self.buckets, -inf)
        self._arrivals = 0
        self._now = 0.0

    def __repr__(self) -> str:
        return f"<Shaper queued={self._queued} {list(self.backends.values())}>"

    # What drivers call.

    def arrive(self, request: Request, now: float) -> list[Action]:
        """A request has come: it is sent, queued (no action) or refused."""
        self._pass_time(now)
        bucket = self.bucket_of(request.prompt_tokens)
        if bucket is None:
            return [Reject(request, "prompt_too_long", "", 0.0, inf)]
        self._last_arrival[bucket.name] = now
        self._arrivals += 1
        waiting = Waiting(request, bucket.name, now, inf, self._arrivals, 0.0)
        options = self._options(waiting, now)
        if not options:
            return [self._reject(waiting, "no_backend_available", now)]
        hopeful = [
            o for o in options if self.backends[o.backend].idle or attainable(request, bucket, o)
        ]
        option = self._route(request, hopeful or options, self.affinity)
        backend = self.backends[option.backend]
        # Whoever can be sent at once needs no place in the queue.
        queued = self._queued[bucket.name] if not self._can_start(backend, waiting, now) else -1
        if reason := refuse(request, bucket, option, queued=queued, idle=backend.idle):
            return [self._reject(waiting, reason, now, min(o.wait_s for o in options))]
        self._enqueue(waiting, option, now)
        return self._dispatch([backend], now)

    def first_token(self, request_id: str, now: float) -> list[Action]:
        """The backend answered: its prefill is over and the next may begin."""
        self._pass_time(now)
        if request_id not in self._running:
            return []
        backend, _ = self._running[request_id]
        backend.first_token(request_id, now)
        return self._dispatch([backend], now)

    def finish(self, request_id: str, now: float) -> list[Action]:
        """The request left its backend: it completed, failed, or its client went away."""
        self._pass_time(now)
        backend, _ = self._running.pop(request_id)
        backend.finished(request_id, now)
        return self._dispatch([backend], now)

    def cancel(self, request_id: str, now: float) -> list[Action]:
        """The client went away before its request was sent."""
        self._pass_time(now)
        self._dequeue(request_id)
        return self._dispatch([], now)

    def retry(self, request_id: str, now: float) -> list[Action]:
        """Its backend failed before the first byte: send it to another one, queue or refuse it."""
        self._pass_time(now)
        failed, waiting = self._running.pop(request_id)
        failed.finished(request_id, now)
        waiting.excluded |= {failed.name}
        waiting.deadline = inf
        options = self._options(waiting, now)
        if not options:
            lost = self._reject(waiting, "no_backend_available", now)
            return [lost, *self._dispatch([failed], now)]
        option = self._route(waiting.request, options, self.affinity)
        backend = self.backends[option.backend]
        full = self._queued[waiting.bucket] >= self.buckets[waiting.bucket].max_queue
        if full and not self._can_start(backend, waiting, now):
            lost = self._reject(waiting, "queue_full", now, option.wait_s)
            return [lost, *self._dispatch([failed], now)]
        self._enqueue(waiting, option, now)
        return self._dispatch([failed, backend], now)

    def backend_up(self, name: str, now: float, kv_tokens: float | None = None) -> list[Action]:
        """The backend takes work. Its cache is empty: it has just started, or was unreachable."""
        self._pass_time(now)
        backend = self.backends[name]
        backend.up = True
        if kv_tokens is not None:
            backend.kv_tokens = kv_tokens
        return self._dispatch([backend], now)

    def backend_down(self, name: str, now: float) -> list[Action]:
        """The backend takes no work: those who wait for it go elsewhere or are refused."""
        self._pass_time(now)
        down = self.backends[name]
        down.up = False
        down.prefixes.clear()
        actions: list[Action] = []
        for queue in down.queues.values():
            for waiting in queue.everyone():
                self._dequeue(waiting.request.id)
                if options := self._options(waiting, now):
                    option = self._route(waiting.request, options, self.affinity)
                    self._enqueue(waiting, option, now)
                else:
                    actions.append(self._reject(waiting, "no_backend_available", now))
        return actions + self._dispatch(list(self.backends.values()), now)

    def wake_at(self) -> float:
        """When `wake` has something to do; infinity if no timer is needed."""
        if not self._waiting:
            return inf
        heads = [h for b in self.backends.values() for q in b.queues.values() if (h := q.head())]
        due = min(head.deadline for head in heads)
        return min([due, *(at for at in self._moments(heads) if at > self._now)])

    def wake(self, now: float) -> list[Action]:
        """Time has passed: send those whose turn it is, refuse those whose deadline is over."""
        self._pass_time(now)
        actions = self._dispatch(list(self.backends.values()), now)
        for backend in self.backends.values():
            for queue in backend.queues.values():
                while (head := queue.head()) and head.deadline <= now:
                    self._dequeue(head.request.id)
                    wait_s = backend.backlog_s(now) + queue.work_s
                    actions.append(self._reject(head, "deadline_unattainable", now, wait_s))
        return actions

    # What drivers ask.

    def bucket_of(self, prompt_tokens: int) -> Bucket | None:
        """The first bucket that holds such a prompt; None beyond all."""
        for bucket in self.buckets.values():
            if prompt_tokens <= bucket.up_to:
                return bucket
        return None

    def queued(self, bucket: str) -> int:
        return self._queued[bucket]

    def waiting(self) -> Iterator[Waiting]:
        return (waiting for _, waiting in self._waiting.values())

    # How it decides.

    def _options(self, waiting: Waiting, now: float) -> list[Option]:
        return [
            self._option(backend, waiting, now)
            for backend in self._usable[waiting.bucket]
            if backend.up and backend.name not in waiting.excluded
        ]

    def _option(self, backend: Backend, waiting: Waiting, now: float) -> Option:
        request = waiting.request
        matched = backend.matched_tokens(request)
        prefill_s = backend.prefill_s(request, matched)
        cold_s = backend.prefill_s(request, 0) if matched else prefill_s
        deadline = min(waiting.deadline, now + self.buckets[waiting.bucket].max_wait_s)
        ahead_s = sum(queue.ahead_s(deadline) for queue in backend.queues.values())
        ahead = backend.queued
        if self._waiting.get(request.id, (None,))[0] is backend:
            ahead_s, ahead = max(0.0, ahead_s - waiting.work_s), ahead - 1
        wait_s = backend.backlog_s(now)
        if ahead:
            wait_s += ahead_s / (1.0 - self._overtaken(backend, waiting.bucket, now))
        wait_s = max(
            wait_s + backend.slots_wait_s(ahead),
            backend.kv_wait_s(request.prompt_tokens - matched + request.output_tokens),
            self._clear_at(backend, waiting, prefill_s, now) - now,
        )
        return Option(backend.name, wait_s, prefill_s, cold_s, matched, backend.load(now))

    def _overtaken(self, backend: Backend, bucket: str, now: float) -> float:
        """Share of the engine that more urgent buckets take while this one waits.

        A queued request waits 1/(1 - share) times the work before it (M/G/1 with priorities).
        """
        max_wait_s = self.buckets[bucket].max_wait_s
        share = sum(
            backend.worked_share(other.name, now)
            for other in self.buckets.values()
            if other.max_wait_s < max_wait_s
        )
        return min(OVERTAKEN_MOST, share)

    def _can_start(self, backend: Backend, waiting: Waiting, now: float) -> bool:
        """Whether the request, were it next, may be sent to this backend now."""
        if not self._has_room(backend, now):
            return False
        bucket = self.buckets[waiting.bucket]
        if backend.prefills_of[bucket.name] >= bucket.prefills_per_backend:
            return False
        request = waiting.request
        matched = backend.matched_tokens(request)
        if not backend.kv_fits(request.prompt_tokens - matched + request.output_tokens):
            return False
        prefill_s = backend.prefill_s(request, matched)
        return self._clear_at(backend, waiting, prefill_s, now) <= now

    def _has_room(self, backend: Backend, now: float) -> bool:
        return (
            backend.up
            and len(backend.flights) < backend.spec.max_concurrency
            and backend.backlog_s(now) < self._dispatch_ahead_s + MATCH_SLACK_S
        )

    def _clear_at(self, backend: Backend, waiting: Waiting, prefill_s: float, now: float) -> float:
        """When the request may start here without taking the last engine clear of long prefills."""
        bucket = self.buckets[waiting.bucket]
        shorter = [
            b
            for b in self.buckets.values()
            if b.max_wait_s < bucket.max_wait_s and now - self._last_arrival[b.name] < FLOWING_S
        ]
        if not shorter:
            return now
        long_s = min(b.max_wait_s for b in shorter)
        others = [b for b in self.backends.values() if b.up and b is not backend]
        if prefill_s <= long_s or not others:
            return now
        if any(all(f.prefill_s <= long_s for f in b.prefills.values()) for b in others):
            return now
        flowing_until = max(self._last_arrival[b.name] for b in shorter) + FLOWING_S
        return may_take_last_at(waiting.arrived_at, bucket.max_wait_s, flowing_until)

    # How it acts.

    def _dispatch(self, backends: Sequence[Backend], now: float) -> list[Action]:
        actions: list[Action] = []
        for backend in backends:
            while waiting := self._next_for(backend, now):
                actions.append(self._send(waiting, backend, now))
        # A change on one backend can free the head of another's queue: the engine it left clear.
        for backend in self.backends.values() if self._waiting else ():
            while waiting := self._next_for(backend, now) or self._better_here(backend, now):
                actions.append(self._send(waiting, backend, now))
        return actions

    def _next_for(self, backend: Backend, now: float) -> Waiting | None:
        """Of those who wait for this backend, the most urgent that may start."""
        if not backend.queued or not self._has_room(backend, now):
            return None
        heads = [head for q in backend.queues.values() if (head := q.head())]
        heads = [head for head in heads if self._can_start(backend, head, now)]
        return min(heads, key=lambda w: w.key, default=None)

    def _better_here(self, backend: Backend, now: float) -> Waiting | None:
        """The head of another backend's queue that would now rather come here."""
        if len(self._waiting) == backend.queued or not self._has_room(backend, now):
            return None
        for other in self.backends.values():
            for queue in other.queues.values():
                head = queue.head() if other is not backend else None
                if (
                    head is not None
                    and backend in self._usable[head.bucket]
                    and backend.name not in head.excluded
                    and self._can_start(backend, head, now)
                ):
                    options = self._options(head, now)
                    if self._route(head.request, options, self.affinity).backend == backend.name:
                        return head
        return None

    def _send(self, waiting: Waiting, backend: Backend, now: float) -> Send:
        request = waiting.request
        self._dequeue(request.id)
        matched = backend.matched_tokens(request)
        backlog_s = backend.backlog_s(now)
        flight = backend.sent(request, waiting.bucket, matched, now)
        self._running[request.id] = backend, waiting
        return Send(
            request,
            backend.name,
            waiting.bucket,
            queued_s=now - waiting.arrived_at,
            predicted_ttft_s=backlog_s + flight.prefill_s,
            matched_tokens=matched,
        )

    def _enqueue(self, waiting: Waiting, option: Option, now: float) -> None:
        bucket = self.buckets[waiting.bucket]
        request = waiting.request
        if waiting.deadline == inf:
            bearable_s = min(bucket.max_wait_s, request.timeout_s - option.prefill_s)
            waiting.deadline = now + max(0.0, bearable_s)
        waiting.work_s = option.prefill_s
        backend = self.backends[option.backend]
        backend.queues[bucket.name].push(waiting)
        self._waiting[request.id] = backend, waiting
        self._queued[bucket.name] += 1

    def _dequeue(self, request_id: str) -> None:
        backend, waiting = self._waiting.pop(request_id)
        backend.queues[waiting.bucket].remove(request_id)
        self._queued[waiting.bucket] -= 1

    def _reject(
        self, waiting: Waiting, reason: RejectReason, now: float, wait_s: float = 0.0
    ) -> Reject:
        after_s = retry_after_s(waiting.request, self.buckets[waiting.bucket], wait_s)
        queued_s = now - waiting.arrived_at
        return Reject(waiting.request, reason, waiting.bucket, queued_s, after_s)

    def _pass_time(self, now: float) -> None:
        self._now = max(self._now, now)
        for backend in self.backends.values():
            backend.pass_time(now)

    def _moments(self, heads: Iterable[Waiting]) -> Iterator[float]:
        """When a head may be able to start without an event; what is past has had its effect."""
        for head in heads:
            yield may_take_last_at(head.arrived_at, self.buckets[head.bucket].max_wait_s, inf)
        for backend in self.backends.values():
            yield backend.backlog_below_at(self._dispatch_ahead_s)
        for arrived_at in self._last_arrival.values():
            yield arrived_at + FLOWING_S
