"""The verbs of the policy: start, send, queue, reject and move requests.

They change the state, and only here are requests sent. A slot is taken when `Send` is returned, not
when a socket opens. `shaper.py` has the events that lead here.
"""

from collections.abc import Collection, Sequence
from math import inf

from forebay.proxy.core.learn.cost import PRIOR_FIXED_S
from forebay.proxy.core.model import INSTANT_S, Action, Reject, RejectReason, Send
from forebay.proxy.core.policy.admission import stands
from forebay.proxy.core.policy.coalesce import (
    expected_tokens,
    freed_followers,
    hits_elsewhere,
    loses_hit,
    must_follow,
)
from forebay.proxy.core.policy.kv_wait import kv_need
from forebay.proxy.core.policy.order import due_at, first
from forebay.proxy.core.policy.routing import Option, Route
from forebay.proxy.core.policy.start import fills
from forebay.proxy.core.policy_state import PolicyState
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.fleet import heads_of
from forebay.proxy.core.state.in_flight import InFlight
from forebay.proxy.core.state.queue import QueuedRequest

# Starting waiting requests.


def freed(
    state: PolicyState, backend: Backend, prefilled: InFlight | None, now: float
) -> list[Action]:
    """Start waiting requests in the room that a request has left on a backend.

    Args:
        prefilled: that request, if its prefill has ended now.
    """
    state.forecast.moved(backend)
    long = prefilled is not None and prefilled.prefill_s > state.least_patience_s
    if prefilled is not None and long:
        backend.long_prefill_s, backend.long_ended_at = prefilled.prefill_s, now
    if not state.queues.waiting:
        return []
    came = prefilled is not None and prefilled.counts and _gather(state, backend, now)
    if came or long:
        return dispatch_all(state, now)  # the backend may be clear of long prefills now
    return _dispatch(state, [backend], now)


def dispatch_all(state: PolicyState, now: float) -> list[Action]:
    return _dispatch(state, state.backends.values(), now) if state.queues.waiting else []


def _dispatch(state: PolicyState, backends: Collection[Backend], now: float) -> list[Action]:
    """Start waiting requests on these backends. A backend with room left steals others."""
    actions: list[Action] = []
    for backend in backends:
        actions += start_next(state, backend, now)
    for backend in backends if state.queues.waiting else ():
        while waiting := _better_here(state, backend, now):
            home = dequeue(state, waiting.request.id)
            matched = backend.matched_tokens(waiting.request)
            actions.append(send(state, waiting, backend, matched, now))
            actions += start_next(state, home, now)  # requests behind it may start now
    return actions


def start_next(state: PolicyState, backend: Backend, now: float) -> list[Action]:
    """Send requests that wait for this backend while they may start, the most urgent first."""
    if backend.review:
        _review(state, backend)
    actions: list[Action] = []
    gate = state.gate
    while backend.queued and gate.has_room(backend, now):
        heads = heads_of([backend])
        ready = [head for head in heads if gate.may_start(backend, head, now)]
        if len(ready) < len(heads) and gate.look_again(backend, heads, now):
            continue
        if not ready:
            break
        waiting = first(backend, ready, now)
        dequeue(state, waiting.request.id)
        matched = backend.matched_tokens(waiting.request)
        actions.append(send(state, waiting, backend, matched, now))
    if state.fairness.on and backend.queued:
        gate.divide(backend, now)
        state.queues.reorder()  # another tenant may be next
    if backend.queued:
        state.recorder.waits(backend, now)
    return actions


def _better_here(state: PolicyState, backend: Backend, now: float) -> QueuedRequest | None:
    """Return the head of another backend's queue that would now rather start here, or None."""
    gate = state.gate
    if backend.queued or not gate.has_room(backend, now):
        return None
    for head in state.queues.heads():
        if now < head.looks_again_at or not state.forecast.suits(backend, head):
            continue
        if gate.may_start(backend, head, now):
            home = state.backends[head.backend]
            if not home.takes_another:  # no request waits for a pause while others have room
                return head
            head.looks_again_at = now + INSTANT_S  # it would rather stay
            if loses_hit(head, home, backend):
                continue
            options = state.forecast.options_among([home, backend], head, now)
            if state.pick(head, options, now).backend == backend.name:
                return head
    return None


def _review(state: PolicyState, backend: Backend) -> None:
    """Reorder followers whose leader's prefill has ended or will not happen."""
    backend.review = False
    for waiting, prefill_s in freed_followers(backend):
        state.queues.leave(waiting, backend)
        _take_place(state, waiting, backend, prefill_s)


def _gather(state: PolicyState, backend: Backend, now: float) -> bool:
    """Pull requests that share a prefix just computed here, if the route prefers it now.

    Returns True if any came.
    """
    came = False
    for waiting, home in hits_elsewhere(backend, state.queues):
        if not state.forecast.suits(backend, waiting):
            continue
        options = state.forecast.options_among([home, backend], waiting, now)
        option = state.pick(waiting, options, now)
        if option.backend == backend.name:
            dequeue(state, waiting.request.id)
            enqueue(state, waiting, option, now)
            came = True
    return came


# One request.


def send(
    state: PolicyState,
    waiting: QueuedRequest,
    backend: Backend,
    matched_tokens: int,
    now: float,
    *,
    wait_s: float | None = None,
) -> Send:
    """Send a request that waits in no queue. `wait_s`: its predicted wait, if it is known."""
    gate = state.gate
    state.recorder.starts(waiting, backend, now)
    # The prediction must see the backend as it is before this request joins it.
    request, rank = waiting.request, waiting.own_rank
    waiting.paid = False  # spent
    priority = gate.engine_priority(backend, waiting)
    if wait_s is None:
        uncached = request.prompt_tokens - matched_tokens
        wait_s = gate.wait_s(backend, waiting, uncached, now)
    sent = backend.send(
        request, waiting.bucket, matched_tokens, now, waiting.output_tokens, rank,
        priority=priority or 0,
    )  # fmt: skip
    # Charge the tenant, and drop predictions that rest on the old state.
    if state.precedence.on:
        charged_s = sent.prefill_s
        if fills(backend, waiting):  # as if its sequences were sent one by one
            charged_s += PRIOR_FIXED_S * request.sequences
        state.precedence.sent(waiting, charged_s, now)
        state.queues.reorder()  # another tenant may be next
        state.note_use(request.tenant, charged_s, now)
    state.forecast.moved(backend)
    state.running[request.id] = backend, waiting
    if not request.streams:
        state.silent[backend.name] = backend
    queued_s, ttft_s = now - waiting.arrived_at, wait_s + sent.prefill_s
    action = Send(request, backend.name, waiting.bucket, queued_s, ttft_s, matched_tokens, priority)
    state.recorder.sent(action, now)
    return action


def enqueue(state: PolicyState, waiting: QueuedRequest, option: Option, now: float) -> None:
    """Let a request wait where the option says."""
    bucket = state.buckets[waiting.bucket]
    request, backend = waiting.request, state.backends[option.backend]
    if waiting.deadline == inf:
        left_s = request.timeout_s - (now - waiting.arrived_at)  # shorter after a retry
        left_s = max(0.0, left_s - option.prefill_s)
        waiting.deadline = now + min(bucket.deadline_s, left_s)
        waiting.leaves_at = now + min(bucket.patience_s, left_s)
        waiting.gives_up_at = now + min(bucket.max_wait_s, left_s)
    _take_place(state, waiting, backend, option.prefill_s)
    if state.fairness.on:
        state.fairness.queued(request.tenant)
    state.recorder.queued(waiting, backend, now)


def waits_on(state: PolicyState, waiting: QueuedRequest, now: float) -> bool:
    """Let a request of a burst wait beyond its deadline. False if it must leave now."""
    bucket, backend = state.buckets[waiting.bucket], state.backends[waiting.backend]
    queued_s = state.queues.queued_s(bucket.name, waiting.request.model, now)
    if now >= waiting.gives_up_at or stands(bucket, backend, queued_s, now):
        return False
    waiting.leaves_at = min(waiting.gives_up_at, now + bucket.patience_s)
    return True


def _take_place(
    state: PolicyState, waiting: QueuedRequest, backend: Backend, prefill_s: float
) -> None:
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
    state.queues.enter(waiting, backend)
    state.forecast.moved(backend)


def dequeue(state: PolicyState, request_id: str) -> Backend:
    """Take a waiting request out of its queue. Returns the backend it waited for."""
    waiting = state.queues.waiting[request_id]
    backend = state.backends[waiting.backend]
    state.queues.leave(waiting, backend)
    state.forecast.moved(backend)
    waiting.backend = ""
    if state.fairness.on:
        state.fairness.left_queue(waiting.request.tenant)
    return backend


def requeue(state: PolicyState, waiting: QueuedRequest, now: float) -> list[Action]:
    """Reroute a request that lost its place, or reject it if no backend may take it."""
    options = state.forecast.options(waiting, now)
    if not options:
        return [reject(state, waiting, "no_backend_available", now)]
    enqueue(state, waiting, state.pick(waiting, options, now), now)
    return []


def reject(
    state: PolicyState,
    waiting: QueuedRequest,
    reason: RejectReason,
    now: float,
    wait_s: float = 0.0,
) -> Reject:
    """Reject a request that was admitted before. `wait_s` is the wait it would have now."""
    state.refund_quota(waiting, now)
    queued_s = now - waiting.arrived_at
    retry_after_s = state.return_times.note(waiting.request, wait_s, now)
    action = Reject(waiting.request, reason, waiting.bucket, queued_s, retry_after_s)
    state.recorder.rejected(action, now)
    return action


def reject_beyond_limit(state: PolicyState, waiting: QueuedRequest, now: float) -> list[Action]:
    """Reject a request that was to start at once, but still waits in a queue that is full.

    It stands behind a request that may not start yet, or that took its place.
    """
    request, bucket = waiting.request, state.buckets[waiting.bucket]
    queued = state.queues.of_model[bucket.name, request.model]
    if request.id not in state.queues.waiting or queued <= bucket.max_queue:
        return []
    backend = dequeue(state, request.id)
    return [reject(state, waiting, "queue_full", now, backend.work_left_s(now))]


def reject_as_too_long(state: PolicyState, waiting: QueuedRequest, now: float) -> Reject:
    """Reject a request that has waited, and that no bucket holds any longer."""
    state.refund_quota(waiting, now)
    action = Reject(waiting.request, "prompt_too_long", "", now - waiting.arrived_at, inf)
    state.recorder.outgrew(action, state.last_bucket, now)
    return action


def send_past_queues(
    state: PolicyState, waiting: QueuedRequest, options: Sequence[Option], route: Route, now: float
) -> Send:
    """Send a request now where the route says, even to a busy backend."""
    option = route(waiting.request, options, state.affinity, now)
    return send(state, waiting, state.backends[option.backend], option.matched_tokens, now)


def send_or_reject(state: PolicyState, waiting: QueuedRequest, route: Route, now: float) -> Action:
    """Send a request that has waited past all queues. Rejects it if no backend may take it."""
    options = state.forecast.options(waiting, now, everywhere=True)
    if not options:
        return reject(state, waiting, "no_backend_available", now)
    return send_past_queues(state, waiting, options, route, now)
