"""Changes while requests run and wait: backends and their models, buckets, rules."""

from collections.abc import Iterable, Sequence
from math import inf

from forebay.proxy.core.model import Action, BackendSpec, Bucket, Tenant
from forebay.proxy.core.peers import Peering
from forebay.proxy.core.policy.routing import Affinity, Route, warm_or_least_work
from forebay.proxy.core.policy.start import DISPATCH_AHEAD_S
from forebay.proxy.core.policy_state import PolicyState
from forebay.proxy.core.state.backend import Backend, takes_model
from forebay.proxy.core.steps import (
    dequeue,
    dispatch_all,
    enqueue,
    reject_as_too_long,
    requeue,
    send_or_reject,
)


class OperatorChanges:
    """Applies an operator's changes to the state of the policy."""

    def __init__(self, state: PolicyState, peering: Peering) -> None:
        self._state = state
        self._forecast = state.forecast
        self._peering = peering

    def add_backend(self, spec: BackendSpec, now: float) -> list[Action]:
        """Add a backend, which takes work from `backend_up` on.

        A backend of this name that still drains stays, and counts as restarted.
        """
        state = self._state
        if spec.name in state.backends:
            state.backends[spec.name].draining = False
            return self.change_backend(spec, now, moved=True)
        state.at(now).add_backend(spec)
        state.rebuild()
        if state.sharing:
            return self._peering.settle(now)  # what other proxies have there counts at once
        return dispatch_all(state, now)

    def change_backend(self, spec: BackendSpec, now: float, *, moved: bool = False) -> list[Action]:
        """Change a backend's limits. `moved`: it is another server, whose cache is empty."""
        state = self._state.at(now)
        backend = state.backends[spec.name]
        backend.resize(spec)
        if spec.kv_tokens < inf:
            backend.kv_tokens = spec.kv_tokens
        if moved:
            backend.restarted()
        state.rebuild()
        return dispatch_all(state, now)

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
        state = self._state.at(now)
        backend = state.backends[name]
        backend.family = family
        if (models, strict) == (backend.models, backend.strict):
            return []
        backend.models, backend.strict = models, strict
        state.rebuild()
        here = [w for queue in backend.queues.values() for w in queue.everyone()]
        for waiting in [w for w in here if not takes_model(backend, w.request.model)]:
            if others := self._forecast.options(waiting, now):
                dequeue(state, waiting.request.id)
                enqueue(state, waiting, state.pick(waiting, others, now), now)
        return dispatch_all(state, now)

    def drain_backend(self, name: str, now: float) -> list[Action]:
        """Give a backend no new work. Its running requests finish before `remove_backend`."""
        state = self._state.at(now)
        backend = state.backends[name]
        backend.draining = True
        state.rebuild()
        return self.take_out(backend, now)

    def remove_backend(self, name: str, now: float) -> list[Action]:
        """Forget a backend that was drained and on which no request of this proxy is left."""
        state = self._state.at(now)
        backends = state.backends
        assert backends[name].draining, name
        assert backends[name].empty, name
        del backends[name]
        self._peering.peers.forget(name)
        for index, backend in enumerate(backends.values()):
            backend.index = index
        state.rebuild()
        return dispatch_all(state, now)

    def pass_by(self, backend: Backend, count: int, now: float) -> list[Action]:
        """Count requests that have passed all queues to a backend: 1 begins, -1 ends."""
        state = self._state.at(now)
        backend.passing += count
        self._forecast.moved(backend)
        return dispatch_all(state, now) if count < 0 and backend.queued else []

    def take_out(self, backend: Backend, now: float) -> list[Action]:
        """Let a backend take no work. Requests that wait for it are rerouted or rejected."""
        state = self._state
        backend.up = False
        self._forecast.moved(backend)
        actions: list[Action] = []
        for queue in backend.queues.values():
            for waiting in queue.everyone():
                dequeue(state, waiting.request.id)
                actions += requeue(state, waiting, now)
        return actions + dispatch_all(state, now)

    def reconfigure(
        self,
        buckets: Sequence[Bucket],
        now: float,
        *,
        route: Route = warm_or_least_work,
        affinity: Affinity | None = None,
        dispatch_ahead_s: float = DISPATCH_AHEAD_S,
        tenants: Iterable[Tenant] = (),
        default_weight: float = 1.0,
        observed: Route | None = None,
    ) -> list[Action]:
        """Change buckets and rules. A rule that is not given has the default of `Shaper`.

        Running and waiting requests belong to the bucket that now holds their prompt. Waiting
        requests keep their deadline, and their place even in a queue that is now shorter. A prompt
        that is now above every bucket is rejected if it waits, and counts for the last bucket if it
        runs. If the proxy only observes from now on, all waiting requests are sent.
        """
        state = self._state.at(now)
        everyone = sorted(state.queues.waiting.values(), key=lambda w: w.key)
        for waiting in everyone:
            dequeue(state, waiting.request.id)
        matches = affinity or Affinity()
        state.reconfigure(
            buckets, tenants, default_weight, route, matches, dispatch_ahead_s, observed
        )
        state.rebuild()
        actions: list[Action] = []
        for waiting in everyone:
            bucket = state.bucket_of(waiting.request.prompt_tokens)
            waiting.bucket = (bucket or state.last_bucket).name
            if observed is not None:
                actions.append(send_or_reject(state, waiting, observed, now))
            elif bucket is None:
                actions.append(reject_as_too_long(state, waiting, now))
            else:
                actions += requeue(state, waiting, now)
        return actions + dispatch_all(state, now)
