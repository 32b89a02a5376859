"""Read logs of LLM servers: vLLM, Dynamo's request traces, and Forebay's JSON log."""

import ast
import re
from datetime import datetime
from typing import Any

from forebay.traces.formats.body import build, of_body
from forebay.traces.formats.table import COMPLETION, ReadOptions, row_format
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.containers import json_value, text_rows
from forebay.traces.reading.jsonl import block_ids
from forebay.traces.rows import NotARequestError, RowError, SourceRow, shown

VLLM = re.compile(
    r"(?P<month>\d\d)-(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d)(?P<rest>.*?) Received request "
    r"(?P<id>[^:]+): prompt: (?P<prompt>'.*'|\".*\"|None), (?:params|params_list|sampling_params): "
    r"(?P<params>.*), prompt_token_ids: (?P<ids>\[[0-9, ]*\]|None)"
)
VLLM_LINE = re.compile(r"(?:INFO|DEBUG|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d")
# vLLM's log has no year, and only differences of times matter.
FIRST_YEAR = 2000  # a leap year


@row_format(
    name="dynamo",
    what="Dynamo request traces (`dynamo.request.trace.v1`), JSONL or JSONL.GZ",
    keeps="blocks, sessions, parents, sub-agents, think times, model",
    recognise=lambda head: (
        "dynamo.request.trace" in str(head.first.get("schema", head.first.get("event", "")))
    ),
    order=COMPLETION,
    own_ids=True,
)
def dynamo(row: SourceRow, options: ReadOptions) -> TraceRequest:
    """Read `request_end` records. Think times include the tools between two turns."""
    last: dict[str, tuple[str, float]] = row.facts.memory
    row = row.inside("event")  # the envelope of a sink
    kind = row.text("event_type")
    if kind != "request_end":
        raise NotARequestError(f"records of type {kind}")
    arrival_s = _received(row)
    # Lengths and blocks.
    size = row.whole_or(0, "request.replay.trace_block_size") or 512
    tokens = row.whole("request.replay.input_length", "request.input_tokens", least=1)
    hashes = row.get("request.replay.input_sequence_hashes")
    # The turn before, or for the first turn of a sub-agent the turn that started it.
    session = row.text("agent_context.session_id")
    name = row.text("request.request_id") or f"dynamo-{row.number}"
    before = last.get(session or "")
    starter = None if before else last.get(row.text("agent_context.parent_session_id") or "")
    wait = before or starter
    request = TraceRequest(
        id=name,
        arrival_s=arrival_s,
        input_tokens=tokens,
        output_tokens=row.whole("request.output_tokens"),
        blocks=block_ids({"hashes": hashes}, "hashes", tokens, size) if hashes else None,
        block_tokens=size if hashes else 512,
        session=session,
        parent=before[0] if before else None,
        waits_for=(starter[0],) if starter else (),
        think_s=round(max(0.0, arrival_s - wait[1]), 6) if wait else None,
        model=row.text("request.model"),
    )
    if session:
        last[session] = name, row.moment("event_time_unix_ms", unit="ms")
    return request


def _received(row: SourceRow) -> float:
    if row.get("request.request_received_ms") is not None:
        return row.moment("request.request_received_ms", unit="ms")
    took_s = row.seconds("request.total_time_ms", unit="ms")
    return row.moment("event_time_unix_ms", unit="ms") - took_s


@row_format(
    name="forebay-log",
    what="the JSON log of Forebay's proxy (its capture is a trace already)",
    keeps="tenant, class, status",
    recognise=lambda head: head.has("time", "level", "message"),
    order=COMPLETION,
)
def forebay_log(row: SourceRow, options: ReadOptions) -> TraceRequest:
    """Read request lines of the proxy's JSON log (`logs.sample: 1` for all requests)."""
    if row.get("event") != "request" or row.get("operation") in (None, "other"):
        raise NotARequestError("lines that are no shaped request")
    service_class = row.text("service_class")
    fields = {
        "tenant": row.text("tenant"),
        "service_class": None if service_class == "standard" else service_class,
        "status": row.whole_or(None, "status"),
    }
    failed = (fields["status"] or 200) >= 400  # type: ignore[operator]
    output = row.whole_or(0 if failed else None, "output_tokens")
    return build(
        row,
        fields,
        options,
        name=row.text("request_id") or f"log-{row.number}",
        arrival_s=row.moment("time") - row.seconds("duration_ms", unit="ms"),
        input_tokens=row.whole_or(None, "prompt_tokens") or None,
        output_tokens=output,
    )


@row_format(
    name="vllm-log",
    what="the log of `vllm serve --enable-log-requests`",
    keeps="text or blocks of token ids, parameters; output_tokens is the limit",
    recognise=lambda head: (
        VLLM_LINE.search(head.line) is not None or "Received request" in head.line
    ),
    rows=text_rows,
    own_ids=True,
)
def vllm_log(row: SourceRow, options: ReadOptions) -> TraceRequest:
    """Read `Received request` lines of `--enable-log-requests`, with times in whole seconds."""
    match = VLLM.search(str(row.get("line")))
    if match is None:
        raise NotARequestError("lines that are no received request")
    # The log has month and day, so a jump back is a new year.
    day = int(match["month"]), int(match["day"])
    year, last = row.facts.memory.get("day", (FIRST_YEAR, day))
    if day < last and last[0] - day[0] > 6:
        year += 1  # the log goes on after New Year
    row.facts.memory["day"] = year, day
    # The prompt: token ids, or text, which has more.
    values: dict[str, Any] = _params(match["params"])
    input_tokens = None
    if match["ids"] not in ("None", "[]"):
        ids = of_body({"prompt": json_value(match["ids"].encode())}, options)
        input_tokens = ids["input_tokens"]
        values |= ids
    if match["prompt"] not in ("None", "''"):
        try:
            values["text"] = ast.literal_eval(match["prompt"])
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise RowError(f"prompt: {shown(match['prompt'])} is cut short") from error
        values.pop("blocks", None)
        values.pop("block_tokens", None)
    when = datetime.fromisoformat(f"{year}-{day[0]:02}-{day[1]:02} {match['time']}+00:00")
    return build(
        row,
        values,
        options,
        name=match["id"],
        arrival_s=when.timestamp(),
        input_tokens=input_tokens,
    )


def _params(text: str) -> dict[str, Any]:
    """Read `SamplingParams(n=1, temperature=0.7, stop=['x'], ..., max_tokens=128, ...)`."""
    fields: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for key in ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens"):
        match = re.search(rf"\b{key}=(\[[^\]]*\]|[^,()]+)", text)
        if match is None:
            continue
        try:
            value = ast.literal_eval(match[1])
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue  # cut short by --max-log-len, or the repr of an object
        if key == "max_tokens":
            fields["output_tokens"] = value
        elif value not in (None, []):
            parameters[key] = value
    return {**fields, "parameters": parameters} if parameters else fields
