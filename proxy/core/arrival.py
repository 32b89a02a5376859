"""A new request: send it, queue it or reject it.

Five questions, in this order. Is it too long, or its tenant over quota? How long would it wait on
each backend? Which backend does the route pick? May it start there now? Must it be rejected?
"""

from forebay.proxy.core.explain.receipt import Receipt
from forebay.proxy.core.explain.recorder import note_decision, note_early_rejection
from forebay.proxy.core.model import Action, Bucket, Reject, RejectReason, Request
from forebay.proxy.core.policy.admission import (
    Admit,
    Placement,
    early_reject,
    gives_way,
    hopeless,
    tenant_holds_too_much,
)
from forebay.proxy.core.policy.routing import Option, Route
from forebay.proxy.core.policy_state import PolicyState
from forebay.proxy.core.state.queue import QueuedRequest
from forebay.proxy.core.steps import (
    dequeue,
    enqueue,
    reject,
    reject_beyond_limit,
    send,
    send_past_queues,
    start_next,
)


class NewRequests:
    """Decides about new requests.

    Args:
        admit: `admission.refuse`, or what takes its place in a simulation.
    """

    def __init__(self, state: PolicyState, admit: Admit) -> None:
        self._state = state
        self._forecast = state.forecast
        self._gate = state.gate
        self._queues = state.queues
        self._recorder = state.recorder
        self._admit = admit
        self._count = 0

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Send, queue (no action) or reject a new request."""
        state = self._state.at(now)
        if state.observed is not None:
            return [self._observe(request, state.observed, now)]
        bucket = state.bucket_of(request.prompt_tokens)
        rejected = early_reject(request, bucket, state.quotas, now)
        if rejected is not None or bucket is None:
            assert rejected is not None
            self._recorder.rejected_early(rejected, state.last_bucket, now)
            return [rejected]
        waiting = self._enter(request, bucket, now)
        options = self._forecast.options(waiting, now)
        if not options:
            return [reject(state, waiting, "no_backend_available", now)]
        place = self._place(waiting, bucket, options, now)
        if not state.return_times.arrived(request, now):  # else it counted when it was rejected
            state.on_demand(place.backend.family, place.option.prefill_s, now)
        # The decision, which the forecast learns from.
        reason = self._reason(waiting, bucket, place, now)
        self._recorder.decided(waiting, bucket, place, reason, now)
        self._forecast.decided(bucket.name, request.model, rejected=reason is not None)
        if reason is not None:
            return [self._reject_new(request, bucket, reason, place, now)]
        return self._take_in(waiting, place, now)

    def preview(self, request: Request, now: float) -> Receipt:
        """Return the record that a request would get if it arrived now. Nothing changes.

        `state` is refused, prefilling or queued. If queued, `waiting_for` is the reason.
        """
        state = self._state
        bucket = state.bucket_of(request.prompt_tokens)
        receipt = Receipt(request, bucket.name if bucket is not None else "", now)
        receipt.state = "refused"
        receipt.ended_at = now
        rejected = early_reject(request, bucket, state.quotas, now)
        if rejected is not None or bucket is None:
            assert rejected is not None
            note_early_rejection(receipt, rejected, state.last_bucket)
            return receipt
        undo = state.fairness.try_arrival(request.tenant, now)
        try:  # a routing rule of a plug-in may raise
            self._fill_in(receipt, request, bucket, now)
        finally:
            undo()
        return receipt

    def _observe(self, request: Request, route: Route, now: float) -> Action:
        """Send a request at once where `route` says, and charge no quota for it."""
        state, bucket = self._state, self._state.nearest_bucket(request)
        waiting = self._enter(request, bucket, now)
        options = self._forecast.options(waiting, now, everywhere=True)
        if not options:
            return reject(state, waiting, "no_backend_available", now)
        waiting.settled = True  # nothing was charged, so nothing is corrected
        self._recorder.observed(request, bucket, now)
        action = send_past_queues(state, waiting, options, route, now)
        backend = state.backends[action.backend]
        state.on_demand(backend.family, backend.in_flight[request.id].prefill_s, now)
        return action

    def _fill_in(self, receipt: Receipt, request: Request, bucket: Bucket, now: float) -> None:
        """Note what would be decided about a request that is neither too long nor over quota."""
        waiting = self._state.new_waiting(request, bucket, self._count, now)
        options = self._forecast.options(waiting, now)
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
            receipt.waiting_for = self._gate.why_not(place.backend, waiting, now) or "turn"

    def _enter(self, request: Request, bucket: Bucket, now: float) -> QueuedRequest:
        """Note the arrival of a request that is neither too long nor over its quota."""
        self._count += 1
        self._state.tell_apart(request, now)
        self._forecast.arrived(request, bucket.name, now)
        return self._state.new_waiting(request, bucket, self._count, now)

    def _place(
        self, waiting: QueuedRequest, bucket: Bucket, options: list[Option], now: float
    ) -> Placement:
        """Route a new request."""
        state, request = self._state, waiting.request
        limits = state.limits_of(request, bucket, options, now)
        hopeful = self._forecast.hopeful(waiting, limits, options, now)
        option = state.pick(waiting, hopeful, now)
        backend = state.backends[option.backend]
        # It starts, waits in its bucket's queue, or takes a less urgent request's place there.
        starts = self._gate.may_start(backend, waiting, now)
        queued = -1 if starts else self._queues.of_model[bucket.name, request.model]
        place = Placement(options, option, backend, starts, queued, limits)
        if queued >= bucket.max_queue and state.precedence.on:
            place.gives_way = gives_way(self._queues, waiting, bucket)
            place.queued -= place.gives_way is not None
        if starts and not (backend.queued and backend.queues[bucket.name]):
            place.sent_now = True  # no request goes before it, regardless of the prediction
            uncached = request.prompt_tokens - option.matched_tokens
            option.wait_s = self._gate.wait_s(backend, waiting, uncached, now)
            option.margin_s = 0.0
        return place

    def _reason(
        self, waiting: QueuedRequest, bucket: Bucket, place: Placement, now: float
    ) -> RejectReason | None:
        """Return the reason to reject a new request, or None to admit it."""
        state, backend = self._state, place.backend
        reason = self._admit(
            waiting.request, place.limits, place.option, place.queued, backend.idle
        )
        if reason is None and place.queued >= 0:
            fairness, queues = state.fairness, self._queues
            if tenant_holds_too_much(
                state.backends, queues, fairness, backend, waiting, bucket, now
            ):
                return "queue_full"
        return reason

    def _take_in(self, waiting: QueuedRequest, place: Placement, now: float) -> list[Action]:
        """Send or queue a request that was admitted."""
        state, backend = self._state, place.backend
        state.admitted(waiting, now)
        actions: list[Action] = []
        if place.gives_way is not None:
            wait_s = backend.work_left_s(now)
            left = dequeue(state, place.gives_way.request.id)
            actions.append(reject(state, place.gives_way, "queue_full", now, wait_s))
            actions += start_next(state, left, now)
        if place.sent_now:
            matched_tokens, wait_s = place.option.matched_tokens, place.option.wait_s
            actions.append(send(state, waiting, backend, matched_tokens, now, wait_s=wait_s))
            return actions
        enqueue(state, waiting, place.option, now)
        actions += start_next(state, backend, now)
        if place.starts:
            actions += reject_beyond_limit(state, waiting, now)
        return actions

    def _reject_new(
        self, request: Request, bucket: Bucket, reason: RejectReason, place: Placement, now: float
    ) -> Reject:
        """Reject a new request, with the time at which its client should come back."""
        if reason == "deadline_unattainable":
            self._queues.overflow(bucket.name, request.model)
        wait_s = min(o.wait_s for o in place.options)
        after_s = self._state.book_return(request, bucket, wait_s, place.option.prefill_s, now)
        never = reason == "deadline_unattainable" and hopeless(request, place.options)
        return Reject(request, reason, bucket.name, 0.0, after_s, never)
