"""Read the results of load generators as traces of the requests that they sent.

Sources: `vllm bench serve --save-detailed`, guidellm (benchmarks.json, before and after 0.4),
aiperf (profile_export.jsonl), genai-perf (profile_export.json) and inference-perf
(per_request_lifecycle_metrics.json).
"""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from forebay.traces.formats.body import answer_tokens, build, of_body
from forebay.traces.formats.head import Head
from forebay.traces.formats.table import COMPLETION, ReadOptions, TraceFormat
from forebay.traces.formats.totals import NO_TIMES, is_sglang, only_totals, tool_of
from forebay.traces.reading.reader import ParseRow
from forebay.traces.rows import NotARequestError, RowError, SourceRow, decoded
from forebay.traces.schema import TraceRequest


def _vllm_rows(document: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Turn the parallel lists of a detailed result into rows."""
    inputs, outputs = document.get("input_lens"), document.get("output_lens")
    starts = document.get("start_times")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        tool = tool_of(Head("", frozenset(document), document))
        remedy = "repeat the run with --save-result --save-detailed"
        raise RowError(only_totals(*(tool or ("vllm bench serve", remedy))), fatal=True)
    if not isinstance(starts, list):
        if is_sglang(document):
            raise RowError(f"no start_times; {NO_TIMES}", fatal=True)
        raise RowError(
            "no start_times, so arrivals are not known; repeat the run with --save-detailed of a "
            "vLLM that writes them"
        )
    errors = document.get("errors") or [""] * len(inputs)
    lengths = {len(inputs), len(outputs), len(starts), len(errors)}
    if len(lengths) != 1:
        raise RowError(f"lists of different lengths ({', '.join(map(str, sorted(lengths)))})")
    model = document.get("model_id")
    for values in zip(starts, inputs, outputs, errors, strict=True):
        start, tokens, output, error = values
        yield {"start": start, "in": tokens, "out": output, "error": error, "model": model}


def _vllm(options: ReadOptions) -> ParseRow:
    numbers: Iterator[int] = count(1)

    def parse(row: SourceRow) -> TraceRequest:
        return TraceRequest(
            id=f"vllm-bench-{next(numbers)}",
            arrival_s=row.number_of("start"),
            input_tokens=row.whole("in", least=1),
            output_tokens=row.whole("out"),
            model=row.text("model"),
            status=500 if row.get("error") else None,
        )

    return parse


def _guidellm_rows(document: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """List the requests of all benchmarks, with their outcome."""
    benchmarks = document.get("benchmarks")
    if not isinstance(benchmarks, list):
        raise RowError("benchmarks: not a list")
    for benchmark in benchmarks:
        groups = benchmark.get("requests") if isinstance(benchmark, dict) else None
        if not isinstance(groups, dict) or not any(groups.values()):
            remedy = "write benchmarks.json with all requests"
            raise RowError(only_totals("guidellm", remedy), fatal=True)
        for outcome in ("successful", "incomplete", "errored"):
            for request in groups.get(outcome) or ():
                yield {**request, "outcome": outcome}


def _guidellm(options: ReadOptions) -> ParseRow:
    """Prefer the intended start to the real start: a late client must not change the arrivals."""

    def parse(row: SourceRow) -> TraceRequest:
        args = row.object("request_args")
        fields = of_body(args.get("body") or args, options)
        if not fields.get("messages") and not fields.get("text"):
            fields["text"] = row.text("prompt")
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
            input_tokens=row.whole_or(
                None, "input_metrics.text_tokens", "prompt_tokens", "input_metrics.total_tokens"
            ),
            output_tokens=row.whole_or(
                None, "output_metrics.text_tokens", "output_tokens", "output_metrics.total_tokens"
            ) or 0,
        )  # fmt: skip

    return parse


def _aiperf(options: ReadOptions) -> ParseRow:
    last: dict[str, str] = {}

    def parse(row: SourceRow) -> TraceRequest:
        if row.get("metadata.benchmark_phase") == "warmup":
            raise NotARequestError("warm-up requests")
        # Turns of a conversation follow one another.
        session = row.text("metadata.x_correlation_id", "metadata.conversation_id")
        turn = row.whole_or(0, "metadata.turn_index") or 0
        name = row.text("metadata.x_request_id") or f"aiperf-{row.number}"
        parent = last.get(session) if session and turn else None
        if session:
            last[session] = name
        code = row.get("error.code")
        return TraceRequest(
            id=name,
            arrival_s=row.moment("metadata.request_start_ns", unit="ns"),
            input_tokens=row.whole(
                "metrics.usage_prompt_tokens.value", "metrics.input_sequence_length.value",
                "metrics.error_isl.value", least=1,
            ),
            output_tokens=row.whole_or(
                0, "metrics.usage_completion_tokens.value", "metrics.output_sequence_length.value",
                "metrics.output_token_count.value",
            ) or 0,
            session=session if turn or row.get("metadata.conversation_id") else None,
            parent=parent,
            status=code if type(code) is int and 100 <= code < 600 else None,
        )  # fmt: skip

    return parse


def _genai_rows(document: dict[str, Any]) -> Iterable[dict[str, Any]]:
    experiments = document.get("experiments")
    if not isinstance(experiments, list):
        raise RowError("experiments: not a list")
    for experiment in experiments:
        yield from experiment.get("requests") or ()


def _genai(options: ReadOptions) -> ParseRow:
    numbers: Iterator[int] = count(1)

    def parse(row: SourceRow) -> TraceRequest:
        fields = of_body(row.object("request_inputs.payload"), options)
        events = row.get("response_timestamps") or ()
        return build(
            row,
            fields,
            options,
            name=f"genai-perf-{next(numbers)}",
            arrival_s=row.moment("timestamp", unit="ns"),
            input_tokens=None,
            # The file has no counts. Its streams have one token an event.
            output_tokens=fields.get("output_tokens") or len(events),
        )

    return parse


def _inference_perf(options: ReadOptions) -> ParseRow:
    def parse(row: SourceRow) -> TraceRequest:
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

    return parse


FORMATS = (
    TraceFormat(
        name="vllm-bench",
        what="results of `vllm bench serve --save-result --save-detailed`",
        keeps="model, failures",
        recognise=lambda head: head.has("input_lens", "output_lens"),
        parser=_vllm,
        unpack=_vllm_rows,
        order=COMPLETION,
    ),
    TraceFormat(
        name="guidellm",
        what="`benchmarks.json` of guidellm",
        keeps="prompts, parameters, failures",
        recognise=lambda head: head.has("benchmarks"),
        parser=_guidellm,
        unpack=_guidellm_rows,
        order=COMPLETION,
        own_ids=True,
    ),
    TraceFormat(
        name="aiperf",
        what="`profile_export.jsonl` of aiperf",
        keeps="sessions, parents, status",
        recognise=lambda head: head.has("metadata", "metrics"),
        parser=_aiperf,
        order=COMPLETION,
        own_ids=True,
    ),
    TraceFormat(
        name="genai-perf",
        what="`profile_export.json` of genai-perf and perf_analyzer",
        keeps="messages, tools, model, parameters",
        recognise=lambda head: head.has("experiments"),
        parser=_genai,
        unpack=_genai_rows,
        order=COMPLETION,
    ),
    TraceFormat(
        name="inference-perf",
        what="`per_request_lifecycle_metrics.json` of inference-perf",
        keeps="prompts, parameters, failures",
        recognise=lambda head: (
            head.has("start_time", "end_time", "info") and ("request" in head.columns)
        ),
        parser=_inference_perf,
        order=COMPLETION,
    ),
)
