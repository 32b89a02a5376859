"""`forebay tune`: the flags that help are found, those that do not are left out."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.analysis.tune.cli import summary_of
from forebay.analysis.tune.tune import (
    AXES,
    CHUNKS,
    LEAST_SHARE,
    TuneFigures,
    Tuner,
    Values,
    best_of,
    serve_words,
    thresholds,
)
from forebay.proxy.cli import main
from forebay.replay.engine.calibration.calibrate import kernel_table
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.timing.step_constants import CalibrationFile
from forebay.replay.plan.slo import Slo
from forebay.replay.sim.scenario import Scenario
from forebay.replay.sim.sweep import SweepCase
from forebay.replay.sim.workload import SimWorkload
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import write_trace

SLOS = (Slo("chat", "ttft", 1.0),)


def chats_beside_documents(count: int) -> list[TraceRequest]:
    """A chat every half second, and a document of 60,000 tokens every ten."""
    return [
        TraceRequest(f"d{at}", at * 0.5, 60_000, 8)
        if at % 20 == 5
        else TraceRequest(f"c{at}", at * 0.5, 300 + at % 50, 40)
        for at in range(count)
    ]


def tuner(rows: Sequence[TraceRequest], **engine: Any) -> Tuner:
    scenario = Scenario(EngineConfig(**engine), 1, "direct")

    def run(cases: Sequence[SweepCase]) -> list[dict[str, Any]]:
        return [summary_of(case) for case in cases]

    return Tuner(scenario, SimWorkload(rows), SLOS, run)


def better(one: TuneFigures, other: TuneFigures) -> bool:
    """True if one wins though it changes a flag more."""
    figures: dict[Values, TuneFigures] = {(0,): one, (1,): other}
    return best_of(figures, {(0,): (0, 1), (1,): (0, 0)}) == (0,)


def test_chats_beside_documents_want_a_threshold() -> None:
    """Documents block the chats behind them until their chunks leave room in each step."""
    found = tuner(chats_beside_documents(100)).tune()
    assert found.start.attainment < 0.9
    assert found.best.attainment > 0.98
    flags = [gain.flag for gain in found.gains]
    assert "long_prefill_token_threshold" in flags
    assert found.engine.long_prefill_token_threshold > 0
    for gain in found.gains:
        assert better(found.best, gain.without), gain.flag
    words = list(serve_words(found.engine))
    at = words.index("--long-prefill-token-threshold")
    assert words[at + 1] == str(found.engine.long_prefill_token_threshold)


def test_the_scheduler_class_is_tried_and_named_for_vllm() -> None:
    tried: set[str | None] = set()

    def run(cases: Sequence[SweepCase]) -> list[dict[str, Any]]:
        tried.update(case.scenario.engine.scheduler_cls for case in cases)
        return [summary_of(case) for case in cases]

    rows = [TraceRequest(f"c{at}", at * 3.0, 16, 4) for at in range(3)]
    Tuner(Scenario(EngineConfig(), 1, "direct"), SimWorkload(rows), SLOS, run).tune()
    assert tried == {None, "forebay"}
    words = list(serve_words(EngineConfig(scheduler_cls="forebay")))
    assert words[3:] == ["--scheduler-cls", "forebay.proxy.vllm_scheduler.ForebayScheduler"]


def test_a_quiet_server_keeps_its_flags() -> None:
    rows = [TraceRequest(f"c{at}", at * 3.0, 16, 4) for at in range(12)]
    found = tuner(rows).tune()
    assert found.gains == []
    assert list(serve_words(found.engine)) == ["vllm", "serve", "llama-3-8b"]


def test_what_cannot_be_is_named_and_left_out() -> None:
    rows = [TraceRequest(f"c{at}", at * 3.0, 16, 4) for at in range(3)]
    found = tuner(rows, enable_chunked_prefill=False, max_model_len=8192).tune()
    assert "without chunked prefill" in found.impossible["max_num_batched_tokens 1024"]
    assert found.impossible["tensor_parallel_size 2"] == "--gpus 1: not a multiple of 2"


def test_the_least_change_wins_among_equals() -> None:
    def chosen(*settings: tuple[float, float, int, int]) -> int:
        """Return which wins: of share in time, strain, servers lost, flags changed."""
        figures: dict[Values, TuneFigures] = {
            (at,): TuneFigures(s[0], 1.0, (), s[1]) for at, s in enumerate(settings)
        }
        changes: dict[Values, tuple[int, int]] = {
            (at,): (s[2], s[3]) for at, s in enumerate(settings)
        }
        return int(best_of(figures, changes)[0] or 0)

    assert chosen((0.99, 5.0, 0, 1), (0.98, 0.1, 0, 0)) == 0
    assert chosen((0.99, 0.5, 0, 1), (0.991, 0.6, 0, 0)) == 0
    assert chosen((0.99, 0.59, 0, 1), (0.99, 0.6, 0, 0)) == 1
    assert chosen((0.99, 0.5, 0, 2), (0.99, 0.5, 0, 1)) == 1
    assert chosen((1.0, 0.1, 1, 1), (1.0, 0.9, 0, 4)) == 1, "a server for no request in time"
    assert chosen((1.0, 0.9, 1, 1), (0.99, 0.1, 0, 4)) == 0
    # Each is a little worse than the one before, but the last is not as good as the first.
    assert chosen((0.99, 0.5, 0, 3), (0.9885, 0.5, 0, 2), (0.987, 0.5, 0, 1)) == 1


def trap(values: Values) -> tuple[float, float]:
    """Two ranks gain 2 points, a threshold at most 7 more. The threshold 2,048 alone gains 10."""
    ranks, _, threshold, *_ = values
    if ranks == 1:
        return (1.0 if threshold == 2048 else 0.9), 1.0
    return (0.99 if threshold == 512 else 0.92), 1.0


def drift(values: Values) -> tuple[float, float]:
    """A larger change of any flag is nearer to the limits, but serves .15 points less in time."""
    changed = sum(value != old for value, old in zip(values, PLAIN, strict=True))
    return 0.99 - 0.0015 * changed, 0.9**changed


PLAIN = (1, 8192, 0, 1, 1024, 1, None)


@pytest.mark.parametrize("truth", [trap, drift])
def test_it_never_ends_below_a_setting_that_it_tried(
    truth: Callable[[Values], tuple[float, float]],
) -> None:
    tried: list[TuneFigures] = []

    def run(cases: Sequence[SweepCase]) -> list[dict[str, Any]]:
        summaries = []
        for case in cases:
            engine = case.scenario.engine
            flags = {"max_num_batched_tokens": engine.batched_tokens, "max_num_seqs": engine.seqs}
            attainment, strain = truth(tuple(flags.get(f) or getattr(engine, f) for f in AXES))
            tried.append(TuneFigures(attainment, 1.0, (strain,), strain))
            summaries.append(
                {"attainment": attainment, "goodput_per_s": 1.0}
                | {"ttft_ms": {"chat": {"p95": strain * 1e3}}}
            )
        return summaries

    scenario = Scenario(EngineConfig(), 2, "direct")
    found = Tuner(scenario, SimWorkload([TraceRequest("c", 0.0, 16, 4)]), SLOS, run).tune()
    assert found.start.attainment == truth(PLAIN)[0]
    assert found.best.attainment >= max(f.attainment for f in tried) - LEAST_SHARE
    if truth is trap:
        assert [(gain.flag, gain.value) for gain in found.gains] == [
            ("long_prefill_token_threshold", 2048)
        ]
        assert (found.servers, found.servers_before) == (2, 2)


def test_chunks_of_a_hybrid_are_whole_blocks() -> None:
    assert thresholds(EngineConfig()) == CHUNKS
    hybrid = EngineConfig(model="Qwen3.6-35B-A3B", gpu="h200")
    assert thresholds(hybrid) == (0, 1_056, 2_112, 4_224)


def test_every_axis_is_a_flag_of_the_engine() -> None:
    for flag, values in AXES.items():
        assert hasattr(EngineConfig(), flag)
        numbers = [value for value in values if isinstance(value, int)]
        assert numbers == sorted(numbers)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, iter(chats_beside_documents(60)))
    words = ["tune", str(path), "--slo", "chat.ttft=1s", "--jobs", "1"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["best"]["attainment"] > told["start"]["attainment"]
    assert told["command"].startswith("vllm serve Llama-3-8B --")
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert told["command"] in shown
    assert "In the proxy's file, give each backend long_prefill_token_threshold: " in shown
    assert main([*words, "--gpus", "3", "--tp", "2"]) == 2
    assert "not a multiple of --tensor-parallel-size 2" in capsys.readouterr().err


def test_a_calibration_is_of_the_gpu_that_is_tuned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, file = tmp_path / "trace.jsonl", tmp_path / "cal.json"
    write_trace(trace, [TraceRequest(f"c{at}", at * 1.0, 160, 40) for at in range(100)])
    slow = replace(kernel_table(), step_s=0.5)
    written = CalibrationFile("llama-3-8b", "h200-sxm", "2026-11-27", "a test", "", slow)
    file.write_text(json.dumps(written.as_json()))
    words = ["tune", str(trace), "--calibration", str(file), "--slo", "tpot=100ms", "--jobs", "1"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["start"]["attainment"] == 0.0  # its steps take half a second
    assert main([*words, "--gpu", "h100"]) == 2
    assert "is for llama-3-8b on h200-sxm" in capsys.readouterr().err
