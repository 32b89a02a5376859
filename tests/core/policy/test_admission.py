"""Tenants, classes, shares, quotas and limits of the core, each by literal values."""

import random
from math import inf

import pytest
from core_requests import all_up, sent_ids
from fakes.api_servers import without_api_server
from hypothesis import given
from hypothesis import strategies as st

from forebay.proxy.core.model import (
    ENOUGH,
    RANKS,
    REMEMBERED_MOST,
    Action,
    BackendSpec,
    Bucket,
    Reject,
    Request,
    Send,
    ServiceClass,
    Tenant,
)
from forebay.proxy.core.policy.admission import ReturnTimes, attainable
from forebay.proxy.core.policy.routing import Option
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.bucket_queue import BucketQueue, Shares
from forebay.proxy.core.state.kv_budget import Holding, Holdings, OutputLengths
from forebay.proxy.core.state.queue import DueQueue, QueuedRequest
from forebay.proxy.core.state.tenants import LATELY_S, Fairness, Quotas

CHAT = Bucket("chat", 5_000, max_queue=64, max_wait_s=2.0)
DOCUMENT = Bucket("document", 131_072, max_queue=64, max_wait_s=30.0)


class TestReturnTimes:
    def times(self) -> ReturnTimes:
        return ReturnTimes({CHAT.name: CHAT, DOCUMENT.name: DOCUMENT})

    def one(self, number: int, tenant: str = "") -> Request:
        return Request(str(number), 1_000, identity=number, tenant=tenant)

    def most_s(
        self, times: ReturnTimes, bucket: Bucket, now: float, *, halved: bool = False
    ) -> float:
        """Return the longest wait of a new request."""
        return times.limits(bucket, self.one(2), now, halved=halved).max_wait_s

    def test_new_requests_leave_a_fifth_of_the_wait_once_a_client_has_come_back(self) -> None:
        times = self.times()
        times.note(self.one(1), 5.0, 0.0)
        assert self.most_s(times, CHAT, 1.0) == CHAT.max_wait_s
        times.arrived(self.one(1), 5.0)
        assert self.most_s(times, CHAT, 5.0) == 0.8 * CHAT.max_wait_s
        assert self.most_s(times, CHAT, 65.0) == CHAT.max_wait_s  # nobody came back for a minute

    def test_new_requests_fill_half_of_a_queue_that_stands(self) -> None:
        times, new = self.times(), self.one(2)
        assert self.most_s(times, DOCUMENT, 20.0, halved=True) == 0.5 * DOCUMENT.patience_s
        times.note(new, 4.0, 0.0)
        assert times.limits(DOCUMENT, new, 4.9, halved=True) == DOCUMENT  # is back

    @pytest.mark.parametrize(
        ("at", "tenant", "known"),
        [
            (4.9, "a", False),
            (5.0, "a", True),
            (64.9, "a", True),
            (65.0, "a", False),
            (5.0, "b", False),
        ],
    )
    def test_only_at_the_time_told_and_of_the_same_tenant(
        self, at: float, tenant: str, known: bool
    ) -> None:
        times = self.times()
        times.note(self.one(9), 1.0, at - 1.0)
        times.arrived(self.one(9), at)  # places are kept from now on
        times.note(self.one(1, "a"), 5.0, 0.0)
        assert times.is_back(self.one(1, tenant), at) == known
        assert (times.limits(CHAT, self.one(1, tenant), at, halved=False) == CHAT) == known

    def test_a_place_is_used_once(self) -> None:
        times = self.times()
        times.note(self.one(1), 5.0, 0.0)
        times.arrived(self.one(1), 5.0)
        assert not times.is_back(self.one(1), 5.0)

    def test_a_prompt_that_cannot_be_told_from_others_keeps_no_place(self) -> None:
        times, short = self.times(), Request("short", 100)
        times.note(short, 1.0, 0.0)
        assert not times.is_back(short, 1.0)

    def test_places_are_bounded_and_those_told_first_keep_theirs(self) -> None:
        times, last = self.times(), REMEMBERED_MOST
        for number in range(1, last + 3):
            times.note(self.one(number), 1.0, 0.0)
        kept = [times.is_back(self.one(number), 1.0) for number in (1, last, last + 1)]
        assert kept == [True, True, False]
        times.note(self.one(last + 1), 1.0, 61.0)  # the others are all too old by now
        assert len(times._due_back) == 1

    def test_a_returning_client_is_admitted_where_a_new_request_is_not(self) -> None:
        shaper = all_up(Shaper([BackendSpec("a", 64)], [CHAT, DOCUMENT]))
        rejected = [
            action
            for number in range(1, 51)
            for action in shaper.arrive(Request(str(number), 4_000, identity=number), 0.0)
            if isinstance(action, Reject)
        ]
        again, new = (Request("x", 4_000, identity=n) for n in (rejected[0].request.identity, 99))
        at = rejected[0].retry_after_s
        # Nobody came back so far, and the queue stands.
        assert shaper.preview(new, at).max_wait_s == 0.5 * CHAT.max_wait_s
        shaper.arrive(again, at)
        limits = [shaper.preview(one, at).max_wait_s for one in (rejected[1].request, new)]
        assert limits == [CHAT.max_wait_s, 0.5 * CHAT.max_wait_s]


class TestTargets:
    """One backend without vLLM's flag: a document of some seconds is computed in one piece."""

    CHAT = Bucket("chat", 5_000, max_wait_s=30.0, target_s=2.0)
    DOCUMENT = Bucket("document", 131_072, max_wait_s=30.0, target_s=15.0, prefills_per_backend=1)

    def busy(self) -> Shaper:
        """Return a backend that has computed documents and begins the next at 100 s."""
        shaper = Shaper([BackendSpec("a", 64)], [self.CHAT, self.DOCUMENT])
        without_api_server(shaper)
        shaper.backend_up("a", 0.0)
        for number in range(4):
            at = 20.0 * number
            assert sent_ids(shaper.arrive(Request(f"d{number}", 100_000, 1), at)) == [f"d{number}"]
            shaper.first_token(f"d{number}", at + 9.0)
            shaper.finish(f"d{number}", at + 9.0)
        assert sent_ids(shaper.arrive(Request("document", 100_000, 1), 100.0)) == ["document"]
        return shaper

    def test_a_chat_that_one_document_delays_waits(self) -> None:
        shaper = self.busy()
        assert shaper.arrive(Request("chat", 500, 10), 101.0) == []
        assert shaper.wake(103.5) == []  # beyond its deadline: still no reason to leave
        assert sent_ids(shaper.first_token("document", 109.0)) == ["chat"]

    def test_a_wait_that_the_document_does_not_explain_ends(self) -> None:
        shaper = self.busy()
        assert shaper.arrive(Request("chat", 500, 10), 101.0) == []
        at, actions = 101.0, list[Action]()
        while not actions:
            at = shaper.wake_at()
            actions = shaper.wake(at)
        assert isinstance(actions[0], Reject)
        assert 108.0 < at <= 131.0  # the document was predicted to take 9 s; `max_wait` is 30 s

    def test_a_queue_that_no_prefill_excuses_holds_the_target(self) -> None:
        shaper = all_up(Shaper([BackendSpec("a", 64)], [self.CHAT, self.DOCUMENT]))
        actions = [a for n in range(300) for a in shaper.arrive(Request(str(n), 4_000, 1), 0.0)]
        rejected = [action for action in actions if isinstance(action, Reject)]
        assert rejected
        assert {action.reason for action in rejected} == {"deadline_unattainable"}
        (backend,) = shaper.backends.values()
        assert backend.work_left_s(0.0) < 2.5

    def test_a_prompt_longer_than_its_target_may_wait_for_a_tenth(self) -> None:
        option = Option("a", 1.4, 0.0, 20.0, 20.0, 0, 0.0)
        assert attainable(Request("x", 100_000), self.DOCUMENT, option)
        option.wait_s = 1.6
        assert not attainable(Request("x", 100_000), self.DOCUMENT, option)

    def test_without_a_target_only_the_wait_is_limited(self) -> None:
        option = Option("a", 29.0, 0.0, 20.0, 20.0, 0, 0.0)
        assert attainable(Request("x", 100_000), DOCUMENT, option)


class TestQuotas:
    def test_a_burst_then_the_rate(self) -> None:
        quotas = Quotas([Tenant("a", 1.0, tokens_per_s=100.0, burst_tokens=1_000.0)])
        quotas.take("a", 1_000, 0.0)
        assert quotas.wait_s("a", 500, 0.0) == 5.0
        assert quotas.wait_s("a", 500, 4.0) == 1.0
        assert quotas.wait_s("a", 500, 5.0) == 0.0
        assert quotas.wait_s("anyone else", 10**9, 0.0) == 0.0

    def test_a_prompt_larger_than_the_bucket_goes_when_it_is_full_and_is_paid_for(self) -> None:
        quotas = Quotas([Tenant("a", 1.0, 100.0, 1_000.0)])
        assert quotas.wait_s("a", 5_000, 0.0) == 0.0
        quotas.take("a", 5_000, 0.0)
        assert quotas.wait_s("a", 1, 39.0) == pytest.approx(1.01)

    @given(st.lists(st.tuples(st.integers(1, 3_000), st.floats(0, 20)), max_size=50))
    def test_whoever_comes_back_then_is_let_in_and_no_more_goes_than_may(
        self, prompts: list[tuple[int, float]]
    ) -> None:
        quotas, now, taken = Quotas([Tenant("a", 1.0, 100.0, 1_000.0)]), 0.0, 0
        for tokens, later in prompts:
            now += later
            now += quotas.wait_s("a", tokens, now) + 1e-6
            assert quotas.wait_s("a", tokens, now) == 0.0
            quotas.take("a", tokens, now)
            taken += tokens
            assert taken <= 1_000 + 100 * now + max(0, tokens - 1_000) + 1


class TestShares:
    def test_the_one_that_is_always_last_gets_its_share(self) -> None:
        shares, got = Shares({"short": 0.3, "long": 0.3}), {"short": 0.0, "long": 0.0}
        for _ in range(4_000):
            name = "long" if shares.due("long", 2.0) else "short"
            seconds = 2.0 if name == "long" else 0.05
            shares.sent(name, seconds, ("short", "long"))
            got[name] += seconds
        assert got["long"] / sum(got.values()) == pytest.approx(0.3, abs=0.02)

    def test_nothing_is_owed_to_one_who_did_not_wait(self) -> None:
        shares = Shares({"short": 0.3, "long": 0.3})
        for _ in range(100):
            shares.sent("short", 1.0, ("short",))
        assert not shares.due("long", 0.1)
        shares.sent("short", 1.0, ("long",))
        assert shares.due("long", 0.3)
        shares.sent("short", 1.0, ())
        assert not shares.due("long", 0.0)


class TestFairness:
    def two(self, weight: float = 1.0) -> Fairness:
        return Fairness([Tenant("b", weight)], 1.0)

    def test_a_newcomer_has_no_claim_on_the_past(self) -> None:
        fair = self.two()
        for _ in range(100):
            fair.arrived("a", 0.0)
            fair.charge("a", 1.0, 0.0)
        fair.queued("a")
        fair.arrived("b", 1.0)
        assert (fair.counter("a"), fair.counter("b")) == (100.0, 99.0 - LATELY_S)

    def test_weights_and_corrections(self) -> None:
        fair = self.two(weight=4.0)
        for name in ("a", "b"):
            fair.arrived(name, 0.0)
            fair.queued(name)
        for name in ("a", "b"):
            fair.charge(name, 2.0, 0.0)
        assert (fair.counter("a"), fair.counter("b")) == (2.0, 0.5)
        fair.correct("a", -1.0)
        assert fair.counter("a") == 1.0

    def test_another_weight_counts_from_now_on(self) -> None:
        fair = Fairness([Tenant("a"), Tenant("b")], 1.0)
        for _ in range(300):
            for name in ("a", "b"):
                fair.arrived(name, 0.0)
                fair.charge(name, 1.0, 0.0)
        fair.charge("a", 4.0, 0.0)
        fair.reconfigure([Tenant("a", 2.0), Tenant("b")], 1.0)
        # Not 152 against 300: `b` would wait for 150 seconds of the other's prefills.
        assert (fair.counter("a"), fair.counter("b")) == (302.0, 300.0)

    def test_a_light_tenant_does_not_wait_for_a_heavy_ones_queue(self) -> None:
        fair = self.two()
        fair.arrived("a", 0.0)
        fair.queued("a")
        for _ in range(10):
            fair.charge("a", 1.0, 0.0)
        fair.arrived("b", 0.0)
        assert fair.seconds_before("b", "a", queued_s=60.0, engines=1) == 0.0
        fair.charge("b", 4.0, 0.0)
        assert fair.seconds_before("b", "a", queued_s=60.0, engines=1) == 2.5
        assert fair.seconds_before("b", "a", queued_s=60.0, engines=2) == 1.25

    def test_the_few_prompts_of_one_below_its_share_all_go_first(self) -> None:
        fair = self.two()
        fair.arrived("a", 0.0)
        fair.queued("a")
        for at in (1.0, 2.0):  # no returning tenant lowers the floor for the next one
            for _ in range(100):
                fair.charge("a", 0.1, at)
            for name in ("b", f"new at {at}"):
                fair.arrived(name, at)
                for _ in range(4):
                    assert fair.seconds_before(name, "a", queued_s=60.0, engines=2) == 0.0
                    assert 0.0 < fair.behind_s(name) <= LATELY_S
                    fair.charge(name, 0.1, at)
                fair.charge(name, 0.4, at)
                assert fair.behind_s(name) == 0.0

    def test_others_take_what_they_took_but_leave_a_fair_share(self) -> None:
        fair = self.two()
        for name, seconds in (("a", 9.0), ("b", 1.0)):
            fair.arrived(name, 0.0)
            fair.charge(name, seconds, 0.0)
        assert fair.others_share("a", 1, 0.0) == pytest.approx(0.1)
        assert fair.others_share("b", 1, 0.0) == 0.5

    def test_idle_tenants_are_forgotten(self) -> None:
        fair = self.two()
        for number in range(1_000):
            fair.arrived(str(number), 0.0)
        fair.arrived("new", 400.0)
        assert fair.shared(400.0) is False
        assert set(fair.counters()) == {"new"}


def waits(order: int, deadline: float, tenant: str = "", rank: int = 1) -> QueuedRequest:
    request = Request(str(order), 1, tenant=tenant)
    return QueuedRequest(request, "chat", 0.0, deadline, order, 1.0, rank)


class TestLanes:
    @given(st.lists(st.tuples(st.floats(0, 10), st.booleans()), max_size=60))
    def test_a_single_tenant_and_class_leave_as_from_a_plain_queue(
        self, arrivals: list[tuple[float, bool]]
    ) -> None:
        lanes, queue = BucketQueue(Holdings(Fairness((), 1.0))), DueQueue()
        for order, (deadline, leaves) in enumerate(arrivals):
            lanes.push(waiting := waits(order, deadline))
            queue.push(waiting)
            if leaves:
                assert lanes.heads() == [queue.head()]
                head = queue.head()
                assert head is not None
                assert lanes.earliest() is head
                lanes.remove(head)
                queue.remove(head.request.id)
            assert lanes.everyone() == queue.everyone()
            assert lanes.seconds_before(5.0) == queue.seconds_before(5.0)
            assert len(lanes) == len(queue)

    def test_classes_then_counters_then_deadlines(self) -> None:
        fair = Fairness((), 1.0)
        lanes = BucketQueue(Holdings(fair))
        fair.arrived("a", 0.0)
        fair.charge("a", 5.0, 0.0)
        fair.account("b")
        for waiting in (
            waits(1, 1.0, "a"),
            waits(2, 3.0, "b"),
            waits(3, 2.0, "b"),
            waits(4, 9.0, "a", RANKS["interactive"]),
            waits(5, 0.5, "a", RANKS["batch"]),
        ):
            lanes.push(waiting)
        assert [head.order for head in lanes.heads()] == [4, 3, 5]
        assert lanes.earliest() is not None
        assert lanes.earliest().order == 5  # type: ignore[union-attr]
        assert lanes.of_tenant("b") == (2, 2.0)

    @given(st.randoms(use_true_random=False))
    def test_heads_are_those_that_a_look_at_everyone_finds(self, dice: random.Random) -> None:
        """Whatever changes the turns of tenants: charges, refunds, holdings, batches, removals."""
        fair = Fairness([Tenant("a", 2.0)], 1.0)
        holdings = Holdings(fair)
        lanes, here, held = BucketQueue(holdings), list[QueuedRequest](), list[str]()
        for order in range(60):
            tenant = dice.choice("abcdef")
            match dice.randrange(8):
                case 0 if here:
                    lanes.remove(here.pop(dice.randrange(len(here))))
                case 1:
                    fair.charge(tenant, dice.random(), 0.0)
                case 2:
                    fair.correct(tenant, -dice.random())
                    lanes.turn_fell(tenant)
                case 3:
                    held.append(tenant)
                    holdings.take(tenant, Holding(0.1, 0.2, 0.0))
                case 4 if held:
                    holdings.give_back(gone := held.pop(0), Holding(0.1, 0.2, 0.0))
                    lanes.turn_fell(gone)
                case 5:
                    before, holdings.last = holdings.last, frozenset(dice.sample("abcdef", 1))
                    for other in before:
                        lanes.turn_fell(other)
                case _:
                    if not any(w.request.tenant == tenant for w in here):
                        fair.arrived(tenant, 0.0)
                    waiting = waits(order, dice.random(), tenant, dice.randrange(3))
                    here.append(waiting)
                    lanes.push(waiting)
            holdings.scarce = dice.random() < 0.5
            turn = holdings.turn_by_holding if holdings.scarce else holdings.turn_by_counter
            expected = []
            for rank in sorted({w.rank for w in here}):
                of_rank = [w for w in here if w.rank == rank]
                expected.append(
                    min(of_rank, key=lambda w: (turn(w.request.tenant), w.due, w.order))
                )
            assert lanes.heads() == expected
            assert lanes.earliest() is min(here, key=lambda w: (w.deadline, w.order), default=None)
            assert lanes.work_s == pytest.approx(sum(w.work_s for w in here))


class TestOutputs:
    def test_reserves_what_nine_in_ten_answers_take(self) -> None:
        outputs = OutputLengths()
        for number in range(2 * ENOUGH):
            assert number >= ENOUGH or outputs.expected("a", "chat", 4_096) == 4_096
            outputs.observe("a", "chat", 100 if number % 20 else 3_000)
        assert 100 <= outputs.expected("a", "chat", 4_096) <= 120
        assert outputs.expected("a", "chat", 50) == 50
        assert outputs.expected("b", "chat", 4_096) == 4_096
        assert outputs.expected("a", "document", 4_096) == 4_096

    def test_follows_a_tenant_that_changes(self) -> None:
        outputs = OutputLengths()
        for tokens in (100, 2_000):
            for _ in range(600):
                outputs.observe("a", "chat", tokens)
        assert 2_000 <= outputs.expected("a", "chat", 10**6) <= 2_400

    def test_memory_is_bounded(self) -> None:
        outputs = OutputLengths()
        for number in range(REMEMBERED_MOST + 1_000):
            outputs.observe(str(number), "chat", 1)
        assert len(outputs._lengths) == REMEMBERED_MOST


class Desk:
    """One backend that prefills one request at a time; time passes by hand."""

    def __init__(self, *tenants: Tenant, **options: float) -> None:
        self.now, self.count = 0.0, 0
        self.shaper = Shaper(
            [BackendSpec("gpu0", 64)],
            [CHAT, DOCUMENT],
            tenants=tenants,
            dispatch_ahead_s=0.01,
            **options,  # type: ignore[arg-type]
        )
        self.shaper.backend_up("gpu0", 0.0)
        without_api_server(self.shaper)

    def ask(
        self, tenant: str = "", service_class: ServiceClass = "standard", tokens: int = 4_000
    ) -> list[Action]:
        self.count += 1
        request = Request(
            f"{tenant}{self.count}", tokens, 10, tenant=tenant, service_class=service_class
        )
        return self.shaper.arrive(request, self.now)

    def serve(self, count: int) -> list[Request]:
        """Answer so many, one after the other; who was answered."""
        backend, answered = self.shaper.backends["gpu0"], []
        for _ in range(count):
            flight = next(iter(backend.prefills.values()))
            self.now += flight.prefill_s
            answered.append(flight.request)
            self.shaper.first_token(flight.request.id, self.now)
            self.shaper.finish(flight.request.id, self.now)
        return answered


def test_tenants_take_turns_by_seconds_and_weight() -> None:
    desk = Desk(Tenant("b", weight=3.0), default_weight=1.0)
    for tenant in "abababababab":
        desk.ask(tenant)
    answered = [request.tenant for request in desk.serve(8)]
    assert answered.count("b") == 6


def test_a_light_tenant_is_taken_in_beside_a_full_queue() -> None:
    desk = Desk()
    while not any(isinstance(action, Reject) for action in desk.ask("heavy")):
        pass
    assert desk.ask("light") == []
    assert [request.tenant for request in desk.serve(2)] == ["heavy", "light"]


def test_the_urgent_go_first_and_the_last_are_not_forgotten() -> None:
    desk = Desk()
    desk.ask()
    for service_class in ("batch", "standard", "interactive"):
        desk.ask("", service_class)
    answered = desk.serve(4)
    assert [r.service_class for r in answered[1:]] == ["interactive", "standard", "batch"]
    desk.ask()
    desk.ask("", "batch")
    served = 0
    while desk.shaper.queued("chat") and desk.now < 60:
        if not any(w.rank == RANKS["batch"] for w in desk.shaper.waiting()):
            break
        desk.ask("", "interactive")
        served += len(desk.serve(1))
    assert served <= 25  # a twentieth of the seconds


def test_a_full_queue_gives_way_to_the_more_urgent() -> None:
    shaper = all_up(Shaper([BackendSpec("gpu0", 1)], [Bucket("chat", 5_000, max_queue=2)]))
    for number, service_class in enumerate(("standard", "batch", "standard")):
        shaper.arrive(Request(str(number), 100, service_class=service_class), 0.0)  # type: ignore[arg-type]
    refused = shaper.arrive(Request("late", 100, service_class="batch"), 0.0)
    assert [(a.request.id, getattr(a, "reason", "")) for a in refused] == [("late", "queue_full")]
    actions = shaper.arrive(Request("urgent", 100, service_class="interactive"), 0.0)
    assert [(a.request.id, getattr(a, "reason", "")) for a in actions] == [("1", "queue_full")]
    assert {w.request.id for w in shaper.waiting()} == {"2", "urgent"}


def test_a_queue_that_one_tenant_has_filled_gives_way_to_another() -> None:
    shaper = all_up(Shaper([BackendSpec("gpu0", 1)], [Bucket("chat", 5_000, max_queue=4)]))
    for number in range(6):
        last = shaper.arrive(Request(str(number), 100, tenant="a"), 0.0)
    assert [getattr(a, "reason", "") for a in last] == ["queue_full"]
    for number in range(3):
        shaper.arrive(Request(f"b{number}", 100, tenant="b"), 0.0)
    tenants = [w.request.tenant for w in shaper.waiting()]
    assert (tenants.count("a"), tenants.count("b")) == (2, 2)


def test_an_empty_quota_refuses_with_the_time_it_takes_to_fill() -> None:
    desk = Desk(Tenant("a", 1.0, tokens_per_s=1_000.0, burst_tokens=4_000.0))
    assert isinstance(desk.ask("a")[0], Send)
    (refused,) = desk.ask("a")
    assert isinstance(refused, Reject)
    assert (refused.reason, refused.retry_after_s) == ("tenant_quota", 4.0)
    desk.now = 4.0
    assert not any(isinstance(action, Reject) for action in desk.ask("a"))


def test_cached_tokens_are_not_charged() -> None:
    desk = Desk()
    for tenant in "ab":
        desk.ask(tenant)
    for request_id, cached in (("a1", 3_900), ("b2", 0)):
        desk.shaper.used(request_id, 10, desk.now, cached)
        desk.serve(1)
    counters = desk.shaper._state.fairness.counters()
    assert counters["a"] < counters["b"] / 2


def test_kv_is_reserved_for_what_answers_turn_out_to_be() -> None:
    shaper = all_up(Shaper([BackendSpec("gpu0", 64, 100_000)], [CHAT]))
    kv = shaper.backends["gpu0"].kv
    for number in range(40):
        now = float(number)
        shaper.arrive(Request(str(number), 100, 4_096), now)
        held = kv.tokens
        shaper.first_token(str(number), now + 0.1)
        shaper.used(str(number), 200, now + 0.2)
        shaper.finish(str(number), now + 0.2)
        assert kv.tokens == 0
        assert held == 4_196 if number < 20 else held < 400


@pytest.mark.parametrize(
    ("tokens", "timeout_s", "hopeless"),
    [
        (100_000, 0.5, True),  # its prefill alone takes seconds
        (100_000, inf, False),  # max_wait binds, and passes
        (10, 0.5, False),  # the queue is too long, now
    ],
)
def test_a_request_that_no_backend_could_answer_in_time_is_hopeless(
    tokens: int, timeout_s: float, hopeless: bool
) -> None:
    shaper = all_up(Shaper([BackendSpec("b", 8)], [Bucket("all", 131_072, max_wait_s=1.0)]))
    late = Request("late", tokens, timeout_s=timeout_s)
    (sent,) = shaper.arrive(Request("first", tokens, timeout_s=timeout_s), 0.0)
    assert isinstance(sent, Send)  # an idle backend never refuses work
    for number in range(8):
        shaper.arrive(Request(f"more{number}", 100_000), 0.0)
    (refused,) = shaper.arrive(late, 0.0)
    assert isinstance(refused, Reject)
    assert (refused.reason, refused.hopeless) == ("deadline_unattainable", hopeless)
