"""Read the result files of other load generators as runs, so that `compare` and `report` take them.

    vllm bench serve   the JSON of --save-result --save-detailed
    aiperf             profile_export.jsonl
    guidellm           benchmarks.json with its requests; the last benchmark in it
    inference-perf     per_request_lifecycle_metrics.json
    genai-perf         profile_export.json, of perf_analyzer too; the last experiment in it

Their times count from when a request was sent, and a request that waited for their own concurrency
limit was sent late. `vllm bench` keeps that wait, guidellm and some versions of inference-perf the
time that a request was meant for: both are added here. The others do not, and such a run says so.
Requests that were never sent are in none of these files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from forebay.analysis.runs.run import NUMBERS, WORDS, RunData, folder_name
from forebay.replay.plan.slo import default_slos, meets
from forebay.traces.buckets import DEFAULT_BUCKETS, bucket_of
from forebay.traces.errors import InputError
from forebay.traces.formats import DEFAULTS
from forebay.traces.formats.body import of_body, prompt_tokens

FROM_SENDING = "times count from when a request was sent, not from when it was due"
NO_VERDICT = "the file does not say how late requests were sent"

ForeignRow = dict[str, float | str | None]


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """A result format: its name, and the function that makes rows of a file's content."""

    name: str
    rows: Callable[[Any], list[ForeignRow]]
    from_due: bool = False


def load_foreign(path: Path, name: str | None = None) -> RunData:
    """Read one result file; raises InputError if it is damaged or of no known format."""
    content = _content(path)
    found = _format(content)
    if found is None:
        raise InputError(
            f"{path}: a file; give a run folder, or a result of `vllm bench serve`, aiperf "
            "(profile_export.jsonl), guidellm, inference-perf "
            "(per_request_lifecycle_metrics.json) or genai-perf (profile_export.json)"
        )
    try:
        rows = found.rows(content)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(f"{path}: not a whole result of {found.name} ({error!r})") from error
    if not rows:
        raise InputError(f"{path}: holds no requests; {_remedy(found.name)}")
    run = _run(path, name, found, rows)
    if found.from_due or np.any(run.numbers["sent_s"] > run.numbers["intended_s"]):
        return run
    return replace(run, summary={**run.summary, "warnings": [f"{found.name}: {FROM_SENDING}"]})


def _content(path: Path) -> Any:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        pass
    rows = []
    for number, line in enumerate(raw.splitlines(), 1):
        if line.strip():
            try:
                rows.append(orjson.loads(line))
            except orjson.JSONDecodeError as error:
                raise InputError(f"{path}:{number}: not JSON ({error})") from error
    return rows


def _format(content: Any) -> ForeignFormat | None:
    if isinstance(content, Mapping) and "benchmarks" in content:
        return ForeignFormat("guidellm", _guidellm)
    if isinstance(content, Mapping) and "request_throughput" in content:
        return ForeignFormat("vllm bench serve", _vllm, from_due="queue_times" in content)
    if isinstance(content, Mapping) and "experiments" in content:
        return ForeignFormat("genai-perf", _genai_perf)
    one = content[0] if isinstance(content, list) and content else content
    if isinstance(one, Mapping) and "metadata" in one and "metrics" in one:
        return ForeignFormat("aiperf", _aiperf)
    if isinstance(one, Mapping) and {"start_time", "end_time", "info"} <= one.keys():
        return ForeignFormat("inference-perf", _inference_perf, from_due="scheduled_time" in one)
    return None


def _remedy(name: str) -> str:
    if name == "vllm bench serve":
        return "give it --save-result --save-detailed"
    return "check that it is the file with every request"


def _vllm(content: Mapping[str, Any]) -> list[ForeignRow]:
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


def _aiperf(content: Any) -> list[ForeignRow]:
    rows = []
    for one in content if isinstance(content, list) else [content]:
        about, metrics = one["metadata"], one["metrics"]
        if about.get("benchmark_phase", "profiling") != "profiling":
            continue
        values = {name: _seconds(metric) for name, metric in metrics.items()}
        failed = one.get("error") is not None
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
    """Return the first value that is there: the server's counts come before aiperf's own."""
    return next((values[name] for name in names if values.get(name) is not None), None)


def _seconds(metric: Mapping[str, Any]) -> Any:
    """Return a metric's value, times in seconds."""
    scale = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9}.get(metric.get("unit", ""), 1.0)
    value = metric["value"]
    return [one * scale for one in value] if isinstance(value, list) else value * scale


def _guidellm(content: Mapping[str, Any]) -> list[ForeignRow]:
    requests = content["benchmarks"][-1]["requests"]
    rows = [
        _guidellm_row(one, ok=kind == "successful")
        for kind in ("successful", "errored", "incomplete")
        for one in requests.get(kind) or []
    ]
    return sorted(rows, key=lambda row: row["sent_s"] or 0.0)


def _guidellm_row(one: Mapping[str, Any], *, ok: bool) -> ForeignRow:
    ttft_ms = one.get("time_to_first_token_ms")
    sent_s = one.get("request_start_time", one.get("start_time")) or 0.0
    timings = (one.get("info") or {}).get("timings") or {}
    due_s = timings.get("targeted_start") or sent_s  # not in files of old versions
    return _row(
        due_s,
        max(0.0, sent_s - due_s),
        one.get("prompt_tokens") or 0,
        one.get("output_tokens"),
        ttft_ms / 1e3 if ok and ttft_ms is not None else None,
        one.get("request_latency") if ok else None,
        None,
    )


def _inference_perf(content: Any) -> list[ForeignRow]:
    return [
        _inference_perf_row(one) for one in (content if isinstance(content, list) else [content])
    ]


def _inference_perf_row(one: Mapping[str, Any]) -> ForeignRow:
    """Read one request; versions before multimodal requests have all fields in `info` itself."""
    info = one["info"] or {}
    answer = info.get("response_metrics") or info
    usage = answer.get("server_usage") or {}
    times = answer.get("output_token_times") or answer.get("chunk_times") or []
    sent_s, failed = one["start_time"], one.get("error") is not None
    due_s = one.get("scheduled_time", sent_s)
    return _row(
        due_s,
        max(0.0, sent_s - due_s),
        usage.get("prompt_tokens") or info.get("input_tokens") or 0,
        usage.get("completion_tokens") or answer.get("output_tokens"),
        times[0] - sent_s if times and not failed else None,
        None if failed else one["end_time"] - sent_s,
        _longest_gap(times),
    )


def _genai_perf(content: Mapping[str, Any]) -> list[ForeignRow]:
    """Read the last experiment: the load that was measured last."""
    requests = content["experiments"][-1]["requests"]
    return sorted(map(_genai_perf_row, requests), key=lambda row: row["sent_s"] or 0.0)


def _genai_perf_row(one: Mapping[str, Any]) -> ForeignRow:
    """Read one request: what came back is there event by event, as the server sent it.

    Events without text do not count: the first one of a chat has a role only. An answer without
    any text failed.
    """
    body = orjson.loads(one["request_inputs"]["payload"])
    usage: Mapping[str, Any] = {}
    times, tokens = [], 0
    for at_ns, event in zip(one["response_timestamps"], one["response_outputs"], strict=True):
        texts, counted = _texts(event.get("response") or "")
        usage = counted or usage
        tokens += texts
        if texts:
            times.append(at_ns / 1e9)
    sent_s = one["timestamp"] / 1e9
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
    """Count the events with text in what came at one time; return the usage too, if one has it."""
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
) -> ForeignRow:
    """Make a row; without `e2e_s` the request failed."""
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


def _run(path: Path, name: str | None, kind: ForeignFormat, rows: Sequence[ForeignRow]) -> RunData:
    first_s = min(float(row["intended_s"] or 0.0) for row in rows)
    for row in rows:
        for key in ("intended_s", "sent_s"):
            row[key] = float(row[key] or 0.0) - first_s
    numbers = {
        key: np.array([row.get(key) for row in rows], dtype=np.float64) for key in NUMBERS
    }  # None becomes NaN
    words = {
        key: np.array([str(row.get(key) or "") for row in rows], dtype=object) for key in WORDS
    }
    names = [bucket.name for bucket in DEFAULT_BUCKETS]
    summary = _summary(rows, names)
    info = {"made_by": kind.name, "buckets": [{"name": one} for one in names]}
    return RunData(path, name or folder_name(path), summary, info, numbers, words)


def _summary(rows: Sequence[ForeignRow], buckets: Sequence[str]) -> dict[str, Any]:
    """Judge the rows by the default targets, as a replay without --slo does."""
    slos = default_slos(buckets)
    due = [float(row["intended_s"] or 0.0) for row in rows]
    window_s = (max(due) - min(due)) * len(rows) / max(1, len(rows) - 1)
    good: dict[str, int] = {}
    total: dict[str, int] = {}
    for row in rows:
        bucket = str(row["bucket"])
        values: dict[str, Any] = {
            "ttft": row["ttft_response_s"], "e2e": row["e2e_response_s"],
            "tpot": row["tpot_s"], "stall": row["stall_s"],
        }  # fmt: skip
        total[bucket] = total.get(bucket, 0) + 1
        good[bucket] = good.get(bucket, 0) + (
            row["outcome"] == "ok" and meets(slos, bucket, values)
        )
    met = sum(good.values())
    return {
        "verdict": "unknown",
        "verdict_reason": NO_VERDICT,
        "requests": len(rows),
        "window_s": window_s,
        "duration_s": max(due) + max(float(row["e2e_response_s"] or 0.0) for row in rows),
        "attainment": met / len(rows),
        "goodput_per_s": met / window_s if window_s else None,
        "attainment_by_bucket": {name: good[name] / count for name, count in total.items()},
        "goodput_by_bucket_per_s": {
            name: good[name] / window_s if window_s else None for name in total
        },
        "slos": [str(slo) for slo in slos],
    }
