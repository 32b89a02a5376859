"""Read access logs of web servers and load balancers: nginx, Envoy, Caddy, Traefik and AWS.

Their lengths are bytes: four are a token, and of a streamed answer an event is one.
"""

import re
from datetime import datetime
from typing import Any

import orjson

from forebay.traces.formats.body import build
from forebay.traces.formats.table import COMPLETION, ReadOptions, row_format
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.containers import text_rows
from forebay.traces.rows import NotARequestError, RowError, SourceRow, shown

BYTES_PER_TOKEN = 4
EVENT_BYTES = 230  # one event, which is one token, of vLLM's chat endpoint; the model's name counts
SHAPED = re.compile(r"/(v1/)?(chat/completions|completions|responses|messages|generate)$")
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
ALB = re.compile(
    r"(?:https?|h2|grpcs|wss?) (?P<time>[0-9TZ:.-]+) app/\S+ \S+ \S+ (?P<request>[0-9.-]+) "
    r"(?P<target>[0-9.-]+) (?P<response>[0-9.-]+) (?P<status>\d{3}) \S+ (?P<received>\d+) "
    r'(?P<sent>\d+) "(?P<method>[A-Z]+) [a-z]+://[^/ ]+(?P<path>/\S*)'
)


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
    took_s = fields["took_s"]
    if took_s is None:
        row.note("lines without request_time, whose arrival is the time of their end")
    return _by_bytes(
        row,
        options,
        name=f"nginx-{row.number}",
        arrival_s=fields["end_s"] - (took_s or 0.0),
        received=int(fields["received"] or 0),
        sent=fields["sent"],
        kind=fields["type"],
        status=int(fields["status"]),
        tenant=fields["user"],
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
    )


@row_format(
    name="caddy",
    what="access logs of Caddy, in JSON",
    keeps="user as tenant, status; lengths from bytes",
    recognise=lambda head: head.has("request", "duration", "size", "status", "ts"),
    order=COMPLETION,
)
def caddy(row: SourceRow, options: ReadOptions) -> TraceRequest:
    """Read Caddy's default log, whose lines have the time of their end."""
    _only_shaped(row.text("request.method") or "", row.text("request.uri") or "")
    if "bytes_read" not in row.values and options.input_tokens is None:
        raise RowError(
            "a log of Caddy, which holds no lengths of prompts; a newer Caddy logs bytes_read, or "
            "give --input-tokens for all rows",
            fatal=True,
        )
    kinds = row.get("resp_headers.Content-Type")
    return _by_bytes(
        row,
        options,
        name=f"caddy-{row.number}",
        arrival_s=row.moment("ts") - row.seconds("duration"),
        received=row.whole_or(0, "bytes_read"),
        sent=row.whole_or(0, "size"),
        kind=str(kinds or ""),
        status=row.whole("status"),
        tenant=row.text("user_id"),
    )


@row_format(
    name="traefik",
    what="access logs of Traefik, in JSON",
    keeps="user as tenant, status; lengths from bytes",
    recognise=lambda head: head.has("RequestContentSize", "DownstreamStatus", "StartUTC"),
    order=COMPLETION,
)
def traefik(row: SourceRow, options: ReadOptions) -> TraceRequest:
    """Read Traefik's log, whose lines have the start of the request."""
    _only_shaped(row.text("RequestMethod") or "", row.text("RequestPath") or "")
    return _by_bytes(
        row,
        options,
        name=f"traefik-{row.number}",
        arrival_s=row.moment("StartUTC"),
        received=row.whole_or(0, "RequestContentSize"),
        sent=row.whole_or(0, "DownstreamContentSize"),
        kind=row.text("downstream_Content-Type") or "",
        status=row.whole("DownstreamStatus"),
        tenant=row.text("ClientUsername"),
    )


@row_format(
    name="alb",
    what="access logs of Application Load Balancers of AWS",
    keeps="status; lengths from bytes",
    recognise=lambda head: ALB.match(head.line) is not None,
    rows=text_rows,
    order=COMPLETION,
)
def alb(row: SourceRow, options: ReadOptions) -> TraceRequest:
    """Read a line, which has the time of its end, and three parts of its duration or -1."""
    match = ALB.match(str(row.get("line")))
    if match is None:
        raise RowError(f"{shown(row.get('line'))} is not a line of a load balancer of AWS")
    _only_shaped(match["method"], match["path"])
    took_s = sum(max(0.0, float(match[part])) for part in ("request", "target", "response"))
    return _by_bytes(
        row,
        options,
        name=f"alb-{row.number}",
        arrival_s=row.with_values({"time": match["time"]}).moment("time", unit="iso8601") - took_s,
        received=int(match["received"]),
        sent=int(match["sent"]),
        status=int(match["status"]),
    )


def _only_shaped(method: str, path: str) -> None:
    path = path.partition("?")[0]
    if method != "POST" or not SHAPED.search(path):
        raise NotARequestError(f"{method} {path}, which generates no text")


def _by_bytes(
    row: SourceRow, options: ReadOptions, *, name: str, arrival_s: float, received: int, sent: int,
    status: int, kind: str = "", tenant: str | None = None,
) -> TraceRequest:  # fmt: skip
    """Make a request of the bytes of its body and of its answer, whose content type is `kind`."""
    output = options.output_tokens
    if (output is None and status >= 400) or status == 0:
        output = output or 0
    elif output is None:
        if not kind:
            row.note(
                "lines without content_type: answers are taken as not streamed, at 4 bytes a token"
            )
        output = max(1, sent // (EVENT_BYTES if "event-stream" in kind else BYTES_PER_TOKEN))
    return build(
        row,
        {
            "status": status if 100 <= status < 600 else None,
            "tenant": tenant if tenant not in ("-", "") else None,
        },
        options,
        name=name,
        arrival_s=arrival_s,
        input_tokens=options.input_tokens or (received // BYTES_PER_TOKEN) or None,
        output_tokens=output,
    )
