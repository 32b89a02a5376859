"""Traffic that a proxy captured replays as it was: hit ratio, gaps, peaks; and captured again."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from stages.proxy_stage import stage

from forebay.proxy.telemetry.logs.capture import SALT
from forebay.replay.clock.virtual_loop import run
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import start_engine
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.schedule import parse_arrivals
from forebay.replay.runner import replay
from forebay.traces.edit.describe import describe
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import read_trace

# Long waits are allowed, so that nothing is rejected and both engines get all requests.
BUCKETS = [{"name": "all", "up_to": 131072, "max_queue": 1000, "max_wait": "1h"}]


def through_a_proxy(
    trace: list[TraceRequest], out: Path, capture: Path, **options: Any
) -> dict[str, Any]:
    """Replay against a new proxy and engine; the proxy captures. Returns the summary."""

    async def main() -> dict[str, Any]:
        engine_config = EngineConfig("llama-3-8b", "h200")
        async with start_engine(engine_config) as engine:
            keys: Any = {"capture": {"path": str(capture)}, "buckets": BUCKETS}
            async with stage([engine.url], **keys) as on:
                asked = ReplayOptions(trace, [on.proxy.url], out, quiet=True, **options)
                summary = await replay(asked)
            await asyncio.sleep(1)
        return summary.values

    return run(main())


def documents() -> list[TraceRequest]:
    """Make 150 questions about twelve documents; each prompt ends within a block."""
    rows = []
    for number in range(150):
        document = number * number % 12
        whole = 2 + document % 4
        blocks = (*range(document * 100, document * 100 + whole), 10_000 + number)
        tokens = whole * 512 + 100 + number
        rows.append(TraceRequest(f"r{number}", number * 0.1, tokens, 5 + number % 9, blocks))
    return rows


def shape(trace: list[TraceRequest]) -> list[tuple[Any, ...]]:
    """Name block ids by their first use: captured ids are hashes."""
    names: dict[int, int] = {}
    return [
        (
            row.input_tokens,
            row.output_tokens,
            row.block_tokens,
            tuple(names.setdefault(one, len(names)) for one in row.blocks or ()),
        )
        for row in trace
    ]


def test_a_capture_replays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SALT, "a secret of many characters")
    first_file, second_file = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    production = through_a_proxy(
        documents(), tmp_path / "a", first_file, arrivals=parse_arrivals("gamma:2"), rate_per_s=2.0
    )
    first = list(read_trace(first_file))
    again = through_a_proxy(first, tmp_path / "b", second_file)
    second = list(read_trace(second_file))
    assert production["completed"] == again["completed"] == 150
    assert again["hit_ratio"] == pytest.approx(production["hit_ratio"], rel=0.02)
    assert production["hit_ratio"] > 0.5
    was, now = describe(first), describe(second)
    assert now.interarrival_cv == pytest.approx(was.interarrival_cv, rel=0.02)
    assert now.peak_rate_1s == pytest.approx(was.peak_rate_1s, rel=0.02)
    assert now.peak_rate_60s == pytest.approx(was.peak_rate_60s, rel=0.02)
    assert shape(second) == shape(first)
    assert [row.arrival_s for row in second] == pytest.approx(
        [row.arrival_s for row in first], abs=1e-3
    )
