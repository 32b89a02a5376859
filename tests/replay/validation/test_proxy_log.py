"""The proxy's own files as the source of a fit, and what they cannot tell."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from commands import forebay
from fakes.proxy_files import write_hour

from forebay.replay.engine.calibration.calibrate import kernel_table
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.scenario import Scenario, simulate
from forebay.replay.validation.fit_run import fit_run, hit_ratio, predict
from forebay.replay.validation.proxy_log import read_log
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest

ENGINE = EngineConfig("llama-3-8b", "h200", max_model_len=32_768)
SLOWER = replace(kernel_table(), gemm_compute=0.5, decode_bandwidth=0.6)


def rows(count: int, longest: int = 12_000) -> list[TraceRequest]:
    """Prompts of 50 tokens and more, each third with the document of the third before."""
    made: list[TraceRequest] = []
    for at in range(count):
        tokens = 50 + (at * 7_919) % (longest - 50)
        asked = at - 3 if at % 3 == 0 and at else at
        document = [1_000 * (asked + 1) + index for index in range(tokens // 512)]
        if asked != at:
            document = list(made[asked].blocks or ())[: tokens // 512]
        blocks = (
            *document,
            *(10**9 + 1_000 * at + i for i in range(-(-tokens // 512) - len(document))),
        )
        made.append(TraceRequest(f"r{at}", at * 0.3, tokens, 20 + at % 90, blocks=blocks))
    return made


def hour(
    count: int, longest: int = 12_000, policy: str = "warm_or_least_work"
) -> Sequence[SimOutcome]:
    """Two servers behind the policy, slower than the shipped constants say."""
    config = replace(ENGINE, calibration=SLOWER)
    return simulate(rows(count, longest), Scenario(config, 2, policy)).outcomes


def at_backend(outcome: SimOutcome) -> float:
    """When a request was sent to its backend."""
    assert outcome.sent_s is not None
    return outcome.sent_s


def test_a_ledger_has_the_times_at_the_backends(tmp_path: Path) -> None:
    """Time of the first byte sent, not of arrival: the log's times to the millisecond."""
    outcomes = hour(260)
    ledger, capture = write_hour(tmp_path, outcomes)
    sent = sorted(outcomes, key=at_backend)
    for measured in (read_log(ledger), read_log(capture), read_log(ledger, capture)):
        for ours, theirs in zip(measured, sent, strict=True):
            at_s, served = at_backend(theirs), theirs.served
            assert served is not None
            assert (ours.backend, ours.cached_tokens) == (theirs.backend, theirs.cached_tokens)
            assert ours.sent_s == pytest.approx(at_s - at_backend(sent[0]), abs=2e-3)
            assert ours.ttft_s == pytest.approx(served.first_token_s - at_s, abs=2e-4)
            assert ours.e2e_s == pytest.approx(served.finished_s - at_s, abs=2e-4)


def test_the_capture_brings_the_prompts(tmp_path: Path) -> None:
    """With it the hits are the server's. Without it each request shares what was cached."""
    ledger, capture = write_hour(tmp_path, hour(260))
    config = replace(ENGINE, calibration=SLOWER)
    with_prompts, without = read_log(capture), read_log(ledger)
    hits = hit_ratio(with_prompts)
    assert hits is not None
    assert hits > 0.1
    assert hit_ratio(predict(with_prompts, config)) == pytest.approx(hits, abs=0.002)
    assert hit_ratio(predict(without, config)) == pytest.approx(hits, abs=0.03)


def test_an_hour_without_documents_says_what_it_cannot_know(tmp_path: Path) -> None:
    measured = read_log(write_hour(tmp_path, hour(240, longest=900))[1])
    done = fit_run(measured, ENGINE, kernel_table(), used="a test", today=date(2026, 11, 29))
    assert done.reasons["prefill_compute"] == (
        "needs documents, computed prompts of 5,900 tokens: the longest has 892"
    )
    assert "at once" in done.reasons["sequence_s"]
    assert "asynchronous" in done.reasons["step_s"]
    for name in done.reasons:
        assert getattr(done.file.constants, name) == getattr(kernel_table(), name)


def test_too_little_or_another_file_is_one_clear_line(tmp_path: Path) -> None:
    few, capture = write_hour(tmp_path, hour(50))
    for path in (few, capture):
        with pytest.raises(InputError, match="50 streamed answers with usage; give 200 or more"):
            read_log(path)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"id": "a", "arrival_s": 0.0, "input_tokens": 7, "output_tokens": 3}\n')
    said = forebay("engine", "fit", str(trace), "--model", "llama-3-8b", "--gpu", "h200")
    assert said.returncode == 2
    assert "0 streamed answers with usage; give 200 or more, as the capture" in said.stderr
    (tmp_path / "more").mkdir()
    ledger, _ = write_hour(tmp_path / "more", hour(220))
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    for line in lines[:80]:
        line |= {"counted": False, "output_tokens": None}
    ledger.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *lines[80:]]))
    with pytest.raises(InputError, match="80 of 360 requests have no streamed answer"):
        read_log(ledger)


def test_other_lines_of_a_log_are_passed_over(tmp_path: Path) -> None:
    """The request log names its events, and a full disk may have left half a line."""
    ledger, _ = write_hour(tmp_path, hour(220))
    lines = ledger.read_text().splitlines()
    logged = [
        json.dumps({**json.loads(line), "event": "request", "level": "info"}) for line in lines
    ]
    start = '{"time":"2026-11-29T10:00:00.123Z","level":"info","event":"listening"}'
    rejected = json.dumps({**json.loads(lines[0]), "status": 429, "backend": ""})
    ledger.write_text("\n".join([start, *logged[:100], lines[0][:40], rejected, *logged[100:]]))
    assert len(read_log(ledger)) == 220
