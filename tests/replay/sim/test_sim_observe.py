"""Mode observe forecasts what mode shape does with the same trace.

Within three points, and eight for sessions above capacity: there the traffic keeps the caches of
the engines full, and answers take longer than they would if it were shaped.
"""

from dataclasses import replace
from itertools import islice

import pytest
from forecasts import play
from guard_workloads import at_load

from forebay.replay.engine.config import EngineConfig
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.agents import AgentSessions, agent_sessions
from forebay.traces.synth.documents import Workload, workload

REQUESTS = 800


def documents() -> list[TraceRequest]:
    """Half chats, half questions about popular documents of 12,000 tokens in the median."""
    spec = Workload(
        documents=100, zipf_s=1.0, chat_share=0.5, rate_per_s=3.0, duration_s=None,
        requests=REQUESTS, instruction_tokens=512, seed=0,
    )  # fmt: skip
    return list(workload(spec))


def sessions() -> list[TraceRequest]:
    """Sessions of coding agents."""
    spec = AgentSessions(
        session_rate_per_s=0.1, duration_s=3_600.0, seed=0, context_tokens=100_000,
        summary_tokens=20_000,
    )  # fmt: skip
    return list(islice(agent_sessions(spec), REQUESTS))


TRACES = {"documents": documents, "sessions": sessions}

CASES = [
    (name, load, chunk, points)
    for name, load, points in (
        ("documents", 0.8, 3),
        ("documents", 1.5, 3),
        ("sessions", 0.8, 4),
        ("sessions", 1.2, 8),
    )
    for chunk in (0, 2_048)
]


@pytest.mark.parametrize(("name", "load", "chunk", "points"), CASES)
def test_the_forecast_is_what_shaping_does(name: str, load: float, chunk: int, points: int) -> None:
    rows = at_load(TRACES[name](), load)
    engine = replace(EngineConfig(), long_prefill_token_threshold=chunk)
    seen, forecast, _ = play(rows, engine, observe=True)
    shaped, _, _ = play(rows, engine, observe=False)
    assert forecast is not None
    assert seen.rejected == 0.0
    assert forecast.rejected == pytest.approx(shaped.rejected, abs=points / 100)
    assert forecast.attained == pytest.approx(shaped.attained, abs=points / 100)
