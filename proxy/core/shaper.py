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
 6. What other proxies have under way counts like our own (`others.py`).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import inf

from forebay.proxy.core.admission import attainable, refuse, retry_after_s
from forebay.proxy.core.backend import Backend, Flight
from forebay.proxy.core.model import (
    Action,
    BackendSpec,
    Bucket,
    Reject,
    RejectReason,
    Request,
    Send,
)
from forebay.proxy.core.others import Books, Peers, TenantUse
from forebay.proxy.core.outlook import Outlook, heads_of
from forebay.proxy.core.queueing import Waiting
from forebay.proxy.core.routing import Affinity, Option, Route, warm_or_least_work

DISPATCH_AHEAD_S = 0.3
"""A backend is sent more while its predicted backlog is below this (the default): enough that it
never waits for us, too little for its own queue to matter."""

LOOKS_ELSEWHERE = 8  # heads of other queues that a backend with room looks at
LOOK_AGAIN_S = 0.05  # a head that would rather stay is not asked again before
TENANT_NEWS_S = 1.5  # how long a tenant's use is repeated to other proxies: messages may be lost


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
        self.backends = {
            spec.name: Backend(spec, buckets, index) for index, spec in enumerate(backends)
        }
        self.affinity = affinity or Affinity()
        self._route = route
        self._outlook = Outlook(
            self.backends, self.buckets, dispatch_ahead_s, self.affinity.min_match
        )
        self._up_to = [(bucket.up_to, bucket) for bucket in self.buckets.values()]
        self._least_patience_s = min(bucket.max_wait_s for bucket in buckets)
        self._waiting: dict[str, Waiting] = {}
        self._queueing: dict[str, Backend] = {}  # the backends that somebody waits for
        self._urgent: list[Waiting] | None = None  # what `_heads` found, while nobody moved
        self._silent: dict[str, Backend] = {}  # those whose line time alone can shorten
        self._running: dict[str, tuple[Backend, Waiting]] = {}
        self._queued = dict.fromkeys(self.buckets, 0)
        self._arrivals = 0
        self._now = 0.0
        self.peers = Peers()
        self._shared = False  # whether there are any
        self._use: dict[str, TenantUse] = {}  # what we gave each tenant, ever
        self._used_at: dict[str, float] = {}

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
        if self._shared:
            self._outlook.came(request)
        waiting = Waiting(request, bucket.name, now, inf, self._arrivals)
        options = self._outlook.options(waiting, now)
        if not options:
            return [self._reject(waiting, "no_backend_available", now)]
        hopeful = [
            o for o in options if attainable(request, bucket, o) or self.backends[o.backend].idle
        ]
        option = self._route(request, hopeful or options, self.affinity)
        backend = self.backends[option.backend]
        starts = self._outlook.may_start(backend, waiting, now)
        reason = refuse(
            request,
            bucket,
            option,
            queued=-1 if starts else self._queued[bucket.name],
            idle=backend.idle,
        )
        eased = self._outlook.decided(bucket.name, refused=reason is not None)
        actions: list[Action] = []
        if reason:
            wait_s = min(o.wait_s for o in options)
            actions.append(self._reject(waiting, reason, now, wait_s))
        elif starts and not backend.queues[bucket.name]:
            actions.append(self._send(waiting, backend, option.matched_tokens, now))
        else:
            self._enqueue(waiting, option, now)
            actions += self._start_next(backend, now)
        return actions + self._dispatch_all(now) if eased else actions

    def first_token(self, request_id: str, now: float) -> list[Action]:
        """The backend answered: its prefill is over and the next may begin."""
        self._pass_time(now)
        if request_id not in self._running:
            return []
        backend, _ = self._running[request_id]
        prefilled = backend.first_token(request_id, now)
        return self._freed(backend, prefilled, now)

    def finish(self, request_id: str, now: float) -> list[Action]:
        """The request left its backend: it completed, failed, or its client went away."""
        self._pass_time(now)
        backend, _ = self._running.pop(request_id)
        prefilled = backend.finished(request_id, now)
        return self._freed(backend, prefilled, now)

    def cancel(self, request_id: str, now: float) -> list[Action]:
        """The client went away before its request was sent."""
        self._pass_time(now)
        backend = self._dequeue(request_id)
        return self._start_next(backend, now)

    def retry(self, request_id: str, now: float) -> list[Action]:
        """Its backend failed before the first byte: send it to another one, queue or refuse it."""
        self._pass_time(now)
        failed, waiting = self._running.pop(request_id)
        failed.finished(request_id, now)
        self._outlook.moved(failed)
        waiting.excluded |= {failed.name}
        waiting.deadline = inf
        actions: list[Action] = []
        if options := self._outlook.options(waiting, now):
            option = self._route(waiting.request, options, self.affinity)
            starts = self._outlook.may_start(self.backends[option.backend], waiting, now)
            bucket = self.buckets[waiting.bucket]
            if starts or self._queued[bucket.name] < bucket.max_queue:
                self._enqueue(waiting, option, now)
            else:
                actions.append(self._reject(waiting, "queue_full", now, option.wait_s))
        else:
            actions.append(self._reject(waiting, "no_backend_available", now))
        return actions + self._dispatch_all(now)

    def backend_up(self, name: str, now: float, kv_tokens: float | None = None) -> list[Action]:
        """The backend takes work. Its cache is empty: it has just started, or was unreachable."""
        self._pass_time(now)
        backend = self.backends[name]
        backend.up = True
        if kv_tokens is not None:
            backend.kv_tokens = kv_tokens
        self._outlook.moved(backend)
        return self._dispatch_all(now)

    def backend_down(self, name: str, now: float) -> list[Action]:
        """The backend takes no work: those who wait for it go elsewhere or are refused."""
        self._pass_time(now)
        down = self.backends[name]
        down.up = False
        down.prefixes.clear()
        self._outlook.moved(down)
        actions: list[Action] = []
        for queue in down.queues.values():
            for waiting in queue.everyone():
                self._dequeue(waiting.request.id)
                if options := self._outlook.options(waiting, now):
                    option = self._route(waiting.request, options, self.affinity)
                    self._enqueue(waiting, option, now)
                else:
                    actions.append(self._reject(waiting, "no_backend_available", now))
        return actions + self._dispatch_all(now)

    def wake_at(self) -> float:
        """When `wake` has something to do; infinity if no timer is needed."""
        if not self._waiting:
            return inf
        heads = self._heads()
        return min(heads[0].deadline, self._outlook.next_moment(heads, self._now))

    def wake(self, now: float) -> list[Action]:
        """Time has passed: send those whose turn it is, refuse those whose deadline is over."""
        self._pass_time(now)
        actions = self._dispatch_all(now)
        for backend in list(self._queueing.values()):
            for queue in backend.queues.values():
                while (head := queue.head()) and head.deadline <= now:
                    self._dequeue(head.request.id)
                    wait_s = backend.backlog_s(now) + queue.work_s
                    actions.append(self._reject(head, "deadline_unattainable", now, wait_s))
        return actions

    # Other proxies in front of the same backends.

    def others(self, peer: str, books: Books, now: float) -> list[Action]:
        """Another proxy says what it has under way; that replaces what it said before."""
        self._pass_time(now)
        self.peers.know(self.backends)
        for name, tokens in self.peers.say(peer, books, now).items():
            if tokens > 0.0 and name in self.backends:  # it may have been removed
                self.backends[name].crowded(tokens)
        return self._peers_changed(now)

    def peer_gone(self, peer: str, now: float) -> list[Action]:
        """Another proxy has left: what it had counts no more."""
        self._pass_time(now)
        return self._peers_changed(now) if self.peers.gone(peer, now) else []

    def forget_silent(self, now: float) -> list[Action]:
        """Those who have said nothing for `others.NEWS_S` are gone. Call it every 0.1 s or so."""
        actions: list[Action] = []
        for peer in self.peers.silent(now):
            actions += self.peer_gone(peer, now)
        return actions

    def books(self, now: float) -> Books:
        """What we have under way, for other proxies; of the tenants those of the last seconds."""
        self._pass_time(now)
        lately = {
            tenant: self._use[tenant].copy()
            for tenant, at in self._used_at.items()
            if now - at <= TENANT_NEWS_S
        }
        self._used_at = {tenant: self._used_at[tenant] for tenant in lately}
        return Books({name: b.books(now) for name, b in self.backends.items()}, lately)

    def _peers_changed(self, now: float) -> list[Action]:
        shared = len(self.peers) > 0
        if shared != self._shared:
            self._shared = shared
            self._outlook.share_with(self.peers if shared else None)
            for backend in self.backends.values():
                if not shared:
                    backend.share_with(None, now)
        for backend in self.backends.values():
            if shared and backend.others is None:
                backend.share_with(self.peers.elsewhere(backend.name), now)
            self._outlook.moved(backend)
        return self._dispatch_all(now)

    # What drivers ask.

    def bucket_of(self, prompt_tokens: int) -> Bucket | None:
        """The first bucket that holds such a prompt; None beyond all."""
        for up_to, bucket in self._up_to:
            if prompt_tokens <= up_to:
                return bucket
        return None

    def queued(self, bucket: str) -> int:
        return self._queued[bucket]

    def waiting(self) -> Iterator[Waiting]:
        yield from self._waiting.values()

    # How it acts.

    def _freed(self, backend: Backend, prefilled: Flight | None, now: float) -> list[Action]:
        """Something ended on `backend`; `prefilled` has left its line of prefills, if any has."""
        self._outlook.moved(backend)
        if not self._waiting:
            return []
        if prefilled and prefilled.prefill_s > self._least_patience_s:
            return self._dispatch_all(now)  # it may be clear of long prefills now
        return self._dispatch([backend], now)

    def _dispatch_all(self, now: float) -> list[Action]:
        return self._dispatch(self.backends.values(), now) if self._waiting else []

    def _dispatch(self, backends: Collection[Backend], now: float) -> list[Action]:
        """Start what may start on these backends; those left with room look at other queues."""
        actions: list[Action] = []
        for backend in backends:
            actions += self._start_next(backend, now)
        for backend in backends if self._waiting else ():
            while waiting := self._better_here(backend, now):
                self._dequeue(waiting.request.id)
                matched = backend.matched_tokens(waiting.request)
                actions.append(self._send(waiting, backend, matched, now))
        return actions

    def _start_next(self, backend: Backend, now: float) -> list[Action]:
        """Send those who wait for this backend while they may start, the most urgent first."""
        actions: list[Action] = []
        while backend.queued and self._outlook.has_room(backend, now):
            ready = [h for h in heads_of([backend]) if self._outlook.may_start(backend, h, now)]
            if not ready:
                break
            waiting = min(ready, key=lambda w: w.key)
            self._dequeue(waiting.request.id)
            matched = backend.matched_tokens(waiting.request)
            actions.append(self._send(waiting, backend, matched, now))
        return actions

    def _better_here(self, backend: Backend, now: float) -> Waiting | None:
        """The head of another backend's queue that would now rather come here."""
        if backend.queued or not self._outlook.has_room(backend, now):
            return None
        for head in self._heads()[:LOOKS_ELSEWHERE]:
            if now < head.looks_again_at or not self._outlook.suits(backend, head):
                continue
            if self._outlook.may_start(backend, head, now):
                head.looks_again_at = now + LOOK_AGAIN_S
                both = [self.backends[head.backend], backend]
                options = self._outlook.options_among(both, head, now)
                if self._route(head.request, options, self.affinity).backend == backend.name:
                    return head
        return None

    def _heads(self) -> list[Waiting]:
        """The heads of all queues, the most urgent first."""
        if self._urgent is None:
            self._urgent = sorted(heads_of(self._queueing.values()), key=lambda w: w.key)
        return self._urgent

    def _send(self, waiting: Waiting, backend: Backend, matched_tokens: int, now: float) -> Send:
        request = waiting.request
        backlog_s = backend.backlog_s(now)
        flight = backend.sent(request, waiting.bucket, matched_tokens, now)
        self._outlook.sent(request.prompt_tokens, now)
        self._outlook.moved(backend)
        self._running[request.id] = backend, waiting
        if request.tenant:
            self._charge(request, flight, now)
        if not request.streams:
            self._silent[backend.name] = backend
        return Send(
            request,
            backend.name,
            waiting.bucket,
            queued_s=now - waiting.arrived_at,
            predicted_ttft_s=backlog_s + flight.prefill_s,
            matched_tokens=matched_tokens,
        )

    def _charge(self, request: Request, flight: Flight, now: float) -> None:
        use = self._use.get(request.tenant)
        if use is None:
            use = self._use[request.tenant] = TenantUse()
        use.prefill_s += flight.prefill_s
        use.prompt_tokens += request.prompt_tokens
        self._used_at[request.tenant] = now

    def _enqueue(self, waiting: Waiting, option: Option, now: float) -> None:
        bucket = self.buckets[waiting.bucket]
        request = waiting.request
        if waiting.deadline == inf:
            bearable_s = min(bucket.max_wait_s, request.timeout_s - option.prefill_s)
            waiting.deadline = now + max(0.0, bearable_s)
        waiting.work_s = option.prefill_s
        waiting.backend = option.backend
        backend = self.backends[option.backend]
        backend.enqueue(waiting)
        self._outlook.moved(backend)
        self._waiting[request.id] = waiting
        self._queueing[backend.name] = backend
        self._urgent = None
        self._queued[bucket.name] += 1

    def _dequeue(self, request_id: str) -> Backend:
        waiting = self._waiting.pop(request_id)
        backend = self.backends[waiting.backend]
        backend.dequeue(waiting)
        self._outlook.moved(backend)
        if not backend.queued:
            del self._queueing[backend.name]
        self._urgent = None
        waiting.backend = ""
        self._queued[waiting.bucket] -= 1
        return backend

    def _reject(
        self, waiting: Waiting, reason: RejectReason, now: float, wait_s: float = 0.0
    ) -> Reject:
        after_s = retry_after_s(waiting.request, self.buckets[waiting.bucket], wait_s)
        queued_s = now - waiting.arrived_at
        return Reject(waiting.request, reason, waiting.bucket, queued_s, after_s)

    def _pass_time(self, now: float) -> None:
        self._now = max(self._now, now)
        for backend in list(self._silent.values()):
            if backend.pass_time(now):
                self._outlook.moved(backend)
            if not backend.silent:
                del self._silent[backend.name]
