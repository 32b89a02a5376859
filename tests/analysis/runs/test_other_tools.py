"""Result files of other load generators, as `compare` reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from commands import printed
from paths import TESTS

from forebay.analysis.runs.other_tools import FROM_SENDING, load_result
from forebay.traces.ground.errors import InputError

VLLM: dict[str, Any] = {  # the keys of vLLM 0.32 (vllm/benchmarks/serve.py)
    "date": "20261101-120000", "backend": "openai", "model_id": "m", "num_prompts": 3,
    "request_rate": 10.0, "burstiness": 1.0, "max_concurrency": 2, "duration": 2.0, "completed": 2,
    "failed": 1, "total_input_tokens": 6100, "request_throughput": 1.0,
    "input_lens": [100, 6000, 100], "output_lens": [3, 2, 0], "ttfts": [0.1, 0.5, 0.0],
    "itls": [[0.02, 0.04], [0.1], []], "latencies": [0.16, 0.6, 0.0],
    "start_times": [50.0, 50.4, 50.2], "queue_times": [0.0, 0.3, 0.0],
    "generated_texts": ["a", "b", ""], "errors": ["", "", "Traceback: boom"],
}  # fmt: skip


GOLDEN = TESTS / "traces" / "golden"  # with records that the tools wrote


def aiperf_line(start_s: float, ttft_ms: float | None) -> dict[str, Any]:
    """Make a record as aiperf's documentation shows it."""
    about = {"session_num": 1, "x_request_id": "x", "request_start_ns": int(start_s * 1e9),
             "benchmark_phase": "profiling", "was_cancelled": ttft_ms is None}  # fmt: skip
    if ttft_ms is None:
        error = {"code": 499, "type": "RequestCancellationError", "message": ""}
        return {"metadata": about, "metrics": {"error_isl": {"value": 550, "unit": "tokens"}},
                "error": error}  # fmt: skip
    metrics = {
        "input_sequence_length": {"value": 550, "unit": "tokens"},
        "time_to_first_token": {"value": ttft_ms, "unit": "ms"},
        "request_latency": {"value": ttft_ms + 40, "unit": "ms"},
        "output_sequence_length": {"value": 9, "unit": "tokens"},
        "inter_chunk_latency": {"value": [4.9, 7.5], "unit": "ms"},
    }
    return {"metadata": about, "metrics": metrics, "error": None}


def guidellm(ttft_ms: float) -> dict[str, Any]:
    """Make a report with the fields of guidellm's GenerativeRequestStats."""
    one = {
        "request_id": "a",
        "request_start_time": 1e9,
        "request_latency": 0.5,
        "prompt_tokens": 700,
        "output_tokens": 11,
        "time_to_first_token_ms": ttft_ms,
    }
    failed = {"request_id": "b", "request_start_time": 1e9 + 1, "prompt_tokens": 700}
    requests = {"successful": [one], "errored": [failed], "incomplete": []}
    return {"benchmarks": [{"requests": {"successful": []}}, {"requests": requests}]}


def test_vllm_bench(tmp_path: Path) -> None:
    path = tmp_path / "vllm.json"
    path.write_bytes(orjson.dumps(VLLM))
    run = load_result(path)
    assert run.words["outcome"].tolist() == ["ok", "ok", "failed"]
    assert run.words["bucket"].tolist() == ["chat", "document", "chat"]
    numbers = run.numbers
    assert numbers["intended_s"].tolist() == pytest.approx([0.0, 0.1, 0.2])
    assert numbers["ttft_service_s"].tolist()[:2] == [0.1, 0.5]
    assert numbers["ttft_response_s"].tolist()[:2] == pytest.approx([0.1, 0.8])  # with its queue
    assert numbers["e2e_response_s"].tolist()[:2] == pytest.approx([0.16, 0.9])
    assert numbers["tpot_s"].tolist()[:2] == pytest.approx([0.03, 0.1])
    assert numbers["stall_s"].tolist()[:2] == [0.04, 0.1]
    assert run.number("attainment") == pytest.approx(2 / 3)
    assert "warnings" not in run.summary  # its queue times make the times those of a schedule


def test_aiperf(tmp_path: Path) -> None:
    path = tmp_path / "profile_export.jsonl"
    lines = [aiperf_line(5.0, 255.9), aiperf_line(5.5, None), aiperf_line(6.0, 2_100.0)]
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    run = load_result(path)
    assert run.words["outcome"].tolist() == ["ok", "failed", "ok"]
    assert run.numbers["ttft_response_s"].tolist()[::2] == pytest.approx([0.2559, 2.1])
    assert run.numbers["stall_s"][0] == pytest.approx(0.0075)
    assert run.numbers["tpot_s"][0] == pytest.approx(0.005)
    assert run.numbers["intended_s"].tolist() == pytest.approx([0.0, 0.5, 1.0])
    assert run.summary["warnings"] == [f"aiperf: {FROM_SENDING}"]
    assert run.number("attainment") == pytest.approx(1 / 3)


def test_aiperf_counts_as_the_server_does(tmp_path: Path) -> None:
    """As aiperf 0.13 wrote it, with a tokenizer of bytes: its 64 tokens are 16 of the server."""
    lines = (GOLDEN / "aiperf.jsonl").read_bytes().splitlines()
    path = tmp_path / "profile_export.jsonl"
    path.write_bytes(b"\n".join(line for line in lines if b"usage_prompt_tokens" in line))
    run = load_result(path)
    assert run.numbers["prompt_tokens"].tolist() == [1000, 1000]
    assert run.numbers["output_tokens"].tolist() == [16, 16]
    assert run.numbers["tpot_s"][0] == pytest.approx((43.070725 - 20.822475) / 15e3)


def test_guidellm(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.json"
    path.write_bytes(orjson.dumps(guidellm(120.0)))
    run = load_result(path)
    assert run.words["outcome"].tolist() == ["ok", "failed"]
    assert run.numbers["ttft_response_s"][0] == pytest.approx(0.12)
    assert run.numbers["tpot_s"][0] == pytest.approx(0.038)


def test_guidellm_tells_when_a_request_was_due() -> None:
    """As guidellm 0.8.1 wrote it: sent 4 ms after the time that it was meant for, which count."""
    run = load_result(GOLDEN / "guidellm.json")
    assert run.numbers["sent_s"][0] - run.numbers["intended_s"][0] == pytest.approx(
        0.00405, abs=5e-6
    )
    assert run.numbers["e2e_response_s"][0] == pytest.approx(0.02148, abs=5e-6)
    assert run.numbers["prompt_tokens"].tolist() == [7, 4]
    assert "warnings" not in run.summary


def inference_perf(**info: Any) -> dict[str, Any]:
    """Make a request as inference-perf's report has it (RequestLifecycleMetric)."""
    return {"start_time": 100.0, "end_time": 101.0, "request": "{}", "response": "that",
            "info": info, "error": None}  # fmt: skip


OLD_INFO = {"input_tokens": 7, "output_tokens": 5, "output_token_times": [100.2, 100.3, 101.0]}
NEW_INFO = {  # since requests may have images
    "request_metrics": {"text": {"input_tokens": 9}}, "input_tokens": 9,
    "response_metrics": {
        "output_tokens": 4, "chunk_times": [100.2, 100.3, 101.0], "output_token_times": [],
        "server_usage": {"prompt_tokens": 7, "completion_tokens": 5},
    },
}  # fmt: skip


@pytest.mark.parametrize("info", [OLD_INFO, NEW_INFO])
def test_inference_perf(tmp_path: Path, info: dict[str, Any]) -> None:
    path = tmp_path / "per_request_lifecycle_metrics.json"
    path.write_bytes(orjson.dumps([inference_perf(**info)]))
    run = load_result(path)
    numbers = run.numbers
    assert numbers["prompt_tokens"].tolist() == [7]  # as the server counts
    assert numbers["output_tokens"].tolist() == [5]
    assert numbers["ttft_response_s"][0] == pytest.approx(0.2)
    assert numbers["e2e_response_s"][0] == pytest.approx(1.0)
    assert numbers["tpot_s"][0] == pytest.approx(0.2)
    assert numbers["stall_s"][0] == pytest.approx(0.7)
    assert run.summary["warnings"] == [f"inference-perf: {FROM_SENDING}"]


def test_inference_perf_tells_when_a_request_was_due() -> None:
    """Its `scheduled_time` is 10 ms before the request was sent, and these count."""
    run = load_result(GOLDEN / "inference-perf.json")
    assert run.words["outcome"].tolist() == ["ok", "failed"]
    assert run.numbers["intended_s"].tolist() == pytest.approx([0.0, 0.5])
    assert run.numbers["sent_s"].tolist() == pytest.approx([0.01, 0.5])
    assert run.numbers["e2e_response_s"][0] == pytest.approx(0.7)
    assert np.isnan(run.numbers["ttft_response_s"]).all()  # not a stream
    assert "warnings" not in run.summary


def genai_perf(*events: tuple[float, str], sent_ms: float = 0.0) -> dict[str, Any]:
    """Make a request of perf_analyzer's export from what came back, and when (ms)."""
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hello there"}]}
    return {
        "timestamp": int(sent_ms * 1e6),
        "request_inputs": {"payload": orjson.dumps(body).decode()},
        "response_timestamps": [int(at_ms * 1e6) for at_ms, _ in events],
        "response_outputs": [{"response": response} for _, response in events],
    }


def chunk(**delta: str) -> str:
    return f"data: {orjson.dumps({'choices': [{'delta': delta}]}).decode()}\n\n"


def test_genai_perf(tmp_path: Path) -> None:
    """The role, an empty text and [DONE] are no tokens; two events may come at one time."""
    usage = {"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 7}}
    streamed = genai_perf(
        (110, chunk(role="assistant", content="")),
        (130, chunk(content="I")),
        (150, chunk(content=" like") + chunk(content=" dogs")),
        (250, chunk(content=".")),
        (251, chunk()),
        (252, "data: [DONE]\n\n"),
        sent_ms=30,
    )
    counted = genai_perf((60, chunk(content="I")), (70, f"data: {orjson.dumps(usage).decode()}"))
    refused = genai_perf((50, '{"error": {"message": "no"}}'), sent_ms=40)
    measured = {"requests": [streamed, refused, counted]}
    path = tmp_path / "profile_export.json"
    path.write_bytes(orjson.dumps({"experiments": [{"requests": []}, measured]}))
    run = load_result(path)
    numbers = run.numbers
    assert run.words["outcome"].tolist() == ["ok", "ok", "failed"]  # in order of sending
    assert numbers["intended_s"].tolist() == pytest.approx([0.0, 0.03, 0.04])
    assert numbers["output_tokens"].tolist()[:2] == [7, 4]
    assert numbers["prompt_tokens"].tolist()[:2] == [
        12,
        5,
    ]  # the second counted here, with its role
    assert numbers["ttft_response_s"].tolist()[:2] == pytest.approx([0.06, 0.1])
    assert numbers["e2e_response_s"].tolist()[:2] == pytest.approx([0.06, 0.22])
    assert numbers["stall_s"][1] == pytest.approx(0.1)
    assert run.summary["warnings"] == [f"genai-perf: {FROM_SENDING}"]


def test_the_torn_last_line_of_a_killed_test_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "profile_export.jsonl"
    line = orjson.dumps(aiperf_line(1.0, 50.0))
    path.write_bytes(line + b"\n" + line[:80])
    assert load_result(path).requests == 1
    path.write_bytes(line[:80] + b"\n" + line)
    with pytest.raises(InputError, match=r"profile_export.jsonl:1: not JSON"):
        load_result(path)


def test_a_result_with_long_prompts_is_recognised(tmp_path: Path) -> None:
    """Its first request fills the head of the file, where `info` is not seen."""
    path = tmp_path / "per_request_lifecycle_metrics.json"
    body = orjson.dumps({"prompt": "word " * 20_000}).decode()
    path.write_bytes(orjson.dumps([inference_perf(**OLD_INFO) | {"request": body}]))
    assert load_result(path).requests == 1


TOOLS = {
    "vllm.json": VLLM,
    "benchmarks.json": guidellm(120.0),
    "profile_export.jsonl": aiperf_line(1.0, 255.9),
    "per_request_lifecycle_metrics.json": [inference_perf(**OLD_INFO)],
    "profile_export.json": {"experiments": [{"requests": [genai_perf((60, chunk(content="I")))]}]},
}


def test_compare_takes_a_file_of_each_tool(tmp_path: Path) -> None:
    for name, content in TOOLS.items():
        (tmp_path / name).write_bytes(orjson.dumps(content))
    assert "TTFT" in printed("compare", *(tmp_path / name for name in TOOLS))


def test_two_tools_are_compared(tmp_path: Path) -> None:
    a, b = tmp_path / "vllm.json", tmp_path / "profile_export.jsonl"
    a.write_bytes(orjson.dumps(VLLM))
    b.write_bytes(b"\n".join(orjson.dumps(aiperf_line(at, 100.0 + at)) for at in range(40)))
    told = orjson.loads(printed("compare", a, b, "--slo", "ttft=150ms", "--json"))
    assert any(FROM_SENDING in warning for warning in told["warnings"])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{}", "a file; give a run folder, or a result of"),
        (b"[1,2", "a file; give a run folder, or a result of"),
        (b'{"request_throughput": 1, "total_input_tokens": 1}', "--save-detailed"),
        (b'{"input_lens": [1', "not JSON"),
        (orjson.dumps({**VLLM, "input_lens": [1]}), "lists of different lengths"),
        (orjson.dumps({**VLLM, "ttfts": [0.1, None, 0.0]}), "ttft_s: no such column"),
        (orjson.dumps({**VLLM, "itls": [["x"], [], []], "latencies": []}), "not of this format"),
        (b'{"benchmarks": [{"requests": {}}]}', "holds no requests, only totals of guidellm"),
        (b'{"experiments": []}', "holds no requests; check that it is the file with every request"),
        (b'{"experiments": [{"requests": []}]}', "holds no requests"),
        (b'[{"start_time": 1, "end_time": "?", "info": {}}]', "end_time: '.' is not a number"),
        (b'{"timestamp": 0, "input_length": 9, "output_length": 1}', "a file of mooncake has no"),
        (b'{"id": "a", "arrival_s": 0.0, "input_tokens": 3}', "a trace or a capture has no"),
        (orjson.dumps({"load_summary": {}}), "only totals of inference-perf; import its per_req"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says):
        load_result(path)
