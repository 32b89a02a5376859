"""The state of the policy, and the questions that take several of its parts.

`steps.py` has the verbs: send, queue, reject and move requests. Each event begins with `at`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.model import RANKS, STANDARD, BackendSpec, Bucket, Request, Tenant, serves
from forebay.proxy.core.policy.admission import ReturnTimes, stands, whole_s
from forebay.proxy.core.policy.forecast import Forecast
from forebay.proxy.core.policy.precedence import Precedence
from forebay.proxy.core.policy.routing import Affinity, Option, Route
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.elsewhere import RecentUse, TenantUse
from forebay.proxy.core.state.fleet import FleetQueues
from forebay.proxy.core.state.in_flight import InFlight
from forebay.proxy.core.state.kv_budget import OutputLengths
from forebay.proxy.core.state.queue import QueuedRequest
from forebay.proxy.core.state.tenants import Fairness, Quotas


def ignore(name: str, amount: float, now: float) -> None:
    """Listen to nothing."""


class PolicyState:
    """Running and waiting requests, the rules, and facts learned from answers.

    Attributes:
        backends, buckets: dicts by name, always the same objects. The shortest bucket is first.
        last_bucket: the bucket of the longest prompts.
        observed: send each request at once where this route says; None in mode shape.
        running: requests that were sent and have not finished, with their backend.
        silent: backends with prefills that end by time alone.
        on_demand: called with family, prefill seconds and time for each new request that could be
            sent, admitted or not.
        sharing: there are other proxies in front of the same backends.
        now: the latest time that any event had.
        changes: how often the backends, the buckets or the rules have changed.
    """

    def __init__(self, recorder: DecisionRecorder) -> None:
        """Begin without rules and backends: `reconfigure`, `add_backend` and `rebuild` follow."""
        # The facts.
        self.backends: dict[str, Backend] = {}
        self.buckets: dict[str, Bucket] = {}
        self.queues = FleetQueues()
        self.running: dict[str, tuple[Backend, QueuedRequest]] = {}
        self.silent: dict[str, Backend] = {}
        self.output_lengths = OutputLengths()
        self.recent_use = RecentUse()
        self.sharing = False
        self.now = 0.0
        self.changes = 0
        # The objects that answer questions about the facts, and the listeners.
        self.fairness = Fairness()
        self.quotas = Quotas()
        self.precedence = Precedence(self.backends, self.buckets, self.fairness)
        self.forecast = Forecast(self.backends, self.buckets, self.precedence)
        self.gate = self.forecast.gate
        self.recorder = recorder
        recorder.watch(self.gate, self.backends, self.buckets)
        self.on_demand: Callable[[str, float, float], None] = ignore

    def at(self, now: float) -> "PolicyState":
        """Let time pass until `now`. Every event begins with this."""
        self.recorder.time_passes(now)
        if now > self.now:
            self.now = now
        if self.silent:
            for backend in list(self.silent.values()):
                if backend.end_silent_prefills(now):
                    self.forecast.moved(backend)
                if not backend.prefill_queue.silent:
                    del self.silent[backend.name]
        return self

    # Questions.

    def bucket_of(self, prompt_tokens: int) -> Bucket | None:
        """Return the first bucket that holds a prompt of this length, or None above all."""
        for bucket in self._by_length:
            if prompt_tokens <= bucket.up_to:
                return bucket
        return None

    def nearest_bucket(self, request: Request) -> Bucket:
        """Return the bucket of a request, or the last bucket if its prompt is above all."""
        return self.bucket_of(request.prompt_tokens) or self.last_bucket

    def new_waiting(
        self, request: Request, bucket: Bucket, order: int, now: float
    ) -> QueuedRequest:
        """Return a new request with its ranks, its expected answer, and the backends it may use."""
        rank = own_rank = STANDARD
        if request.service_class != "standard":
            rank = own_rank = RANKS[request.service_class]
            if request.tenant and not self.fairness.grants(request.tenant, request.service_class):
                rank = STANDARD
        waiting = QueuedRequest(request, bucket.name, now, inf, order, 0.0, rank, own_rank)
        home = self.backends.get(request.home) if request.home else None
        if home is not None and self.forecast.suits(home, waiting):
            waiting.excluded = frozenset(self.backends) - {home.name}
        waiting.output_tokens = self.output_lengths.expected(
            request.tenant, bucket.name, request.output_tokens, request.sequences
        )
        return waiting

    def pick(self, waiting: QueuedRequest, options: Sequence[Option], now: float) -> Option:
        """Return the option that the route picks."""
        return self.route(waiting.request, options, self.affinity, now)

    def limits_of(
        self, request: Request, bucket: Bucket, options: Sequence[Option], now: float
    ) -> Bucket:
        """Return the bucket with the limits that apply to a new request.

        Behind a queue that stands, wherever it would go, no wait in `options` is due to a burst.
        Once such a queue has rejected a request, new requests fill only half of it. Several active
        tenants need all of it for their fair shares.
        """
        queued_s, halved = self.queues.queued_s(bucket.name, request.model, now), False
        backends = [self.backends[o.backend] for o in options] if queued_s > 0.0 else []
        if backends and all(stands(bucket, b, queued_s, now) for b in backends):
            for option in options:
                option.sent_s = 0.0
            halved = self.queues.has_overflowed(bucket.name, request.model)
            halved = halved and not self.gate.beside_others(now)
        return self.return_times.limits(bucket, request, now, halved=halved)

    # Requests.

    def admitted(self, waiting: QueuedRequest, now: float) -> None:
        """Charge the tenant of a new request that was admitted."""
        waiting.paid = self.quotas.any
        if waiting.paid or self.sharing:
            self.charge(waiting.request.tenant, waiting.request.charged_tokens, now)

    def book_return(
        self, request: Request, bucket: Bucket, wait_s: float, prefill_s: float, now: float
    ) -> float:
        """Return the seconds after which the client of a rejected new request should come back."""
        engines = sum(b.up and serves(b.models, request.model) for b in self.backends.values())
        return self.return_times.book(request, bucket.name, wait_s, prefill_s, engines, now)

    def ended(self, request_id: str, now: float) -> tuple[Backend, QueuedRequest]:
        """Take out a request that runs no longer.

        Its tenant gets back the part of its prefill that was not computed.
        """
        backend, waiting = self.running.pop(request_id)
        request = waiting.request
        sent = backend.prefills.get(request_id) if self.fairness.on else None
        if sent is not None and request.streams:
            computed_s = min(sent.prefill_s, backend.prefill_queue.computed_s(sent, now))
            self.correct_charge(request.tenant, computed_s - sent.prefill_s, now)
        return backend, waiting

    def learn_length(self, sent: InFlight, waiting: QueuedRequest, output_tokens: int) -> None:
        """Learn from the length of an answer, 0 if unknown."""
        sent.output_tokens = output_tokens
        if output_tokens > 0:
            request = waiting.request
            each = -(-output_tokens // request.sequences)
            self.output_lengths.observe(request.tenant, waiting.bucket, each)

    # Tenants.

    def tell_apart(self, request: Request, now: float) -> None:
        """Note the tenant and the class of a new request."""
        if request.tenant or self.fairness.on:
            self.tell_tenants_apart()
            self.fairness.arrived(request.tenant, now)
        if request.service_class != "standard":
            self.precedence.tell_classes_apart()

    def tell_tenants_apart(self) -> None:
        """Order by tenants, from the first request that names a tenant."""
        if self.fairness.on:
            return
        self.fairness.on = self.precedence.on = True
        for waiting in self.queues.waiting.values():
            self.fairness.queued(waiting.request.tenant)

    def correct_charge(self, tenant: str, more_s: float, now: float) -> None:
        self.fairness.correct(tenant, more_s)
        if more_s < 0.0:
            self.queues.turn_fell(tenant)
        self.note_use(tenant, more_s, now)

    def note_use(self, tenant: str, prefill_s: float, now: float) -> None:
        """Report prefill seconds of a tenant to other proxies."""
        if self.sharing and self.fairness.on:
            self.recent_use.computed(tenant, prefill_s, now)

    def used_elsewhere(self, used: Mapping[str, TenantUse], now: float) -> None:
        """Charge what tenants have used at other proxies."""
        self.tell_tenants_apart()
        self.fairness.used_elsewhere({name: use.prefill_s for name, use in used.items()}, now)
        if self.quotas.any:
            for name, use in used.items():
                self.quotas.take(name, use.prompt_tokens, now)
        self.queues.reorder_all()

    def corrects_quota(self, waiting: QueuedRequest) -> bool:
        """True if its tenant's quota may still be corrected."""
        return self.quotas.any and not waiting.settled

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

    def charge_unqueued(self, tenant: str, tokens: int, now: float) -> float:
        """Charge a tenant's quota for a request that passes no queue. Negative tokens: a refund.

        Returns the seconds until the quota has room for it, or 0 if it was charged.
        """
        if not self.quotas.any:
            return 0.0
        self.tell_tenants_apart()  # reports to other proxies list use by tenant
        wait_s = self.quotas.wait_s(tenant, tokens, now)
        if wait_s > 0.0:
            return whole_s(wait_s)
        self.charge(tenant, tokens, now)
        return 0.0

    # Changes of backends, buckets and rules. `rebuild` must follow.

    def add_backend(self, spec: BackendSpec) -> None:
        """Add a backend, which takes no work yet."""
        buckets, index = self.buckets.values(), len(self.backends)
        self.backends[spec.name] = Backend(spec, buckets, index, fairness=self.fairness)

    def reconfigure(
        self,
        buckets: Sequence[Bucket],
        tenants: Iterable[Tenant],
        default_weight: float,
        route: Route,
        affinity: Affinity,
        dispatch_ahead_s: float,
        observed: Route | None,
    ) -> None:
        """Set buckets and rules while no request waits."""
        self.route, self.affinity, self.observed = route, affinity, observed
        self.dispatch_ahead_s = dispatch_ahead_s
        configured = list(tenants)
        self.fairness.reconfigure(configured, default_weight)
        self.quotas.reconfigure(configured)
        # The buckets, and the buckets of running requests.
        self._by_length = sorted(buckets, key=lambda b: b.up_to)
        self.last_bucket = self._by_length[-1]
        self.buckets.clear()
        self.buckets.update((bucket.name, bucket) for bucket in self._by_length)
        self.least_patience_s = min(bucket.patience_s for bucket in buckets)
        self.return_times = ReturnTimes(self.buckets)
        self.queues.rebucket(self.buckets)
        for backend in self.backends.values():
            backend.rebucket(self.buckets.values(), self.nearest_bucket)
        for _, running in self.running.values():
            running.bucket = self.nearest_bucket(running.request).name

    def rebuild(self) -> None:
        """Renew the forecast and the order of queues."""
        self.changes += 1
        self.forecast.rebuild(self.dispatch_ahead_s, self.affinity.min_match)
        self.queues.reorder()
