"""Captures of made traffic, as a proxy in front of simulated servers would have written them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.scenario import Scenario, simulate
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.ground.trace_line import row_bytes


def chats_beside_documents(count: int, every: int = 20, apart_s: float = 0.5) -> list[TraceRequest]:
    """A chat every `apart_s`, and a document of 60,000 tokens among each `every` requests."""
    return [
        TraceRequest(f"d{at}", at * apart_s, 60_000, 8)
        if at % every == 5
        else TraceRequest(f"c{at}", at * apart_s, 300 + at % 50, 40)
        for at in range(count)
    ]


def truth(servers: int = 2, policy: str = "least_connections", slower: float = 1.0) -> Scenario:
    """Servers whose products and attention are slower than the twin's constants say."""
    engine = EngineConfig()
    constants = engine.step_constants()
    slow = replace(
        constants,
        gemm_compute=constants.gemm_compute / slower,
        prefill_compute=constants.prefill_compute / slower,
    )
    return Scenario(replace(engine, calibration=slow), servers, policy)


def captured_lines(rows: Sequence[TraceRequest], servers: Scenario) -> list[bytes]:
    """Play the rows, and return the lines of the capture."""
    lines = []
    for number, outcome in enumerate(simulate(rows, servers).outcomes, 1):
        came_s, first_s, last_s = (
            outcome.request.arrival_s,
            outcome.first_token_s,
            outcome.finished_s,
        )
        observed: dict[str, float | str] = {"e2e_s": 0.0}
        if outcome.sent_s is not None and first_s is not None and last_s is not None:
            observed = {
                "sent_s": outcome.sent_s - came_s,
                "ttft_s": first_s - came_s,
                "e2e_s": last_s - came_s,
                "backend": outcome.backend or "",
                "cached_tokens": outcome.cached_tokens,
            }
        status = 429 if outcome.reject else 200
        row = replace(outcome.request, id=f"captured-{number}", status=status, observed=observed)
        lines.append(row_bytes(row))
    return lines


def write_capture(path: Path, rows: Sequence[TraceRequest], servers: Scenario) -> Path:
    path.write_bytes(b"".join(captured_lines(rows, servers)))
    return path
