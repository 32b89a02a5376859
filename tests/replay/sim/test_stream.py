"""`simulate --stream` gives the figures of a whole simulation, and forgets requests that ended."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.proxy.cli import main
from forebay.replay.sim.fleet import Fleet
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    lengths = (200, 900, 12_000, 400, 30_000)
    rows = (
        TraceRequest(f"r{n}", 0.05 * n, lengths[n % 5], 1 + n % 40, blocks=None) for n in range(400)
    )
    write_trace(path, rows)
    return path


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["simulate", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_streamed_simulation_gives_the_same_figures(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = simulated(capsys, str(trace), "--rate", "30")
    streamed = simulated(capsys, str(trace), "--rate", "30", "--stream")
    same = ("requests", "completed", "rejected", "window_s", "attainment", "duration_s", "busy",
            "prompt_tokens", "prompt_tokens_per_backend", "hit_ratio", "goodput_per_s")  # fmt: skip
    for key in same:
        assert streamed[key] == whole[key], key
    assert sum(whole["rejected"].values()) > 0
    for metric in ("ttft_ms", "e2e_ms", "tpot_ms", "stall_ms", "queue_ms"):
        for bucket in ("all", "chat", "document"):
            for name, value in whole[metric][bucket].items():
                assert streamed[metric][bucket][name] == pytest.approx(value, rel=2e-3, abs=2e-3)


def test_a_streamed_simulation_does_not_count_sessions_as_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(
        path, (TraceRequest(f"r{n}", 1.0 * n, 500, 5, session=f"s{n % 3}") for n in range(9))
    )
    words = str(path), "--speed", "1"
    assert simulated(capsys, *words)["sessions"] == 3
    streamed = simulated(capsys, *words, "--stream")
    assert streamed["sessions"] is streamed["session_e2e_ms"] is None
    assert main(["simulate", *words, "--stream"]) == 0  # the table has no column of them


def test_all_requests_may_be_rejected_as_they_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, config = tmp_path / "t.jsonl", tmp_path / "proxy.yaml"
    write_trace(trace, [TraceRequest("long", 0.0, 9_000, 5, blocks=None)])
    config.write_text("buckets: [{name: chat, up_to: 4000, max_wait: 1s}]\n")
    words = str(trace), "--speed", "1", "--config", str(config)
    whole, streamed = simulated(capsys, *words), simulated(capsys, *words, "--stream")
    assert whole["rejected"] == {"prompt_too_long": 1}
    for key in ("rejected", "duration_s", "busy", "attainment", "requests_per_s", "hit_ratio"):
        assert streamed[key] == whole[key], key


def test_a_streamed_simulation_forgets_requests_that_ended(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    play = Fleet._play

    def watched(self: Fleet, until: float) -> None:
        play(self, until)
        kept.append(len(self._outcomes))

    monkeypatch.setattr(Fleet, "_play", watched)
    simulated(capsys, str(trace), "--rate", "5", "--stream")
    assert max(kept) < 100
    assert kept[-1] == 0


def test_what_needs_all_requests_is_refused(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--load", "0.5"], ["--sweep", "gpus=1,2"], ["--explain", "r1"]):
        assert main(["simulate", str(trace), "--stream", *words]) == 2
        assert "--stream" in capsys.readouterr().err
