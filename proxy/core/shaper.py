"""Decide when and where each request goes.

The shaper does no I/O, reads no clock and rolls no dice. Every event takes `now` and returns the
actions to carry out, in order. The proxy carries them out on sockets, the simulator on an event
heap, property tests on nothing at all. The rules stand in `policy/`. The table in
`policy/__init__.py` names the file for each question.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf

from forebay.proxy.core.arrival import NewRequests
from forebay.proxy.core.changes import OperatorChanges
from forebay.proxy.core.explain.receipt import Receipt
from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.model import Action, BackendSpec, Bucket, Request, Tenant
from forebay.proxy.core.peers import Peering
from forebay.proxy.core.policy.admission import Admit, refuse
from forebay.proxy.core.policy.routing import Affinity, Route, warm_or_least_work
from forebay.proxy.core.policy.start import DISPATCH_AHEAD_S
from forebay.proxy.core.policy_state import PolicyState
from forebay.proxy.core.state.queue import NONE_EXCLUDED, QueuedRequest
from forebay.proxy.core.steps import (
    dequeue,
    dispatch_all,
    enqueue,
    freed,
    reject,
    reject_beyond_limit,
    send_or_reject,
    start_next,
    waits_on,
)


class Shaper:
    """The policy and its state, behind the events that a driver reports.

    Attributes:
        changes: the changes by operators while requests run.
        peering: the reports of other proxies, and the report of this proxy.
        recorder: keeps a record of each decision, or none.
        preview: returns the record that a request would get if it arrived now. Nothing changes.
        charge_unqueued: charges a quota for a request that passes no queue.
    """

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
        admit: Admit = refuse,
        recorder: DecisionRecorder | None = None,
        observed: Route | None = None,
    ) -> None:
        """A tenant that is not among `tenants` weighs `default_weight` and has no quota.

        Args:
            observed: send each request at once where this route says. The decisions of `route` and
                the other rules are only recorded.
        """
        self.recorder = recorder or DecisionRecorder(0, on=False)
        self._state = state = PolicyState(self.recorder)
        matches = affinity or Affinity()
        state.reconfigure(
            buckets, tenants, default_weight, route, matches, dispatch_ahead_s, observed
        )
        for spec in backends:
            state.add_backend(spec)
        state.rebuild()
        self._forecast = state.forecast
        self._gate = state.gate
        self._queues = state.queues
        self._running = state.running
        self.backends = state.backends
        self.peering = Peering(state)
        self.changes = OperatorChanges(state, self.peering)
        self._arrivals = NewRequests(state, admit)
        self.preview: Callable[[Request, float], Receipt] = self._arrivals.preview
        self.charge_unqueued: Callable[[str, int, float], float] = state.charge_unqueued

    def __repr__(self) -> str:
        return f"<Shaper queued={self._queues.count} {list(self.backends.values())}>"

    # Events of one request.

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Send, queue (no action) or reject a new request."""
        return self._arrivals.arrive(request, now)

    def first_token(self, request_id: str, now: float) -> list[Action]:
        """End a prefill: the backend has answered, and the next prefill may begin."""
        state = self._state.at(now)
        running = self._running.get(request_id)
        if running is None:
            return []
        backend, waiting = running
        if waiting.request.pure:
            self.recorder.first_token(request_id, now)
        prefilled = backend.first_token(request_id, now)
        return freed(state, backend, prefilled, now)

    def finish(self, request_id: str, now: float) -> list[Action]:
        """Free a slot: the request completed, failed, or its client left."""
        state = self._state.at(now)
        self.recorder.finished(request_id, now)
        backend, waiting = state.ended(request_id, now)
        prefilled = backend.finished(request_id, now)
        if prefilled is None and state.corrects_quota(waiting):
            self._charge(waiting.request, waiting.request.quota_tokens, now)
        return freed(state, backend, prefilled, now)

    def used(
        self,
        request_id: str,
        output_tokens: int,
        now: float,
        cached_tokens: int | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        """Learn from the usage that an answer reports. Call it before `finish`.

        Args:
            output_tokens: 0 if unknown.
            cached_tokens: prompt tokens found in the engine's prefix cache; None if unknown.
            prompt_tokens: as the engine counts; 0 if unknown.
        """
        state = self._state
        self.recorder.used(request_id, output_tokens, cached_tokens, prompt_tokens)
        running = self._running.get(request_id)
        if running is None:
            return
        backend, waiting = running
        sent, request = backend.in_flight[request_id], waiting.request
        state.learn_length(sent, waiting, output_tokens)
        if prompt_tokens > 0 and state.corrects_quota(waiting):
            waiting.settled = True
            most = state.last_bucket.up_to  # a higher count is an error of the engine
            counted = max(request.prompt_tokens, min(prompt_tokens, most))
            self._charge(request, counted - request.charged_tokens, now)
        if cached_tokens is not None and self.wants_usage:
            tokens = request.prompt_tokens
            cached = cached_tokens * tokens // prompt_tokens if prompt_tokens else cached_tokens
            uncached = max(1, min(tokens, tokens - cached))
            taken_s = backend.cost.predict_s(uncached, tokens)
            state.correct_charge(request.tenant, taken_s - sent.prefill_s, now)
        backend.learn_cached(sent, cached_tokens, prompt_tokens)

    def generated(self, request_id: str, output_tokens: int) -> None:
        """Learn from a complete answer without usage. Call it before `finish`.

        Args:
            output_tokens: as counted by its events.
        """
        running = self._running.get(request_id)
        if running is not None:
            backend, waiting = running
            self._state.learn_length(backend.in_flight[request_id], waiting, output_tokens)

    def cancel(self, request_id: str, now: float) -> list[Action]:
        """Take out a waiting request: its client left before it was sent."""
        state = self._state.at(now)
        self.recorder.cancelled(request_id, now)
        state.refund_quota(self._queues.waiting[request_id], now)
        return start_next(state, dequeue(state, request_id), now)

    def retry(
        self, request_id: str, now: float, *, refused: bool = False, rest: Request | None = None
    ) -> list[Action]:
        """Send, queue or reject a request whose backend failed.

        Args:
            refused: the backend has not seen it, so it has used nothing of a quota.
            rest: the request for the rest of its answer, if a part was sent to the client. It goes
                before requests that came later, and a full queue takes it.
        """
        state = self._state.at(now)
        if rest is None:
            self.recorder.failed(request_id, now)
        failed, waiting = state.ended(request_id, now)
        # Its API server has answered, or has never seen the text.
        failed.api_server.answered(failed.in_flight[request_id].reached_at, now)
        failed.finished(request_id, now)
        self._forecast.moved(failed)
        waiting.excluded = (waiting.excluded if rest is None else NONE_EXCLUDED) | {failed.name}
        waiting.paid = refused and state.corrects_quota(waiting)
        waiting.deadline = inf
        if rest is not None:
            waiting.go_on(rest, now, self.buckets[waiting.bucket].max_wait_s)
            return self._try_elsewhere(waiting, now, begun=True) + dispatch_all(state, now)
        actions = self._try_elsewhere(waiting, now) + dispatch_all(state, now)
        return actions + reject_beyond_limit(state, waiting, now)

    # Events of backends and of time.

    def backend_up(
        self,
        name: str,
        now: float,
        kv_tokens: float | None = None,
        most_prefills: float = inf,
    ) -> list[Action]:
        """Let a backend take work: `most_prefills` at once, 1 for a trial, 0 for a pause."""
        state = self._state.at(now)
        backend = self.backends[name]
        backend.up = not backend.draining
        backend.allow(most_prefills)
        limited = any(b.up and b.most_prefills < inf for b in self.backends.values())
        self._forecast.limited = limited
        if kv_tokens is not None:
            backend.kv_tokens = kv_tokens
        self._forecast.moved(backend)
        return dispatch_all(state, now)

    def backend_down(self, name: str, now: float, keeps_cache: bool = False) -> list[Action]:
        """Let a backend take no work. Requests that wait for it are rerouted or rejected.

        Args:
            keeps_cache: it still runs; else its prefix cache is forgotten.
        """
        self._state.at(now)
        down = self.backends[name]
        if not keeps_cache:
            down.restarted()
        return self.changes.take_out(down, now)

    def wake_at(self) -> float:
        """Return when `wake` must be called, or inf if no timer is needed."""
        queues = self._queues
        if not queues.waiting:
            return inf
        next_moment = self._forecast.next_moment(queues.heads(), self._state.now)
        return min(queues.first_leaves_at(), next_moment)

    def wake(self, now: float) -> list[Action]:
        """Send requests that may start by now, and reject requests whose deadline is over."""
        state = self._state.at(now)
        actions, left = dispatch_all(state, now), False
        while waiting := self._queues.next_to_leave(now):
            if waits_on(state, waiting, now):
                continue
            wait_s = dequeue(state, waiting.request.id).work_left_s(now)
            actions.append(reject(state, waiting, "deadline_unattainable", now, wait_s))
            left = True
        # A request that has left may have kept the requests behind it from starting.
        return actions + dispatch_all(state, now) if left else actions

    def settle(self, now: float) -> None:
        """Judge the rejections that can be judged by now. It decides nothing."""
        self.recorder.time_passes(now)

    def report_demand(self, listener: Callable[[str, float, float], None]) -> None:
        """Call `listener` with family, prefill seconds and time for each new request.

        Rejected requests count too. A prompt that is too long or over a quota does not, nor does a
        request that comes back when told.
        """
        self._state.on_demand = listener

    # Questions of drivers.

    @property
    def buckets(self) -> dict[str, Bucket]:
        """The buckets by name, the shortest first."""
        return self._state.buckets

    @property
    def wants_usage(self) -> bool:
        """True if the usage that an answer reports corrects its tenant's charge."""
        return self._state.fairness.on

    def bucket_of(self, prompt_tokens: int) -> Bucket | None:
        """Return the first bucket that holds a prompt of this length, or None above all."""
        return self._state.bucket_of(prompt_tokens)

    def queued(self, bucket: str) -> int:
        return self._queues.count[bucket]

    def waiting(self) -> Iterator[QueuedRequest]:
        yield from self._queues.waiting.values()

    def waits(self, request_id: str) -> bool:
        return request_id in self._queues.waiting

    # Parts of `retry` and `used`.

    def _try_elsewhere(
        self, waiting: QueuedRequest, now: float, *, begun: bool = False
    ) -> list[Action]:
        """Queue a request on a backend that has not failed it, or reject it.

        Args:
            begun: its client has a part of the answer.
        """
        state = self._state
        if state.observed is not None:
            return [send_or_reject(state, waiting, state.observed, now)]
        options = self._forecast.options(waiting, now)
        if not options:
            return [reject(state, waiting, "no_backend_available", now)]
        left_s = waiting.request.timeout_s - (now - waiting.arrived_at)
        hopeful = [o for o in options if o.ttft_s <= left_s]
        if not hopeful:
            return [reject(state, waiting, "deadline_unattainable", now)]
        option = state.pick(waiting, hopeful, now)
        bucket = self.buckets[waiting.bucket]
        starts = self._gate.may_start(self.backends[option.backend], waiting, now)
        queued = self._queues.of_model[bucket.name, waiting.request.model]
        if not (starts or begun) and queued >= bucket.max_queue:
            return [reject(state, waiting, "queue_full", now, option.wait_s)]
        enqueue(state, waiting, option, now)
        return []

    def _charge(self, request: Request, more: int, now: float) -> None:
        """Correct the quota's charge of the admission. Refunds are not reported to other proxies.

        A client that misleads the estimate gets no more than its tenant's quota: it pays the
        engine's count or, where an answer was begun and its prompt never counted, twice the tokens
        of an ordinary text. An estimate that was too high stays charged.
        """
        if more:
            self._state.charge(request.tenant, more, now)
