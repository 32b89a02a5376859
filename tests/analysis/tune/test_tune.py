"""`forebay tune`: what would have been, on captures whose truth the twin does not know."""

import json
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_captures import captured_lines, chats_beside_documents, truth, write_capture

from forebay.analysis.tune.figures import (
    ASSUMED_ERROR,
    BETTER,
    IN_TIME,
    LEVEL,
    WORSE,
    Figure,
    OtherwiseRow,
    Repeat,
    RepeatLine,
)
from forebay.analysis.tune.otherwise import Answer, otherwise
from forebay.analysis.tune.plays import Player
from forebay.analysis.tune.setups import AS_IT_IS, SetUp, serve_words, set_ups
from forebay.analysis.tune.show import short, table_lines
from forebay.analysis.tune.traffic import fitted, observed_of, read_traffic
from forebay.analysis.tune.verdict import judge
from forebay.proxy.cli import main
from forebay.replay.engine.calibration.calibrate import kernel_table
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.timing.step_constants import CalibrationFile
from forebay.replay.plan.slo import Slo
from forebay.replay.sim.scenario import Scenario
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import write_trace

SLOS = (Slo("chat", "ttft", 1.0), Slo("document", "ttft", 15.0))
AS_LOGGED = ["--policy", "least_connections", "--slo", "chat.ttft=1s,document.ttft=15s"]


def asked(path: Path, base: Scenario) -> Answer:
    """Ask in this process, without a fit."""
    rows = fitted(read_traffic(str(path), inf, None, 10**6).rows, base.engine.context, "error")
    return otherwise(
        base,
        rows,
        SLOS,
        partial(map, Player(rows, SLOS).play),
        observed=observed_of(rows),
    )


def test_a_twin_that_repeats_what_happened_finds_what_helps(tmp_path: Path) -> None:
    """Documents block chats. A flag alone helps, and so the sentence need not be about a proxy."""
    servers = truth(1)
    path = write_capture(tmp_path / "c.jsonl", chats_beside_documents(300, 10, 0.4), servers)
    answer = asked(path, servers)
    assert answer.twin.why_not == ""
    assert answer.twin.error == pytest.approx(0.03)
    present, *others = answer.rows
    assert present.set_up.name == AS_IT_IS
    best = answer.verdict.best
    assert best is not None
    assert best.figures[IN_TIME].against == BETTER
    most = max(row.figures[IN_TIME].value or 0 for row in others if row.set_up.gpus == 1)
    assert (best.figures[IN_TIME].value or 0) >= most - answer.twin.points
    names = [row.set_up.name for row in answer.rows]
    assert "as it is, flag 2048" in names
    assert "Forebay, one GPU more" in names
    assert not any("fewer" in name or "TP 2" in name for name in names)  # one server has no spare
    assert "SMG" not in names  # one server leaves a router nothing to choose
    for row in answer.rows:
        low, value, high = (getattr(row.figures[IN_TIME], k) for k in ("low", "value", "high"))
        assert low <= value <= high


def test_a_fit_repeats_servers_that_are_slower_than_the_twin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The constants of the servers are hidden from the twin. Without a fit it is refused."""
    rows = chats_beside_documents(160, 8, 1.5)
    path = write_capture(tmp_path / "c.jsonl", rows, truth(2, slower=1.6))
    assert "slower than the twin" in asked(path, truth(2)).twin.why_not
    assert main(["tune", str(path), *AS_LOGGED, "--jobs", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["twin"]["fitted"]
    assert told["twin"]["error"] < 0.15
    assert told["set_ups"][0]["servers"] == 2  # as many as answered


def test_a_twin_that_cannot_repeat_gives_no_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the requests to the servers are not in the capture."""
    rows = chats_beside_documents(400, 8, 0.35)
    lines = captured_lines(rows, truth(1))
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"".join(lines[::2]))
    page = tmp_path / "page.html"
    assert main(["tune", str(path), *AS_LOGGED, "--jobs", "1", "-o", str(page)]) == 1
    shown = capsys.readouterr().out
    assert "No advice: the twin does not repeat what happened." in shown
    assert "200 of 399 captured rows are missing" in shown.replace("\n", " ") or "199 of" in shown
    assert "vllm serve" not in shown
    assert "No advice" in page.read_text()


def test_a_trace_says_nothing_of_what_happened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, iter(chats_beside_documents(120)))
    words = ["tune", str(path), "--slo", "chat.ttft=1s", "--jobs", "1"]
    page = tmp_path / "otherwise.html"
    assert main([*words, "-o", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "the twin is not checked" in shown.replace("\n", " ")
    # A trace does not tell the present set-up: it was assumed without a word.
    assert "As it is: Llama-3-8B on 1 GPU (h200-sxm), 1 server," in shown.replace("\n", " ")
    assert max(len(line) for line in shown.splitlines() if not line.startswith("  vllm")) <= 80
    text = page.read_text()
    assert "<svg" in text
    assert "What to type" in text
    assert "http" not in text.replace("http-equiv", "").replace("http://SERVER", "")  # by itself
    assert main([*words, "-o", str(page)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main([*words, "--gpus", "3", "--tp", "2"]) == 2
    assert "not a multiple of --tensor-parallel-size 2" in capsys.readouterr().err


def test_a_calibration_is_of_the_gpu_that_is_asked_for(
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
    assert told["set_ups"][0]["figures"]["in_time"]["value"] == 0.0  # steps of half a second
    assert main([*words, "--gpu", "h100"]) == 2
    assert "is for llama-3-8b on h200-sxm" in capsys.readouterr().err


# Set-ups.


def test_each_set_up_differs_and_says_what_it_costs() -> None:
    found, impossible = set_ups(Scenario(EngineConfig(), 2, "direct"), 40)
    by_name = {set_up.name: set_up for set_up in found}
    assert len(found) == 14
    assert impossible == {}
    assert "nginx round robin" not in by_name  # it is the present one
    assert by_name["Forebay, TP 2"].lost.startswith("The spare is lost")
    assert by_name["Forebay, TP 2"].gpus == 2
    assert by_name["Forebay, one GPU fewer"].gpus == 1
    assert by_name["Forebay, max-num-seqs 16"].scenario.engine.max_num_seqs == 16
    assert by_name["as it is, flag 2048"].change < by_name["Forebay"].change


def test_a_proxy_in_place_is_no_change_and_a_reached_limit_is_doubled() -> None:
    base = Scenario(EngineConfig(max_num_seqs=8), 4, "warm_or_least_work")
    found, _ = set_ups(base, 8)
    names = [set_up.name for set_up in found]
    assert "Forebay" not in names
    assert names.index("as it is, TP 2") < names.index("nginx round robin")
    assert "as it is, max-num-seqs 16" in names
    [ranks] = [set_up for set_up in found if set_up.name == "as it is, TP 2"]
    assert ranks.lost == "When one server fails, 1 of 2 is lost."


def test_what_cannot_be_is_named_and_left_out() -> None:
    base = Scenario(EngineConfig(enable_chunked_prefill=False, max_model_len=8192), 1, "direct")
    found, impossible = set_ups(base, 1)
    assert "divides prompts" in impossible["Forebay, scheduler class"]
    assert "Forebay, scheduler class" not in [set_up.name for set_up in found]


def test_chunks_of_a_hybrid_are_whole_blocks() -> None:
    hybrid = EngineConfig(model="Qwen3.6-35B-A3B", gpu="h200")
    found, _ = set_ups(Scenario(hybrid, 1, "direct"), 1)
    assert "as it is, flag 2112" in [set_up.name for set_up in found]


def test_the_scheduler_class_is_named_for_vllm() -> None:
    words = list(serve_words(EngineConfig(scheduler_cls="forebay")))
    assert words[3:] == ["--scheduler-cls", "forebay.proxy.vllm_scheduler.ForebayScheduler"]


# Verdicts.


def row(name: str, change: int = 1, gpus: int = 2, **figures: tuple[float, str]) -> OtherwiseRow:
    """Make a row. Figures are given as value and comparison."""
    set_up = SetUp(name, Scenario(EngineConfig(), gpus, "direct"), change)
    made = {key.replace("__", "."): Figure(v, None, None, a) for key, (v, a) in figures.items()}
    return OtherwiseRow(set_up, made, 0, 1.0, 1.0)


TWIN = Repeat(500, (RepeatLine("chat", "p50", 1.0, 1.1),), (0.9, 0.9), {"chat": 0.1}, 0.002)
PRESENT = row(AS_IT_IS, 0, in_time=(0.9, ""), chat__ttft_p99=(4.0, ""))


def test_nothing_better_keeps_what_is_there() -> None:
    verdict = judge([PRESENT, row("x", in_time=(0.9, LEVEL), chat__ttft_p99=(3.9, LEVEL))], TWIN)
    assert verdict.best is None
    assert verdict.sentence.startswith("Keep what you have")


def test_a_loss_is_named_and_needs_more_requests_in_time() -> None:
    worse: Any = {"document__ttft_p99": (12.0, WORSE)}
    present = replace(PRESENT, figures={**PRESENT.figures, "document.ttft_p99": Figure(10.0)})
    level = row("x", in_time=(0.9, LEVEL), chat__ttft_p99=(1.0, BETTER), **worse)
    assert judge([present, level], TWIN).best is None
    more = row("y", in_time=(0.99, BETTER), chat__ttft_p99=(1.0, BETTER), **worse)
    verdict = judge([present, level, more], TWIN)
    assert verdict.best is more
    assert "worse: document first tokens' p99 12.0 s instead of 10.0 s" in verdict.sentence


def test_the_least_change_wins_among_equals_and_none_ends_below_a_single_flag() -> None:
    flag = row("flag", 1, in_time=(1.0, BETTER), chat__ttft_p99=(1.0, BETTER))
    both = row("both", 5, in_time=(0.999, BETTER), chat__ttft_p99=(0.95, BETTER))
    far = row("far", 5, in_time=(0.96, BETTER), chat__ttft_p99=(0.1, BETTER))
    assert judge([PRESENT, both, far, flag], TWIN).best is flag


def test_a_server_is_not_given_up_for_faster_first_tokens() -> None:
    """Among equals in time, two servers of one GPU each have a spare that one of two has not."""
    ranks = row("Forebay, TP 2", 8, 1, in_time=(0.9, LEVEL), chat__ttft_p99=(1.0, BETTER))
    assert judge([PRESENT, ranks], TWIN).best is None
    more = row("Forebay, TP 2", 8, 1, in_time=(0.99, BETTER), chat__ttft_p99=(1.0, BETTER))
    assert judge([PRESENT, more], TWIN).best is more
    other = row("llm-d", 4, 2, in_time=(0.99, BETTER), chat__ttft_p99=(3.0, BETTER))
    assert judge([PRESENT, more, other], TWIN).best is other


def test_more_gpus_never_win_and_are_told() -> None:
    more = row("Forebay, one GPU more", 9, 3, in_time=(1.0, BETTER), chat__ttft_p99=(0.1, BETTER))
    verdict = judge([PRESENT, more], TWIN)
    assert verdict.best is None
    assert verdict.more == ("Forebay with one GPU more would have had 100.0% in time.",)


def test_differences_within_the_twins_error_are_level(tmp_path: Path) -> None:
    """Nothing was observed, so small differences of a quiet fleet say nothing."""
    path = tmp_path / "t.jsonl"
    write_trace(path, [TraceRequest(f"c{at}", at * 1.0, 160, 40) for at in range(120)])
    answer = asked(path, Scenario(EngineConfig(), 2, "least_connections"))
    assert answer.twin.error == ASSUMED_ERROR
    assert answer.verdict.best is None
    better = {each.set_up.name for each in answer.rows[1:] if each.those(BETTER)}
    assert better == set(), "less than 20 ms"
    assert max(map(len, table_lines(answer, priced=False))) <= 80


def test_numbers_are_short() -> None:
    values = (None, 0.0, 0.0449, 0.45, 1.234, 12.3, 1234.0)
    assert [short(value) for value in values] == ["-", "0", ".045", ".45", "1.2", "12", "1,234"]


# Bad input.


def test_lost_rows_a_restart_and_foreign_rows_are_said(tmp_path: Path) -> None:
    lines = captured_lines(chats_beside_documents(200), truth(1))
    day = lines[:50] + lines[53:]  # rows that a slow disk has cost
    path = tmp_path / "two-days.jsonl"
    path.write_bytes(b"".join([*day, b"GET / HTTP/1.1\n", b'{"event":"other"}\n', *lines]))
    traffic = read_traffic(str(path), inf, None, 10**6)
    assert len(traffic.rows) == 397
    told = " ".join(traffic.remarks)
    assert "2 of 399 rows are no requests" in told
    assert "3 of 400 captured rows are missing" in told
    assert "started 2 times" in told
    arrivals = [each.arrival_s for each in traffic.rows]
    assert arrivals == sorted(arrivals)
    assert len({each.id for each in traffic.rows}) == 397
    late = read_traffic(str(path), 50.0, None, 10**6).rows
    assert late[0].arrival_s == 0.0
    assert late[-1].arrival_s == pytest.approx(50.0)


def test_a_file_of_other_rows_is_refused(tmp_path: Path) -> None:
    lines = captured_lines(chats_beside_documents(150), truth(1))
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"".join([*lines, *[b'{"event":"other"}\n'] * 20]))
    with pytest.raises(InputError, match=r"20 of 170 rows are no requests; the first: .*:151: "):
        read_traffic(str(path), inf, None, 10**6)


def test_one_tenant_a_gap_and_a_short_time_are_said(tmp_path: Path) -> None:
    rows = [replace(each, tenant="t-1") for each in chats_beside_documents(120)]
    rows = [
        replace(each, arrival_s=each.arrival_s + (3600 if at > 60 else 0))
        for at, each in enumerate(rows)
    ]
    path = write_capture(tmp_path / "c.jsonl", rows, truth(1))
    told = " ".join(read_traffic(str(path), inf, None, 10**6).remarks)
    assert "All requests are of one tenant" in told
    assert "No request came for 60 min after 0 min" in told
    with pytest.raises(InputError, match="has only 59 requests in 29 s, 100 are needed"):
        read_traffic(str(path), 60.0, None, 10**6)


def test_refused_requests_are_asked_again_with_the_usual_length(tmp_path: Path) -> None:
    """Their captured length is the limit that they allowed, of which answers use little."""
    rows = [TraceRequest(f"c{at}", at * 1.0, 160, 40) for at in range(120)]
    path = write_capture(tmp_path / "c.jsonl", rows, truth(1))
    lines = path.read_bytes().splitlines(keepends=True)
    bad = (
        lines[7]
        .replace(b'"status":200', b'"status":429')
        .replace(b'"output_tokens":40', b'"output_tokens":4096')
    )
    path.write_bytes(b"".join([*lines[:7], bad, *lines[8:]]))
    got = fitted(read_traffic(str(path), inf, None, 10**6).rows, 8192, "error")
    assert got[7].output_tokens == 40
    observed = observed_of(got)
    assert observed is not None
    assert (observed.ended.sum(), observed.done.sum()) == (120, 119)
    assert np.isfinite(observed.metrics["tpot"][observed.done]).all()
