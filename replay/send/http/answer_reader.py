"""Read one answer: a stream of events, an error, or one piece of JSON.

Bytes have the time of their network read, and may be parsed long after it. Events of a stream are
parsed, except tokens whose form was learned from an earlier token (`TokenForms`).
"""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any

import httptools

from forebay.replay.clock.clock import Clock
from forebay.replay.send.http import outcome
from forebay.replay.send.http.connection import HttpConnection
from forebay.replay.send.http.exchange import ClientExchange, ProgressWatch
from forebay.replay.send.http.framing import KEPT, ChunkedBody, MalformedAnswer, plain_head
from forebay.traces.ground.sse import (
    EventScanner,
    MalformedStream,
    event_body,
    event_of,
    read_object,
)
from forebay.traces.ground.token_forms import TokenForms, token_forms

MAX_ERROR_BYTES = 64 << 10
MAX_WHOLE_BYTES = 64 << 20
MOST_FORMS = 8  # forms of events in one stream: more mean that its events differ
_DATA = b"data: %b\n\n"


class AnswerReader:
    """Reads one answer into its exchange.

    Attributes:
        unread: times and bytes, in turn, of network reads that are not parsed yet. Two objects,
            because the garbage collector would search pairs.
        head: the head of a stream in chunks, empty until it is parsed.
        connecting: opens its connection.
    """

    def __init__(
        self,
        exchange: ClientExchange,
        clock: Clock,
        watch: ProgressWatch,
        whole: bool,
        on_end: Callable[[ClientExchange], None],
    ) -> None:
        self.exchange = exchange
        self.unread: list[Any] = []
        self.head = b""
        self._clock = clock
        self._watch = watch
        self._wants_whole = whole
        self._on_end = on_end
        self._connection: HttpConnection | None = None
        self.connecting: asyncio.Task[None] | None = None
        self._chunks: ChunkedBody | None = None
        self._parser: Any = None  # parser of an answer that is not a plain stream in chunks
        self._headers: dict[str, str] = {}
        self._scanner: EventScanner | None = None  # scanner of a stream
        self._body: bytearray | None = None  # body of an error, or of an answer in one piece
        self._most = 0
        self._ended = False  # `on_end` was called, and bytes may be unread
        self._over = False  # all bytes are read, or no more are wanted
        self._at_s = 0.0  # time of the network read that is parsed
        self._took = exchange.events.at_s.append
        self._learned: TokenForms | None = None
        self._forms: TokenForms | None = None  # the learned forms, while a chunk and an event begin
        self._forms_left = MOST_FORMS

    def send(self, connection: HttpConnection, head: bytes, body: Sequence[bytes]) -> None:
        self.connecting = None
        if self._ended:  # `give_up` was called while the connection was opened
            connection.abort()
            return
        self._connection = connection
        connection.send(self, head, body)

    def give_up(self) -> None:
        """End for the reason of the watch."""
        self.read()
        if self._ended:
            return
        if self.exchange.outcome != "ok":
            self.exchange.fail(self._watch.reason or "cancelled")
        if self.connecting is not None:
            self.connecting.cancel()
        self._stop(self._clock.now())

    def came_whole(self) -> None:
        """End after the last bytes, which are parsed when the exchange is settled."""
        self._connection = None
        self.exchange.unread = self._read_to_end
        self._end(self.unread[-2])

    def lost(self, error: Exception | None) -> None:
        """End after the connection has ended or could not be made."""
        self.read()
        if self._over:
            return
        exchange, headers = self.exchange, self._headers
        unbounded = "content-length" not in headers and "transfer-encoding" not in headers
        if exchange.status is not None and unbounded and error is None:
            self._complete(keep=False)  # the end of the connection is the end of this answer
            return
        if exchange.outcome != "ok" and exchange.reason is None:
            words = None if error is None else outcome.words_of(str(error))
            exchange.fail(failure_of(error, exchange), words)
        self._stop(self._clock.now())

    def read(self) -> None:
        """Parse the network reads so far."""
        unread, self.unread = iter(self.unread), []
        for self._at_s, data in zip(unread, unread, strict=True):
            if self._forms is not None:
                first, start, last, end, text = self._forms[len(data)]
                if data[first] == start and data[last] == end and 34 not in data[text]:  # no quote
                    self._took(self._at_s)
                    continue
            if not self._over:
                self._read(data)

    def _read_to_end(self) -> None:
        self.read()
        if not self._over:
            self.exchange.fail("truncated")

    def _read(self, data: bytes) -> None:
        if self._chunks is None:
            plain = plain_head(data) if self._parser is None else None
            if plain is None:
                self._parse(data)
                return
            size, headers = plain
            self.head, data = data[:size], data[size:]
            self._chunks = ChunkedBody()
            self._begin(200, headers)
        try:
            pieces = self._chunks.feed(data)
        except MalformedAnswer as error:
            self.lost(error)
            return
        for piece in pieces:
            if not self._piece(piece):
                self._stop(self._at_s)
                return
        if self._chunks.ended:
            self._complete(keep=not self._chunks.surplus)
        elif self._chunks.between and self._scanner is not None and not self._scanner.partial:
            self._forms = self._learned
        else:
            self._forms = None

    def _parse(self, data: bytes) -> None:
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.lost(MalformedAnswer(str(error)))

    # httptools calls the next methods.

    def on_message_begin(self) -> None:
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in KEPT:
            self._headers[name.decode("ascii")] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and not self._over:
            self._begin(status, self._headers)

    def on_body(self, data: bytes) -> None:
        if not self._over and not self._piece(data):
            self._stop(self._at_s)

    def on_message_complete(self) -> None:
        if self.exchange.status is not None and not self._over:  # else it ends a 1xx answer
            self._complete(keep=self._parser.should_keep_alive())

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        exchange, scale = self.exchange, self._clock.scale
        self._headers = headers
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
            exchange.fail("malformed", f"the content type is {outcome.words_of(kind) or 'missing'}")

    def _piece(self, data: bytes) -> bool:
        """Take a piece of the body. False ends the answer here."""
        scanner, forms, exchange = self._scanner, self._learned, self.exchange
        if scanner is None:
            return self._collect(data)
        if forms is not None and not scanner.partial and forms.fit(data):
            self._took(self._at_s)
            return True
        if exchange.outcome == "ok":
            return True  # after [DONE] only the end of the HTTP framing follows
        try:
            for payload in scanner.feed(data):
                if not self._event(payload, data):
                    return False
                if exchange.outcome == "ok":
                    self._learned = None
                    break
        except MalformedStream as error:
            exchange.fail("malformed", str(error))
            return False
        return True

    def _event(self, payload: bytes, data: bytes) -> bool:
        """Take one event, whose end was in `data`. False if it ends the answer as failed."""
        exchange = self.exchange
        if payload == b"[DONE]":
            if exchange.reason is None:
                exchange.ok()
            return True
        body = event_body(payload)
        if text := _plain_token(body):
            self._output(None, text)
            if exchange.pieces is None and self._forms_left and data == _DATA % payload:
                self._forms_left -= 1
                self._learned = token_forms(data)
            return True
        event = event_of(body)
        if event.error is not None:
            exchange.fail(outcome.of_stream_error(event.error), outcome.error_words(event.error))
            return False
        if event.finish_reason == "abort":  # vLLM shutting down ends its streams cleanly
            exchange.fail("truncated")
        counted = _usage(event.usage, exchange) if event.usage is not None else None
        if event.has_output:
            self._output(counted, answer_text(payload) if exchange.pieces is not None else "")
        return True

    def _output(self, counted: int | None, text: str) -> None:
        exchange = self.exchange
        exchange.events.add(self._at_s, counted)
        if exchange.pieces is not None:
            exchange.pieces.append(text)

    def _collect(self, data: bytes) -> bool:
        if self._body is None:
            return False
        self._body += data
        if len(self._body) <= self._most:
            return True
        if self.exchange.status == 200:
            self.exchange.fail("malformed", f"an answer of more than {self._most} bytes")
        else:
            self._refused()
        return False

    def _refused(self) -> None:
        exchange = self.exchange
        assert exchange.status is not None
        raw = bytes(self._body or b"")[:MAX_ERROR_BYTES]
        exchange.outcome, exchange.reason = outcome.of_status(exchange.status, raw)
        exchange.said = outcome.first_words(raw)
        exchange.reject_latency_s = self._at_s - exchange.sent_s

    def _whole(self, raw: bytes) -> None:
        """Read an answer in one piece (`stream: false`) as one output event."""
        exchange = self.exchange
        try:
            event = event_of(event_body(raw))
        except MalformedStream:
            exchange.fail("malformed", "the answer is not a JSON object")
            return
        counted = _usage(event.usage, exchange) if event.usage is not None else None
        if event.error is not None:
            exchange.fail(outcome.of_stream_error(event.error), outcome.error_words(event.error))
            return
        self._output(counted, answer_text(raw) if exchange.pieces is not None else "")
        exchange.ok()

    def _complete(self, *, keep: bool) -> None:
        """End a complete answer, and keep or close its connection."""
        self._leave(keep=keep)
        exchange = self.exchange
        if self._body is not None and exchange.status == 200:
            self._whole(bytes(self._body))
        elif self._body is not None:
            self._refused()
        elif exchange.outcome != "ok" and exchange.reason is None:
            exchange.fail("truncated")
        self._end(self._at_s)

    def _stop(self, at_s: float) -> None:
        """End an incomplete answer, and close its connection."""
        self._leave(keep=False)
        self._end(at_s)

    def _leave(self, *, keep: bool) -> None:
        self._over, self._forms = True, None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release(keep=keep)

    def _end(self, at_s: float) -> None:
        if not self._ended:
            self._ended = True
            self._watch.finish()
            self.exchange.done_s = at_s
            self._on_end(self.exchange)


def _plain_token(body: dict[str, Any]) -> str:
    """Return the text of an event that has only one choice with text, as nearly all have.

    This shortcut is faster than `event_of`, which handles all other events. For them it returns "".
    """
    choices = body.get("choices")
    if not choices or body.get("usage") or "error" in body:
        return ""
    try:
        (choice,) = choices
        if choice["finish_reason"] is not None:
            return ""
        text = choice["text"] if "text" in choice else choice["delta"]["content"]
        return text if isinstance(text, str) else ""
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return ""


def answer_text(payload: bytes) -> str:
    """Return the text of the first choice of an event, or of an answer in one piece."""
    try:
        choice = (read_object(payload) or {})["choices"][0]
        message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        return str(message.get("content") or "")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return ""


def _usage(usage: dict[str, Any], exchange: ClientExchange) -> int | None:
    """Store the counts of a usage object, and return the number of output tokens so far."""
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
