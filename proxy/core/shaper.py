"""Decide when and where each request goes.

The shaper does no I/O, reads no clock and rolls no dice. Every event takes `now` and returns the
actions to carry out, in order. The proxy carries them out on sockets, the simulator on an event
heap, property tests on nothing at all. The rules stand in `policy/`. The table in
`policy/__init__.py` names the file for each question.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf

from forebay.proxy.core.arrival import NewRequests, send_past_queues
from forebay.proxy.core.changes import OperatorChanges, by_length
from forebay.proxy.core.dispatcher import Dispatcher
from forebay.proxy.core.explain.receipt import Receipt
from forebay.proxy.core.explain.recorder import DecisionRecorder, NullRecorder
from forebay.proxy.core.model import Action, BackendSpec, Bucket, Request, Tenant
from forebay.proxy.core.peers import Peering
from forebay.proxy.core.policy.admission import Admit, refuse
from forebay.proxy.core.policy.routing import Affinity, Route, warm_or_least_work
from forebay.proxy.core.policy.start import DISPATCH_AHEAD_S
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.in_flight import InFlight
from forebay.proxy.core.state.queue import QueuedRequest
from forebay.proxy.core.state.tenants import Fairness, Quotas


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
        self.recorder = recorder or NullRecorder()
        configured = list(tenants)
        fairness = Fairness(configured, default_weight)
        self._dispatcher = Dispatcher(
            {
                spec.name: Backend(spec, buckets, index, fairness=fairness)
                for index, spec in enumerate(backends)
            },
            by_length(buckets),
            route=route,
            affinity=affinity or Affinity(),
            dispatch_ahead_s=dispatch_ahead_s,
            fairness=fairness,
            quotas=Quotas(configured),
            recorder=self.recorder,
            observed=observed,
        )
        self.backends = self._dispatcher.backends
        self.peering = Peering(self._dispatcher)
        self.changes = OperatorChanges(self._dispatcher, self.peering)
        self._arrivals = NewRequests(self._dispatcher, admit)
        self.preview: Callable[[Request, float], Receipt] = self._arrivals.preview
        self.charge_unqueued: Callable[[str, int, float], float] = self._arrivals.charge_unqueued

    def __repr__(self) -> str:
        return f"<Shaper queued={self._dispatcher.queues.count} {list(self.backends.values())}>"

    # Events of one request.

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Send, queue (no action) or reject a new request."""
        return self._arrivals.arrive(request, now)

    def first_token(self, request_id: str, now: float) -> list[Action]:
        """End a prefill: the backend has answered, and the next prefill may begin."""
        dispatcher = self._dispatcher
        dispatcher.pass_time(now)
        if request_id not in dispatcher.running:
            return []
        backend, waiting = dispatcher.running[request_id]
        if waiting.request.pure:
            self.recorder.first_token(request_id, now)
        prefilled = backend.first_token(request_id, now)
        return dispatcher.freed(backend, prefilled, now)

    def finish(self, request_id: str, now: float) -> list[Action]:
        """Free a slot: the request completed, failed, or its client left."""
        dispatcher = self._dispatcher
        dispatcher.pass_time(now)
        self.recorder.finished(request_id, now)
        backend, waiting = dispatcher.running.pop(request_id)
        if dispatcher.fairness.on:
            dispatcher.refund_prefill(backend, waiting, now)
        prefilled = backend.finished(request_id, now)
        if dispatcher.quotas.any and prefilled is None and not waiting.settled:
            self._charge(waiting.request, waiting.request.quota_tokens, now)
        return dispatcher.freed(backend, prefilled, now)

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
        dispatcher = self._dispatcher
        self.recorder.used(request_id, output_tokens, cached_tokens, prompt_tokens)
        running = dispatcher.running.get(request_id)
        if running is None:
            return
        backend, waiting = running
        sent, request = backend.in_flight[request_id], waiting.request
        self._learn_length(sent, waiting, output_tokens)
        if prompt_tokens > 0 and dispatcher.quotas.any and not waiting.settled:
            waiting.settled = True
            most = dispatcher.by_length[-1].up_to  # a higher count is an error of the engine
            counted = max(request.prompt_tokens, min(prompt_tokens, most))
            self._charge(request, counted - request.charged_tokens, now)
        if cached_tokens is not None and dispatcher.fairness.on:
            tokens = request.prompt_tokens
            cached = cached_tokens * tokens // prompt_tokens if prompt_tokens else cached_tokens
            uncached = max(1, min(tokens, tokens - cached))
            taken_s = backend.cost.predict_s(uncached, tokens)
            dispatcher.correct_charge(request.tenant, taken_s - sent.prefill_s, now)
        backend.cache.reported(sent.visit, cached_tokens, prompt_tokens, backend.kv_tokens)

    def generated(self, request_id: str, output_tokens: int) -> None:
        """Learn from a complete answer without usage. Call it before `finish`.

        Args:
            output_tokens: as counted by its events.
        """
        running = self._dispatcher.running.get(request_id)
        if running is not None:
            backend, waiting = running
            self._learn_length(backend.in_flight[request_id], waiting, output_tokens)

    def cancel(self, request_id: str, now: float) -> list[Action]:
        """Take out a waiting request: its client left before it was sent."""
        dispatcher = self._dispatcher
        dispatcher.pass_time(now)
        self.recorder.cancelled(request_id, now)
        dispatcher.refund_quota(dispatcher.queues.waiting[request_id], now)
        backend = dispatcher.dequeue(request_id)
        return dispatcher.start_next(backend, now)

    def retry(self, request_id: str, now: float, *, refused: bool = False) -> list[Action]:
        """Send, queue or reject a request whose backend failed before the first byte.

        Args:
            refused: the backend has not seen it, so it has used nothing of a quota.
        """
        dispatcher = self._dispatcher
        dispatcher.pass_time(now)
        self.recorder.failed(request_id, now)
        failed, waiting = dispatcher.running.pop(request_id)
        if dispatcher.fairness.on:
            dispatcher.refund_prefill(failed, waiting, now)
        # Its API server has answered, or has never seen the text.
        failed.api_server.answered(failed.in_flight[request_id].reached_at, now)
        failed.finished(request_id, now)
        dispatcher.forecast.moved(failed)
        waiting.excluded |= {failed.name}
        waiting.paid = refused and dispatcher.quotas.any and not waiting.settled
        waiting.deadline = inf
        actions = self._try_elsewhere(waiting, now) + dispatcher.dispatch_all(now)
        return actions + dispatcher.reject_beyond_limit(waiting, now)

    # Events of backends and of time.

    def backend_up(
        self,
        name: str,
        now: float,
        kv_tokens: float | None = None,
        most_prefills: float = inf,
    ) -> list[Action]:
        """Let a backend take work: `most_prefills` at once, 1 for a trial, 0 for a pause."""
        dispatcher = self._dispatcher
        dispatcher.pass_time(now)
        backend = self.backends[name]
        backend.up = not backend.draining
        backend.allow(most_prefills)
        dispatcher.forecast.limited = any(
            b.up and b.most_prefills < inf for b in self.backends.values()
        )
        if kv_tokens is not None:
            backend.kv_tokens = kv_tokens
        dispatcher.forecast.moved(backend)
        return dispatcher.dispatch_all(now)

    def backend_down(self, name: str, now: float, keeps_cache: bool = False) -> list[Action]:
        """Let a backend take no work. Requests that wait for it are rerouted or rejected.

        Args:
            keeps_cache: it still runs; else its prefix cache is forgotten.
        """
        self._dispatcher.pass_time(now)
        down = self.backends[name]
        if not keeps_cache:
            down.restarted()
        return self.changes.take_out(down, now)

    def wake_at(self) -> float:
        """Return when `wake` must be called, or inf if no timer is needed."""
        dispatcher, queues = self._dispatcher, self._dispatcher.queues
        if not queues.waiting:
            return inf
        next_moment = dispatcher.forecast.next_moment(queues.heads(), dispatcher.now)
        return min(queues.first_leaves_at(), next_moment)

    def wake(self, now: float) -> list[Action]:
        """Send requests that may start by now, and reject requests whose deadline is over."""
        dispatcher = self._dispatcher
        dispatcher.pass_time(now)
        actions, left = dispatcher.dispatch_all(now), False
        while waiting := dispatcher.queues.next_to_leave(now):
            if dispatcher.waits_on(waiting, now):
                continue
            backend = dispatcher.dequeue(waiting.request.id)
            wait_s = backend.work_left_s(now)
            actions.append(dispatcher.reject(waiting, "deadline_unattainable", now, wait_s))
            left = True
        # A request that has left may have kept the requests behind it from starting.
        return actions + dispatcher.dispatch_all(now) if left else actions

    def settle(self, now: float) -> None:
        """Judge the rejections that can be judged by now. It decides nothing."""
        self.recorder.time_passes(self._dispatcher.forecast.gate, self.backends, now)

    def report_demand(self, listener: Callable[[str, float, float], None]) -> None:
        """Call `listener` with family, prefill seconds and time for each new request.

        Rejected requests count too. A prompt that is too long or over a quota does not, nor does a
        request that comes back when told.
        """
        self._dispatcher.on_demand = listener

    # Questions of drivers.

    @property
    def buckets(self) -> dict[str, Bucket]:
        """The buckets by name, the shortest first."""
        return self._dispatcher.buckets

    @property
    def wants_usage(self) -> bool:
        """True if the usage that an answer reports corrects its tenant's charge."""
        return self._dispatcher.fairness.on

    def bucket_of(self, prompt_tokens: int) -> Bucket | None:
        """Return the first bucket that holds a prompt of this length, or None above all."""
        return self._dispatcher.bucket_of(prompt_tokens)

    def queued(self, bucket: str) -> int:
        return self._dispatcher.queues.count[bucket]

    def waiting(self) -> Iterator[QueuedRequest]:
        yield from self._dispatcher.queues.waiting.values()

    # Parts of `retry` and `used`.

    def _try_elsewhere(self, waiting: QueuedRequest, now: float) -> list[Action]:
        """Queue a request on a backend that has not failed it, or reject it."""
        dispatcher = self._dispatcher
        observed = dispatcher.observed
        options = dispatcher.forecast.options(waiting, now, everywhere=observed is not None)
        if not options:
            return [dispatcher.reject(waiting, "no_backend_available", now)]
        if observed is not None:
            return [send_past_queues(dispatcher, waiting, options, observed, now)]
        left_s = waiting.request.timeout_s - (now - waiting.arrived_at)
        hopeful = [o for o in options if o.ttft_s <= left_s]
        if not hopeful:
            return [dispatcher.reject(waiting, "deadline_unattainable", now)]
        option = dispatcher.route(waiting.request, hopeful, dispatcher.affinity, now)
        bucket = dispatcher.buckets[waiting.bucket]
        backend = self.backends[option.backend]
        starts = dispatcher.forecast.gate.may_start(backend, waiting, now)
        queued = dispatcher.queues.of_model[bucket.name, waiting.request.model]
        if not starts and queued >= bucket.max_queue:
            return [dispatcher.reject(waiting, "queue_full", now, option.wait_s)]
        dispatcher.enqueue(waiting, option, now)
        return []

    def _learn_length(self, sent: InFlight, waiting: QueuedRequest, output_tokens: int) -> None:
        sent.output_tokens = output_tokens
        if output_tokens > 0:
            request = waiting.request
            each = -(-output_tokens // request.sequences)
            self._dispatcher.output_lengths.observe(request.tenant, waiting.bucket, each)

    def _charge(self, request: Request, more: int, now: float) -> None:
        """Correct the quota's charge of the admission. Refunds are not reported to other proxies.

        A client that misleads the estimate gets no more than its tenant's quota: it pays the
        engine's count or, where an answer was begun and its prompt never counted, twice the tokens
        of an ordinary text. An estimate that was too high stays charged.
        """
        if more:
            self._dispatcher.charge(request.tenant, more, now)
