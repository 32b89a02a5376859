"""Turns that wait for answers in a simulation: when each arrives, and what commands say of them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.proxy.config.schema import Config
from forebay.replay.engine.config import EngineConfig
from forebay.replay.plan.slo import default_slos
from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.scenario import DIRECT, Scenario, simulate
from forebay.replay.sim.stream import stream_case
from forebay.replay.sim.sweep import SweepCase, run_all, simulate_case
from forebay.replay.sim.turns import WaitingTurns
from forebay.replay.sim.workload import SimWorkload
from forebay.traces.ground.buckets import DEFAULT_BUCKETS
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest

ENGINE = EngineConfig()
SLOS = default_slos(DEFAULT_BUCKETS)
# A slow first answer, a turn after it, one that also waits for a sub-agent, and another session.
ROWS = [
    TraceRequest("a", 0.0, 20_000, 400, session="s"),
    TraceRequest("b", 0.5, 200, 20, session="s", parent="a", think_s=2.0),
    TraceRequest("agent", 0.6, 200, 300, session="s", waits_for=("a",)),
    TraceRequest("c", 0.7, 200, 20, session="s", parent="b", waits_for=("agent",), think_s=0.0),
    TraceRequest("x", 0.8, 100, 10),
]


def played(rows: Sequence[TraceRequest], scenario: Scenario) -> dict[str, SimOutcome]:
    outcomes = simulate(rows, scenario, new_turns=lambda: WaitingTurns(rows)).outcomes
    return {outcome.request.id: outcome for outcome in outcomes}


def ended_s(outcome: SimOutcome) -> float:
    if outcome.reject is not None:
        return outcome.request.arrival_s + outcome.reject.queued_s
    assert outcome.finished_s is not None
    return outcome.finished_s


def test_a_turn_comes_after_the_answers_before_it() -> None:
    outcomes = played(ROWS, Scenario(engine=ENGINE, gpus=1))
    came_s = {name: outcome.request.arrival_s for name, outcome in outcomes.items()}
    end_s = {name: ended_s(outcome) for name, outcome in outcomes.items()}
    assert came_s["b"] == end_s["a"] + 2.0
    assert came_s["agent"] == end_s["a"] > 0.6  # without a think time: not before the answer
    assert came_s["c"] == max(end_s["agent"], end_s["b"])
    assert came_s["x"] == 0.8


def test_without_waiting_all_come_at_their_time() -> None:
    outcomes = simulate(ROWS, Scenario(engine=ENGINE, gpus=1)).outcomes
    assert [outcome.request for outcome in outcomes] == ROWS


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 6)), min_size=1, max_size=6),
    st.sampled_from([DIRECT, "warm_or_least_work", "least_connections"]),
    st.integers(1, 3),
    st.integers(0, 2**30),
)
def test_every_turn_is_sent_once_and_when_it_is_due(
    sessions: list[tuple[float, int]], policy: str, gpus: int, seed: int
) -> None:
    """Also where the policy rejects, and whatever the order of sessions in the trace."""
    rows = []
    for number, (start_s, turns) in enumerate(sessions):
        parent = None
        for turn in range(turns):
            prompt = 500 + (seed >> turn) % 40_000
            row = TraceRequest(f"{number}-{turn}", start_s + turn, prompt, 1 + seed % 50)
            rows.append(replace(row, parent=parent, think_s=0.5 if parent else None))
            parent = row.id
    proxy = Config.model_validate(
        {"buckets": [{"name": "all", "up_to": 131_072, "max_queue": 1, "max_wait": 0.5}]}
    )
    outcomes = played(rows, Scenario(engine=ENGINE, gpus=gpus, policy=policy, proxy=proxy))
    assert sorted(outcomes) == sorted(row.id for row in rows)
    assert all(
        one <= other for one, other in pairwise(o.request.arrival_s for o in outcomes.values())
    )
    for row in rows:
        due_s = row.arrival_s
        if row.parent is not None:
            due_s = ended_s(outcomes[row.parent]) + 0.5
        assert outcomes[row.id].request.arrival_s == pytest.approx(due_s)


def test_a_turn_that_is_due_after_the_end_does_not_come() -> None:
    turns = WaitingTurns(ROWS, until_s=0.8)
    assert turns.take().id == "a"
    assert turns.next_at() == inf  # x comes at .8 s
    turns.ended("a", 0.7)
    assert turns.next_at() == 0.7
    assert turns.take().id == "agent"
    assert turns.next_at() == inf


def test_a_rate_counts_all_requests_and_moves_turns_with_their_session() -> None:
    rows = [replace(row, think_s=None) for row in ROWS]
    paced, window_s = SimWorkload(rows, rate=10.0, turns="wait").requests(131_072, len)
    assert [row.id for row in paced] == [row.id for row in rows]
    starts_s = {row.id: row.arrival_s for row in paced}
    assert starts_s["x"] == pytest.approx(1 / 4)  # two of five requests are roots
    assert starts_s["b"] == pytest.approx(starts_s["x"] * 0.5 / 0.8)
    assert window_s == pytest.approx(1 / 2)


def test_a_duration_leaves_out_later_sessions_with_their_turns() -> None:
    later = [
        replace(row, id=f"late-{row.id}", arrival_s=row.arrival_s + 9, parent=None, waits_for=())
        for row in ROWS
    ]
    paced, _ = SimWorkload([*ROWS, *later], duration=5.0, turns="wait").requests(131_072, len)
    assert [row.id for row in paced] == [row.id for row in ROWS]


def test_a_link_to_a_missing_row_is_an_error() -> None:
    with pytest.raises(InputError, match="waits for 'a', which is no earlier row"):
        SimWorkload(ROWS[1:], turns="wait").requests(131_072, len)
    SimWorkload(ROWS[1:]).requests(131_072, len)


def case(**changes: str) -> SweepCase:
    return SweepCase({}, Scenario(engine=ENGINE), SimWorkload(ROWS, **changes), SLOS)  # type: ignore[arg-type]


def test_what_cannot_wait_says_so() -> None:
    with pytest.raises(InputError, match="--turns: 'never' is none of wait, trace"):
        simulate_case(case(turns="never"))
    with pytest.raises(InputError, match=r"--stream keeps no request .*--turns trace"):
        stream_case(case(turns="wait"))
    slow = replace(case(turns="wait"), slos=(replace(SLOS[0], limit_s=1e-3),))
    with pytest.raises(InputError, match=r"--possible: .*give --turns trace"):
        list(run_all([slow], 1))


def test_a_trace_without_links_is_the_same_either_way() -> None:
    alone = [replace(row, parent=None, waits_for=(), think_s=None) for row in ROWS]
    found = [
        simulate_case(SweepCase({}, Scenario(), SimWorkload(alone, turns=turns), SLOS))[0]
        for turns in ("wait", "trace")
    ]
    assert [o.finished_s for o in found[0].outcomes] == [o.finished_s for o in found[1].outcomes]
    assert not found[0].waited


def test_the_command_waits_unless_told_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from forebay.replay.sim.cli import app

    trace = tmp_path / "trace.jsonl"
    lines = [
        {"id": "a", "arrival_s": 0, "input_tokens": 20_000, "output_tokens": 400},
        {"id": "b", "arrival_s": 1, "input_tokens": 99, "output_tokens": 9, "parent": "a"},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended_s = []
    for words in ((), ("--turns", "wait"), ("--turns", "trace")):
        app([str(trace), "--gpus", "2", "--json", *words], standalone_mode=False)
        ended_s.append(json.loads(capsys.readouterr().out)["duration_s"])
    assert ended_s[0] == ended_s[1] > ended_s[2]
