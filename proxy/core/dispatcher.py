"""Start, queue, reject and move waiting requests.

The dispatcher carries out the policy's decisions. A slot is taken when `Send` is returned, not when
a socket opens. `shaper.py` has the events that lead here.
"""

from collections.abc import Callable, Collection, Mapping
from math import inf

from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.model import (
    INSTANT_S,
    Action,
    Bucket,
    Reject,
    RejectReason,
    Send,
)
from forebay.proxy.core.policy.admission import ReturnTimes, stands, whole_s
from forebay.proxy.core.policy.coalesce import (
    expected_tokens,
    freed_followers,
    hits_elsewhere,
    loses_hit,
    must_follow,
)
from forebay.proxy.core.policy.forecast import Forecast
from forebay.proxy.core.policy.kv_wait import kv_need
from forebay.proxy.core.policy.order import due_at, first
from forebay.proxy.core.policy.precedence import Precedence
from forebay.proxy.core.policy.routing import Affinity, Option, Route
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.elsewhere import RecentUse
from forebay.proxy.core.state.fleet import FleetQueues, heads_of
from forebay.proxy.core.state.in_flight import InFlight
from forebay.proxy.core.state.kv_budget import OutputLengths
from forebay.proxy.core.state.queue import QueuedRequest
from forebay.proxy.core.state.tenants import Fairness, Quotas


class Dispatcher:
    """The state of the policy, and the steps that all events share.

    Attributes:
        running: requests that were sent and have not finished, with their backend.
        on_demand: called with family, prefill seconds and time for each new request that could be
            sent, admitted or not.
        sharing: there are other proxies in front of the same backends.
        now: the latest time that any event had.
    """

    def __init__(
        self,
        backends: dict[str, Backend],
        buckets: dict[str, Bucket],
        *,
        route: Route,
        affinity: Affinity,
        dispatch_ahead_s: float,
        fairness: Fairness,
        quotas: Quotas,
        recorder: DecisionRecorder,
        observed: Route | None,
    ) -> None:
        self.backends = backends
        self.buckets = buckets
        self.affinity = affinity
        self.route = route
        self.dispatch_ahead_s = dispatch_ahead_s
        self.fairness = fairness
        self.quotas = quotas
        self.recorder = recorder
        self.observed = observed
        self.precedence = Precedence(backends, buckets, fairness)
        self.forecast = Forecast(
            backends, buckets, dispatch_ahead_s, affinity.min_match, self.precedence
        )
        self.queues = FleetQueues(buckets)
        self.running: dict[str, tuple[Backend, QueuedRequest]] = {}
        self.silent: dict[str, Backend] = {}  # backends with prefills that end by time alone
        self.least_patience_s = least_patience_s(buckets)
        self.by_length = list(buckets.values())
        self.return_times = ReturnTimes(buckets)
        self.output_lengths = OutputLengths()
        self.recent_use = RecentUse()
        self.on_demand: Callable[[str, float, float], None] | None = None
        self.sharing = False
        self.now = 0.0

    def bucket_of(self, prompt_tokens: int) -> Bucket | None:
        """Return the first bucket that holds a prompt of this length, or None above all."""
        for bucket in self.by_length:
            if prompt_tokens <= bucket.up_to:
                return bucket
        return None

    # Time.

    def pass_time(self, now: float) -> None:
        """Let time pass until `now`. Every event begins with this."""
        self.recorder.time_passes(self.forecast.gate, self.backends, now)
        if now > self.now:
            self.now = now
        if not self.silent:
            return
        for backend in list(self.silent.values()):
            if backend.end_silent_prefills(now):
                self.forecast.moved(backend)
            if not backend.prefill_queue.silent:
                del self.silent[backend.name]

    # Starting waiting requests.

    def freed(self, backend: Backend, prefilled: InFlight | None, now: float) -> list[Action]:
        """Start waiting requests in the room that a request has left on a backend.

        Args:
            prefilled: that request, if its prefill has ended now.
        """
        self.forecast.moved(backend)
        long = prefilled is not None and prefilled.prefill_s > self.least_patience_s
        if prefilled is not None and long:
            backend.long_prefill_s, backend.long_ended_at = prefilled.prefill_s, now
        if not self.queues.waiting:
            return []
        came = prefilled is not None and prefilled.counts and self._gather(backend, now)
        if came or long:
            return self.dispatch_all(now)  # the backend may be clear of long prefills now
        return self._dispatch([backend], now)

    def dispatch_all(self, now: float) -> list[Action]:
        return self._dispatch(self.backends.values(), now) if self.queues.waiting else []

    def _dispatch(self, backends: Collection[Backend], now: float) -> list[Action]:
        """Start waiting requests on these backends. A backend with room left steals others."""
        actions: list[Action] = []
        for backend in backends:
            actions += self.start_next(backend, now)
        for backend in backends if self.queues.waiting else ():
            while waiting := self._better_here(backend, now):
                home = self.dequeue(waiting.request.id)
                matched = backend.matched_tokens(waiting.request)
                actions.append(self.send(waiting, backend, matched, now))
                actions += self.start_next(home, now)  # requests behind it may start now
        return actions

    def start_next(self, backend: Backend, now: float) -> list[Action]:
        """Send requests that wait for this backend while they may start, the most urgent first."""
        if backend.review:
            self._review(backend)
        actions: list[Action] = []
        gate = self.forecast.gate
        while backend.queued and gate.has_room(backend, now):
            heads = heads_of([backend])
            ready = [head for head in heads if gate.may_start(backend, head, now)]
            if len(ready) < len(heads) and gate.look_again(backend, heads, now):
                continue
            if not ready:
                break
            waiting = first(backend, ready, now)
            self.dequeue(waiting.request.id)
            matched = backend.matched_tokens(waiting.request)
            actions.append(self.send(waiting, backend, matched, now))
        if self.fairness.on and backend.queued:
            gate.divide(backend, now)
            self.queues.reorder()  # another tenant may be next
        if backend.queued:
            self.recorder.waits(backend, gate, now)
        return actions

    def _better_here(self, backend: Backend, now: float) -> QueuedRequest | None:
        """Return the head of another backend's queue that would now rather start here, or None."""
        gate = self.forecast.gate
        if backend.queued or not gate.has_room(backend, now):
            return None
        for head in self.queues.heads():
            if now < head.looks_again_at or not self.forecast.suits(backend, head):
                continue
            if gate.may_start(backend, head, now):
                home = self.backends[head.backend]
                if not home.takes_another:  # no request waits for a pause while others have room
                    return head
                head.looks_again_at = now + INSTANT_S  # it would rather stay
                if loses_hit(head, home, backend):
                    continue
                options = self.forecast.options_among([home, backend], head, now)
                if self.better(head, options, now).backend == backend.name:
                    return head
        return None

    def _review(self, backend: Backend) -> None:
        """Reorder followers whose leader's prefill has ended or will not happen."""
        backend.review = False
        for waiting, prefill_s in freed_followers(backend):
            self.queues.leave(waiting, backend)
            self._take_place(waiting, backend, prefill_s)

    def _gather(self, backend: Backend, now: float) -> bool:
        """Pull requests that share a prefix just computed here, if the route prefers it now.

        Returns True if any came.
        """
        came = False
        for waiting, home in hits_elsewhere(backend, self.queues):
            if not self.forecast.suits(backend, waiting):
                continue
            options = self.forecast.options_among([home, backend], waiting, now)
            option = self.better(waiting, options, now)
            if option.backend == backend.name:
                self.dequeue(waiting.request.id)
                self.enqueue(waiting, option, now)
                came = True
        return came

    # One request.

    def send(
        self,
        waiting: QueuedRequest,
        backend: Backend,
        matched_tokens: int,
        now: float,
        *,
        wait_s: float | None = None,
    ) -> Send:
        """Send a request that waits in no queue. `wait_s`: its predicted wait, if it is known."""
        self.recorder.starts(waiting, backend, self.forecast.gate, self.buckets, now)
        # The prediction must see the backend as it is before this request joins it.
        request, rank = waiting.request, waiting.own_rank
        waiting.paid = False  # spent
        gate = self.forecast.gate
        priority = gate.engine_priority(backend, waiting)
        if wait_s is None:
            uncached = request.prompt_tokens - matched_tokens
            wait_s = gate.wait_s(backend, waiting, uncached, now)
        sent = backend.send(
            request, waiting.bucket, matched_tokens, now, waiting.output_tokens, rank,
            priority=priority or 0,
        )  # fmt: skip
        # Charge the tenant, and drop predictions that rest on the old state.
        if self.precedence.on:
            self.precedence.sent(waiting, sent.prefill_s, now)
            self.queues.reorder()  # another tenant may be next
            self._note_use(request.tenant, sent.prefill_s, now)
        self.forecast.moved(backend)
        self.running[request.id] = backend, waiting
        if not request.streams:
            self.silent[backend.name] = backend
        queued_s, ttft_s = now - waiting.arrived_at, wait_s + sent.prefill_s
        send = Send(
            request, backend.name, waiting.bucket, queued_s, ttft_s, matched_tokens, priority
        )
        self.recorder.sent(send, now)
        return send

    def enqueue(self, waiting: QueuedRequest, option: Option, now: float) -> None:
        """Let a request wait where the option says."""
        bucket = self.buckets[waiting.bucket]
        request, backend = waiting.request, self.backends[option.backend]
        if waiting.deadline == inf:
            left_s = request.timeout_s - (now - waiting.arrived_at)  # shorter after a retry
            left_s = max(0.0, left_s - option.prefill_s)
            waiting.deadline = now + min(bucket.deadline_s, left_s)
            waiting.leaves_at = now + min(bucket.patience_s, left_s)
            waiting.gives_up_at = now + min(bucket.max_wait_s, left_s)
        self._take_place(waiting, backend, option.prefill_s)
        if self.fairness.on:
            self.fairness.queued(request.tenant)
        self.recorder.queued(waiting, backend, self.forecast.gate, now)

    def waits_on(self, waiting: QueuedRequest, now: float) -> bool:
        """Let a request of a burst wait beyond its deadline. False if it must leave now."""
        bucket, backend = self.buckets[waiting.bucket], self.backends[waiting.backend]
        queued_s = self.queues.queued_s(bucket.name, waiting.request.model, now)
        if now >= waiting.gives_up_at or stands(bucket, backend, queued_s, now):
            return False
        waiting.leaves_at = min(waiting.gives_up_at, now + bucket.patience_s)
        return True

    def _take_place(self, waiting: QueuedRequest, backend: Backend, prefill_s: float) -> None:
        """Enter the backend's queue with this predicted prefill."""
        request = waiting.request
        # Hits of a long prompt keep the API server busy for longer than the engine.
        server_s = backend.api_server.model.before_s(request.prompt_tokens)
        waiting.work_s = max(prefill_s, server_s)
        waiting.backend = backend.name
        expected, leader = expected_tokens(backend, waiting)
        waiting.leader = leader
        waiting.kv_tokens = kv_need(backend, waiting, expected if leader else 0)
        waiting.follows = leader is not None or must_follow(backend, request)
        # A follower is ordered as if it were cold: as a hit it would be in front of its leader.
        worth_s = backend.prefill_s(request, 0) if waiting.follows else prefill_s
        waiting.due = due_at(waiting.arrived_at, waiting.deadline, worth_s)
        self.queues.enter(waiting, backend)
        self.forecast.moved(backend)

    def dequeue(self, request_id: str) -> Backend:
        """Take a waiting request out of its queue. Returns the backend it waited for."""
        waiting = self.queues.waiting[request_id]
        backend = self.backends[waiting.backend]
        self.queues.leave(waiting, backend)
        self.forecast.moved(backend)
        waiting.backend = ""
        if self.fairness.on:
            self.fairness.left_queue(waiting.request.tenant)
        return backend

    def requeue(self, waiting: QueuedRequest, now: float) -> list[Action]:
        """Reroute a request that lost its place, or reject it if no backend may take it."""
        options = self.forecast.options(waiting, now)
        if not options:
            return [self.reject(waiting, "no_backend_available", now)]
        self.enqueue(waiting, self.better(waiting, options, now), now)
        return []

    def better(self, waiting: QueuedRequest, options: list[Option], now: float) -> Option:
        """Route a request that has waited."""
        return self.route(waiting.request, options, self.affinity, now)

    def reject(
        self, waiting: QueuedRequest, reason: RejectReason, now: float, wait_s: float = 0.0
    ) -> Reject:
        """Reject a request that was admitted before. `wait_s` is the wait it would have now."""
        self.refund_quota(waiting, now)
        queued_s, retry_after_s = now - waiting.arrived_at, whole_s(wait_s)
        self.return_times.note(waiting.request, retry_after_s, now)
        reject = Reject(waiting.request, reason, waiting.bucket, queued_s, retry_after_s)
        self.recorder.rejected(reject, now)
        return reject

    def reject_beyond_limit(self, waiting: QueuedRequest, now: float) -> list[Action]:
        """Reject a request that was to start at once, but still waits in a queue that is full.

        It stands behind a request that may not start yet, or that took its place.
        """
        request, bucket = waiting.request, self.buckets[waiting.bucket]
        queued = self.queues.of_model[bucket.name, request.model]
        if request.id not in self.queues.waiting or queued <= bucket.max_queue:
            return []
        backend = self.dequeue(request.id)
        return [self.reject(waiting, "queue_full", now, backend.work_left_s(now))]

    # Tenants.

    def tell_tenants_apart(self) -> None:
        """Order by tenants, from the first request that names a tenant."""
        if self.fairness.on:
            return
        self.fairness.on = self.precedence.on = True
        for waiting in self.queues.waiting.values():
            self.fairness.queued(waiting.request.tenant)

    def refund_prefill(self, backend: Backend, waiting: QueuedRequest, now: float) -> None:
        """Refund the part of a prefill that was not computed when its request ended."""
        request = waiting.request
        sent = backend.prefills.get(request.id)
        if sent is not None and request.streams:
            computed_s = min(sent.prefill_s, backend.prefill_queue.computed_s(sent, now))
            self.correct_charge(request.tenant, computed_s - sent.prefill_s, now)

    def correct_charge(self, tenant: str, more_s: float, now: float) -> None:
        self.fairness.correct(tenant, more_s)
        if more_s < 0.0:
            self.queues.turn_fell(tenant)
        self._note_use(tenant, more_s, now)

    def refund_quota(self, waiting: QueuedRequest, now: float) -> None:
        """Refund the quota of a request that was never sent, at this proxy.

        Other proxies still count it, because sums of tokens in reports only rise.
        """
        if waiting.paid:
            waiting.paid = False
            self.quotas.take(waiting.request.tenant, -waiting.request.charged_tokens, now)

    def charge(self, tenant: str, tokens: int, now: float) -> None:
        """Charge a tenant's quota, and report it to other proxies. Refunds are not reported."""
        if self.quotas.any:
            self.quotas.take(tenant, tokens, now)
        if self.sharing and self.fairness.on:
            self.recent_use.admitted(tenant, max(0, tokens), now)

    def _note_use(self, tenant: str, prefill_s: float, now: float) -> None:
        if self.sharing and self.fairness.on:
            self.recent_use.computed(tenant, prefill_s, now)


def least_patience_s(buckets: Mapping[str, Bucket]) -> float:
    """Return the shortest patience of all buckets."""
    return min(bucket.patience_s for bucket in buckets.values())
