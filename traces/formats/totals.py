"""Recognise files without requests: totals of a load test, histograms, runs. Name the right use."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from forebay.traces.formats.head import Head, head_of
from forebay.traces.ground.errors import InputError

NO_TIMES: Final = (
    "SGLang's benchmark keeps no times of requests: import the data set that it sent, or record "
    "the traffic with forebay proxy (capture)"
)
# A tool, keys of which a summary of it has all of one group, and the remedy.
TOOLS: Final = (
    (
        "inference-perf",
        ("load_summary", "successes failures"),
        "import its per_request_lifecycle_metrics.json (report: request_lifecycle: per_request)",
    ),
    (
        "aiperf",
        ("aiperf_version", "request_throughput benchmark_id"),
        "import its profile_export.jsonl (--export-level records)",
    ),
    (
        "genai-perf",
        (
            "request_throughput input_config",
            "request_latency output_sequence_length",
            "Metric avg min max",
        ),
        "import its profile_export.json",
    ),
    (
        "llm-optimizer",
        ("server_args client_args", "server_cmd client_cmd", "llm_optimizer_version"),
        "it keeps no requests: import the data set that it sent",
    ),
    (
        "SGLang's bench_serving",
        (
            "request_throughput total_output_tokens_retokenized",
            "request_throughput sharegpt_output_len",
            "request_throughput random_input_len",
            "request_throughput mean_e2e_latency_ms concurrency",
        ),
        NO_TIMES,
    ),
    (
        "vllm bench serve",
        ("request_throughput total_input_tokens",),
        "repeat the run with --save-result --save-detailed",
    ),
    (
        "guidellm",
        ("benchmarks metrics", "run_stats metrics"),
        "import its benchmarks.json with all requests",
    ),
)
HGRM: Final = re.compile(
    r'^\s*"?Value(?:\((?P<unit>ns|us|ms|s)\))?"?[\s,]+"?Percentile"?[\s,]+"?TotalCount"?'
)
"""The columns of a percentile distribution, as HdrHistogram, wrk2 and vegeta print it."""
HAPROXY: Final = re.compile(
    r"\S+ \[\d\d/\w{3}/\d{4}:[\d:.]+\] \S+ \S+/\S+ (?:[-+]?\d+/){4}[-+]?\d+ \d{3} "
)
AGGREGATES: Final = {"mean", "median", "avg", "average", "std", "stddev", "p50", "p75", "p90",
                     "p95", "p99", "p999", "throughput", "goodput", "percentile",
                     "percentiles"}  # fmt: skip


def only_totals(what: str, remedy: str) -> str:
    return f"holds no requests, only totals{f' of {what}' if what else ''}; {remedy}"


def refuse_without_requests(path: str | Path) -> None:
    """Raise InputError for totals, histograms, a run, HTML or HAProxy's log. `-` is peeked at."""
    head = head_of(path)
    tool = tool_of(head)
    if tool is not None:
        raise InputError(f"{path}: {only_totals(*tool)}")
    if head.line.startswith("<"):
        raise InputError(f"{path}: an HTML page; download the file again (is a login needed?)")
    if HAPROXY.search(head.line):
        raise InputError(
            f"{path}: a log of HAProxy, which holds no lengths of prompts; log JSON with nginx's "
            'names: {"msec":%Ts.%ms,"request":"%HM %HP","status":%ST,"request_length":%U,'
            '"body_bytes_sent":%B}'
        )
    what = "a histogram log" if head.line.startswith("#[") else ""
    what = "a percentile distribution" if HGRM.match(head.line) else what
    if (Path(path) / "run.json").is_file():
        what = "the folder of a run"
    if what:
        raise InputError(f"{path}: {what} is no trace; `forebay report` and `compare` read it")


def is_table(head: Head) -> bool:
    """Return True for the first line of a CSV file."""
    return head.line[:1] not in ("{", "[") and len(head.columns) > 1


def tool_of(head: Head) -> tuple[str, str] | None:
    """Return the tool that wrote a summary and the remedy, or None for any other file."""
    keys = head.columns | set(_keys(head.first))
    if keys & {"input_lens", "output_lens", "requests"}:
        return None
    matches = (
        (tool, remedy)
        for tool, signs, remedy in TOOLS
        if any(keys.issuperset(sign.split()) for sign in signs)
    )
    return next(matches, None)


def _keys(value: Any, levels: int = 3) -> Iterable[str]:
    if isinstance(value, dict) and levels:
        for key, inside in value.items():
            yield key
            yield from _keys(inside, levels - 1)


def is_sglang(document: dict[str, Any]) -> bool:
    """True for SGLang's detailed results, which have no times. vLLM's have the same names."""
    backend = str(document.get("backend", ""))
    marks = {"total_output_tokens_retokenized", "sharegpt_output_len", "random_input_len"}
    return backend.startswith("sglang") or bool(marks & document.keys())
