"""Results of other tools as measurements: read, compared, fitted, and refused where they lie."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import forebay
from paths import TESTS

from forebay.replay.engine.calibration.calibrate import kernel_table
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.timing.step_constants import read_calibration
from forebay.replay.validation.fit_run import FitLine, compared, predict
from forebay.replay.validation.measured import Timed, is_results, read_results
from forebay.replay.validation.model_names import differ
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import write_trace

CONFIG = EngineConfig("llama-3-8b", "h200")
MODEL = ("--model", "llama-3-8b", "--gpu", "h200")
COMPARED = (*MODEL, "--hold-out", "1")


def served(count: int, **constants: float) -> list[Timed]:
    """Requests of 200 to 6,000 tokens with the times of a server with these constants."""
    rows = [
        TraceRequest(f"r{at}", at // 2 * 0.5, 200 + (at * 7_919) % 5_800, 10 + at * 7 % 60)
        for at in range(count)
    ]
    asked = [Timed(row, row.arrival_s, 1.0, 1.0, 1.0, 0) for row in rows]
    calibration = replace(kernel_table(), **constants)  # type: ignore[arg-type]
    return list(predict(asked, CONFIG, calibration))


def vllm_bench(of: Sequence[Timed], **more: Any) -> dict[str, Any]:
    """The lists of `vllm bench serve --save-detailed`; its clock starts anywhere."""
    gaps = [[(one.tpot_s or 0.0)] * (one.row.output_tokens - 1) for one in of]
    return {
        "model_id": "meta-llama/Meta-Llama-3-8B-Instruct",
        "request_throughput": 1.0,
        "start_times": [5_000.0 + one.sent_s for one in of],
        "input_lens": [one.row.input_tokens for one in of],
        "output_lens": [one.row.output_tokens for one in of],
        "ttfts": [one.ttft_s for one in of],
        "itls": gaps,
        "errors": [""] * len(of),
        **more,
    }


def lines_of(of: Sequence[Timed]) -> list[dict[str, Any]]:
    return [
        {"sent_s": one.sent_s, "input_tokens": one.row.input_tokens,
         "output_tokens": one.row.output_tokens, "ttft_ms": one.ttft_s * 1e3, "e2e_s": one.e2e_s,
         "cached_tokens": one.cached_tokens}
        for one in of
    ]  # fmt: skip


def test_three_forms_of_results_say_the_same(tmp_path: Path) -> None:
    truth = served(6)
    bench, rows, table = (tmp_path / name for name in ("bench.json", "rows.jsonl", "rows.csv"))
    bench.write_text(json.dumps(vllm_bench(truth)))
    rows.write_text("".join(json.dumps(row) + "\n" for row in lines_of(truth)))
    listed = lines_of(truth)
    head = ",".join(listed[0])
    cells = "\n".join(",".join(map(str, row.values())) for row in listed)
    table.write_text(f"{head}\n{cells}\n")
    for path in (bench, rows, table):
        assert is_results(path)
        for one, theirs in zip(read_results(path), truth, strict=True):
            assert one.row.input_tokens == theirs.row.input_tokens
            assert one.sent_s == pytest.approx(theirs.sent_s)
            assert one.ttft_s == pytest.approx(theirs.ttft_s)
            assert one.e2e_s == pytest.approx(theirs.e2e_s)
            assert one.tpot_s == pytest.approx(theirs.tpot_s)
            assert one.cached_tokens == (None if path == bench else 0)


def test_a_file_that_guidellm_wrote() -> None:
    requests = read_results(TESTS / "traces" / "golden" / "guidellm.json")
    assert [request.finished for request in requests] == [True, True]
    assert 0 < requests[0].ttft_s < requests[0].e2e_s


def test_a_failed_request_is_played_and_not_compared(tmp_path: Path) -> None:
    truth = served(3)
    body = vllm_bench(truth, errors=["", "reset", ""])
    body["ttfts"][1], body["itls"][1], body["output_lens"][1] = 0.0, [], 0
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(body))
    assert [result.finished for result in read_results(path)] == [True, False, True]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"start_times": None}, "does not say when requests were sent; use a newer vllm-bench"),
        ({"itls": None}, "request 1: ttft .* s, e2e"),
        ({"ttfts": [-1.0, 1.0]}, "request 1: ttft -1 s, e2e"),
        ({"input_lens": ["many", 3]}, "'many' is not a whole number"),
        ({"ttfts": [0.0, 1.0]}, "request 1: ttft 0 s, e2e"),
    ],
)
def test_what_no_server_measured(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(vllm_bench(served(2), **change)))
    with pytest.raises(InputError, match=says):
        read_results(path)


def test_results_of_another_trace(tmp_path: Path) -> None:
    truth, path = served(3), tmp_path / "bench.json"
    path.write_text(json.dumps(vllm_bench(truth)))
    trace = [one.row for one in truth]
    assert [result.row.id for result in read_results(path, trace)] == ["r0", "r1", "r2"]
    with pytest.raises(InputError, match="has 3 requests, --trace 2; give the trace it is of"):
        read_results(path, trace[:2])
    with pytest.raises(InputError, match="request 1 has 200 prompt tokens, in the trace it has"):
        read_results(path, trace[::-1])


def test_the_shipped_constants_are_compared_with_vllm_bench(tmp_path: Path) -> None:
    """Against the engine's own times it is exact, at the mean and at every quantile."""
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(vllm_bench(served(12))))
    done = forebay("engine", "fit", str(path), *COMPARED, "--within", "0.01", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    named = [(line["measure"], line["quantile"]) for line in told["points"]]
    assert named == [(m, q) for m in ("ttft", "tpot", "e2e") for q in (None, 0.5, 0.9, 0.99)]
    assert all(line["low"] <= line["error"] + 1e-9 for line in told["points"])
    assert told["hit_ratio"] == {"measured": None, "simulated": 0.0}
    assert done.stderr == ""  # Meta-Llama-3-8B-Instruct may well be llama-3-8b
    table = forebay("engine", "fit", str(path), *COMPARED)
    assert "ttft mean" in table.stdout
    assert "measured not in the file, simulated 0.0%" in table.stdout
    other = forebay("engine", "fit", str(path), "--model", "qwen2.5-14b", "--gpu", "h200")
    assert (other.returncode, other.stdout) == (2, "")
    assert "is of meta-llama/Meta-Llama-3-8B-Instruct, --model is qwen2.5-14b" in other.stderr


def test_a_run_under_an_unknown_name_is_compared_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({**vllm_bench(served(4)), "model_id": "our-finetune"}))
    done = forebay("engine", "fit", str(path), *COMPARED, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["points"]
    said = "is of our-finetune, --model is llama-3-8b; are they one model?"
    assert done.stderr == f"forebay engine: warning: {path}: {said}\n"


def test_a_part_is_held_out_while_all_of_it_is_played(tmp_path: Path) -> None:
    path, out = tmp_path / "rows.jsonl", tmp_path / "cal.json"
    truth = served(30, gemm_compute=0.5)
    path.write_text("".join(json.dumps(row) + "\n" for row in lines_of(truth)))
    done = forebay(
        "engine", "fit", str(path), *MODEL, "--hold-out", "0.3", "--out", str(out), "--json"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {row["requests"] for row in told["points"]} == {9}
    assert max(abs(row["error"]) for row in told["points"]) < 0.03
    assert told["checked"].startswith("9 held-out requests: at most ")
    assert read_calibration(out).constants.gemm_compute == pytest.approx(0.5, rel=0.05)
    refused = forebay("engine", "fit", str(path), *COMPARED, "--out", str(tmp_path / "new.json"))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--hold-out 1 fits nothing; hold out a smaller share" in refused.stderr


def test_a_fit_that_leaves_physics_is_printed_and_not_written(tmp_path: Path) -> None:
    """A server three times as fast as the GPU's data sheet had its prompts cached."""
    path, out = tmp_path / "rows.jsonl", tmp_path / "cal.json"
    fast = [replace(one, ttft_s=one.ttft_s / 3, e2e_s=one.e2e_s / 3) for one in served(16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in lines_of(fast)))
    done = forebay("engine", "fit", str(path), *MODEL, "--out", str(out))
    assert done.returncode == 2
    assert "ttft mean" in done.stdout
    assert "this fit is no calibration: " in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not out.exists()


def test_the_interval_holds_the_error_of_more_requests() -> None:
    """Times that are 10 % off on average, with noise: the interval covers it, and narrows."""
    drawing = np.random.default_rng(3)

    def line(count: int) -> FitLine:
        row = TraceRequest("r", 0.0, 100, 10)
        measured = [Timed(row, 0.0, float(t), 2.0, None, 0) for t in drawing.gamma(4.0, 1.0, count)]
        noise = drawing.lognormal(0.0, 0.3, count) * 1.1 / np.exp(0.3**2 / 2)
        models = [
            replace(one, ttft_s=one.ttft_s * float(by))
            for one, by in zip(measured, noise, strict=True)
        ]
        return next(one for one in compared(measured, models) if one.name == "ttft mean")

    few, many = line(100), line(3_000)
    for one in (few, many):
        assert one.low < 0.1 < one.high
    assert many.high - many.low < (few.high - few.low) / 3


def test_names_of_one_model_and_of_two() -> None:
    for one, other in (
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-8b"),
        ("served", "qwen2.5-14b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "models/llama-8b/config.json"),
    ):
        assert not differ(one, other)
    for one, other in (
        ("Qwen/Qwen2.5-72B-Instruct", "qwen2.5-14b"),
        ("microsoft/Phi-3-mini-128k-instruct", "llama-3-8b"),
    ):
        assert differ(one, other)


def test_a_trace_gives_results_their_prompts(tmp_path: Path) -> None:
    """Two prompts of one document: with the trace the second is cached, without it nothing is."""
    blocks = tuple(range(8))
    rows = [TraceRequest(f"r{at}", 5.0 * at, 4_096, 12, blocks=blocks) for at in range(2)]
    asked = [Timed(row, row.arrival_s, 1.0, 1.0, 1.0, 0) for row in rows]
    path, trace = tmp_path / "rows.jsonl", tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in lines_of(predict(asked, CONFIG))))
    write_trace(trace, iter(rows))
    with_trace = forebay("engine", "fit", str(path), *COMPARED, "--trace", str(trace), "--json")
    hits = json.loads(with_trace.stdout)["hit_ratio"]
    assert hits["measured"] == hits["simulated"] > 0.4
    alone = json.loads(forebay("engine", "fit", str(path), *COMPARED, "--json").stdout)["hit_ratio"]
    assert alone["simulated"] == 0.0 < alone["measured"]
