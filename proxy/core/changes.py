"""Changes while requests run and wait: backends and their models, buckets, rules."""

from collections.abc import Iterable, Sequence
from math import inf

from forebay.proxy.core.arrival import send_past_queues
from forebay.proxy.core.dispatcher import Dispatcher, least_patience_s
from forebay.proxy.core.model import Action, BackendSpec, Bucket, Reject, Request, Tenant
from forebay.proxy.core.peers import Peering
from forebay.proxy.core.policy.admission import ReturnTimes
from forebay.proxy.core.policy.routing import Affinity, Route
from forebay.proxy.core.state.backend import Backend, takes_model
from forebay.proxy.core.state.queue import QueuedRequest


class OperatorChanges:
    """Applies an operator's changes to a dispatcher."""

    def __init__(self, dispatcher: Dispatcher, peering: Peering) -> None:
        self._dispatcher = dispatcher
        self._peering = peering

    def add_backend(self, spec: BackendSpec, now: float) -> list[Action]:
        """Add a backend, which takes work from `backend_up` on.

        A backend of this name that still drains stays, and counts as restarted.
        """
        dispatcher = self._dispatcher
        if spec.name in dispatcher.backends:
            dispatcher.backends[spec.name].draining = False
            return self.change_backend(spec, now, moved=True)
        dispatcher.pass_time(now)
        dispatcher.backends[spec.name] = Backend(
            spec,
            dispatcher.buckets.values(),
            len(dispatcher.backends),
            fairness=dispatcher.fairness,
        )
        self._rebuild()
        if dispatcher.sharing:
            return self._peering.settle(now)  # what other proxies have there counts at once
        return dispatcher.dispatch_all(now)

    def change_backend(self, spec: BackendSpec, now: float, *, moved: bool = False) -> list[Action]:
        """Change a backend's limits. `moved`: it is another server, whose cache is empty."""
        dispatcher = self._dispatcher
        dispatcher.pass_time(now)
        backend = dispatcher.backends[spec.name]
        backend.resize(spec)
        if spec.kv_tokens < inf:
            backend.kv_tokens = spec.kv_tokens
        if moved:
            backend.restarted()
        self._rebuild()
        return dispatcher.dispatch_all(now)

    def set_models(
        self,
        name: str,
        models: frozenset[str] | None,
        now: float,
        *,
        strict: bool = False,
        family: str = "",
    ) -> list[Action]:
        """Note which models a backend serves. None: unknown, so it is sent requests for any.

        Requests whose model it no longer serves move to another backend, if any serves it.
        """
        dispatcher = self._dispatcher
        dispatcher.pass_time(now)
        backend = dispatcher.backends[name]
        backend.family = family
        if (models, strict) == (backend.models, backend.strict):
            return []
        backend.models, backend.strict = models, strict
        self._rebuild()
        here = [w for queue in backend.queues.values() for w in queue.everyone()]
        for waiting in [w for w in here if not takes_model(backend, w.request.model)]:
            if others := dispatcher.forecast.options(waiting, now):
                dispatcher.dequeue(waiting.request.id)
                dispatcher.enqueue(waiting, dispatcher.better(waiting, others, now), now)
        return dispatcher.dispatch_all(now)

    def drain_backend(self, name: str, now: float) -> list[Action]:
        """Give a backend no new work. Its running requests finish before `remove_backend`."""
        self._dispatcher.pass_time(now)
        backend = self._dispatcher.backends[name]
        backend.draining = True
        self._rebuild()
        return self.take_out(backend, now)

    def remove_backend(self, name: str, now: float) -> list[Action]:
        """Forget a backend that was drained and on which no request of this proxy is left."""
        dispatcher = self._dispatcher
        dispatcher.pass_time(now)
        assert dispatcher.backends[name].draining, name
        assert dispatcher.backends[name].empty, name
        del dispatcher.backends[name]
        self._peering.peers.forget(name)
        dispatcher.silent.pop(name, None)
        for index, backend in enumerate(dispatcher.backends.values()):
            backend.index = index
        self._rebuild()
        return dispatcher.dispatch_all(now)

    def pass_by(self, backend: Backend, count: int, now: float) -> list[Action]:
        """Count requests that have passed all queues to a backend: 1 begins, -1 ends."""
        dispatcher = self._dispatcher
        dispatcher.pass_time(now)
        backend.passing += count
        dispatcher.forecast.moved(backend)
        return dispatcher.dispatch_all(now) if count < 0 and backend.queued else []

    def take_out(self, backend: Backend, now: float) -> list[Action]:
        """Let a backend take no work. Requests that wait for it are rerouted or rejected."""
        dispatcher = self._dispatcher
        backend.up = False
        dispatcher.forecast.moved(backend)
        actions: list[Action] = []
        for queue in backend.queues.values():
            for waiting in queue.everyone():
                dispatcher.dequeue(waiting.request.id)
                actions += dispatcher.requeue(waiting, now)
        return actions + dispatcher.dispatch_all(now)

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
        observed: Route | None = None,
    ) -> list[Action]:
        """Change buckets and rules.

        Running and waiting requests belong to the bucket that now holds their prompt. Waiting
        requests keep their deadline, and their place even in a queue that is now shorter. A prompt
        that is now above every bucket is rejected if it waits, and counts for the last bucket if it
        runs. If the proxy only observes from now on, all waiting requests are sent.
        """
        dispatcher = self._dispatcher
        dispatcher.pass_time(now)
        everyone = sorted(dispatcher.queues.waiting.values(), key=lambda w: w.key)
        for waiting in everyone:
            dispatcher.dequeue(waiting.request.id)
        dispatcher.affinity, dispatcher.route, dispatcher.observed = affinity, route, observed
        dispatcher.dispatch_ahead_s = dispatch_ahead_s
        configured = list(tenants)
        dispatcher.fairness.reconfigure(configured, default_weight)
        dispatcher.quotas.reconfigure(configured)
        self._rebucket(by_length(buckets))
        actions: list[Action] = []
        for waiting in everyone:
            bucket = self._dispatcher.bucket_of(waiting.request.prompt_tokens)
            if observed is not None:
                waiting.bucket = (bucket or dispatcher.by_length[-1]).name
                actions.append(self._send_or_reject(waiting, observed, now))
            elif bucket is None:
                actions.append(self._too_long(waiting, now))
            else:
                waiting.bucket = bucket.name
                actions += dispatcher.requeue(waiting, now)
        return actions + dispatcher.dispatch_all(now)

    def _send_or_reject(self, waiting: QueuedRequest, route: Route, now: float) -> Action:
        options = self._dispatcher.forecast.options(waiting, now, everywhere=True)
        if not options:
            return self._dispatcher.reject(waiting, "no_backend_available", now)
        return send_past_queues(self._dispatcher, waiting, options, route, now)

    def _rebucket(self, buckets: dict[str, Bucket]) -> None:
        dispatcher = self._dispatcher
        dispatcher.buckets = dispatcher.precedence.buckets = buckets
        dispatcher.least_patience_s = least_patience_s(buckets)
        dispatcher.queues.rebucket(buckets)
        dispatcher.by_length = list(buckets.values())
        dispatcher.return_times = ReturnTimes(buckets)
        for backend in dispatcher.backends.values():
            backend.rebucket(buckets.values(), self._home)
        for _, running in dispatcher.running.values():
            running.bucket = self._home(running.request)
        self._rebuild()

    def _too_long(self, waiting: QueuedRequest, now: float) -> Reject:
        """Reject a waiting request that no bucket holds any longer."""
        self._dispatcher.refund_quota(waiting, now)
        queued_s = now - waiting.arrived_at
        reject = Reject(waiting.request, "prompt_too_long", "", queued_s, inf)
        self._dispatcher.recorder.outgrew(reject, self._dispatcher.by_length[-1], now)
        return reject

    def _home(self, request: Request) -> str:
        """Return the bucket that a running request counts for."""
        bucket = self._dispatcher.bucket_of(request.prompt_tokens)
        return (bucket or self._dispatcher.by_length[-1]).name

    def _rebuild(self) -> None:
        """Renew the forecast and the order of queues after a change of backends or buckets."""
        dispatcher = self._dispatcher
        dispatcher.forecast = dispatcher.forecast.rebuilt(
            dispatcher.backends,
            dispatcher.buckets,
            dispatcher.dispatch_ahead_s,
            dispatcher.affinity.min_match,
        )
        dispatcher.queues.reorder()


def by_length(buckets: Sequence[Bucket]) -> dict[str, Bucket]:
    return {bucket.name: bucket for bucket in sorted(buckets, key=lambda b: b.up_to)}
