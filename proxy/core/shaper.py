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
from forebay.proxy.core.outlook import Outlook, heads_of
from forebay.proxy.core.queueing import Waiting
from forebay.proxy.core.routing import Affinity, Option, Route, warm_or_least_work

DISPATCH_AHEAD_S = 0.3
"""A backend is sent more while its predicted backlog is below this (the default): enough that it
never waits for us, too little for its own queue to matter."""


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
        self._outlook = Outlook(self.backends, self.buckets, dispatch_ahead_s)
        self._waiting: dict[str, Waiting] = {}
        self._running: dict[str, tuple[Backend, Waiting]] = {}
        self._queued = dict.fromkeys(self.buckets, 0)
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
        self._outlook.arrived(bucket.name, now)
        self._arrivals += 1
        waiting = Waiting(request, bucket.name, now, inf, self._arrivals)
        options = self._outlook.options(waiting, now)
        if not options:
            return [self._reject(waiting, "no_backend_available", now)]
        hopeful = [
            o for o in options if self.backends[o.backend].idle or attainable(request, bucket, o)
        ]
        option = self._route(request, hopeful or options, self.affinity)
        backend = self.backends[option.backend]
        reason = refuse(
            request, bucket, option, queued=self._ahead(waiting, backend, now), idle=backend.idle
        )
        self._outlook.decided(bucket.name, refused=reason is not None)
        if reason:
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
        options = self._outlook.options(waiting, now)
        if not options:
            lost = self._reject(waiting, "no_backend_available", now)
            return [lost, *self._dispatch([failed], now)]
        option = self._route(waiting.request, options, self.affinity)
        backend = self.backends[option.backend]
        if self._ahead(waiting, backend, now) >= self.buckets[waiting.bucket].max_queue:
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
                if options := self._outlook.options(waiting, now):
                    option = self._route(waiting.request, options, self.affinity)
                    self._enqueue(waiting, option, now)
                else:
                    actions.append(self._reject(waiting, "no_backend_available", now))
        return actions + self._dispatch(list(self.backends.values()), now)

    def wake_at(self) -> float:
        """When `wake` has something to do; infinity if no timer is needed."""
        if not self._waiting:
            return inf
        heads = heads_of(self.backends.values())
        due = min(head.deadline for head in heads)
        return min([due, *(at for at in self._outlook.moments(heads) if at > self._now)])

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
        yield from self._waiting.values()

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
        if not backend.queued or not self._outlook.has_room(backend, now):
            return None
        ready = [h for h in heads_of([backend]) if self._outlook.may_start(backend, h, now)]
        return min(ready, key=lambda w: w.key, default=None)

    def _better_here(self, backend: Backend, now: float) -> Waiting | None:
        """The head of another backend's queue that would now rather come here."""
        if backend.queued or not self._outlook.has_room(backend, now):
            return None
        for head in heads_of(self.backends.values()):
            if backend in self._outlook.usable(head) and self._outlook.may_start(
                backend, head, now
            ):
                options = self._outlook.options(head, now)
                if self._route(head.request, options, self.affinity).backend == backend.name:
                    return head
        return None

    def _ahead(self, waiting: Waiting, backend: Backend, now: float) -> int:
        """How many of its bucket wait before it; -1 if it may be sent at once, without a place."""
        if self._outlook.may_start(backend, waiting, now):
            return -1
        return self._queued[waiting.bucket]

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
        waiting.backend = option.backend
        self.backends[option.backend].queues[bucket.name].push(waiting)
        self._waiting[request.id] = waiting
        self._queued[bucket.name] += 1

    def _dequeue(self, request_id: str) -> None:
        waiting = self._waiting.pop(request_id)
        self.backends[waiting.backend].queues[waiting.bucket].remove(request_id)
        waiting.backend = ""
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
