"""Split a server-sent event stream into events, and parse OpenAI's events.

Bytes come in pieces as the network cut them. Nothing here changes the relayed bytes. The format is
the WHATWG event stream: lines end in LF, CRLF or CR, an empty line ends an event, comments start
with a colon. The size of an event is bounded, so that an endless event cannot fill the memory.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import orjson
from jiter import from_json

MAX_EVENT_BYTES = 4 << 20
_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DATA = re.compile(rb"(?:^|[\r\n])data:")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class MalformedStream(Exception):
    """The stream is no sequence of OpenAI events: an event is too long, or not a JSON object."""


class EventTooLarge(MalformedStream):
    """An event with data is longer than `limit` bytes, which is not always the sender's fault."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"an event of more than {limit} bytes")
        self.limit = limit


class EventScanner:
    """Split chunks of bytes into the `data` payloads of complete events.

    Attributes:
        partial: bytes of an incomplete event; always the same object.
    """

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self.partial = bytearray()
        self._limit = limit

    @property
    def mid_event(self) -> bool:
        """An event is incomplete: a stream that stops here was cut."""
        return bool(self.partial.strip())

    def plain(self, chunk: bytes) -> bool:
        """True if `chunk` is whole `data` events that carry output only.

        This is cheap, and true of nearly every chunk of a stream. Otherwise use `events`.
        """
        return (
            chunk[:6] == b"data: "
            and chunk[-2:] == b"\n\n"
            and not self.partial
            and output_only(chunk)
        )

    def events(self, chunk: bytes) -> list[tuple[bytes, bytes]]:
        """Return the events completed by `chunk`, in order: bytes as received, and payloads.

        The bytes joined are the stream. A comment has an empty payload.
        """
        # Join the chunk to the unfinished event before it.
        data = chunk
        if self.partial:
            # Only new bytes can end the event; searching all of them again would be quadratic.
            searched = max(0, len(self.partial) - 3)
            self.partial += chunk
            find = self.partial.find
            if find(b"\n\n", searched) < 0 and (
                find(b"\r", searched) < 0 or _END.search(self.partial, searched) is None
            ):
                self._check()
                return []
            data = bytes(self.partial)
            self.partial.clear()
        # Cut the bytes at the ends of events.
        events, start = [], 0
        if b"\r" not in data:  # nearly always; the search below takes ten times as long
            while (end := data.find(b"\n\n", start)) >= 0:
                events.append((data[start : end + 2], _payload(data[start:end])))
                start = end + 2
        else:
            for match in _END.finditer(data):
                events.append((data[start : match.end()], _payload(data[start : match.start()])))
                start = match.end()
        # Keep an unfinished event.
        if start < len(data):
            self.partial += data[start:]
            self._check()
        return events

    def _check(self) -> None:
        if len(self.partial) <= self._limit:
            return
        if _DATA.search(self.partial):
            raise EventTooLarge(self._limit)
        raise MalformedStream(f"more than {self._limit} bytes and no event")

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the payloads completed by `chunk`, without comments and other fields."""
        if not self.partial and chunk[-2:] == b"\n\n" and 13 not in chunk:  # whole events, no CR
            return [payload for payload in map(_payload, chunk[:-2].split(b"\n\n")) if payload]
        return [payload for _, payload in self.events(chunk) if payload]


def output_only(events: bytes) -> bool:
    """True if whole `data` events hold no usage, error, abort or end of the stream."""
    find = events.find  # `in` raises and drops an exception (Python 3.11): twice the time
    return (
        find(b'"usage"') < 0
        and find(b'"error"') < 0
        and find(b'"abort"') < 0
        and find(b"[DONE]") < 0
    )


def _payload(event: bytes) -> bytes:
    if event[:6] == b"data: " and 10 not in event and 13 not in event:  # one line
        return event[6:]
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(line[1:] if line.startswith(b" ") else line for line in lines)


@dataclass(slots=True)  # frozen, each token would take 0.4 us more
class StreamEvent:
    """One event of an OpenAI stream.

    Attributes:
        done: the `[DONE]` mark.
        has_output: non-empty content, reasoning or tool-call text (role-only, empty and usage
            events are not output: vllm#3768).
        finish_reason: the reason of the first choice that has a reason.
        kind: the type of the event, where events have one (not in chats and completions).
        response_id: the id of a response that is kept for later requests.
        usage: the usage object, when the event has one.
        error: the error object, when the event has one.
    """

    done: bool = False
    has_output: bool = False
    finish_reason: str | None = None
    kind: str = ""
    response_id: str = ""
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @property
    def has_usage(self) -> bool:
        """Whether it counts tokens of output."""
        usage = self.usage or {}
        return bool(usage.get("completion_tokens") or usage.get("output_tokens"))


_DONE = StreamEvent(done=True)


def parse_event(payload: bytes) -> StreamEvent:
    """Parse one payload of a stream. A payload that is no JSON object gives an empty event."""
    return _DONE if payload == b"[DONE]" else event_of(read_object(payload) or {})


def event_body(payload: bytes) -> dict[str, Any]:
    """Return the object of one payload that is not `[DONE]`. Raises MalformedStream."""
    body = read_object(payload)
    if body is None:
        raise MalformedStream("an event that is not a JSON object")
    return body


def read_object(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object that a server sent, or None if it is not an object.

    Servers write NaN, Infinity, a byte order mark and half a character, and most clients read them.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            value = from_json(data.removeprefix(BYTE_ORDER_MARK), allow_inf_nan=True)
        except ValueError:
            value = _with_half_characters(data)
    return value if isinstance(value, dict) else None


def _with_half_characters(data: bytes) -> Any:
    """Parse JSON in which a surrogate stands alone, which becomes a question mark."""
    if _SURROGATE.search(data) is None:
        return None
    try:
        text = json.dumps(json.loads(data), ensure_ascii=False)
        return from_json(text.encode("utf-8", "replace"), allow_inf_nan=True)
    except (ValueError, RecursionError):
        return None


def event_of(body: dict[str, Any]) -> StreamEvent:
    """Return the event that a JSON object describes."""
    usage, error_body = body.get("usage"), _error_in(body)
    kind, response = body.get("type"), body.get("response")
    response_id = None
    if isinstance(response, dict):
        usage, response_id = response.get("usage"), response.get("id")
    has_output, finish_reason = False, None
    choices = body.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            has_output = has_output or _has_output(choice)
            finish_reason = finish_reason or choice.get("finish_reason")
    return StreamEvent(
        has_output=has_output,
        finish_reason=finish_reason,
        kind=kind if isinstance(kind, str) else "",
        response_id=response_id if isinstance(response_id, str) else "",
        usage=usage if isinstance(usage, dict) else None,
        error=error_body,
    )


def _error_in(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the error object, in any of its spellings."""
    error = body.get("error")
    if isinstance(error, dict):
        return error
    if isinstance(error, str) and error:  # {"error": "Unauthorized"}
        return {"message": error, "type": "server_error", "param": None, "code": None}
    # An event of /v1/responses; an answer of vLLM up to 0.10.
    return body if body.get("type") == "error" or body.get("object") == "error" else None


def _has_output(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return False
    return bool(
        delta.get("content")
        or delta.get("reasoning_content")
        or delta.get("reasoning")
        or delta.get("tool_calls")
    )
