"""Read logs of gateways and of tracing: OpenAI-style logs, LiteLLM, Langfuse, OpenTelemetry.

A row is written when its request ends. Its time is the start, or the end minus the duration.
"""

import re
from collections.abc import Iterable
from typing import Any

from forebay.traces.formats.body import answer_tokens, build, ended, is_html, message_list, of_body
from forebay.traces.formats.head import Head
from forebay.traces.formats.table import COMPLETION, ReadOptions, row_format
from forebay.traces.formats.usage import usage_of
from forebay.traces.reading.reader import Ended
from forebay.traces.rows import NotARequestError, RowError, SourceRow, decoded

NO_TEXT = ("embedding", "rerank", "moderation", "image", "audio", "speech", "transcription")
USAGES = ("usage", "response.usage", "response.body.usage", "response_body.usage",
          "usageMetadata", "response.usageMetadata", "response_body.usageMetadata")  # fmt: skip
STARTS = ("timestamp", "start_time", "startTime", "request_time", "created_at", "time", "ts",
          "created", "@timestamp", "date", "request_created_at")  # fmt: skip
CODES = ("status", "status_code", "response.status_code", "response.status")


def _logged(
    row: SourceRow, options: ReadOptions, name: str, fields: dict[str, Any], answer: Any,
    times: tuple[tuple[str, ...], tuple[str, ...]], usages: tuple[str, ...] = (),
) -> Ended:  # fmt: skip
    """Make the request of a row, with its end. Logged counts are better than counts of text.

    Args:
        times: the columns of the start, and the columns of the end.
        usages: the columns of a usage object. Without one, the row itself has the counts.
    """
    starts, ends = times
    usage = usage_of(row, *usages)
    request = build(
        row,
        fields,
        options,
        name=name,
        arrival_s=row.moment(*starts),
        input_tokens=usage.prompt,
        output_tokens=answer_tokens(answer, options, usage.answer),
    )
    return ended(row, request, ends)


@row_format(
    name="litellm",
    what="LiteLLM: an export of LiteLLM_SpendLogs, or standard logging payloads",
    keeps="messages, model, parameters, sessions, team or key as tenant, status",
    recognise=lambda head: head.has("call_type") and head.has_any("startTime", "start_time"),
    order=COMPLETION,
    own_ids=True,
)
def litellm(row: SourceRow, options: ReadOptions) -> Ended:
    """Read rows of LiteLLM_SpendLogs, or the standard logging payload of its callbacks."""
    # Leave out calls that generate no text.
    kind = row.text("call_type") or "completion"
    if any(word in kind for word in NO_TEXT):
        raise NotARequestError(f"calls of type {kind}, which generates no text")
    # The request is in the body, or the messages have a column.
    body = row.object("proxy_server_request.body", "proxy_server_request", "model_parameters")
    fields = of_body(body, options)
    messages = decoded(row.get("messages"))
    if isinstance(messages, list) and messages:
        fields["messages"] = message_list(messages)
        fields.pop("text", None)
    # Outcome and names.
    failed = row.get("status") == "failure" or row.get("exception") is not None
    code = row.get("error_information.error_code", "metadata.error_information.error_code")
    fields["status"] = int(code) if str(code or "").isdecimal() else 500 if failed else None
    fields["tenant"] = row.text(
        "team_id", "metadata.user_api_key_team_id", "api_key", "user", "end_user"
    )
    fields["model"] = row.text("model_group", "model") or fields.get("model")
    fields["session"] = row.text("session_id", "litellm_session_id", "trace_id")
    name = row.text("request_id", "id") or f"litellm-{row.number}"
    times = ("startTime", "start_time"), ("endTime", "end_time")
    return _logged(row, options, name, fields, row.get("response"), times)


def _langfuse_rows(document: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Split a downloaded trace, or a page of the API, into its observations."""
    for key in ("observations", "data"):
        observations = decoded(document.get(key))
        if isinstance(observations, list):
            shared = {"session_id": document.get("sessionId"), "user_id": document.get("userId")}
            for observation in observations:
                yield {**shared, **observation}
            return
    yield document


@row_format(
    name="langfuse",
    what="Langfuse: exports of observations (JSON, JSONL, CSV), a downloaded trace, API pages",
    keeps="messages, model, parameters, sessions, user as tenant, status",
    recognise=lambda head: (
        (head.has_any("trace_id", "traceId") and head.has_any("start_time", "startTime"))
        or (head.has("observations") and head.has_any("sessionId", "latency"))
    ),
    unpack=_langfuse_rows,
    order=COMPLETION,
    own_ids=True,
)
def langfuse(row: SourceRow, options: ReadOptions) -> Ended:
    """Read observations of type GENERATION. A trace without a session id is a session."""
    kind = row.text("type") or "GENERATION"
    if kind != "GENERATION":
        raise NotARequestError(f"observations of type {kind}")
    # The prompt is a body, a list of messages or text.
    fields = of_body(row.object("model_parameters", "modelParameters"), options)
    prompt = decoded(row.get("input"))
    if isinstance(prompt, dict):
        fields |= of_body(prompt, options)
    elif isinstance(prompt, list) and prompt:
        fields["messages"] = message_list(prompt)
    elif isinstance(prompt, str):
        fields["text"] = prompt
    # Names and outcome, in the spelling of exports and of the API.
    name = row.text("id") or f"langfuse-{row.number}"
    fields["session"] = row.text("session_id", "sessionId", "trace_id", "traceId")
    fields["tenant"] = row.text("user_id", "userId")
    fields["model"] = row.text("provided_model_name", "providedModelName", "model")
    fields["status"] = 500 if row.get("level") == "ERROR" else None
    times = ("start_time", "startTime"), ("end_time", "endTime")
    usages = ("usage_details", "usageDetails", "usage")
    return _logged(row, options, name, fields, row.get("output"), times, usages)


def _spans(document: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """List the spans of one export or trace, with their attributes as plain columns."""
    document = _camel(document)
    yield from document.get("spans") or ()
    for resource in document.get("resourceSpans") or ():
        for scope in (
            resource.get("scopeSpans") or resource.get("instrumentationLibrarySpans") or ()
        ):
            for span in scope.get("spans") or ():
                attributes = {
                    attribute.get("key"): _value(attribute.get("value") or {})
                    for attribute in span.get("attributes") or ()
                }
                yield {**span, "attributes": attributes}


def _camel(value: Any) -> Any:
    """Rename the keys of protobuf (`start_time_unix_nano`) as OTLP's JSON has them."""
    if isinstance(value, list):
        return [_camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key if "." in key else re.sub("_([a-z])", lambda match: match[1].upper(), key): (
            content if key == "attributes" and isinstance(content, dict) else _camel(content)
        )
        for key, content in value.items()
    }


def _value(value: dict[str, Any]) -> Any:
    for kind, content in value.items():
        if kind == "intValue":  # 64-bit integers are strings in OTLP's JSON
            return int(content) if str(content).lstrip("-").isdecimal() else content
        if kind == "arrayValue":
            return [_value(item) for item in content.get("values") or ()]
        return content
    return None


@row_format(
    name="otel",
    what="spans as OTLP JSON, one export a line or a document: OpenTelemetry GenAI, "
    "OpenInference, Claude Code",
    keeps="messages, model, parameters, conversation or trace as session, user as tenant, status",
    recognise=lambda head: (
        head.has_any("resourceSpans", "resource_spans")
        or (head.has("spans") and head.has_any("trace_id", "traceId"))
    ),
    unpack=_spans,
    order=COMPLETION,
    own_ids=True,
)
def otel(row: SourceRow, options: ReadOptions) -> Ended:
    """Read spans of requests to a model, not spans of agents or tools.

    Attributes have the names of OpenTelemetry (also old names), OpenInference or Claude Code.
    """
    about = row.object("attributes")
    usage = usage_of(row.with_values(about))
    operation = about.get("gen_ai.operation.name")
    _only_requests(about, usage.prompt is not None or usage.answer is not None)
    fields = _of_span(row, about)
    if not usage.prompt and not {"messages", "status"} & fields.keys() and (
        options.input_tokens is None
    ):  # fmt: skip
        raise RowError(
            "no attribute gen_ai.usage.input_tokens, llm.token_count.prompt or input_tokens in "
            f"this span of operation {operation or 'LLM'}; record it, or give --input-tokens"
        )
    request = build(
        row,
        fields,
        options,
        name=row.text("spanId") or f"span-{row.number}",
        arrival_s=row.moment("startTimeUnixNano", unit="ns")
        if row.get("startTimeUnixNano") is not None
        else row.moment("startTime"),
        input_tokens=usage.prompt,
        output_tokens=usage.answer,
    )
    return ended(row, request, ("endTimeUnixNano", "endTime"))


def _of_span(row: SourceRow, about: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request from the attributes of its span."""
    counts = row.with_values(about)
    parameters = {
        key: about[f"gen_ai.request.{name}"]
        for key, name in (("temperature", "temperature"), ("top_p", "top_p"),
                          ("stop", "stop_sequences"), ("seed", "seed"))
        if about.get(f"gen_ai.request.{name}") is not None
    }  # fmt: skip
    messages = decoded(about.get("gen_ai.input.messages")) or _flat_messages(about)
    fields: dict[str, Any] = {
        "model": counts.text("gen_ai.request.model", "llm.model_name", "model"),
        "session": counts.text("gen_ai.conversation.id", "session.id") or row.text("traceId"),
        "tenant": counts.text("user.id"),
        "parameters": parameters or None,
        "output_tokens": counts.whole_or(None, "gen_ai.request.max_tokens"),
        "status": _status(row, about),
        "messages": _parts(messages) if isinstance(messages, list) and messages else None,
    }
    return {key: value for key, value in fields.items() if value is not None}


def _only_requests(about: dict[str, Any], counted: bool) -> None:
    """Raise NotARequestError unless a span is a request. An agent's span repeats other counts.

    Args:
        counted: the span reports tokens of its prompt or answer.
    """
    operation = about.get("gen_ai.operation.name")
    kind = about.get("openinference.span.kind", about.get("span.type"))
    if kind is not None and str(kind).lower() not in ("llm", "llm_request"):
        raise NotARequestError(f"spans of kind {str(kind)[:40]}")
    if operation is None and kind is None and not counted:
        raise NotARequestError("spans of other kinds than GenAI requests")
    if operation not in (None, "chat", "text_completion", "generate_content"):
        raise NotARequestError(f"spans of operation {str(operation)[:40]}")


def _flat_messages(about: dict[str, Any]) -> list[dict[str, Any]]:
    """Collect OpenInference's messages, whose parts are attributes with numbered names."""
    messages: list[dict[str, Any]] = []
    while (
        role := about.get(f"{(at := f'llm.input_messages.{len(messages)}.message')}.role")
    ) is not None:
        content = about.get(f"{at}.content")
        part = 0
        while (text := about.get(f"{at}.contents.{part}.message_content.text")) is not None:
            content = f"{content or ''}{text}"
            part += 1
        messages.append({"role": role, "content": content})
    return messages


def _status(row: SourceRow, about: dict[str, Any]) -> int | None:
    code = about.get("http.response.status_code", about.get("error.type"))
    if code is not None and str(code).isdecimal():
        return int(code)
    return 500 if row.get("status.code") in (2, "STATUS_CODE_ERROR") else None


def _parts(messages: list[Any]) -> tuple[dict[str, Any], ...]:
    """Turn messages of OpenTelemetry, which are lists of parts, into messages of the chat API."""
    plain = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError("gen_ai.input.messages: not objects with a role")
        parts = message.get("parts")
        content = message.get("content")
        if isinstance(parts, list):
            content = "".join(str(part.get("content", part.get("response", ""))) for part in parts)
        plain.append({"role": message["role"], "content": content or ""})
    return tuple(plain)


def _has_openai_log(head: Head) -> bool:
    keys = ("request", "request_body", "body", "kwargs")
    body = decoded(next((head.first[key] for key in keys if head.first.get(key)), None))
    if isinstance(body, dict) and isinstance(body.get("body"), dict):
        body = body["body"]
    timed = bool(head.columns.intersection(STARTS))
    if isinstance(body, dict) and timed:
        return bool({"messages", "prompt"} & body.keys())
    return timed and head.has("messages") and "model" in head.columns


@row_format(
    name="openai-log",
    what="JSON logs of OpenAI-style requests: `request`, `response` and a time",
    keeps="messages, tools, model, parameters, sessions, user as tenant, status",
    recognise=_has_openai_log,
    order=COMPLETION,
    own_ids=True,
)
def openai_log(row: SourceRow, options: ReadOptions) -> Ended:
    """Read request and response objects under their usual names, or a row that is the body."""
    # Leave out requests that generate no text.
    path = row.text("path", "url", "endpoint", "request.path", "request.url") or ""
    if any(word in path for word in NO_TEXT):
        raise NotARequestError(f"requests to {path.partition('?')[0]}, which generates no text")
    # The request, and the answer.
    body = row.object("request.body", "request_body", "kwargs", "body", "request") or row.values
    answer = decoded(row.get("response.body", "response_body", "response", "completion", "output"))
    fields = of_body(body, options)
    if body is row.values:
        fields.pop("parameters", None)  # the log's own columns, not fields of the body
    fields["status"] = _logged_status(row, answer)
    # Names: tenant, request and session.
    fields["tenant"] = fields.get("tenant") or row.text("user", "user_id", "tenant", "api_key_id")
    name = row.text("request_id", "id", "response.id") or f"request-{row.number}"
    fields["session"] = row.text("session_id", "conversation_id", "thread_id", "session")
    times = STARTS, ("end_time", "endTime", "completed_at", "end")
    return _logged(row, options, name, fields, answer, times, USAGES)


def _logged_status(row: SourceRow, answer: Any) -> int | None:
    """Return the status of an answer. A gateway sends an HTML page when the server is down."""
    code = row.get(*CODES)
    is_code = type(code) is int or (isinstance(code, str) and code.isdecimal())
    status = row.whole_or(None, *CODES) if is_code else None
    if isinstance(answer, str) and is_html(answer):
        status = status if status is not None and status >= 400 else 502
    return status
