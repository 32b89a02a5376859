"""Read one answer where its bytes arrive: a stream of events, an error, or one piece of JSON.

A network read gets one time stamp, taken before its bytes are parsed. Nearly every event of a
stream is plain text, which is known by its bytes; all others are parsed. Most tokens of a stream
differ in their text alone, so the bytes around it are learned from the first ones.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from forebay.proxy.http1.sse import EventScanner, MalformedStream, event_body, event_of
from forebay.replay import outcome
from forebay.replay.clock import Clock
from forebay.replay.connection import HttpConnection, MalformedAnswer
from forebay.replay.exchange import ClientExchange, ProgressWatch

MAX_ERROR_BYTES = 64 << 10
MAX_WHOLE_BYTES = 64 << 20
MOST_FORMS = 8  # of one stream: a server whose events differ has none


class AnswerReader:
    """Reads one answer into its exchange."""

    def __init__(
        self,
        exchange: ClientExchange,
        clock: Clock,
        watch: ProgressWatch,
        whole: bool,
        on_end: Callable[[ClientExchange], None],
    ) -> None:
        self.exchange = exchange
        self._clock = clock
        self._watch = watch
        self._wants_whole = whole
        self._on_end = on_end
        self._connection: HttpConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._scanner: EventScanner | None = None  # of a stream
        self._body: bytearray | None = None  # of an error, or of an answer in one piece
        self._most = 0
        self._ended = False
        self._append = exchange.events.at_s.append
        self._form: TokenForm | None = None
        self._forms_left = MOST_FORMS

    def connect_by(self, task: "asyncio.Task[None]") -> None:
        self._connecting = task

    def send(self, connection: HttpConnection, head: bytes, body: Sequence[bytes]) -> None:
        self._connecting = None
        if self._ended:  # it was given up while the connection was opened
            connection.abort()
            return
        self._connection = connection
        connection.send(self, head, body)

    def give_up(self) -> None:
        """End for the watch's reason."""
        if self.exchange.outcome != "ok":
            self.exchange.fail(self._watch.reason or "cancelled")
        if self._connecting is not None:
            self._connecting.cancel()
        self._end(close=True)

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        exchange, scale = self.exchange, self._clock.scale
        exchange.status = status
        exchange.backend = headers.get("x-forebay-backend", exchange.backend)
        if "x-forebay-queue-ms" in headers:
            exchange.queue_ms = outcome.seconds_header(headers["x-forebay-queue-ms"], scale)
        for name, unit_s in (("retry-after", 1.0), ("retry-after-ms", 1e-3)):
            if name in headers:
                wait_s = outcome.seconds_header(headers[name], scale * unit_s)
                exchange.retry_after_s = exchange.retry_after_s if wait_s is None else wait_s
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if status != 200:
            self._body, self._most = bytearray(), MAX_ERROR_BYTES
        elif kind == "application/json" and self._wants_whole:
            self._body, self._most = bytearray(), MAX_WHOLE_BYTES
        elif kind == "text/event-stream":
            self._scanner = EventScanner()
        else:
            exchange.fail("malformed")

    def chunk(self, data: bytes, at_s: float) -> bool:
        form = self._form
        if form is None or self._scanner is None or self._scanner.partial:
            return False
        length = len(data)
        start, end = form.starts.get(length) or form.start_at(length), length - form.end_size
        if (
            data.startswith(start)
            and data.endswith(form.end)
            and data.find(b'"', len(start), end) < 0
        ):
            self._append(at_s)
            return True
        return False

    def piece(self, data: bytes, at_s: float) -> bool:
        scanner = self._scanner
        if scanner is None:
            return self._collect(data)
        exchange = self.exchange
        if exchange.outcome == "ok":
            return True  # after [DONE] only the end of the HTTP framing follows
        if exchange.pieces is None and not scanner.partial and is_one_token(data):
            exchange.events.at_s.append(at_s)
            if self._forms_left and (self._form is None or not self._form.made_of(data)):
                self._forms_left -= 1
                self._form = token_form(data)
            return True
        try:
            for payload in scanner.feed(data):
                if not self._event(payload, at_s):
                    self._end()
                    return False
                if exchange.outcome == "ok":
                    self._form = None
                    break
        except MalformedStream:
            exchange.fail("malformed")
            self._end()
            return False
        return True

    def complete(self) -> None:
        exchange = self.exchange
        if self._body is not None and exchange.status == 200:
            self._whole(bytes(self._body))
        elif self._body is not None:
            self._refused()
        elif exchange.outcome != "ok" and exchange.reason is None:
            exchange.fail("truncated")
        self._end()

    def broken(self, error: Exception | None) -> None:
        exchange = self.exchange
        if exchange.outcome != "ok" and exchange.reason is None:
            exchange.fail(failure_of(error, exchange))
        self._end()

    def _event(self, payload: bytes, at_s: float) -> bool:
        """Take one event of a stream; False if it ends the answer as failed."""
        exchange = self.exchange
        if payload == b"[DONE]":
            if exchange.reason is None:
                exchange.ok()
            return True
        body = event_body(payload)
        if text := _plain_token(body):
            self._output(at_s, None, text)
            return True
        event = event_of(body)
        if event.error is not None:
            exchange.fail(outcome.of_stream_error(event.error))
            return False
        if event.finish_reason == "abort":  # vLLM shutting down ends its streams cleanly
            exchange.fail("truncated")
        counted = _usage(event.usage, exchange) if event.usage is not None else None
        if event.has_output:
            self._output(at_s, counted, answer_text(payload) if exchange.pieces is not None else "")
        return True

    def _output(self, at_s: float, counted: int | None, text: str) -> None:
        exchange = self.exchange
        exchange.events.add(at_s, counted)
        if exchange.pieces is not None:
            exchange.pieces.append(text)

    def _collect(self, data: bytes) -> bool:
        if self._body is None:
            self._end()
            return False
        self._body += data
        if len(self._body) <= self._most:
            return True
        if self.exchange.status == 200:
            self.exchange.fail("malformed")
        else:
            self._refused()
        self._end()
        return False

    def _refused(self) -> None:
        exchange = self.exchange
        assert exchange.status is not None
        raw = bytes(self._body or b"")[:MAX_ERROR_BYTES]
        exchange.outcome, exchange.reason = outcome.of_status(exchange.status, raw)
        exchange.reject_latency_s = self._clock.now() - exchange.sent_s

    def _whole(self, raw: bytes) -> None:
        """Read an answer in one piece (`stream: false`): all of it is one output event."""
        exchange, at_s = self.exchange, self._clock.now()
        try:
            event = event_of(event_body(raw))
        except MalformedStream:
            exchange.fail("malformed")
            return
        counted = _usage(event.usage, exchange) if event.usage is not None else None
        if event.error is not None:
            exchange.fail(outcome.of_stream_error(event.error))
            return
        exchange.events.add(at_s, counted)
        if exchange.pieces is not None:
            exchange.pieces.append(answer_text(raw))
        exchange.ok()

    def _end(self, *, close: bool = False) -> None:
        if self._ended:
            return
        self._ended = True
        self._watch.finish()
        if close and self._connection is not None:
            self._connection.abort()
        self._connection = None
        self.exchange.done_s = self._clock.now()
        self._on_end(self.exchange)


class TokenForm:
    """All but the text of a chunk that holds one token: another that differs in its text fits.

    Its text must not be empty and must hold no quote.

    Attributes:
        end: what comes behind the text, with the line end of the chunk.
        starts: the line with the size of the chunk, and what comes before the text, by the length
            of the whole chunk.
    """

    __slots__ = ("_start", "end", "end_size", "starts")

    def __init__(self, start: bytes, end: bytes) -> None:
        self._start, self.end = start, end + b"\r\n"
        self.end_size = len(self.end)
        self.starts: dict[int, bytes] = {}

    def made_of(self, event: bytes) -> bool:
        return event.startswith(self._start) and event.endswith(self.end[:-2])

    def start_at(self, length: int) -> bytes:
        """Add to `starts` what a chunk of this length begins with, if such a chunk can be."""
        found = b"\0"  # begins no chunk
        most = (length.bit_length() + 3) // 4
        for digits in (most, most - 1):
            size = length - digits - 4  # each of the two lines ends in two bytes
            if size > len(self._start) + self.end_size - 2 and len(b"%x" % size) == digits:
                found = b"%x\r\n%b" % (size, self._start)
        self.starts[length] = found
        return found


def token_form(event: bytes) -> TokenForm | None:
    """Make the form of an event for which `is_one_token` is true."""
    for name in (b'"text":"', b'"content":"'):
        at = event.find(name)
        if at >= 0:
            start = at + len(name)
            end = event.find(b'"', start)
            return TokenForm(event[:start], event[end:]) if event[end - 1] != 92 else None
    return None


def is_one_token(chunk: bytes) -> bool:
    """Tell whether `chunk` is one whole event with text and nothing else, as nearly all are.

    Only bytes are compared, in a twentieth of the time of parsing. A quote inside of a JSON string
    is escaped, so these bytes mean what they seem to mean. Anything unusual is "no".
    """
    find = chunk.find  # `in` raises and drops an exception (Python 3.11): twice the time
    return (
        find(b"\n\n") == len(chunk) - 2
        and chunk[:6] == b"data: "
        and (find(b'"text":"') >= 0 or find(b'"content":"') >= 0)
        and find(b'":""') < 0
        and (find(b'"usage"') < 0 or find(b'"usage":null') >= 0)
        and find(b'"error"') < 0
        and find(b'"abort"') < 0
    )


def _plain_token(body: dict[str, Any]) -> str:
    """Return the text of an event with one choice with text and nothing else, as nearly all are.

    This shortcut is faster than `event_of`, which handles all others; they are "" here.
    """
    try:
        (choice,) = body["choices"]
        if choice["finish_reason"] is not None or body.get("usage") or "error" in body:
            return ""
        text = choice["text"] if "text" in choice else choice["delta"]["content"]
        return text if isinstance(text, str) else ""
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return ""


def answer_text(payload: bytes) -> str:
    """Return the text of the first choice of an event, or of an answer in one piece."""
    try:
        choice = orjson.loads(payload)["choices"][0]
        message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        return str(message.get("content") or "")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return ""


def _usage(usage: dict[str, Any], exchange: ClientExchange) -> int | None:
    """Store the counts of a usage object; returns the number of output tokens so far."""
    counted = outcome.token_count(usage.get("completion_tokens"))
    if counted is not None:
        exchange.output_tokens = counted
    prompt = outcome.token_count(usage.get("prompt_tokens"))
    if prompt is not None:
        exchange.prompt_tokens = prompt
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        cached = outcome.token_count(details.get("cached_tokens"))
        if cached is not None:
            exchange.cached_tokens = cached
    return counted


def failure_of(error: Exception | None, exchange: ClientExchange) -> str:
    if isinstance(error, ssl.SSLError):
        return "tls"
    if isinstance(error, MalformedAnswer):
        return "malformed"  # the answer is not HTTP
    return "connect" if exchange.status is None else "truncated"
