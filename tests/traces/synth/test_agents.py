"""Synthetic sessions of coding agents: what they share, when their turns come, their defaults."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from common_start import common_length

from forebay.traces.edit.sharing import IdealCache
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import BLOCK_TOKENS, TraceRequest
from forebay.traces.ground.trace_line import row_bytes
from forebay.traces.reading.jsonl import parse_row
from forebay.traces.synth.agents import AgentSessions, agent_sessions, answer_s
from forebay.traces.synth.lengths import Fixed

SMALL = AgentSessions(
    session_rate_per_s=0.01, duration_s=3_000.0, turns=Fixed(6), instruction_tokens=2_048,
    task_tokens=Fixed(3_000), tool_tokens=Fixed(700), output_tokens=Fixed(100),
    subagents=Fixed(2), subagent_task_tokens=Fixed(1_000), subagent_turns=Fixed(3),
)  # fmt: skip


def by_agent(rows: list[TraceRequest]) -> dict[str, list[TraceRequest]]:
    """The turns of each session and of each sub-agent."""
    found = defaultdict(list)
    for row in rows:
        found[row.id.rpartition("-")[0]].append(row)
    return found


def shared(one: TraceRequest, other: TraceRequest) -> int:
    """Leading blocks that two prompts have in common."""
    return common_length(one.blocks or (), other.blocks or ())


def test_the_defaults_are_what_agentx_reports() -> None:
    spec = AgentSessions(session_rate_per_s=0.02, duration_s=12_000.0, seed=1)
    rows = list(agent_sessions(spec))
    cache = IdealCache()
    hits = sum(cache.look_up(row).hit_tokens for row in rows)
    turns = [len(of) for name, of in by_agent(rows).items() if name.count("-") == 1]
    started = {row.session for row in rows if row.id.count("-") > 2}
    assert median(row.input_tokens for row in rows) == pytest.approx(142_000, rel=0.05)
    assert median(row.output_tokens for row in rows) == pytest.approx(444, rel=0.05)
    assert median(turns) == pytest.approx(43, rel=0.15)
    assert len(started) / len(turns) == pytest.approx(0.44, abs=0.07)
    assert hits / sum(row.input_tokens for row in rows) > 0.96
    assert max(row.input_tokens for row in rows) <= spec.context_tokens


def test_a_turn_repeats_the_one_before_and_comes_after_its_answer() -> None:
    rows = list(agent_sessions(SMALL))
    assert all(one.arrival_s <= two.arrival_s for one, two in pairwise(rows))
    assert len({row.id for row in rows}) == len(rows)
    assert all(parse_row(row_bytes(row)) == row for row in rows)
    for turns in by_agent(rows).values():
        for before, after in pairwise(turns):
            assert after.input_tokens == before.input_tokens + 100 + 700
            assert shared(before, after) == before.input_tokens // BLOCK_TOKENS
            assert after.arrival_s >= before.arrival_s + answer_s(100) + 0.05 - 1e-6


def test_sessions_share_their_instruction_and_sub_agents_another() -> None:
    agents = list(by_agent(list(agent_sessions(replace(SMALL, subagent_share=1.0)))).items())
    main = [turns[0] for name, turns in agents if name.count("-") == 1]
    helpers = [turns[0] for name, turns in agents if name.count("-") == 3]
    assert len(main) > 5
    assert len(helpers) > 5
    assert shared(main[0], main[1]) == shared(helpers[0], helpers[1]) == 4
    assert shared(main[0], helpers[0]) == 0


def test_a_session_goes_on_when_the_last_sub_agent_has_ended() -> None:
    agents = by_agent(list(agent_sessions(replace(SMALL, subagent_share=1.0))))
    waited = 0
    for name, turns in agents.items():
        session, _, spawned = name.rpartition("-")
        if session.count("-") != 2:
            continue
        turn = int(session.rpartition("-")[2])
        later = [
            row for row in agents[session.rpartition("-")[0]] if row.id.endswith(f"-{turn + 1}")
        ]
        for row in later:
            waited += 1
            assert row.arrival_s > turns[-1].arrival_s + answer_s(100)
        assert int(spawned) in (0, 1)
    assert waited > 5


def test_a_context_that_is_too_long_begins_again() -> None:
    spec = replace(SMALL, turns=Fixed(20), context_tokens=10_240, summary_tokens=1_024)
    turns = next(iter(by_agent(list(agent_sessions(spec))).values()))
    assert max(row.input_tokens for row in turns) <= 10_240
    again = [after for before, after in pairwise(turns) if after.input_tokens < before.input_tokens]
    assert {row.input_tokens for row in again} == {2_048 + 1_024}
    assert all(shared(turns[0], row) == 4 for row in again)


def test_a_seed_gives_the_same_sessions() -> None:
    assert list(agent_sessions(SMALL)) == list(agent_sessions(SMALL))
    assert list(agent_sessions(SMALL)) != list(agent_sessions(replace(SMALL, seed=1)))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (replace(SMALL, session_rate_per_s=0.0), "--session-rate 0: not a rate"),
        (replace(SMALL, subagent_share=1.5), "--subagent-share 1.5: not a share"),
        (replace(SMALL, context_tokens=4_000), "--context-tokens 4000: give"),
        (replace(SMALL, duration_s=-1.0), "--duration -1: give more than 0 seconds"),
    ],
)
def test_bad_settings(spec: AgentSessions, says: str) -> None:
    with pytest.raises(InputError, match=says):
        agent_sessions(spec)
