"""The prefills of an engine's next step: random queues, and an engine that runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.proxy.core.learn.step_cost import StepCost
from forebay.proxy.core.policy.engine_queue import StepRequest
from forebay.proxy.core.policy.engine_step import EngineSteps, StepLimits, StepPlan

BLOCK = 16
COST = {"base_s": 0.01, "token_s": 3e-5, "slope": 30_000.0}
lengths = st.one_of(st.integers(1, 400), st.integers(1, 9_000), st.integers(1, 130_000))


@dataclass
class Queues:
    """Random requests of one engine at time 100."""

    running: list[StepRequest]
    waiting: list[StepRequest]
    decoding: int
    seats: int
    cap: int
    room: int
    steps: EngineSteps

    def look(self, request: StepRequest, owed: int) -> int | None:
        fits = request.tokens - request.computed + owed <= self.room
        return request.computed if fits else None

    def plan(self) -> StepPlan:
        return self.steps.plan(100.0, self.decoding, self.running, self.look, self.seats, self.cap)


@st.composite
def queues(draw: st.DrawFn, pause_s: float | None = None) -> Queues:
    limits = StepLimits(
        pause_s=pause_s or draw(st.sampled_from([0.02, 0.1, 0.5, inf])),
        step_tokens=draw(st.sampled_from([300, 2_048, 8_192])),
        block_tokens=BLOCK,
        by_priority=draw(st.booleans()),
    )
    steps = EngineSteps(limits, StepCost(**COST))

    def request(name: str) -> StepRequest:
        tokens = draw(lengths)
        computed = draw(st.integers(0, tokens - 1)) // BLOCK * BLOCK
        arrived_at, priority = draw(st.floats(0.0, 100.0)), draw(st.integers(-1, 1))
        return StepRequest(name, arrived_at, tokens, computed, priority)

    running = [request(f"r{n}") for n in range(draw(st.integers(0, 4)))]
    waiting = [request(f"w{n}") for n in range(draw(st.integers(0, 6)))]
    for each in running:  # they have waited before
        steps.add(each)
        steps.remove(each)
    for each in waiting:
        steps.add(each)
    return Queues(
        running, waiting, draw(st.integers(0, 256)), draw(st.integers(0, 8)),
        draw(st.sampled_from([0, 0, 512])), draw(st.sampled_from([0, 2_000, 10**9])), steps,
    )  # fmt: skip


@given(queues())
def test_a_plan_keeps_the_limits(asked: Queues) -> None:
    plan = asked.plan()
    parts = [*plan.running, *plan.admit]
    assert len({id(request) for request, _ in parts}) == len(parts)
    assert all(request in asked.running for request, _ in plan.running)
    assert all(request in asked.waiting for request, _ in plan.admit)
    assert len(plan.admit) <= asked.seats
    assert all(0 < count <= request.tokens - request.computed for request, count in parts)
    assert not asked.cap or all(count <= asked.cap for _, count in parts)
    budget = asked.steps.limits.step_tokens - asked.decoding
    # A running prefill has a block in reserve, for the case that those to admit do not fit.
    reserve = BLOCK if not asked.decoding else 0
    assert sum(count for _, count in parts) <= budget + reserve


@given(queues())
def test_the_predicted_time_is_within_the_bound(asked: Queues) -> None:
    plan, cost = asked.plan(), asked.steps.cost
    parts = [*plan.running, *plan.admit]
    seconds = sum(cost.chunk_s(count, request.computed) for request, count in parts)
    blocks = sum(count <= BLOCK for _, count in parts)
    assert seconds <= plan.bound_s * (1 + 1e-9) + blocks * cost.chunk_s(BLOCK, 130_000)
    base_s, pause_s = cost.base_s, asked.steps.limits.pause_s
    assert plan.bound_s in (inf, max(pause_s, 3 * base_s) - base_s)
    if asked.decoding:
        assert plan.bound_s < inf or pause_s == inf


@given(queues())
def test_a_step_is_full_or_all_have_their_tokens(asked: Queues) -> None:
    plan, limits, cost = asked.plan(), asked.steps.limits, asked.steps.cost
    parts = {id(request): count for request, count in [*plan.running, *plan.admit]}
    spent = sum(parts.values())
    if spent >= limits.step_tokens - asked.decoding:
        return
    chunks = [(count, r.computed) for r, count in [*plan.running, *plan.admit]]
    left_s = plan.bound_s - (cost.step_s(chunks) - cost.base_s)

    def is_served(request: StepRequest) -> bool:
        most = min(request.tokens - request.computed, asked.cap or inf)
        count = parts.get(id(request), 0)
        return count == most or left_s <= cost.chunk_s(BLOCK, 130_000)

    assert all(map(is_served, asked.running))
    if asked.room >= 10**9 and len(plan.admit) < asked.seats:
        assert all(map(is_served, asked.waiting))


@given(queues())
def test_no_step_is_empty_while_a_prefill_could_run(asked: Queues) -> None:
    plan = asked.plan()
    if asked.decoding >= asked.steps.limits.step_tokens:
        return
    if asked.running or (asked.waiting and asked.seats and asked.room >= 10**9):
        assert plan.running or plan.admit


@given(queues(pause_s=0.1), st.integers(0, 5))
def test_requests_that_are_not_admitted_stay(asked: Queues, admitted: int) -> None:
    """Whatever part of a plan the engine admits, none is lost and none is planned twice."""
    plan = asked.plan()
    for request, count in plan.admit[:admitted]:
        asked.steps.remove(request)
        request.computed += count
        asked.running.append(request)
        asked.waiting.remove(request)
    asked.running = [request for request in asked.running if request.computed < request.tokens]
    assert len(asked.steps) == len(asked.waiting)
    again = asked.plan()
    assert {id(r) for r, _ in again.admit} <= set(map(id, asked.waiting))
    for request in list(asked.waiting):
        asked.steps.remove(request)
    assert not len(asked.steps)
    assert not asked.plan().admit


@dataclass
class Engine:
    """An engine whose steps take as long as predicted, with an adversary who sends requests."""

    steps: EngineSteps = field(default_factory=lambda: EngineSteps(StepLimits(), StepCost(**COST)))
    now: float = 0.0
    running: list[StepRequest] = field(default_factory=list)
    room: float = inf
    longest_s: float = 0.0
    shared: Callable[[StepRequest, StepRequest], int] | None = None
    document: int = 0  # tokens of the beginning of all prompts
    cached: int = 0  # how many of them have been computed

    def send(self, tokens: int, priority: int = 0) -> StepRequest:
        request = StepRequest("", self.now, tokens, 0, priority)
        self.steps.add(request)
        return request

    def look(self, request: StepRequest, owed: int) -> int | None:
        if request.tokens + owed > self.room:
            return None
        return min(self.cached, (request.tokens - 1) // BLOCK * BLOCK)

    def step(self, decoding: int = 4) -> None:
        plan = self.steps.plan(
            self.now, decoding, self.running, self.look, 1_000, shared=self.shared
        )
        chunks = [(count, request.computed) for request, count in [*plan.running, *plan.admit]]
        for request, _ in plan.admit:
            self.steps.remove(request)
            self.running.append(request)
        for request, count in [*plan.running, *plan.admit]:
            request.computed += count
            self.cached = max(self.cached, min(request.computed, self.document))
        self.running = [request for request in self.running if request.computed < request.tokens]
        seconds = self.steps.cost.step_s(chunks)
        self.longest_s = max(self.longest_s, seconds)
        self.now += seconds


@given(st.integers(8_000, 130_000), st.lists(st.integers(50, 3_000), min_size=1, max_size=8))
def test_a_long_prompt_gets_half_of_each_step_once_it_is_due(
    tokens: int, shorts: list[int]
) -> None:
    """Chats keep the engine busy for ever: more of them come in each step than it can compute."""
    engine = Engine()
    document = engine.send(tokens)
    alone_s = engine.steps.cost.chunk_s(tokens, 0)
    chats: list[StepRequest] = []
    while document.computed < tokens:
        chats = [chat for chat in chats if chat.computed < chat.tokens]
        while sum(chat.tokens for chat in chats) < 20_000:
            chats += map(engine.send, shorts)
        engine.step()
        # Its last part is a short prompt itself, behind the chats that came before it was due.
        waiting_s = engine.steps.cost.chunk_s(20_000, 0)
        assert engine.now < document.due + 2.5 * (alone_s + waiting_s) + 0.3
    assert engine.longest_s <= 0.1 + 1e-9


def test_short_prompts_do_not_wait_for_a_queue_of_documents() -> None:
    """Documents come at twice the rate that the engine computes, and all are due."""
    engine, chats, number = Engine(), [], 0
    while engine.now < 200.0:
        number += 1
        if number % 40 == 0:
            engine.send(120_000)
        if number % 5 == 0:
            chats.append((engine.now, engine.send(1_000)))
        engine.step()
        for sent_at, chat in chats:
            assert engine.now - sent_at < 0.35 or chat.computed == chat.tokens
        chats = [(sent_at, chat) for sent_at, chat in chats if chat.computed < chat.tokens]


@given(st.lists(st.integers(50, 3_000), min_size=40, max_size=60))
def test_short_prompts_pass_a_long_one_without_room_for_five_times_its_tokens(
    shorts: list[int],
) -> None:
    engine = Engine(room=9_000)
    document = engine.send(10_000)
    engine.now = document.due
    engine.step()
    passed = 0
    for length in shorts:
        chat = engine.send(length)
        engine.step()
        passed += length if chat.computed else 0
    assert passed <= 5 * 10_000
    assert engine.steps.passed_over <= len(shorts)
    if sum(shorts) > 53_000:
        assert len(engine.steps) > 1
    engine.room = inf
    while document.computed < 10_000:
        engine.step()


def test_a_lone_document_takes_whole_steps_when_no_chat_has_come_lately() -> None:
    engine = Engine()
    engine.send(500)
    engine.step(decoding=0)
    document = engine.send(100_000)
    engine.step(decoding=0)
    assert 0 < document.computed < 3_300
    engine.now += 11.0
    before = document.computed
    engine.step(decoding=0)
    assert document.computed == before + 8_192
    before = document.computed
    engine.step(decoding=1)
    assert document.computed < before + 3_300


def test_a_more_urgent_priority_goes_first() -> None:
    steps = EngineSteps(StepLimits(by_priority=True), StepCost(**COST))
    engine = Engine(steps)
    chat, document = engine.send(500, priority=1), engine.send(50_000, priority=-(10**9))
    engine.step()
    assert (chat.computed, document.computed > 0) == (0, True)


def test_the_slowest_engines_keep_two_thirds_of_a_step_for_prompts() -> None:
    steps = EngineSteps(StepLimits(pause_s=0.01), StepCost(base_s=0.05, token_s=1e-3))
    engine = Engine(steps)
    engine.send(4_000)
    engine.step()
    assert 0.13 < engine.longest_s < 0.15 + 1e-9


def test_a_plan_looks_at_few_of_many() -> None:
    """The cost of a decision depends on the requests that start, not on all that wait."""
    engine = Engine()
    for number in range(10_000):
        engine.send(120_000 if number % 3 else 1_000)
    looks = 0

    def look(request: StepRequest, owed: int) -> int:
        nonlocal looks
        looks += 1
        return 0

    plan = engine.steps.plan(engine.now, 256, [], look, 768)
    assert looks == len(plan.admit) < 10


def test_aborted_requests_do_not_pile_up() -> None:
    engine = Engine()
    for _ in range(5_000):
        engine.steps.remove(engine.send(120_000))
    assert len(engine.steps) == 0
    assert len(engine.steps._longs._heap) <= 64


@pytest.mark.parametrize("field", ["pause_s", "step_tokens", "block_tokens"])
def test_limits_are_positive(field: str) -> None:
    with pytest.raises(AssertionError):
        StepLimits(**{field: 0})  # type: ignore[arg-type]


def begins_alike(blocks: int) -> Callable[[StepRequest, StepRequest], int]:
    return lambda waiting, leader: min(blocks * BLOCK, (waiting.tokens - 1) // BLOCK * BLOCK)


def test_followers_wait_for_the_prefill_of_their_prompt_and_lose_no_place() -> None:
    """Twelve questions about one document: it is computed once, and all are answered with it."""
    engine = Engine(shared=begins_alike(3_000), document=48_000)
    asked = [engine.send(48_000 + 100 * number) for number in range(12)]
    while any(request.computed < request.tokens for request in asked):
        engine.step()
    assert engine.now < 1.3 * engine.steps.cost.chunk_s(50_000, 0) + 1.0
    assert len(engine.steps) == 0


def test_a_leader_is_due_no_later_than_its_followers() -> None:
    engine = Engine(shared=lambda _, leader: 0 if leader is other else 48_000)
    other = engine.send(50_000)
    leader = engine.send(60_000)
    engine.step()
    assert (other.computed > 0, leader.computed) == (True, 0)  # it is due first
    engine.running.append(leader)
    engine.steps.remove(leader)
    follower = StepRequest("", engine.now, 60_000, deadline=engine.now + 1.0)
    engine.steps.add(follower)
    engine.step()
    engine.step()
    assert leader.due == follower.due
    assert leader.computed > 0


def test_followers_whose_leader_is_gone_take_its_place() -> None:
    engine = Engine(shared=begins_alike(3_000))
    leader, follower = engine.send(60_000), engine.send(60_000)
    engine.step()
    assert (leader.computed > 0, follower.computed) == (True, 0)
    assert len(engine.steps) == 1
    engine.running.remove(leader)  # aborted
    engine.step()
    assert follower.computed > 0
    third = engine.send(60_000)
    engine.step()
    engine.steps.remove(third)  # aborted while it follows
    assert len(engine.steps) == 0


def test_a_long_prompt_whose_prefix_was_computed_blocks_nobody() -> None:
    """The prompt had no room, became short, and was not admitted after all."""
    engine = Engine(room=50_000, document=59_000)
    document = engine.send(60_000)
    engine.now = document.due
    engine.step()
    assert engine.steps._blocked is document
    engine.room, engine.cached = inf, 59_000
    plan = engine.steps.plan(engine.now, 0, [], engine.look, 1)
    assert [request for request, _ in plan.admit] == [document]
    chats = [engine.send(150_000 // 50) for _ in range(200)]
    for _ in range(400):
        engine.step()
    assert all(request.computed == request.tokens for request in [document, *chats])
