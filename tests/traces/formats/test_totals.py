"""Totals and rates are never taken for requests; the remedy fits the tool that wrote the file."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import refusal, remarks

from forebay.traces.formats import open_trace
from forebay.traces.formats.guess import guess
from forebay.traces.ground.errors import InputError

VLLM = {"date": "20261126-081500", "endpoint_type": "openai-chat", "model_id": "m",
        "tokenizer_id": "m", "num_prompts": 100, "request_rate": 4.0, "max_concurrency": None,
        "duration": 25.5, "completed": 100, "total_input_tokens": 1000,
        "total_output_tokens": 500, "request_throughput": 3.9, "output_throughput": 19.6,
        "total_token_throughput": 58.8, "mean_ttft_ms": 30.5, "p99_ttft_ms": 80.1}  # fmt: skip
SGLANG = {"tag": None, "backend": "sglang", "dataset_name": "random", "request_rate": 4.0,
          "max_concurrency": None, "sharegpt_output_len": None, "random_input_len": 1024,
          "random_output_len": 128, "duration": 25.5, "completed": 100,
          "total_input_tokens": 1000, "total_output_tokens": 500,
          "total_output_tokens_retokenized": 499, "request_throughput": 3.9,
          "mean_e2e_latency_ms": 120.0, "mean_ttft_ms": 30.5, "concurrency": 1.4}  # fmt: skip
STAGE = {
    "load_summary": {"count": 100, "send_duration": 25.1, "requested_rate": 4.0,
                     "achieved_rate": 3.98, "schedule_delay": {"mean": 0.001, "p99": 0.01}},
    "successes": {"count": 100, "latency": {"request_latency": {"mean": 1.5, "p90": 2.0}},
                  "prompt_len": {"mean": 100}, "output_len": {"mean": 50}},
    "failures": {"count": 0},
}  # fmt: skip
STATISTIC = {"unit": "requests/sec", "avg": 3.9, "min": 1.0, "max": 9.0, "p99": 8.0}
GUIDELLM = {
    "metadata": {},
    "benchmarks": [
        {
            "type_": "b",
            "metrics": {"requests_per_second": {"successful": {"mean": 3.9}}},
            "requests": {"successful": [], "errored": []},
        }
    ],
}
SUMMARIES: dict[str, tuple[Any, str]] = {
    "vllm bench serve": (VLLM, "of vllm bench serve; repeat the run with --save-result --save-det"),
    "SGLang": (SGLANG, "of SGLang's bench_serving; SGLang's benchmark keeps no times of requests"),
    "llm-optimizer": (
        {"config": {"server_args": {"tp": 1}, "client_args": {"max_concurrency": 8}},
         "results": VLLM},
        "of llm-optimizer; it keeps no requests: import the data set",
    ),
    "inference-perf": (STAGE, "of inference-perf; import its per_request_lifecycle_metrics.json"),
    "guidellm": (GUIDELLM, "of guidellm; write benchmarks.json with all requests"),
    "genai-perf": (
        {"request_throughput": STATISTIC, "request_latency": STATISTIC, "input_config": {"m": 1}},
        "of genai-perf; import its profile_export.json",
    ),
    "aiperf": (
        {"aiperf_version": "0.13", "request_throughput": STATISTIC, "start_time": "2026-11-26"},
        "of aiperf; import its profile_export.jsonl",
    ),
    "a tool that nobody knows": (
        {"when": "2026-11-26T08:00:00", "mean_latency": 3, "p99_latency": 4, "mean_in_tokens": 9},
        "only totals; give the file of the same run that has a row for each request",
    ),
}  # fmt: skip


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", SUMMARIES)
def test_a_summary_is_refused_with_a_remedy_of_its_tool(
    name: str, indent: int | None, tmp_path: Path
) -> None:
    content, remedy = SUMMARIES[name]
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(content, indent=indent) + "\n")
    said = refusal("traces", "import", "auto", path, "-o", tmp_path / "t")
    assert "holds no requests, only totals" in said
    assert remedy in said
    if remedy.startswith("of"):
        with pytest.raises(InputError, match="holds no requests, only totals"):
            list(open_trace(path))


def test_a_csv_of_metrics_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("Metric,avg,min,max,p99\nRequest Latency (ms),5,1,9,8\n")
    with pytest.raises(InputError, match=r"only totals of genai-perf"):
        guess(tmp_path / "x.csv")


def test_results_that_are_no_trace_name_the_command(tmp_path: Path) -> None:
    (tmp_path / "latency.hlog").write_text("#[Histogram log format version 1.3]\n")
    (tmp_path / "run.json").write_text("{}")
    for path, what in ((tmp_path / "latency.hlog", "a histogram log"), (tmp_path, "the folder of")):
        with pytest.raises(InputError, match=f"{what}.* is no trace; `forebay report` and"):
            list(open_trace(path))


def test_sglangs_details_get_sglangs_remedy(tmp_path: Path) -> None:
    details: dict[str, Any] = {
        **SGLANG,
        "input_lens": [5],
        "output_lens": [5],
        "ttfts": [0.1],
        "itls": [[]],
    }
    (tmp_path / "x.jsonl").write_text(json.dumps(details) + "\n")
    with pytest.raises(InputError, match=r"no start_times; SGLang's benchmark keeps no times"):
        list(open_trace(tmp_path / "x.jsonl"))


@pytest.mark.parametrize(
    "column",
    ["total_input_tokens", "mean_prompt_tokens", "prompt_tokens_per_second", "avg_input_len",
     "input_token_rate", "p99_input_tokens", "input_throughput", "max_prompt_tokens",
     "sum_prompt_tokens"],
)  # fmt: skip
def test_a_guess_takes_no_total_for_a_length(column: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(f"ts,{column},output_tokens\n0,5,5\n1,6,6\n")
    with pytest.raises(InputError, match="no prompt length"):
        guess(tmp_path / "x.csv")


@pytest.mark.parametrize(
    "column", ["requested_rate", "request_rate", "start_count", "requests_at_mean", "time_total"]
)
def test_a_guess_takes_no_rate_for_a_time(column: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(f"{column},prompt_tokens,output_tokens\n0,5,5\n1,6,6\n")
    with pytest.raises(InputError, match="no time"):
        guess(tmp_path / "x.csv")


def test_a_guess_shows_one_whole_row(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("ts,prompt_tokens,output_tokens,team\n3,5,7,acme\n4,6,8,b\n")
    said = remarks("traces", "import", "auto", tmp_path / "x.csv", "-o", tmp_path / "t")
    assert '"arrival_s":0.0,"input_tokens":5,"output_tokens":7,"tenant":"acme"' in said
