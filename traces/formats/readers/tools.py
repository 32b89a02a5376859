"""Read the results of load generators: the requests that they sent, and the times of the answers.

Sources: `vllm bench serve --save-detailed`, guidellm (benchmarks.json, before and after 0.4),
aiperf (profile_export.jsonl), genai-perf (profile_export.json) and inference-perf
(per_request_lifecycle_metrics.json). A trace takes the requests, a run takes what `served` reads.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import orjson

from forebay.traces.formats.body import answer_tokens, build, of_body, prompt_tokens
from forebay.traces.formats.head import Head
from forebay.traces.formats.table import (
    COMPLETION,
    DEFAULTS,
    MeasuredRequest,
    ReadOptions,
    row_format,
)
from forebay.traces.formats.totals import NO_TIMES, is_sglang, only_totals, tool_of
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.rows import UNITS, NotARequestError, RowError, SourceRow, decoded

VLLM_LISTS = {"in": "input_lens", "out": "output_lens", "start": "start_times", "error": "errors",
              "ttft_s": "ttfts", "gaps_s": "itls", "e2e_s": "latencies",
              "wait_s": "queue_times"}  # fmt: skip
# Lengths of prompt and answer. The server's counts come before the tool's own.
GUIDELLM_PROMPT = ("input_metrics.text_tokens", "prompt_tokens", "input_metrics.total_tokens")
GUIDELLM_ANSWER = ("output_metrics.text_tokens", "output_tokens", "output_metrics.total_tokens")
AIPERF_PROMPT = ("metrics.usage_prompt_tokens.value", "metrics.input_sequence_length.value",
                 "metrics.error_isl.value")  # fmt: skip
AIPERF_ANSWER = ("metrics.usage_completion_tokens.value", "metrics.output_sequence_length.value",
                 "metrics.output_token_count.value")  # fmt: skip
AIPERF_START = ("metadata.request_start_ns", "metadata.timestamp_ns")  # the latter until 2025-10
UNTIMED = (
    "no start_times, so arrivals are not known; repeat the run with --save-detailed of a vLLM that "
    "writes them"
)


def _vllm_rows(document: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Turn the parallel lists of a detailed result into rows. Some versions lack some lists."""
    lists: dict[str, Any] = {key: document.get(name) for key, name in VLLM_LISTS.items()}
    if not isinstance(lists["in"], list) or not isinstance(lists["out"], list):
        tool = tool_of(Head("", frozenset(document), document))
        remedy = "repeat the run with --save-result --save-detailed"
        raise RowError(only_totals(*(tool or ("vllm bench serve", remedy))), fatal=True)
    lists = {key: values for key, values in lists.items() if values}
    lengths = {len(values) for values in lists.values()}
    if len(lengths) > 1:
        raise RowError(f"lists of different lengths ({', '.join(map(str, sorted(lengths)))})")
    shared = {"model": document.get("model_id"), "untimed": UNTIMED}
    if is_sglang(document):
        shared["untimed"] = f"no start_times; {NO_TIMES}"
    for values in zip(*lists.values(), strict=True):
        yield shared | dict(zip(lists, values, strict=True))


def _vllm_served(row: SourceRow) -> MeasuredRequest:
    """Read one request. Its time in the queue of --max-concurrency counts, if it is logged."""
    start_s, wait_s = row.number_or(0.0, "start"), row.number_or(0.0, "wait_s")
    ttft_s = e2e_s = None
    gaps_s = row.get("gaps_s") or ()
    if not row.get("error"):
        ttft_s = row.number_of("ttft_s")
        e2e_s = row.number_or(ttft_s + sum(gaps_s), "e2e_s")
    return MeasuredRequest(
        due_s=start_s - wait_s,
        wait_s=wait_s if "wait_s" in row.values else None,
        input_tokens=row.whole("in"),
        output_tokens=row.whole("out"),
        ttft_s=ttft_s,
        e2e_s=e2e_s,
        stall_s=max(gaps_s, default=None),
    )


@row_format(
    name="vllm-bench",
    what="results of `vllm bench serve --save-result --save-detailed`",
    keeps="model, failures",
    recognise=lambda head: head.has("input_lens"),
    unpack=_vllm_rows,
    served=_vllm_served,
    order=COMPLETION,
)
def vllm_bench(row: SourceRow, options: ReadOptions) -> TraceRequest:
    if row.get("start") is None:
        raise RowError(str(row.get("untimed")), fatal=True)
    if row.facts.memory.setdefault("document", row.number) != row.number:
        raise RowError(
            "a second result (--append-result), whose times would overlap the first one's; "
            "FILE#1, FILE#2 and so on choose one",
            fatal=True,
        )
    return TraceRequest(
        id=f"vllm-bench-{next(row.facts.places) + 1}",
        arrival_s=row.number_of("start"),
        input_tokens=row.whole("in", least=1),
        output_tokens=row.whole("out"),
        model=row.text("model"),
        status=500 if row.get("error") else None,
    )


def _guidellm_rows(document: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """List the requests of all benchmarks, with their outcome."""
    benchmarks = document.get("benchmarks")
    if not isinstance(benchmarks, list):
        raise RowError("benchmarks: not a list")
    groups = [each.get("requests") if isinstance(each, dict) else None for each in benchmarks]
    if not any(isinstance(group, dict) and any(group.values()) for group in groups):
        remedy = "write benchmarks.json with all requests"
        raise RowError(only_totals("guidellm", remedy), fatal=True)
    for number, group in enumerate(groups):
        for outcome in ("successful", "incomplete", "errored"):
            for request in (group or {}).get(outcome) or ():
                yield {**request, "outcome": outcome, "result": number}


def _guidellm_served(row: SourceRow) -> MeasuredRequest:
    sent_s = row.number_or(0.0, "request_start_time", "start_time", "info.timings.request_start")
    due_s = row.number_or(None, "info.timings.targeted_start")  # not in files of old versions
    done = row.get("outcome") == "successful"
    ttft_ms = row.number_or(None, "time_to_first_token_ms") if done else None
    return MeasuredRequest(
        due_s=sent_s if due_s is None else due_s,
        wait_s=None if due_s is None else max(0.0, sent_s - due_s),
        input_tokens=row.whole_or(0, *GUIDELLM_PROMPT),
        output_tokens=row.whole_or(None, *GUIDELLM_ANSWER),
        ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
        e2e_s=row.number_or(None, "request_latency") if done else None,
    )


@row_format(
    name="guidellm",
    what="`benchmarks.json` of guidellm",
    keeps="prompts, parameters, failures",
    recognise=lambda head: head.has("benchmarks"),
    unpack=_guidellm_rows,
    served=_guidellm_served,
    order=COMPLETION,
    own_ids=True,
)
def guidellm(row: SourceRow, options: ReadOptions) -> TraceRequest:
    """Prefer the intended start to the real start: a late client must not change the arrivals."""
    args = row.object("request_args")
    fields = of_body(args.get("body") or args, options)
    if not fields.get("messages") and not fields.get("text"):
        fields["text"] = row.get("prompt")
    fields["status"] = 500 if row.get("outcome") == "errored" else None
    return build(
        row,
        fields,
        options,
        name=row.text("request_id", "info.request_id") or f"guidellm-{row.number}",
        arrival_s=row.moment(
            "info.timings.targeted_start", "scheduler_info.targeted_start_time",
            "info.timings.request_start", "start_time", "request_start_time",
        ),
        input_tokens=row.whole_or(None, *GUIDELLM_PROMPT),
        output_tokens=row.whole_or(0, *GUIDELLM_ANSWER),
    )  # fmt: skip


def _aiperf_served(row: SourceRow) -> MeasuredRequest:
    _only_measured(row)
    metrics = row.object("metrics")
    gaps_s = _seconds(metrics.get("inter_chunk_latency"))
    failed = row.get("error") is not None
    return MeasuredRequest(
        due_s=row.number_of(*AIPERF_START) / 1e9,
        wait_s=None,
        input_tokens=row.whole_or(0, *AIPERF_PROMPT),
        output_tokens=row.whole_or(None, *AIPERF_ANSWER),
        ttft_s=None if failed else _seconds(metrics.get("time_to_first_token")),
        e2e_s=None if failed else _seconds(metrics["request_latency"]),
        stall_s=max(gaps_s, default=None) if isinstance(gaps_s, list) else gaps_s,
    )


def _seconds(metric: dict[str, Any] | None) -> Any:
    """Return the value or values of a metric, times in seconds, or None without the metric."""
    if metric is None:
        return None
    value, scale = metric["value"], UNITS.get(metric.get("unit", ""), 1.0)
    return [item * scale for item in value] if isinstance(value, list) else value * scale


def _only_measured(row: SourceRow) -> None:
    if row.get("metadata.benchmark_phase", "metadata.credit_phase") not in (None, "profiling"):
        raise NotARequestError("warm-up requests")


@row_format(
    name="aiperf",
    what="`profile_export.jsonl` of aiperf",
    keeps="sessions, parents, status",
    recognise=lambda head: head.has("metadata", "metrics"),
    served=_aiperf_served,
    order=COMPLETION,
    own_ids=True,
)
def aiperf(row: SourceRow, options: ReadOptions) -> TraceRequest:
    _only_measured(row)
    # Turns of a conversation follow one another.
    session = row.text("metadata.x_correlation_id", "metadata.conversation_id")
    turn = row.whole_or(0, "metadata.turn_index")
    name = row.text("metadata.x_request_id") or f"aiperf-{row.number}"
    before = row.turn_before(session, name)
    code = row.get("error.code")
    return TraceRequest(
        id=name,
        arrival_s=row.moment(*AIPERF_START, unit="ns"),
        input_tokens=row.whole(*AIPERF_PROMPT, least=1),
        output_tokens=row.whole_or(0, *AIPERF_ANSWER),
        session=session if turn or row.get("metadata.conversation_id") else None,
        parent=before if turn else None,
        status=code if type(code) is int and 100 <= code < 600 else None,
    )


def _genai_rows(document: dict[str, Any]) -> Iterable[dict[str, Any]]:
    experiments = document.get("experiments")
    if not isinstance(experiments, list):
        raise RowError("experiments: not a list")
    for number, experiment in enumerate(experiments):
        for request in experiment.get("requests") or ():
            yield {**request, "result": number} if isinstance(request, dict) else request


def _genai_served(row: SourceRow) -> MeasuredRequest:
    """Read one request, whose answer is stored event by event, as the server sent it.

    Events without text do not count: the first event of a chat has a role only. An answer without
    any text failed.
    """
    body = decoded(row.required("request_inputs.payload"))
    usage: dict[str, Any] = {}
    times_s, tokens = [], 0
    events = zip(row.values["response_timestamps"], row.values["response_outputs"], strict=True)
    for at_ns, event in events:
        texts, counted = _texts(event.get("response") or "")
        usage = counted or usage
        tokens += texts
        if texts:
            times_s.append(at_ns / 1e9)
    sent_s = row.number_of("timestamp") / 1e9
    logged = row.with_values(usage)
    prompt = logged.whole_or(None, "prompt_tokens")
    if prompt is None:
        prompt = prompt_tokens(of_body(body, DEFAULTS), DEFAULTS)
    return MeasuredRequest(
        due_s=sent_s,
        wait_s=None,
        input_tokens=prompt or 0,
        output_tokens=logged.whole_or(tokens, "completion_tokens"),
        ttft_s=times_s[0] - sent_s if times_s and body.get("stream") else None,
        e2e_s=times_s[-1] - sent_s if times_s else None,
        stall_s=_longest_gap(times_s),
    )


def _texts(response: str) -> tuple[int, dict[str, Any]]:
    """Count the events with text that arrived at one time. Return their usage too, if any."""
    count = 0
    usage: dict[str, Any] = {}
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


@row_format(
    name="genai-perf",
    what="`profile_export.json` of genai-perf and perf_analyzer",
    keeps="messages, tools, model, parameters",
    recognise=lambda head: head.has("experiments"),
    unpack=_genai_rows,
    served=_genai_served,
    order=COMPLETION,
)
def genai_perf(row: SourceRow, options: ReadOptions) -> TraceRequest:
    fields = of_body(row.object("request_inputs.payload"), options)
    events = row.get("response_timestamps") or ()
    return build(
        row,
        fields,
        options,
        name=f"genai-perf-{next(row.facts.places) + 1}",
        arrival_s=row.moment("timestamp", unit="ns"),
        # The file has no counts. Its streams have one token an event.
        output_tokens=fields.get("output_tokens") or len(events),
    )


def _inference_perf_served(row: SourceRow) -> MeasuredRequest:
    """Read one request. Versions before multimodal requests have all fields in `info` itself."""
    info = "info.response_metrics" if row.get("info.response_metrics") else "info"
    times_s = row.get(f"{info}.output_token_times") or row.get(f"{info}.chunk_times") or []
    sent_s, failed = row.number_of("start_time"), row.get("error") is not None
    due_s = row.number_or(sent_s, "scheduled_time")
    return MeasuredRequest(
        due_s=due_s,
        wait_s=max(0.0, sent_s - due_s) if "scheduled_time" in row.values else None,
        input_tokens=row.whole_or(0, f"{info}.server_usage.prompt_tokens", "info.input_tokens"),
        output_tokens=row.whole_or(
            None, f"{info}.server_usage.completion_tokens", f"{info}.output_tokens"
        ),
        ttft_s=times_s[0] - sent_s if times_s and not failed else None,
        e2e_s=None if failed else row.number_of("end_time") - sent_s,
        stall_s=_longest_gap(times_s),
    )


def _has_inference_perf(head: Head) -> bool:
    """A long prompt, which is text, may fill the head: `info` comes after it and is not seen."""
    cut = not head.first and head.has("request") and not head.has("messages")
    return head.has("start_time", "end_time") and (head.has("info") or cut)


@row_format(
    name="inference-perf",
    what="`per_request_lifecycle_metrics.json` of inference-perf",
    keeps="prompts, parameters, failures",
    recognise=_has_inference_perf,
    served=_inference_perf_served,
    order=COMPLETION,
)
def inference_perf(row: SourceRow, options: ReadOptions) -> TraceRequest:
    body = decoded(row.get("request"))
    fields = of_body(body, options) if isinstance(body, dict) else {}
    fields["status"] = 500 if row.get("error") else None
    counted = row.whole_or(None, "info.output_tokens")
    return build(
        row,
        fields,
        options,
        name=f"inference-perf-{row.number}",
        arrival_s=row.moment("scheduled_time", "start_time"),
        input_tokens=row.whole_or(None, "info.input_tokens"),
        output_tokens=answer_tokens(row.get("response"), options, counted),
    )
