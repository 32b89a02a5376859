"""Decide when and where each request goes.

The shaper does no I/O, reads no clock and rolls no dice. Every method that can change a decision
takes `now` and returns the actions to carry out, in order. The proxy carries them out on sockets,
the simulator on an event heap, the tests on nothing at all.

The rules:
 1. A request belongs to the first length bucket that holds it, and is meant for the backend that
    `route` picks (`routing.py`).
 2. It is refused on arrival if it cannot make its deadline (`admission.py`), else sent or queued.
 3. Queues leave by class, with a guaranteed share for each class and bucket (`turns.py`); tenants
    by the seconds they were given (`fairness.py`); of one tenant and bucket, whoever is due first
    (`queueing.py`). A backend is sent the next request while its predicted backlog is short (late
    binding: the engine's own queue stays almost empty, so that order and cancellation stay ours),
    a slot and KV cache are free, and the bucket's prefill limit allows.
 4. A long prefill does not take the last engine that is clear of them (`partition.py`), unless
    the engine lets shorter ones pass (`chunks.py`).
 5. To an engine that is to get them so, a long prompt goes in pieces while others come in that have
    less patience, and these get in between (`pieces.py`).
 6. A backend with room and nobody waiting takes the head of another's queue, if `route` now
    prefers it.
 7. What other proxies have under way counts like our own (`others.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Final

from forebay.proxy.core.dispatcher import Dispatcher, least_patience_s
from forebay.proxy.core.model import (
    RANKS,
    STANDARD,
    Action,
    BackendSpec,
    Bucket,
    Reject,
    RejectReason,
    Request,
    Tenant,
)
from forebay.proxy.core.policy.admission import Admit, attainable, hopeless, refuse, whole_s
from forebay.proxy.core.policy.returns import Returns
from forebay.proxy.core.policy.routing import Affinity, Option, Route, warm_or_least_work
from forebay.proxy.core.policy.split_prefill import found_the_last
from forebay.proxy.core.state.backend import UNLIMITED, Backend
from forebay.proxy.core.state.elsewhere import Books
from forebay.proxy.core.state.outputs import Outputs
from forebay.proxy.core.state.queue import Waiting
from forebay.proxy.core.state.quota import Quotas
from forebay.proxy.core.state.tenants import Fairness

DISPATCH_AHEAD_S: Final = 0.3
"""A backend is sent more while its predicted backlog is below this (the default): enough that it
never waits for us, too little for its own queue to matter."""


MOST_PROMPT_TOKENS: Final = 10_000_000  # longer than any context: an engine that says more is wrong


class Shaper(Dispatcher):
    def __init__(
        self,
        backends: Iterable[BackendSpec],
        buckets: Sequence[Bucket],
        *,
        route: Route = warm_or_least_work,
        affinity: Affinity | None = None,
        dispatch_ahead_s: float = DISPATCH_AHEAD_S,
        tenants: Iterable[Tenant] = (),
        default_weight: float = 1.0,
        itl_slo_s: float = inf,
        admit: Admit = refuse,
    ) -> None:
        """A tenant that is not among `tenants` weighs `default_weight` and has no quota.

        `itl_slo_s`: fewer requests run on a backend while their tokens come further apart.
        """
        listed = list(tenants)
        fairness = Fairness(listed, default_weight)
        super().__init__(
            {
                spec.name: Backend(spec, buckets, index, fairness=fairness, itl_slo_s=itl_slo_s)
                for index, spec in enumerate(backends)
            },
            _by_length(buckets),
            route=route,
            affinity=affinity or Affinity(),
            dispatch_ahead_s=dispatch_ahead_s,
            fairness=fairness,
            quotas=Quotas(listed),
        )
        self.peers = self._sharing.peers
        self._admit = admit
        self._outputs = Outputs()
        self._itl_slo_s = itl_slo_s
        self._up_to = [(bucket.up_to, bucket) for bucket in self.buckets.values()]
        self._returns = Returns(self.buckets)
        self._arrivals = 0

    def __repr__(self) -> str:
        return f"<Shaper queued={self._queues.count} {list(self.backends.values())}>"

    # What drivers call.

    def arrive(self, request: Request, now: float) -> list[Action]:
        """A request has come: it is sent, queued (no action) or refused."""
        self._pass_time(now)
        bucket = self.bucket_of(request.prompt_tokens)
        if bucket is None:
            return [Reject(request, "prompt_too_long", "", 0.0, inf)]
        tenant = request.tenant
        rank = STANDARD if request.service_class == "standard" else RANKS[request.service_class]
        if tenant or self._fairness.on:
            if self._quotas.any:
                quota_s = self._quotas.wait_s(tenant, request.prompt_tokens, now)
                if quota_s > 0:
                    return [Reject(request, "tenant_quota", bucket.name, 0.0, whole_s(quota_s))]
            self._tell_tenants_apart()
            self._fairness.arrived(tenant, now)
        if rank != STANDARD:
            self._ahead.tell_classes_apart()
        self._outlook.partition.arrived(bucket.name, now)
        self._arrivals += 1
        if self._sharing.on:
            self._outlook.came(request)
        waiting = Waiting(request, bucket.name, now, inf, self._arrivals, 0.0, rank)
        if self._outputs.any:
            most = request.output_tokens
            waiting.output_tokens = self._outputs.expected(tenant, bucket.name, most)
        options = self._outlook.options(waiting, now)
        if not options:
            return [self._reject(waiting, "no_backend_available", now)]
        hopeful = [
            o for o in options if attainable(request, bucket, o) or self.backends[o.backend].idle
        ]
        if not hopeful:
            hopeful = self._outlook.idle_elsewhere(waiting, now)
            options += hopeful
        option = self._route(request, hopeful or options, self.affinity)
        backend = self.backends[option.backend]
        starts = self._outlook.may_start(backend, waiting, now)
        queued, gives_way = -1 if starts else self._queues.count[bucket.name], None
        if queued >= bucket.max_queue and self._ahead.on:
            gives_way = self._ahead.gives_way(waiting, bucket)
            queued -= gives_way is not None
        sent_now = starts and not (backend.queued and backend.queues[bucket.name])
        if sent_now:  # nobody goes before it, whatever was reckoned
            uncached = request.prompt_tokens - option.matched_tokens
            option.wait_s, option.margin_s = backend.ahead_s(uncached, now), 0.0
        reason = self._admit(request, bucket, option, queued, backend.idle)
        if reason is None and queued >= 0 and self._ahead.too_much(backend, waiting, bucket, now):
            reason = "queue_full"
        self._decided(waiting, options, option, queued, reason, now)
        eased = self._outlook.partition.decided(bucket.name, refused=reason is not None)
        actions: list[Action] = []
        if reason is None:
            if self._quotas.any:
                self._quotas.take(tenant, request.prompt_tokens, now)
                waiting.paid = True
            self._sharing.took(tenant, request.prompt_tokens, now)
            if gives_way is not None:
                wait_s = backend.backlog_s(now) + backend.queued_s
                left = self._dequeue(gives_way.request.id)
                actions.append(self._reject(gives_way, "queue_full", now, wait_s))
                actions += self._start_next(left, now)
        if reason:
            wait_s = min(o.wait_s for o in options) - min(bucket.max_wait_s, request.timeout_s)
            engines = sum(b.up for b in self.backends.values())
            wait_s = self._returns.book(bucket.name, wait_s, option.prefill_s, engines, now)
            never = reason == "deadline_unattainable" and hopeless(request, options)
            actions.append(Reject(request, reason, bucket.name, 0.0, whole_s(wait_s), never))
        elif sent_now:
            actions.append(self._send(waiting, backend, option.matched_tokens, now))
        else:
            self._enqueue(waiting, option, now)
            actions += self._start_next(backend, now)
            if starts and self._queues.count[bucket.name] > bucket.max_queue:
                # It could, but stands behind one of its own tenant that may not yet.
                self._dequeue(request.id)
                actions.append(self._reject(waiting, "queue_full", now, option.wait_s))
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
        backend, waiting = self._running.pop(request_id)
        if self._fairness.on:
            self._refund(backend, waiting, now)
        prefilled = backend.finished(request_id, now)
        return self._freed(backend, prefilled, now)

    def computed(
        self, request_id: str, now: float, cached_tokens: int | None = None, prompt_tokens: int = 0
    ) -> list[Action]:
        """The piece that was sent of the request is computed: it waits for its next turn.

        Args:
            cached_tokens: of the piece, found in the engine's cache; None when not known.
            prompt_tokens: of the piece, as the engine counts; 0 when not known.
        """
        self._pass_time(now)
        backend, waiting = self._running.pop(request_id)
        piece = backend.flights[request_id]
        taken_s = backend.line.computed_for(piece, now)
        if not found_the_last(piece, cached_tokens, prompt_tokens, taken_s):
            waiting.request.whole = True
        backend.prompt_cached(piece, cached_tokens, prompt_tokens)
        backend.computed(request_id, now)
        return self._next_turn(backend, waiting, now)

    def not_in_pieces(self, request_id: str, now: float) -> list[Action]:
        """The piece that was sent of the request was not computed: it goes whole."""
        self._pass_time(now)
        backend, waiting = self._running.pop(request_id)
        waiting.request.whole = True
        if self._fairness.on:
            self._refund(backend, waiting, now)
        backend.finished(request_id, now)
        return self._next_turn(backend, waiting, now)

    def _next_turn(self, backend: Backend, waiting: Waiting, now: float) -> list[Action]:
        """It has left the backend and waits for what is left to be sent."""
        self._outlook.moved(backend)
        waiting.deadline = inf  # as far away again as when it came: it is under way
        return self._elsewhere(waiting, now) + self._dispatch_all(now)

    def used(
        self,
        request_id: str,
        output_tokens: int,
        now: float,
        cached_tokens: int | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        """What the answer says it took; to be told before `finish`.

        Args:
            output_tokens: 0 when not known.
            cached_tokens: of the prompt, found in the engine's cache; None when not known.
            prompt_tokens: as the engine counts; 0 when not known.
        """
        running = self._running.get(request_id)
        if running is None:
            return
        backend, waiting = running
        flight = backend.flights[request_id]
        flight.output_tokens = output_tokens
        if output_tokens > 0:
            self._outputs.observe(waiting.request.tenant, waiting.bucket, output_tokens)
        if prompt_tokens > waiting.request.prompt_tokens and self._quotas.any:
            self._count_more(waiting.request, prompt_tokens, now)
        if cached_tokens is not None and self._fairness.on:
            tokens = waiting.request.prompt_tokens
            cached = cached_tokens * tokens // prompt_tokens if prompt_tokens else cached_tokens
            uncached = max(1, min(tokens, tokens - cached))
            taken_s = backend.cost.predict_s(uncached, tokens)
            self._correct(waiting.request.tenant, taken_s - flight.prefill_s, now)
        backend.prompt_cached(flight, cached_tokens, prompt_tokens)

    def cancel(self, request_id: str, now: float) -> list[Action]:
        """The client went away before its request was sent."""
        self._pass_time(now)
        self._pay_back(self._queues.waiting[request_id], now)
        backend = self._dequeue(request_id)
        return self._start_next(backend, now)

    def retry(self, request_id: str, now: float) -> list[Action]:
        """Its backend failed before the first byte: send it to another one, queue or refuse it."""
        self._pass_time(now)
        failed, waiting = self._running.pop(request_id)
        if self._fairness.on:
            self._refund(failed, waiting, now)
        failed.finished(request_id, now)
        self._outlook.moved(failed)
        waiting.excluded |= {failed.name}
        waiting.deadline = inf
        actions: list[Action] = []
        left_s = waiting.request.timeout_s - (now - waiting.arrived_at)
        options = self._outlook.options(waiting, now)
        if options and not (hopeful := [o for o in options if o.ttft_s <= left_s]):
            actions.append(self._reject(waiting, "deadline_unattainable", now))
        elif options:
            option = self._route(waiting.request, hopeful, self.affinity)
            starts = self._outlook.may_start(self.backends[option.backend], waiting, now)
            bucket = self.buckets[waiting.bucket]
            if starts or self._queues.count[bucket.name] < bucket.max_queue:
                self._enqueue(waiting, option, now)
            else:
                actions.append(self._reject(waiting, "queue_full", now, option.wait_s))
        else:
            actions.append(self._reject(waiting, "no_backend_available", now))
        return actions + self._dispatch_all(now)

    def backend_up(
        self,
        name: str,
        now: float,
        kv_tokens: float | None = None,
        most_prefills: int = UNLIMITED,
    ) -> list[Action]:
        """The backend takes work, so many prefills at once: 1 for a trial, 0 for a pause."""
        self._pass_time(now)
        backend = self.backends[name]
        backend.up = not backend.draining
        backend.allow(most_prefills)
        self._outlook.limited = any(
            b.up and b.most_prefills < UNLIMITED for b in self.backends.values()
        )
        if kv_tokens is not None:
            backend.kv_tokens = kv_tokens
        self._outlook.moved(backend)
        return self._dispatch_all(now)

    def backend_down(self, name: str, now: float, keeps_cache: bool = False) -> list[Action]:
        """The backend takes no work: those who wait for it go elsewhere or are refused.

        Args:
            keeps_cache: it still runs; else what it held is forgotten.
        """
        self._pass_time(now)
        down = self.backends[name]
        if not keeps_cache:
            down.restarted()
        return self._take_out(down, now)

    # What operators change while it runs.

    def add_backend(self, spec: BackendSpec, now: float) -> list[Action]:
        """One more backend, which takes work from `backend_up` on; one that drained stays."""
        if spec.name in self.backends:
            self.backends[spec.name].draining = False
            return self.change_backend(spec, now)
        self._pass_time(now)
        buckets = self.buckets.values()
        self.backends[spec.name] = Backend(
            spec,
            buckets,
            len(self.backends),
            fairness=self._fairness,
            itl_slo_s=self._itl_slo_s,
        )
        self._rebuild()
        if self._sharing.on:
            return self._peers_changed(now)  # what they have there counts at once
        return self._dispatch_all(now)

    def change_backend(self, spec: BackendSpec, now: float, *, moved: bool = False) -> list[Action]:
        """The backend has other limits. `moved`: another server, whose cache is empty."""
        self._pass_time(now)
        backend = self.backends[spec.name]
        backend.resize(spec, self._itl_slo_s)
        if spec.kv_tokens < inf:
            backend.kv_tokens = spec.kv_tokens
        if moved:
            backend.restarted()
        self._outlook.moved(backend)
        return self._dispatch_all(now)

    def drain_backend(self, name: str, now: float) -> list[Action]:
        """The backend gets no new work and keeps what runs there, until `remove_backend`."""
        self._pass_time(now)
        backend = self.backends[name]
        backend.draining = True
        return self._take_out(backend, now)

    def remove_backend(self, name: str, now: float) -> list[Action]:
        """Forget a backend that was drained and where nothing of ours is left."""
        self._pass_time(now)
        assert self.backends[name].draining, name
        assert self.backends[name].empty, name
        del self.backends[name]
        self.peers.forget(name)
        self._silent.pop(name, None)
        for index, backend in enumerate(self.backends.values()):
            backend.index = index
        self._rebuild()
        return self._dispatch_all(now)

    def reconfigure(
        self,
        buckets: Sequence[Bucket],
        now: float,
        *,
        route: Route,
        affinity: Affinity,
        dispatch_ahead_s: float,
        tenants: Iterable[Tenant] = (),
        default_weight: float = 1.0,
        itl_slo_s: float = inf,
    ) -> list[Action]:
        """Other buckets and rules from now on.

        Who runs or waits belongs to the bucket that now holds the prompt. Who waits keeps the
        deadline, and the place even in a queue that is now shorter; a prompt that is now beyond
        every bucket is refused if it waits, and counts for the last bucket if it runs.
        """
        self._pass_time(now)
        everyone = sorted(self._queues.waiting.values(), key=lambda w: w.key)
        for waiting in everyone:
            self._dequeue(waiting.request.id)
        self.buckets = _by_length(buckets)
        self.affinity, self._route = affinity, route
        self._dispatch_ahead_s = dispatch_ahead_s
        listed = list(tenants)
        self._fairness.reconfigure(listed, default_weight)
        self._quotas.reconfigure(listed)
        self._returns = Returns(self.buckets)
        if itl_slo_s != self._itl_slo_s:
            self._itl_slo_s = itl_slo_s
            for backend in self.backends.values():
                backend.resize(backend.spec, itl_slo_s)
        self._up_to = [(bucket.up_to, bucket) for bucket in self.buckets.values()]
        self._least_patience_s = least_patience_s(self.buckets)
        self._queues.rebucket(self.buckets)
        for backend in self.backends.values():
            backend.rebucket(self.buckets.values(), self._home)
        for _, running in self._running.values():
            running.bucket = self._home(running.request)
        self._rebuild()
        actions: list[Action] = []
        for waiting in everyone:
            bucket = self.bucket_of(waiting.request.prompt_tokens)
            if bucket is None:
                actions.append(self._beyond(waiting, now))
            else:
                waiting.bucket = bucket.name
                actions += self._elsewhere(waiting, now)
        return actions + self._dispatch_all(now)

    # Other proxies in front of the same backends.

    def others(self, peer: str, books: Books, now: float) -> list[Action]:
        """Another proxy says what it has under way; that replaces what it said before."""
        self._pass_time(now)
        given = self._sharing.heard(peer, books, now)
        if given:
            self._tell_tenants_apart()
            self._sharing.charge(given, now)
            self._queues.reorder()  # another tenant may be next
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
        return self._sharing.books(now)

    def _peers_changed(self, now: float) -> list[Action]:
        self._sharing.settle(self._outlook, now)
        return self._dispatch_all(now)

    # What drivers ask.

    def bucket_of(self, prompt_tokens: int) -> Bucket | None:
        """The first bucket that holds such a prompt; None beyond all."""
        for up_to, bucket in self._up_to:
            if prompt_tokens <= up_to:
                return bucket
        return None

    def queued(self, bucket: str) -> int:
        return self._queues.count[bucket]

    @property
    def wants_usage(self) -> bool:
        """Whether lengths of answers change decisions, even where `max_tokens` is exact."""
        return self._itl_slo_s < inf or self._fairness.on

    def waiting(self) -> Iterator[Waiting]:
        yield from self._queues.waiting.values()

    # How it acts.

    def _decided(
        self,
        waiting: Waiting,
        options: Sequence[Option],
        option: Option,
        queued: int,
        reason: RejectReason | None,
        now: float,
    ) -> None:
        """What was decided about a newcomer, and from what: for `explain.py`."""

    def _count_more(self, request: Request, prompt_tokens: int, now: float) -> None:
        """The engine counted more than was guessed on arrival: a client that misleads the guess
        must not have more than its tenant's quota. What was guessed too high stays counted."""
        more = max(0, min(prompt_tokens, MOST_PROMPT_TOKENS) - request.prompt_tokens)
        self._quotas.take(request.tenant, more, now)
        self._sharing.took(request.tenant, more, now)

    def _beyond(self, waiting: Waiting, now: float) -> Reject:
        """It waits, and no bucket holds it any longer."""
        self._pay_back(waiting, now)
        queued_s = now - waiting.arrived_at
        return Reject(waiting.request, "prompt_too_long", "", queued_s, inf)

    def _home(self, request: Request) -> str:
        """The bucket that a request which runs counts for."""
        bucket = self.bucket_of(request.prompt_tokens)
        return bucket.name if bucket else self._up_to[-1][1].name


def _by_length(buckets: Sequence[Bucket]) -> dict[str, Bucket]:
    return {bucket.name: bucket for bucket in sorted(buckets, key=lambda b: b.up_to)}
