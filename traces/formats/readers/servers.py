"""Read logs of servers: vLLM, nginx, Envoy, Dynamo's request traces, and Forebay's JSON log."""

import ast
import re
from datetime import datetime
from typing import Any

import orjson

from forebay.traces.formats.body import build, of_body
from forebay.traces.formats.table import COMPLETION, ReadOptions, row_format
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.containers import json_value, text_rows
from forebay.traces.reading.jsonl import block_ids
from forebay.traces.rows import NotARequestError, RowError, SourceRow, shown

BYTES_PER_TOKEN = 4
EVENT_BYTES = 230  # one event, which is one token, of vLLM's chat endpoint; the model's name counts
SHAPED = re.compile(r"/(v1/)?(chat/completions|completions|responses|messages|generate)$")
VLLM = re.compile(
    r"(?P<month>\d\d)-(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d)(?P<rest>.*?) Received request "
    r"(?P<id>[^:]+): prompt: (?P<prompt>'.*'|\".*\"|None), (?:params|params_list|sampling_params): "
    r"(?P<params>.*), prompt_token_ids: (?P<ids>\[[0-9, ]*\]|None)"
)
VLLM_LINE = re.compile(r"(?:INFO|DEBUG|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d")
# vLLM's log has no year, and only differences of times matter.
FIRST_YEAR = 2000  # a leap year
NGINX = re.compile(
    r"(?P<client>\S+) \S+ (?P<user>\S+) \[(?P<time>[^\]]+)\] "
    r'"(?P<request>(?:[^"\\]|\\.)*)"'
    r" (?P<status>\d{3}) (?P<sent>\d+|-)(?P<rest>.*)"
)
REQUEST = re.compile(r"(?P<method>[A-Z]+) (?P<path>\S+)")
ENVOY = re.compile(
    r'\[(?P<time>[0-9TZ:.+-]+)\] "(?P<method>[A-Z]+) (?P<path>\S+)[^"]*" (?P<status>\d+) \S+ '
    r'(?:\S+ \S+ "[^"]*" )?(?P<received>\d+) (?P<sent>\d+) (?P<duration>\d+) \S+ '
    r'"[^"]*" "[^"]*" "(?P<id>[^"]*)"'
)
INGRESS = re.compile(r'" (?P<received>\d+) (?P<took>\d+\.\d+) \[')  # Kubernetes ingress-nginx
NUMBERS = re.compile(r'(?:^|[ "])(?P<key>[a-z_]+)=(?P<value>[0-9.]+)')


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


@row_format(
    name="nginx",
    what="nginx access logs: combined format with `request_length=`, `request_time=` and "
    "`content_type=`, ingress-nginx's format, or JSON",
    keeps="user as tenant, status; lengths from bytes",
    recognise=lambda head: (
        NGINX.match(head.line) is not None
        or (
            head.has("status", "body_bytes_sent")
            and head.has_any("time_iso8601", "time_local", "msec", "request_time")
        )
    ),
    rows=text_rows,
    order=COMPLETION,
)
def nginx(row: SourceRow, options: ReadOptions) -> TraceRequest:
    """Read the combined log format, ingress-nginx's format, or a `log_format` of JSON.

    After the combined format may follow `request_length=`, `request_time=`, `content_type=`.
    The time of a line is the end of the request. Lengths are computed from bytes, or are options.
    """
    line = str(row.get("line"))
    fields = _nginx_json(row, line) if line.startswith("{") else _nginx_line(row, line)
    _only_shaped(fields["method"], fields["path"])
    took_s, sent = fields["took_s"], fields["sent"]
    if took_s is None:
        row.note("lines without request_time, whose arrival is the time of their end")
    status = int(fields["status"])
    streamed = "event-stream" in fields["type"]
    if not fields["type"] and status < 400 and options.output_tokens is None:
        row.note(
            "lines without content_type: answers are taken as not streamed, at 4 bytes a token"
        )
    return _by_bytes(
        row,
        options,
        name=f"nginx-{row.number}",
        arrival_s=fields["end_s"] - (took_s or 0.0),
        received=int(fields["received"] or 0),
        sent=sent * BYTES_PER_TOKEN // EVENT_BYTES if streamed else sent,
        status=status,
        tenant=fields["user"] if fields["user"] not in ("-", "") else None,
    )


def _nginx_line(row: SourceRow, line: str) -> dict[str, Any]:
    match = NGINX.match(line)
    if match is None:
        raise RowError(f"{shown(line)} is not a line of the combined log format")
    request = REQUEST.match(match["request"])
    if request is None:  # scanners send TLS, nothing or words of their own
        raise NotARequestError("lines whose request is no HTTP")
    more = {pair["key"]: pair["value"] for pair in NUMBERS.finditer(match["rest"])}
    ingress = INGRESS.search(match["rest"])
    if ingress is not None:
        more |= {"request_length": ingress["received"], "request_time": ingress["took"]}
    took = more.get("request_time", more.get("rt"))
    return {
        "method": request["method"],
        "path": request["path"],
        "status": match["status"],
        "user": match["user"],
        "end_s": _nginx_time(match["time"]),
        "took_s": None if took is None else float(took),
        "received": more.get("request_length", more.get("rl")),
        "sent": 0 if match["sent"] == "-" else int(match["sent"]),
        "type": match["rest"].partition("content_type=")[2],
    }


def _nginx_json(row: SourceRow, line: str) -> dict[str, Any]:
    """Read nginx's variables by their names, as a `log_format` with `escape=json` writes them."""
    try:
        variables = row.with_values(orjson.loads(line))
    except orjson.JSONDecodeError as error:
        raise RowError(f"not JSON ({error}); each line must hold one JSON object") from error
    request_line = (variables.text("request") or "").split(" ")
    local = variables.text("time_local")
    took = variables.get("request_time")
    return {
        "method": variables.text("request_method", "method") or request_line[0],
        "path": variables.text("request_uri", "uri", "path") or "".join(request_line[1:2]),
        "status": variables.whole("status"),
        "user": variables.text("remote_user") or "",
        "end_s": _nginx_time(local)
        if local
        else variables.moment("msec", "time_iso8601", "@timestamp", "timestamp", "time"),
        "took_s": None if took is None else variables.seconds("request_time"),
        "received": variables.whole_or(None, "request_length", "content_length"),
        "sent": variables.whole_or(0, "body_bytes_sent", "bytes_sent"),
        "type": variables.text("sent_http_content_type", "upstream_http_content_type") or "",
    }


def _nginx_time(text: str) -> float:
    try:
        return datetime.strptime(text, "%d/%b/%Y:%H:%M:%S %z").timestamp()
    except ValueError as error:
        raise RowError(f"time: {text!r} is not 24/Nov/2026:02:47:04 +0000") from error


@row_format(
    name="envoy",
    what="Envoy and Istio access logs, default format",
    keeps="status; lengths from bytes",
    recognise=lambda head: ENVOY.match(head.line) is not None,
    rows=text_rows,
    order=COMPLETION,
)
def envoy(row: SourceRow, options: ReadOptions) -> TraceRequest:
    """Read Envoy's default text format, whose lines begin with the start of the request."""
    match = ENVOY.match(str(row.get("line")))
    if match is None:
        raise RowError(f"{shown(row.get('line'))} is not a line of Envoy's default format")
    _only_shaped(match["method"], match["path"])
    start = row.with_values({"time": match["time"]})
    identity = match["id"]
    return _by_bytes(
        row,
        options,
        name=identity if identity not in ("", "-") else f"envoy-{row.number}",
        arrival_s=start.moment("time", unit="iso8601"),
        received=int(match["received"]),
        sent=int(match["sent"]),
        status=int(match["status"]),
        tenant=None,
    )


def _only_shaped(method: str, path: str) -> None:
    path = path.partition("?")[0]
    if method != "POST" or not SHAPED.search(path):
        raise NotARequestError(f"{method} {path}, which generates no text")


def _by_bytes(
    row: SourceRow, options: ReadOptions, *, name: str, arrival_s: float, received: int, sent: int,
    status: int, tenant: str | None,
) -> TraceRequest:  # fmt: skip
    failed = status >= 400 or status == 0
    output = options.output_tokens
    if output is None:
        output = 0 if failed else max(1, sent // BYTES_PER_TOKEN)
    return build(
        row,
        {"status": status if 100 <= status < 600 else None, "tenant": tenant},
        options,
        name=name,
        arrival_s=arrival_s,
        input_tokens=options.input_tokens or (received // BYTES_PER_TOKEN) or None,
        output_tokens=output,
    )
