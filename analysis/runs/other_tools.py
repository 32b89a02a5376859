"""Read the result files of other load generators as runs, so that `compare` and `report` take them.

    vllm bench serve   the JSON of --save-result --save-detailed
    aiperf             profile_export.jsonl
    guidellm           benchmarks.json with its requests
    inference-perf     per_request_lifecycle_metrics.json
    genai-perf         profile_export.json, of perf_analyzer too

A file with several results is read as its last result, or as the result named in FILE#N.

Their times count from when a request was sent, and a request that waited for their own concurrency
limit was sent late. `vllm bench` keeps that wait, guidellm and some versions of inference-perf the
time that a request was meant for: both are added here. The others do not, and such a run notes it.
Requests that were never sent are in none of these files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from forebay.analysis.runs.run import RunData
from forebay.analysis.runs.sources.proxy_logs import read_json_lines
from forebay.analysis.runs.sources.rows import FileOrigin, FileRow, run_of_rows
from forebay.traces.buckets import DEFAULT_BUCKETS, bucket_of
from forebay.traces.errors import InputError
from forebay.traces.formats import DEFAULTS
from forebay.traces.formats.body import of_body, prompt_tokens

FROM_SENDING = "times count from when a request was sent, not from when it was due"

DIFFERS: dict[str, dict[str, str]] = {
    "vllm bench serve": {
        "ttft": "from sending; a wait for --max-concurrency is added where the file has it",
        "tpot": "(E2E - TTFT) / (output tokens - 1)",
        "stall": "longest gap between chunks; not the wait for the first",
    },
    "guidellm": {
        "ttft": "to the first line with content",
        "e2e": "to the end of the stream, with usage and [DONE]",
        "tpot": "(E2E - TTFT) / (output tokens - 1)",
    },
    "aiperf": {
        "ttft": "from sending",
        "e2e": "from sending",
        "tpot": "(E2E - TTFT) / (output tokens - 1)",
    },
    "genai-perf": {
        "ttft": "from sending",
        "e2e": "from sending",
        "tpot": "(E2E - TTFT) / (output tokens - 1)",
    },
    "inference-perf": {
        "e2e": "to the end of the call, with the time to tokenise the answer",
        "tpot": "(E2E - TTFT) / (output tokens - 1)",
    },
}
"""How each tool defines a figure otherwise than a run folder does, by the key of the figure."""


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """A result format: its name, and the functions that find results and make rows of one."""

    name: str
    rows: Callable[[Any], list[FileRow]]
    from_due: bool = False
    results: Callable[[Any], Sequence[Any]] | None = None  # None: a file holds one
    unix: bool = True  # times of the rows are seconds since 1970


def load_foreign(path: Path, name: str | None = None, number: int | None = None) -> RunData:
    """Read one result file, or raise InputError if it is damaged or of no known format.

    Args:
        number: place of the result in the file, from 1. None is the last result.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    return foreign_run(path, name, content_of(path, raw), number)


def foreign_run(path: Path, name: str | None, content: Any, number: int | None = None) -> RunData:
    """Make a run of the content of a result file, as `load_foreign` does."""
    file_format = _format(content)
    if file_format is None:
        if _is_trace(content):
            raise InputError(
                f"{path}: a trace or a capture has no results; `forebay replay` or `simulate` it, "
                "or read `forebay traces describe`"
            )
        raise InputError(
            f"{path}: a file; give a run folder, or a result of `vllm bench serve`, aiperf "
            "(profile_export.jsonl), guidellm, inference-perf "
            "(per_request_lifecycle_metrics.json) or genai-perf (profile_export.json), a usage "
            "ledger or JSON log of the proxy, an .hlog or an .hgrm"
        )
    # Files differ by version, so a missing key means a damaged or unknown file.
    try:
        results = file_format.results(content) if file_format.results else [content]
        chosen, notes = _chosen(path, content, results, number)
        rows = file_format.rows(chosen)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(f"{path}: not a whole result of {file_format.name} ({error!r})") from error
    if not rows:
        raise InputError(f"{path}: holds no requests; {_remedy(file_format.name)}")
    # Latencies count from sending unless the file says when a request was due.
    late = any(float(row["sent_s"] or 0.0) > float(row["intended_s"] or 0.0) for row in rows)
    if not (file_format.from_due or late):
        notes.append(FROM_SENDING)
    origin = FileOrigin(
        file_format.name, DIFFERS.get(file_format.name, {}), tuple(notes), unix=file_format.unix
    )
    return run_of_rows(path, name, origin, rows)


def _chosen(
    path: Path, content: Any, results: Sequence[Any], number: int | None
) -> tuple[Any, list[str]]:
    """Return one of the results in a file, and a note if several were appended to it."""
    if number is not None and not 1 <= number <= len(results):
        raise InputError(f"{path}#{number}: the file holds {len(results)} results, from #1")
    if len(results) == 1 or (number is None and not isinstance(content, list)):
        return results[-1], []
    at = len(results) if number is None else number
    note = f"result {at} of {len(results)} in the file; FILE#1 to FILE#{len(results)} choose one"
    return results[at - 1], [note]


def content_of(path: Path, raw: bytes) -> Any:
    """Parse a file of one JSON value, or of one a line. Raises InputError."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return list(read_json_lines(path, raw.split(b"\n")))


def _is_trace(content: Any) -> bool:
    first = content[0] if isinstance(content, list) and content else content
    return isinstance(first, Mapping) and {"arrival_s", "input_tokens"} <= first.keys()


def _format(content: Any) -> ForeignFormat | None:
    if isinstance(content, Mapping) and "benchmarks" in content:
        return ForeignFormat("guidellm", _guidellm, results=lambda of: of["benchmarks"])
    if isinstance(content, Mapping) and "experiments" in content:
        return ForeignFormat("genai-perf", _genai_perf, results=lambda of: of["experiments"])
    first = content[0] if isinstance(content, list) and content else content
    if isinstance(first, Mapping) and "request_throughput" in first:
        return ForeignFormat(
            "vllm bench serve",
            _vllm,
            from_due="queue_times" in first,
            results=lambda of: of if isinstance(of, list) else [of],
            unix=False,
        )
    if isinstance(first, Mapping) and "metadata" in first and "metrics" in first:
        return ForeignFormat("aiperf", _aiperf)
    if isinstance(first, Mapping) and {"start_time", "end_time", "info"} <= first.keys():
        return ForeignFormat("inference-perf", _inference_perf, from_due="scheduled_time" in first)
    return None


def _remedy(name: str) -> str:
    if name == "vllm bench serve":
        return "give it --save-result --save-detailed"
    return "check that it is the file with every request"


def _vllm(content: Mapping[str, Any]) -> list[FileRow]:
    sent, ttfts, itls = (content.get(key) or [] for key in ("start_times", "ttfts", "itls"))
    count = len(ttfts)
    latencies = content.get("latencies") or [
        ttft + sum(gaps) for ttft, gaps in zip(ttfts, itls, strict=True)
    ]
    queued = content.get("queue_times") or [0.0] * count
    errors = content.get("errors") or [""] * count
    rows = []
    for at in range(count):
        wait_s = queued[at] or 0.0
        rows.append(
            _row(
                (sent[at] if sent else 0.0) - wait_s,
                wait_s,
                content["input_lens"][at],
                content["output_lens"][at],
                None if errors[at] else ttfts[at],
                None if errors[at] else latencies[at],
                max(itls[at], default=None),
            )
        )
    return rows


def _aiperf(content: Any) -> list[FileRow]:
    rows = []
    for record in content if isinstance(content, list) else [content]:
        about, metrics = record["metadata"], record["metrics"]
        if about.get("benchmark_phase", "profiling") != "profiling":
            continue
        values = {name: _seconds(metric) for name, metric in metrics.items()}
        failed = record.get("error") is not None
        gaps = values.get("inter_chunk_latency")
        rows.append(
            _row(
                about["request_start_ns"] / 1e9,
                0.0,
                _first(values, "usage_prompt_tokens", "input_sequence_length", "error_isl") or 0,
                _first(values, "usage_completion_tokens", "output_sequence_length"),
                None if failed else values.get("time_to_first_token"),
                None if failed else values["request_latency"],
                max(gaps, default=None) if isinstance(gaps, list) else gaps,
            )
        )
    return rows


def _first(values: Mapping[str, Any], *names: str) -> Any:
    """Return the first value present: the server's counts come before aiperf's own."""
    return next((values[name] for name in names if values.get(name) is not None), None)


def _seconds(metric: Mapping[str, Any]) -> Any:
    """Return a metric's value, times in seconds."""
    scale = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9}.get(metric.get("unit", ""), 1.0)
    value = metric["value"]
    return [item * scale for item in value] if isinstance(value, list) else value * scale


def _guidellm(content: Mapping[str, Any]) -> list[FileRow]:
    requests = content["requests"]
    rows = [
        _guidellm_row(record, ok=kind == "successful")
        for kind in ("successful", "errored", "incomplete")
        for record in requests.get(kind) or []
    ]
    return sorted(rows, key=lambda row: row["sent_s"] or 0.0)


def _guidellm_row(record: Mapping[str, Any], *, ok: bool) -> FileRow:
    ttft_ms = record.get("time_to_first_token_ms")
    sent_s = record.get("request_start_time", record.get("start_time")) or 0.0
    timings = (record.get("info") or {}).get("timings") or {}
    due_s = timings.get("targeted_start") or sent_s  # not in files of old versions
    return _row(
        due_s,
        max(0.0, sent_s - due_s),
        record.get("prompt_tokens") or 0,
        record.get("output_tokens"),
        ttft_ms / 1e3 if ok and ttft_ms is not None else None,
        record.get("request_latency") if ok else None,
        None,
    )


def _inference_perf(content: Any) -> list[FileRow]:
    return [
        _inference_perf_row(record)
        for record in (content if isinstance(content, list) else [content])
    ]


def _inference_perf_row(record: Mapping[str, Any]) -> FileRow:
    """Read one request. Versions before multimodal requests have all fields in `info` itself."""
    info = record["info"] or {}
    answer = info.get("response_metrics") or info
    usage = answer.get("server_usage") or {}
    times = answer.get("output_token_times") or answer.get("chunk_times") or []
    sent_s, failed = record["start_time"], record.get("error") is not None
    due_s = record.get("scheduled_time", sent_s)
    return _row(
        due_s,
        max(0.0, sent_s - due_s),
        usage.get("prompt_tokens") or info.get("input_tokens") or 0,
        usage.get("completion_tokens") or answer.get("output_tokens"),
        times[0] - sent_s if times and not failed else None,
        None if failed else record["end_time"] - sent_s,
        _longest_gap(times),
    )


def _genai_perf(content: Mapping[str, Any]) -> list[FileRow]:
    """Read one experiment: the requests of one load."""
    return sorted(map(_genai_perf_row, content["requests"]), key=lambda row: row["sent_s"] or 0.0)


def _genai_perf_row(record: Mapping[str, Any]) -> FileRow:
    """Read one request, whose answer is stored event by event, as the server sent it.

    Events without text do not count: the first event of a chat has a role only. An answer without
    any text failed.
    """
    body = orjson.loads(record["request_inputs"]["payload"])
    usage: Mapping[str, Any] = {}
    times, tokens = [], 0
    for at_ns, event in zip(record["response_timestamps"], record["response_outputs"], strict=True):
        texts, counted = _texts(event.get("response") or "")
        usage = counted or usage
        tokens += texts
        if texts:
            times.append(at_ns / 1e9)
    sent_s = record["timestamp"] / 1e9
    return _row(
        sent_s,
        0.0,
        usage.get("prompt_tokens") or prompt_tokens(of_body(body, DEFAULTS), DEFAULTS) or 0,
        usage.get("completion_tokens") or tokens,
        times[0] - sent_s if times and body.get("stream") else None,
        times[-1] - sent_s if times else None,
        _longest_gap(times),
    )


def _texts(response: str) -> tuple[int, Mapping[str, Any]]:
    """Count the events with text that arrived at one time. Return their usage too, if any."""
    count = 0
    usage: Mapping[str, Any] = {}
    for line in response.splitlines():
        data = line.removeprefix("data:").strip()
        if not data.startswith("{"):
            continue  # blank, [DONE], or the name of an event
        event = orjson.loads(data)
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            part = choice.get("delta") or choice.get("message") or choice
            thought = part.get("reasoning_content") or part.get("reasoning")
            count += bool(part.get("content") or part.get("text") or thought)
    return count, usage


def _longest_gap(times_s: Sequence[float]) -> float | None:
    return max((after - before for before, after in pairwise(times_s)), default=None)


def _row(
    due_s: float,
    wait_s: float,
    prompt: float,
    output: float | None,
    ttft_s: float | None,
    e2e_s: float | None,
    stall_s: float | None,
) -> FileRow:
    """Make a row. Without `e2e_s` the request failed."""
    ok = e2e_s is not None
    tpot_s = None
    if e2e_s is not None and ttft_s is not None and output is not None and output > 1:
        tpot_s = (e2e_s - ttft_s) / (output - 1)
    return {
        "bucket": bucket_of(int(prompt), DEFAULT_BUCKETS) or "other",
        "outcome": "ok" if ok else "failed",
        "reason": None if ok else "unknown",
        "input_tokens": prompt,
        "prompt_tokens": prompt if ok else None,
        "output_tokens": output if ok else None,
        "intended_s": due_s,
        "sent_s": due_s + wait_s,
        "ttft_service_s": ttft_s,
        "ttft_response_s": None if ttft_s is None else ttft_s + wait_s,
        "e2e_response_s": None if e2e_s is None else e2e_s + wait_s,
        "tpot_s": tpot_s,
        "stall_s": stall_s if ok else None,
    }
