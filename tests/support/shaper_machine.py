"""A state machine that drives the shaper and checks it against a model of its own."""

from math import inf

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.proxy.core.model import (
    RANKS,
    Action,
    BackendSpec,
    Bucket,
    Reject,
    Request,
    Send,
    ServiceClass,
    Tenant,
    serves,
)
from forebay.proxy.core.policy.routing import ROUTES
from forebay.proxy.core.shaper import Shaper

ROUNDING_S = 1e-6
TEXTS_S = 0.05  # nothing is sent while an API server tokenizes earlier texts for longer
BEFORE = 0.65  # of an API server's time for a prompt: the part until the engine has it
RATE, BURST = 1_000.0, 6_000.0  # tokens, of the limited tenant


MODELS = {0: "x", 1: "y"}  # of the documents, where backends serve different models
DOCUMENTS = [tuple(range(d * 1000, d * 1000 + 60)) for d in range(3)]


class ShaperMachine(RuleBasedStateMachine):
    """The machine keeps its own model of waiting and running requests."""

    @initialize(
        slots=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        kv_tokens=st.sampled_from([inf, 150_000.0]),
        prefills=st.sampled_from([1, inf]),
        max_queue=st.sampled_from([0, 1, 3, 6]),
        route=st.sampled_from(sorted(ROUTES)),
        tenants=st.sampled_from([("",), ("a",), ("a", "b", "c"), ("", "a", "limited")]),
        chunks=st.lists(st.sampled_from([inf, inf, 2_048.0]), min_size=3, max_size=3),
        models=st.sampled_from([None, None, ("x", "y"), ("xy", "y"), ("y", "x", "x")]),
    )
    def start(
        self,
        slots: list[int],
        kv_tokens: float,
        prefills: float,
        max_queue: int,
        route: str,
        tenants: tuple[str, ...],
        chunks: list[float],
        models: tuple[str, ...] | None = None,
    ) -> None:
        self.tenants = tenants
        self.models_differ = models is not None
        self.now = 0.0
        self.max_queue = max_queue
        self.slots = {str(i): n for i, n in enumerate(slots)}
        self.up = set(self.slots)
        self.prefills_per_backend = prefills
        self.waiting: dict[str, Request] = {}
        self.came: dict[str, float] = {}
        self.since: dict[str, float] = {}  # when its present wait began
        self.patience_s: dict[str, tuple[float, float]] = {}  # of that wait: shortest, longest
        self.running: dict[str, tuple[Request, str, str]] = {}
        self.no_token: set[str] = set()
        # When each API server has tokenized all that was sent to it, and when each running request
        # reaches its engine: the earliest and the latest, as an event may also teach the speed.
        self.texts: dict[str, tuple[float, float]] = {}
        self.reaches: dict[str, tuple[float, float]] = {}
        self.token_s: dict[str, float] = {}
        self.retried: set[str] = set()
        self.arrived = self.left = 0
        self.shaper = Shaper(
            [
                BackendSpec(name, n, kv_tokens, chunk)
                for (name, n), chunk in zip(self.slots.items(), chunks, strict=False)
            ],
            [
                Bucket("chat", 5_000, max_queue=max_queue, max_wait_s=2.0),
                Bucket("document", 131_072, max_queue, 30.0, prefills),
            ],
            route=ROUTES[route],
            tenants=[Tenant("b", weight=2.0), Tenant("limited", 1.0, RATE, BURST)],
        )
        for name in self.slots:
            self.apply(self.shaper.backend_up(name, self.now))
        for name, served in zip(self.slots, models or (), strict=False):
            self.apply(self.shaper.changes.set_models(name, frozenset(served), self.now))

    def bucket(self, request: Request) -> str:
        return "chat" if request.prompt_tokens <= 5_000 else "document"

    def idle(self, backend: str) -> bool:
        return all(b != backend for _, b, _ in self.running.values())

    def begin_to_wait(self, request: Request) -> None:
        self.waiting[request.id] = request
        self.since[request.id] = self.now

    def note_patience(self, request: Request) -> None:
        """Note the bounds of the wait before a rejection.

        The longest: its bucket's limit, or the unspent rest of the client's timeout. The
        shortest: the same, if the whole prompt has to be computed within that timeout. A
        reconfiguration changes neither.
        """
        allowed_s = 2.0 if self.bucket(request) == "chat" else 30.0
        left_s = request.timeout_s - (self.now - self.came[request.id])
        backends = self.shaper.backends.values()
        prefill_s = max((b.prefill_s(request, 0) for b in backends), default=0.0)
        least_s, most_s = min(allowed_s, left_s - prefill_s), max(0.0, min(allowed_s, left_s))
        self.patience_s[request.id] = least_s, most_s

    def apply(self, actions: list[Action], newcomer: str | None = None) -> None:
        """Check the shaper's decisions. `newcomer` is the request that has just arrived."""
        if newcomer is not None:
            self.note_patience(self.waiting[newcomer])
        for action in actions:
            request = self.waiting.pop(action.request.id)
            assert request == action.request
            if isinstance(action, Send):
                assert action.backend in self.up
                assert serves(self.shaper.backends[action.backend].models, request.model)
                assert action.bucket == self.bucket(request)
                self.tokenize(request, action.backend)
                self.running[request.id] = request, action.backend, action.bucket
                self.no_token.add(request.id)
            else:
                self.left += 1
                self.check(action, newcomer == request.id)

    def tokenize(self, request: Request, backend: str) -> None:
        """Let an API server read a text, behind the earlier texts."""
        least, most = self.texts.get(backend, (-inf, -inf))
        assert least - self.now <= TEXTS_S + ROUNDING_S
        after = self.shaper.backends[backend].api_server.model.token_s
        before = self.token_s.get(backend, after)
        text_s = BEFORE * request.prompt_tokens
        least = max(least, self.now) + text_s * min(before, after)
        most = max(most, self.now) + text_s * max(before, after)
        self.texts[backend] = self.reaches[request.id] = least, most

    def answered(self, request_id: str) -> None:
        """Note an answer: if it is early, so are the texts behind it."""
        backend = self.running[request_id][1]
        least, most = self.texts[backend]
        early, late = self.reaches[request_id]
        least -= max(0.0, late - self.now)
        self.texts[backend] = least, most - max(0.0, early - self.now)

    def tokenizes(self) -> bool:
        """True if an API server is busy, perhaps with the text of a client that left."""
        return any(most > self.now + TEXTS_S - ROUNDING_S for _, most in self.texts.values())

    def restarted(self, backend: str) -> None:
        """Forget the texts of an API server that was replaced."""
        self.texts.pop(backend, None)
        for request_id, (_, name, _) in self.running.items():
            if name == backend:
                self.reaches[request_id] = -inf, -inf
        self.texts[backend] = -inf, -inf

    def check(self, reject: Reject, on_arrival: bool) -> None:
        if reject.reason == "prompt_too_long":
            assert reject.request.prompt_tokens > 131_072
            return
        assert 1.0 <= reject.retry_after_s <= 60.0
        mates = [r for r in self.waiting.values() if self.bucket(r) == reject.bucket]
        if reject.reason == "tenant_quota":
            assert on_arrival
            assert reject.request.tenant == "limited"
        elif (
            reject.reason == "deadline_unattainable"
            and on_arrival
            and (reject.request.id in self.retried)
        ):
            assert reject.request.timeout_s < inf  # a second try is not for a lost cause
        elif reject.reason == "queue_full" and not on_arrival:
            # Whoever made it leave is more urgent, or its tenant held more than half.
            tenant = reject.request.tenant
            held = 1 + sum(r.tenant == tenant for r in mates)
            urgent = RANKS[reject.request.service_class]
            others = [r for r in mates if r.tenant != tenant]
            assert any(RANKS[r.service_class] < urgent for r in mates) or (
                others and held > self.max_queue / 2
            )
        elif reject.reason == "queue_full":
            tenant = reject.request.tenant
            held = sum(r.tenant == tenant for r in mates)
            alone = set(self.tenants) == {tenant}
            served = [b.models for b in self.shaper.backends.values()]
            served = [models for models in served if serves(models, reject.request.model)]
            rivals = [r for r in mates if any(serves(models, r.model) for models in served)]
            assert len(rivals) >= self.max_queue or (held and not alone)
        elif reject.reason == "deadline_unattainable" and on_arrival:
            # An idle backend never refuses work, however wrong the estimate.
            model, backends = reject.request.model, self.shaper.backends
            up = [name for name in self.up if serves(backends[name].models, model)]
            assert not any(self.idle(name) for name in up) or self.waiting
        elif reject.reason == "deadline_unattainable":
            waited_s = self.now - self.since[reject.request.id]
            least_s, most_s = self.patience_s[reject.request.id]
            assert least_s - ROUNDING_S <= waited_s <= most_s + ROUNDING_S

    @rule(
        tokens=st.sampled_from([10, 500, 5_000, 5_001, 40_000, 131_072, 131_073]),
        document=st.sampled_from([None, 0, 1, 2]),
        timeout_s=st.sampled_from([0.05, 1.0, inf]),
        streams=st.booleans(),
        tenant=st.integers(0, 2),
        service_class=st.sampled_from(["standard", "standard", "interactive", "batch"]),
    )
    def arrive(
        self,
        tokens: int,
        document: int | None,
        timeout_s: float,
        streams: bool,
        tenant: int,
        service_class: ServiceClass,
    ) -> None:
        blocks = () if document is None else DOCUMENTS[document][: tokens // 2048]
        request = Request(
            str(self.arrived),
            tokens,
            100,
            blocks,
            2048.0,
            timeout_s,
            streams,
            self.tenants[tenant % len(self.tenants)],
            service_class,
            model=MODELS.get(document or 0, "") if self.models_differ else "",
        )
        self.arrived += 1
        self.came[request.id] = self.now
        self.begin_to_wait(request)
        self.apply(self.shaper.arrive(request, self.now), newcomer=request.id)

    @rule(
        many=st.integers(2, 8),
        tokens=st.sampled_from([500, 5_000, 40_000]),
        document=st.sampled_from([None, 0, 1]),
        timeout_s=st.sampled_from([1.0, inf]),
        tenant=st.integers(0, 2),
    )
    def crowd(
        self, many: int, tokens: int, document: int | None, timeout_s: float, tenant: int
    ) -> None:
        """Several requests arrive at once, so that queues form."""
        for _ in range(many):
            self.arrive(tokens, document, timeout_s, True, tenant, "standard")

    @precondition(lambda self: self.no_token)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.no_token)))
        self.no_token.remove(request_id)
        self.answered(request_id)
        self.apply(self.shaper.first_token(request_id, self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        if output := data.draw(st.sampled_from([None, 0, 1, 40, 100])):
            cached = data.draw(st.sampled_from([None, 0, 10**6]))
            self.shaper.used(request_id, output, self.now, cached)
            if request_id in self.no_token:
                self.answered(request_id)
        del self.running[request_id]
        self.no_token.discard(request_id)
        self.left += 1
        self.apply(self.shaper.finish(request_id, self.now))

    @precondition(lambda self: self.no_token)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.no_token)))
        self.answered(request_id)
        request, failed, _ = self.running.pop(request_id)
        self.no_token.remove(request_id)
        self.begin_to_wait(request)
        self.retried.add(request_id)
        actions = self.shaper.retry(request_id, self.now)
        assert not any(
            isinstance(a, Send) and a.request.id == request_id and a.backend == failed
            for a in actions
        )
        self.apply(actions, newcomer=request_id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[request_id]
        self.left += 1
        self.apply(self.shaper.cancel(request_id, self.now))

    @precondition(lambda self: self.up)
    @rule(data=st.data())
    def backend_down(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.up)))
        self.up.remove(name)
        self.restarted(name)
        self.apply(self.shaper.backend_down(name, self.now))

    @precondition(lambda self: len(self.up) < len(self.slots))
    @rule(data=st.data())
    def backend_up(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.slots) - self.up)))
        self.up.add(name)
        self.apply(self.shaper.backend_up(name, self.now))

    @rule(step=st.sampled_from([0.0, 0.01, 0.3, 5.0, 35.0]))
    def time_passes(self, step: float) -> None:
        end, wakes = self.now + step, 0
        while (at := self.shaper.wake_at()) <= end:
            assert at > self.now or wakes == 0, "a timer that does not move spins"
            self.now, wakes = at, wakes + 1
            self.apply(self.shaper.wake(at))
            assert wakes < 500
        self.now = end

    @invariant()
    def every_request_is_somewhere(self) -> None:
        assert self.arrived == len(self.waiting) + len(self.running) + self.left
        assert {w.request.id for w in self.shaper.waiting()} == set(self.waiting)

    @invariant()
    def books_balance(self) -> None:
        for name, backend in self.shaper.backends.items():
            mine = {i: r for i, (r, b, _) in self.running.items() if b == name}
            assert set(backend.in_flight) == set(mine)
            assert len(mine) <= self.slots[name]
            assert 1 <= backend.spec.max_concurrency <= self.slots[name]
            queued = [w for w in self.shaper.waiting() if w.backend == name]
            assert backend.queued == len(queued) == sum(map(len, backend.queues.values()))
            kv_tokens = sum(q.kv_tokens for q in backend.queues.values())
            assert kv_tokens == pytest.approx(sum(w.kv_tokens for w in queued), abs=1e-3)
            assert backend.queued_s == pytest.approx(sum(w.work_s for w in queued))
            assert set(backend.prefills) <= set(mine)
            assert set(backend.prefills) >= {
                i for i in mine if i in self.no_token and mine[i].streams
            }
            for bucket in ("chat", "document"):
                lined = [f for i, f in backend.prefills.items() if self.running[i][2] == bucket]
                cold = [f for f in lined if f.uncached_tokens == f.request.prompt_tokens]
                long = [f for f in lined if f.uncached_tokens > 2_048]
                # Short questions about what is cached do not count.
                assert backend.prefill_queue.prefills_of[bucket] == len(
                    {f.request.id for f in cold + long}
                )
            assert backend.prefill_queue.tokens == sum(
                f.uncached_tokens for f in backend.prefills.values()
            )
            if not mine:
                assert backend.kv.tokens == 0
                assert backend.prefill_queue.backlog_s(self.now) == 0.0

    @invariant()
    def who_leads_and_who_follows(self) -> None:
        for name, backend in self.shaper.backends.items():
            queued = {w.request.id: w for w in self.shaper.waiting() if w.backend == name}
            assert set(backend.followers.by_id) == {i for i, w in queued.items() if w.follows}
            leaders = {w.request.id for w in backend.leaders.by_id.values()}
            assert leaders == {
                i for i, w in queued.items() if not w.follows and w.request.prompt_tokens > 2_048
            }

    @invariant()
    def nobody_is_kept_by_one_behind(self) -> None:
        """A leader waits for none of its followers."""
        for waiting in self.shaper.waiting():
            seen = {waiting.request.id}
            while waiting.leader is not None:
                waiting = waiting.leader
                assert waiting.request.id not in seen
                seen.add(waiting.request.id)

    @invariant()
    def queues_are_bounded(self) -> None:
        for bucket in ("chat", "document"):
            mates = [r for r in self.waiting.values() if self.bucket(r) == bucket]
            assert self.shaper.queued(bucket) == len(mates)
            for model in {r.model for r in mates}:
                alike = [r for r in mates if r.model == model]
                assert len(alike) <= self.max_queue

    @invariant()
    def prefill_limit_holds(self) -> None:
        for backend in self.shaper.backends.values():
            assert backend.prefill_queue.prefills_of["document"] <= self.prefills_per_backend

    @invariant()
    def nobody_waits_while_every_engine_idles(self) -> None:
        if self.waiting and self.up:
            assert self.running or self.tokenizes()
        if not self.up:
            assert not self.waiting

    @invariant()
    def no_head_waits_that_may_start(self) -> None:
        for backend in self.shaper.backends.values():
            for queue in backend.queues.values():
                # Where several tenants wait, a send elsewhere may have made another one next.
                for head in queue.heads() if len(queue.flows) == 1 else ():
                    assert not self.shaper._state.forecast.gate.may_start(backend, head, self.now)

    @invariant()
    def who_waits_for_a_tokenizer_has_a_timer(self) -> None:
        for name, backend in self.shaper.backends.items():
            self.token_s[name] = backend.api_server.model.token_s
            _, most = self.texts.get(name, (-inf, -inf))
            gate = self.shaper._state.forecast.gate
            heads = [head for queue in backend.queues.values() for head in queue.heads()]
            if any(gate.why_not(backend, head, self.now) == "tokenizer" for head in heads):
                assert self.now < most - TEXTS_S + ROUNDING_S
                assert self.shaper.wake_at() < most - TEXTS_S + ROUNDING_S

    @invariant()
    def tenants_queue_apart(self) -> None:
        if self.shaper._state.fairness.on:
            for name, account in self.shaper._state.fairness._accounts.items():
                assert account.queued == sum(r.tenant == name for r in self.waiting.values())

    @invariant()
    def nobody_waits_past_the_deadline(self) -> None:
        assert all(w.deadline >= self.now for w in self.shaper.waiting())
        for request_id in self.waiting:
            _, most_s = self.patience_s[request_id]
            assert self.now - self.since[request_id] <= most_s + ROUNDING_S

    def teardown(self) -> None:
        """Everyone finishes: nothing is left anywhere."""
        if not hasattr(self, "shaper"):
            return
        while self.running or self.waiting:
            if not self.running:
                assert self.tokenizes()
                self.now = self.shaper.wake_at()
                self.apply(self.shaper.wake(self.now))
                continue
            request_id = min(self.running)
            del self.running[request_id]
            self.no_token.discard(request_id)
            self.left += 1
            self.apply(self.shaper.finish(request_id, self.now))
        assert not self.waiting
        assert self.shaper.wake_at() == inf
