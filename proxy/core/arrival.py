"""A new request: send it, queue it or reject it.

Five questions, in this order. Is it too long, or its tenant over quota? How long would it wait on
each backend? Which backend does the route pick? May it start there now? Must it be rejected?
"""

from collections.abc import Sequence
from math import inf

from forebay.proxy.core.dispatcher import Dispatcher
from forebay.proxy.core.explain.receipt import Receipt
from forebay.proxy.core.explain.recorder import note_decision, note_early_rejection
from forebay.proxy.core.model import (
    RANKS,
    STANDARD,
    Action,
    Bucket,
    Reject,
    RejectReason,
    Request,
    Send,
    serves,
)
from forebay.proxy.core.policy.admission import (
    Admit,
    Placement,
    attainable,
    early_reject,
    gives_way,
    hopeless,
    stands,
    tenant_holds_too_much,
    whole_s,
)
from forebay.proxy.core.policy.kv_wait import without_copies
from forebay.proxy.core.policy.routing import Option, Route
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.queue import QueuedRequest


class NewRequests:
    """Decides about new requests.

    Args:
        admit: `admission.refuse`, or what takes its place in a simulation.
    """

    def __init__(self, dispatcher: Dispatcher, admit: Admit) -> None:
        self._dispatcher = dispatcher
        self._admit = admit
        self._count = 0

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Send, queue (no action) or reject a new request."""
        dispatcher = self._dispatcher
        dispatcher.pass_time(now)
        if dispatcher.observed is not None:
            return [self._observe(request, dispatcher.observed, now)]
        bucket = dispatcher.bucket_of(request.prompt_tokens)
        rejected = early_reject(request, bucket, dispatcher.quotas, now)
        if rejected is not None or bucket is None:
            assert rejected is not None
            dispatcher.recorder.rejected_early(rejected, dispatcher.by_length[-1], now)
            return [rejected]
        waiting = self._enter(request, bucket, now)
        options = dispatcher.forecast.options(waiting, now)
        if not options:
            return [dispatcher.reject(waiting, "no_backend_available", now)]
        place = self._place(waiting, bucket, options, now)
        if dispatcher.on_demand is not None and not dispatcher.return_times.is_back(request, now):
            dispatcher.on_demand(place.backend.family, place.option.prefill_s, now)
        dispatcher.return_times.arrived(request, now)
        reason = self._decide(waiting, bucket, place, now)
        long_prefills = dispatcher.forecast.long_prefills
        long_prefills.decided(bucket.name, request.model, rejected=reason is not None)
        if reason is not None:
            return [self._reject_new(request, bucket, reason, place, now)]
        return self._take_in(waiting, bucket, place, now)

    def preview(self, request: Request, now: float) -> Receipt:
        """Return the record that a request would get if it arrived now. Nothing changes.

        `state` is refused, prefilling or queued. If queued, `waiting_for` is the reason.
        """
        dispatcher = self._dispatcher
        bucket = dispatcher.bucket_of(request.prompt_tokens)
        receipt = Receipt(request, bucket.name if bucket is not None else "", now)
        receipt.state = "refused"
        receipt.ended_at = now
        rejected = early_reject(request, bucket, dispatcher.quotas, now)
        if rejected is not None or bucket is None:
            assert rejected is not None
            note_early_rejection(receipt, rejected, dispatcher.by_length[-1])
            return receipt
        undo = dispatcher.fairness.try_arrival(request.tenant, now)
        try:  # a routing rule of a plug-in may raise
            self._fill_in(receipt, request, bucket, now)
        finally:
            undo()
        return receipt

    def _observe(self, request: Request, route: Route, now: float) -> Action:
        """Send a request at once where `route` says, and charge no quota for it."""
        dispatcher = self._dispatcher
        bucket = dispatcher.bucket_of(request.prompt_tokens) or dispatcher.by_length[-1]
        waiting = self._enter(request, bucket, now)
        options = dispatcher.forecast.options(waiting, now, everywhere=True)
        if not options:
            return dispatcher.reject(waiting, "no_backend_available", now)
        waiting.settled = True  # nothing was charged, so nothing is corrected
        dispatcher.recorder.observed(request, bucket, now)
        send = send_past_queues(dispatcher, waiting, options, route, now)
        if dispatcher.on_demand is not None:
            backend = dispatcher.backends[send.backend]
            dispatcher.on_demand(backend.family, backend.in_flight[request.id].prefill_s, now)
        return send

    def _fill_in(self, receipt: Receipt, request: Request, bucket: Bucket, now: float) -> None:
        """Note what would be decided about a request that is neither too long nor over quota."""
        dispatcher = self._dispatcher
        waiting = self._waiting(request, bucket, now)
        options = dispatcher.forecast.options(waiting, now)
        if not options:
            receipt.rule = "no_backend"
            return
        place = self._place(waiting, bucket, options, now)
        reason = self._reason(waiting, bucket, place, now)
        note_decision(receipt, request, bucket, place, reason)
        if reason is not None:
            return
        receipt.backend = place.option.backend
        receipt.state = "prefilling"
        if not place.sent_now:
            receipt.state = "queued"
            why = dispatcher.forecast.gate.why_not(place.backend, waiting, now)
            receipt.waiting_for = why or "turn"

    def _enter(self, request: Request, bucket: Bucket, now: float) -> QueuedRequest:
        """Note the arrival of a request that is neither too long nor over its quota."""
        dispatcher, tenant = self._dispatcher, request.tenant
        if tenant or dispatcher.fairness.on:
            dispatcher.tell_tenants_apart()
            dispatcher.fairness.arrived(tenant, now)
        if request.service_class != "standard":
            dispatcher.precedence.tell_classes_apart()
        self._count += 1
        dispatcher.forecast.arrived(request, bucket.name, now)
        return self._waiting(request, bucket, now)

    def _waiting(self, request: Request, bucket: Bucket, now: float) -> QueuedRequest:
        dispatcher, tenant = self._dispatcher, request.tenant
        rank = own_rank = STANDARD
        if request.service_class != "standard":
            rank = own_rank = RANKS[request.service_class]
            if tenant and not dispatcher.fairness.grants(tenant, request.service_class):
                rank = STANDARD
        waiting = QueuedRequest(request, bucket.name, now, inf, self._count, 0.0, rank, own_rank)
        home = dispatcher.backends.get(request.home)
        if home is not None and dispatcher.forecast.suits(home, waiting):
            waiting.excluded = frozenset(dispatcher.backends) - {home.name}
        if dispatcher.output_lengths.any:
            waiting.output_tokens = dispatcher.output_lengths.expected(
                tenant, bucket.name, request.output_tokens, request.sequences
            )
        return waiting

    def _place(
        self, waiting: QueuedRequest, bucket: Bucket, options: list[Option], now: float
    ) -> Placement:
        """Route a new request."""
        dispatcher, request = self._dispatcher, waiting.request
        # Prefer backends that can meet the limits, then an idle backend that was not priced.
        limits = self._limits(request, bucket, options, now)
        allowed = without_copies(options)
        hopeful = [
            o
            for o in allowed
            if attainable(request, limits, o) or self._dispatcher.backends[o.backend].idle
        ]
        if not hopeful:
            hopeful = dispatcher.forecast.idle_elsewhere(waiting, now)
            options += hopeful
        hopeful = dispatcher.forecast.without_late_copies(
            hopeful or allowed, dispatcher.backends, waiting, now
        )
        option = dispatcher.route(request, hopeful, dispatcher.affinity, now)
        backend = self._dispatcher.backends[option.backend]
        # It starts, waits in its bucket's queue, or takes a less urgent request's place there.
        starts = dispatcher.forecast.gate.may_start(backend, waiting, now)
        queued = -1 if starts else dispatcher.queues.of_model[bucket.name, request.model]
        place = Placement(options, option, backend, starts, queued, limits)
        if queued >= bucket.max_queue and dispatcher.precedence.on:
            place.gives_way = gives_way(dispatcher.queues, waiting, bucket)
            place.queued -= place.gives_way is not None
        if starts and not (backend.queued and backend.queues[bucket.name]):
            place.sent_now = True  # no request goes before it, regardless of the prediction
            uncached = request.prompt_tokens - option.matched_tokens
            option.wait_s = dispatcher.forecast.gate.wait_s(backend, waiting, uncached, now)
            option.margin_s = 0.0
        return place

    def _limits(
        self, request: Request, bucket: Bucket, options: Sequence[Option], now: float
    ) -> Bucket:
        """Return the bucket with the limits that apply to a new request.

        Behind a queue that stands, wherever it would go, no wait in `options` is due to a burst.
        Once such a queue has rejected a request, new requests fill only half of it. Several active
        tenants need all of it for their fair shares.
        """
        dispatcher, halved = self._dispatcher, False
        queued_s = dispatcher.queues.queued_s(bucket.name, request.model, now)
        backends = [dispatcher.backends[o.backend] for o in options] if queued_s > 0.0 else []
        if backends and all(stands(bucket, b, queued_s, now) for b in backends):
            for option in options:
                option.sent_s = 0.0
            halved = dispatcher.queues.has_overflowed(bucket.name, request.model)
            halved = halved and not dispatcher.forecast.gate.beside_others(now)
        return dispatcher.return_times.limits(bucket, request, now, halved=halved)

    def _decide(
        self, waiting: QueuedRequest, bucket: Bucket, place: Placement, now: float
    ) -> RejectReason | None:
        """Return the reason to reject a new request, or None to admit it, and record that."""
        reason = self._reason(waiting, bucket, place, now)
        self._dispatcher.recorder.decided(waiting, bucket, place, reason, now)
        return reason

    def _reason(
        self, waiting: QueuedRequest, bucket: Bucket, place: Placement, now: float
    ) -> RejectReason | None:
        backend = place.backend
        request, limits = waiting.request, place.limits
        reason = self._admit(request, limits, place.option, place.queued, backend.idle)
        if reason is None and place.queued >= 0 and self._too_much(waiting, bucket, backend, now):
            return "queue_full"
        return reason

    def _too_much(
        self, waiting: QueuedRequest, bucket: Bucket, backend: Backend, now: float
    ) -> bool:
        dispatcher = self._dispatcher
        return tenant_holds_too_much(
            dispatcher.backends,
            dispatcher.queues,
            dispatcher.fairness,
            backend,
            waiting,
            bucket,
            now,
        )

    def _take_in(
        self, waiting: QueuedRequest, bucket: Bucket, place: Placement, now: float
    ) -> list[Action]:
        """Send or queue a request that was admitted."""
        dispatcher, backend = self._dispatcher, place.backend
        actions: list[Action] = []
        self._charge(waiting, now)
        if place.gives_way is not None:
            wait_s = backend.work_left_s(now)
            left = dispatcher.dequeue(place.gives_way.request.id)
            actions.append(dispatcher.reject(place.gives_way, "queue_full", now, wait_s))
            actions += dispatcher.start_next(left, now)
        if place.sent_now:
            matched_tokens, wait_s = place.option.matched_tokens, place.option.wait_s
            send = dispatcher.send(waiting, backend, matched_tokens, now, wait_s=wait_s)
            actions.append(send)
            return actions
        dispatcher.enqueue(waiting, place.option, now)
        actions += dispatcher.start_next(backend, now)
        if place.starts:
            actions += dispatcher.reject_beyond_limit(waiting, now)
        return actions

    def _charge(self, waiting: QueuedRequest, now: float) -> None:
        """Charge the tenant of a request that was admitted."""
        request = waiting.request
        self._dispatcher.charge(request.tenant, request.charged_tokens, now)
        waiting.paid = self._dispatcher.quotas.any

    def charge_unqueued(self, tenant: str, tokens: int, now: float) -> float:
        """Charge a tenant's quota for a request that passes no queue. Negative tokens: a refund.

        Returns the seconds until the quota has room for it, or 0 if it was charged.
        """
        dispatcher = self._dispatcher
        if not dispatcher.quotas.any:
            return 0.0
        dispatcher.tell_tenants_apart()  # reports to other proxies list use by tenant
        wait_s = dispatcher.quotas.wait_s(tenant, tokens, now)
        if wait_s > 0.0:
            return whole_s(wait_s)
        dispatcher.charge(tenant, tokens, now)
        return 0.0

    def _reject_new(
        self, request: Request, bucket: Bucket, reason: RejectReason, place: Placement, now: float
    ) -> Reject:
        """Reject a new request, with the time at which its client should come back."""
        if reason == "deadline_unattainable":
            self._dispatcher.queues.overflow(bucket.name, request.model)
        wait_s = min(o.wait_s for o in place.options)
        backends = self._dispatcher.backends.values()
        engines = sum(b.up and serves(b.models, request.model) for b in backends)
        prefill_s = place.option.prefill_s
        times = self._dispatcher.return_times
        retry_after_s = whole_s(times.book(request, bucket.name, wait_s, prefill_s, engines, now))
        times.note(request, retry_after_s, now)
        never = reason == "deadline_unattainable" and hopeless(request, place.options)
        return Reject(request, reason, bucket.name, 0.0, retry_after_s, never)


def send_past_queues(
    dispatcher: Dispatcher,
    waiting: QueuedRequest,
    options: Sequence[Option],
    route: Route,
    now: float,
) -> Send:
    """Send a request now where the route says, even to a busy backend."""
    option = route(waiting.request, options, dispatcher.affinity, now)
    backend = dispatcher.backends[option.backend]
    return dispatcher.send(waiting, backend, option.matched_tokens, now)
