"""Many users, few documents: how often each is computed, and for whom it is computed once more."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from statistics import median

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.proxy.config.schema import Config
from forebay.proxy.core.model import Action, Send
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.find import find_gpu
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import Fleet, SimOutcome
from forebay.replay.sim.scenario import DIRECT, Scenario
from forebay.traces.ground.schema import BLOCK_TOKENS, TraceRequest

MODES = ("whole", "flag")
OUTPUT_TOKENS = 32
STEP_S = 0.05  # a follower may be computed a step after its leader


def questions(
    users: int, document_tokens: int, apart_s: float, first_block: int = 0, begin_s: float = 0.0
) -> list[TraceRequest]:
    """One question of each user about one document, so many seconds apart."""
    blocks = range(first_block, first_block + document_tokens // BLOCK_TOKENS)
    tokens = len(blocks) * BLOCK_TOKENS + 64
    return [
        TraceRequest(
            f"{first_block}-{user}", begin_s + user * apart_s, tokens, OUTPUT_TOKENS,
            (*blocks, 10**9 + first_block + user),
        )
        for user in range(users)
    ]  # fmt: skip


def chats(count: int, apart_s: float) -> list[TraceRequest]:
    return [
        TraceRequest(
            f"chat-{n}", n * apart_s, 600, OUTPUT_TOKENS, (10**12 + 2 * n, 10**12 + 2 * n + 1)
        )
        for n in range(count)
    ]  # fmt: skip


def played(
    rows: Sequence[TraceRequest],
    engines: int,
    mode: str,
    *,
    policy: str = "",
    speed: float = 1.0,
    record: Callable[[float, Action], None] | None = None,
) -> list[SimOutcome]:
    gpu = find_gpu("h200")
    gpu = replace(gpu, peak_flops=speed * gpu.peak_flops, bandwidth=speed * gpu.bandwidth)
    engine = EngineConfig(gpu=gpu, long_prefill_token_threshold=2_048 if mode == "flag" else 0)
    names = [f"gpu{number}" for number in range(engines)]
    proxy = Config.model_validate({"backends": [{"url": "http://127.0.0.1"}]})
    scenario = Scenario(engine=engine, proxy=proxy)
    if policy:
        scenario = replace(scenario, policy=policy)
    engines_by_name = {name: served_engine(engine) for name in names}
    fleet = Fleet(scenario.new_policy(names), engines_by_name, record)
    return fleet.run(sorted(rows, key=lambda row: row.arrival_s))


def cold(outcome: SimOutcome) -> bool:
    return outcome.cached_tokens < outcome.request.input_tokens / 2


def ttft_s(outcome: SimOutcome) -> float:
    return inf if outcome.ttft_s is None else outcome.ttft_s


def worst_s(outcomes: Sequence[SimOutcome]) -> float:
    return max(map(ttft_s, outcomes))


def lost_their_hit(outcomes: Sequence[SimOutcome]) -> list[str]:
    """Requests that waited and were then sent cold although another engine had their document."""
    lost = []
    for outcome in outcomes:
        if (
            outcome.sent_s is None
            or not cold(outcome)
            or outcome.sent_s <= outcome.request.arrival_s + 0.01
        ):
            continue
        document = (outcome.request.blocks or ())[0]
        for other in outcomes:
            first_token_s = other.first_token_s
            if (
                (other.request.blocks or (-1,))[0] == document
                and other.backend != outcome.backend
                and first_token_s is not None
                and other.sent_s is not None
                and outcome.sent_s >= other.sent_s + 0.75 * (first_token_s - other.sent_s)
            ):
                lost.append(outcome.request.id)
                break
    return lost


@settings(deadline=None, max_examples=30)
@given(
    users=st.integers(2, 40),
    apart_s=st.sampled_from([0.0, 0.01, 0.05, 0.3]),
    tokens=st.sampled_from([5_000, 20_000, 60_000, 100_000]),
    engines=st.integers(1, 4),
    mode=st.sampled_from(MODES),
    speed=st.sampled_from([0.3, 1.0, 3.0]),
    chat_gap_s=st.sampled_from([0.0, 0.1, 1.0]),
)
@example(
    users=40,
    apart_s=0.01,
    tokens=60_000,
    engines=2,
    mode="whole",
    speed=0.3,
    chat_gap_s=1.0,
)  # found by letting requests move to where they are cold
def test_nobody_who_waited_is_sent_cold_when_the_document_is_computed(
    users: int, apart_s: float, tokens: int, engines: int, mode: str, speed: float,
    chat_gap_s: float,
) -> None:  # fmt: skip
    rows = questions(users, tokens, apart_s)
    rows += chats(int(10 / chat_gap_s), chat_gap_s) if chat_gap_s else []
    outcomes = played(rows, engines, mode, speed=speed)
    assert lost_their_hit(outcomes) == []


def copied_late(outcomes: Sequence[SimOutcome], begun: dict[str, Send]) -> list[str]:
    """Requests that waited to be sent cold although their document was computed on arrival."""
    late = []
    for outcome in outcomes:
        send = begun[outcome.request.id]
        if send.queued_s <= 0.01 or send.matched_tokens >= outcome.request.input_tokens / 2:
            continue
        for other in outcomes:
            first = begun[other.request.id]
            since_s, until_s = other.request.arrival_s + first.queued_s, other.first_token_s or inf
            if (
                (other.request.blocks or ())[0] == (outcome.request.blocks or ())[0]
                and other is not outcome
                and first.backend != send.backend
                and first.matched_tokens < other.request.input_tokens / 2
                and since_s <= outcome.request.arrival_s < until_s
            ):
                late.append(outcome.request.id)
                break
    return late


@settings(deadline=None, max_examples=60)
@given(
    documents=st.lists(
        st.tuples(
            st.sampled_from([20_000, 60_000, 100_000]), st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0])
        ),
        min_size=2,
        max_size=3,
    ),
    users=st.integers(2, 12),
    apart_s=st.sampled_from([0.0, 0.05, 0.3]),
    engines=st.integers(2, 4),
    mode=st.sampled_from(MODES),
    speed=st.sampled_from([1.0, 3.0]),
    chat_gap_s=st.sampled_from([0.0, 0.1, 1.0]),
)
@example(
    documents=[(100_000, 0.0), (20_000, 0.0), (20_000, 2.0)],
    users=2,
    apart_s=0.05,
    engines=2,
    mode="whole",
    speed=1.0,
    chat_gap_s=0.0,
)
@example(
    documents=[(20_000, 2.0), (20_000, 0.5), (100_000, 1.0)],
    users=5,
    apart_s=0.05,
    engines=4,
    mode="whole",
    speed=1.0,
    chat_gap_s=0.1,
)
def test_no_copy_waits_behind_other_work(
    documents: list[tuple[int, float]], users: int, apart_s: float, engines: int, mode: str,
    speed: float, chat_gap_s: float,
) -> None:  # fmt: skip
    """A second copy of a document that is being computed is begun at once or not at all."""
    rows = chats(int(10 / chat_gap_s), chat_gap_s) if chat_gap_s else []
    for number, (tokens, begin_s) in enumerate(documents):
        rows += questions(users, tokens, apart_s, 10_000 * number, begin_s)
    begun: dict[str, Send] = {}

    def record(now: float, action: Action) -> None:
        if isinstance(action, Send):
            begun.setdefault(action.request.id, action)

    outcomes = played(rows, engines, mode, speed=speed, record=record)
    asked = [outcome for outcome in outcomes if outcome.request.id in begun]
    assert copied_late(asked, begun) == []


@pytest.mark.parametrize(
    ("document_tokens", "engines", "longer", "rejected"),
    [
        (20_000, 1, 1.4, 0),
        (20_000, 2, 1.0, 0),
        (20_000, 4, 1.0, 0),
        (100_000, 1, 1.25, 14),
        (100_000, 2, 1.05, 0),
        (100_000, 4, 1.05, 0),
    ],
)
def test_fifty_at_once_beside_engines_in_turn(
    document_tokens: int, engines: int, longer: float, rejected: int
) -> None:
    """50 users begin at most one copy for each engine.

    Alone, an engine would answer the last of them after more than 15 s, so these are rejected.
    Texts of 100,000 tokens pass the API server in 0.25 s each. As with engines in turn, most are
    tokenized while the document is computed; the proxy sends those that fit a short engine step.
    """
    rows = questions(50, document_tokens, 0.02)
    ours, in_turn = (played(rows, engines, "whole", policy=name) for name in ("", DIRECT))
    served = [outcome for outcome in ours if outcome.reject is None]
    assert len(ours) - len(served) == rejected
    assert sum(map(cold, served)) <= engines
    assert worst_s(served) <= longer * worst_s(in_turn)
    assert median(map(ttft_s, served)) <= longer * median(map(ttft_s, in_turn)) + 3 * STEP_S
