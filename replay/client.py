"""Send one prepared request and read its stream, recording when each event arrived.

The client decides nothing: no retry, no redirect, no rate. Every request ends as an outcome in its
`ClientExchange`, never as an exception. No task runs for a request: its answer is read where its
bytes arrive. A network read gets one time stamp, taken before its bytes are parsed.
"""

import asyncio
import math
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson
from yarl import URL

from forebay.proxy.http1.sse import EventScanner, MalformedStream, parse_event
from forebay.replay import outcome
from forebay.replay.clock import Clock
from forebay.replay.connection import (
    ConnectionPool,
    HttpConnection,
    MalformedAnswer,
    Route,
    route_to,
)
from forebay.replay.measure import OutputEvents

MAX_ERROR_BYTES = 64 << 10
MAX_WHOLE_BYTES = 64 << 20


@dataclass(slots=True)
class ClientExchange:
    """One request and its answer so far; times in seconds of the run."""

    request_id: str
    intended_s: float
    cap_wait_s: float = 0.0
    sent_s: float = 0.0
    done_s: float | None = None
    events: OutputEvents = field(default_factory=OutputEvents)
    status: int | None = None
    outcome: str = "failed"
    reason: str | None = None
    backend: str | None = None
    queue_ms: float | None = None
    retry_after_s: float | None = None
    reject_latency_s: float | None = None
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    pieces: list[str] | None = None  # of the answer's text; None: it is not kept

    @property
    def answer(self) -> str | None:
        """The text of a complete answer, if it is kept."""
        return "".join(self.pieces) if self.pieces is not None and self.outcome == "ok" else None

    def ok(self) -> None:
        self.outcome, self.reason = "ok", None

    def fail(self, reason: str) -> None:
        self.outcome, self.reason = "failed", reason


class ProgressWatch:
    """Ends a request that makes no progress, or that the run cancels.

    One timer checks, when it fires, whether there was progress. So no timer is set for each token.
    """

    def __init__(
        self, clock: Clock, first_token_s: float, stall_s: float, leaves_s: float = math.inf
    ) -> None:
        self.reason: str | None = None
        self._leaves_s = leaves_s
        self._clock = clock
        self._stall_s = stall_s
        self._due_s = clock.now() + first_token_s
        self._look_s = min(first_token_s, stall_s)
        self._events: OutputEvents | None = None
        self._stop: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, events: OutputEvents, stop: Callable[[], None]) -> None:
        """Watch the output `events` of a request; `stop` is called when it must end."""
        self._events, self._stop = events, stop
        if self.reason is not None:  # ended before it began
            stop()
        else:
            self._arm(self._clock.now() + self._look_s)  # in time for either limit

    def finish(self) -> None:
        """Stop watching; the request has ended."""
        self._stop = None
        if self._timer is not None:
            self._timer.cancel()

    def end(self, reason: str) -> None:
        """End the request now."""
        if self.reason is None:
            self.reason = reason
            if self._stop is not None:
                self._stop()

    def _limit_s(self) -> float:
        events = self._events
        if events is not None and events.at_s:
            return events.at_s[-1] + self._stall_s
        return self._due_s

    def _arm(self, at_s: float) -> None:
        left = self._clock.wall(min(at_s, self._leaves_s) - self._clock.now())
        self._timer = asyncio.get_running_loop().call_later(max(left, 0.001), self._look)

    def _look(self) -> None:
        now_s, limit_s = self._clock.now(), self._limit_s()
        if now_s >= self._leaves_s:
            self.end("cancelled")
        elif now_s < limit_s:
            # Output may begin at any time, and be a stall that much later.
            self._arm(min(limit_s, now_s + self._look_s))
        else:
            self.end("stall" if self._events is not None and self._events.at_s else "timeout")


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

    def connect_by(self, task: "asyncio.Task[None]") -> None:
        self._connecting = task

    def send(self, connection: HttpConnection, head: bytes, body: bytes) -> None:
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
        exchange.queue_ms = outcome.seconds_header(headers.get("x-forebay-queue-ms"), scale)
        exchange.retry_after_s = outcome.seconds_header(headers.get("retry-after-ms"), scale / 1e3)
        if exchange.retry_after_s is None:
            exchange.retry_after_s = outcome.seconds_header(headers.get("retry-after"), scale)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if status != 200:
            self._body, self._most = bytearray(), MAX_ERROR_BYTES
        elif kind == "application/json" and self._wants_whole:
            self._body, self._most = bytearray(), MAX_WHOLE_BYTES
        elif kind == "text/event-stream":
            self._scanner = EventScanner()
        else:
            exchange.fail("malformed")

    def piece(self, data: bytes, at_s: float) -> bool:
        scanner = self._scanner
        if scanner is None:
            return self._collect(data)
        exchange = self.exchange
        if exchange.outcome == "ok":
            return True  # after [DONE] only the end of the HTTP framing follows
        if exchange.pieces is None and not scanner.partial and is_one_token(data):
            exchange.events.at_s.append(at_s)
            return True
        try:
            for payload in scanner.feed(data):
                if not self._event(payload, at_s):
                    self._end()
                    return False
                if exchange.outcome == "ok":
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
        if text := _plain_token(payload):
            self._output(at_s, None, text)
            return True
        event = parse_event(payload)
        if event.done:
            if exchange.reason is None:
                exchange.ok()
            return True
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
            event = parse_event(raw)
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


class Client:
    """Sends the requests of a run; it keeps connections, and nothing else."""

    def __init__(
        self,
        clock: Clock,
        *,
        first_token_timeout_s: float,
        stall_timeout_s: float,
        api_key: str | None = None,
    ) -> None:
        self._clock = clock
        self._first_token_s = first_token_timeout_s
        self._stall_s = stall_timeout_s
        self._headers = {"content-type": "application/json"}
        self._defaults = {"accept": "text/event-stream"}
        if api_key:
            self._defaults["authorization"] = f"Bearer {api_key}"
        self._default_lines = _lines(self._defaults)
        self._pool = ConnectionPool(clock)
        self._connecting: set[asyncio.Task[None]] = set()

    @cached_property
    def session(self) -> aiohttp.ClientSession:
        """A session for everything that is not measured: model lists, metrics."""
        headers = {k: v for k, v in self._defaults.items() if k == "authorization"}
        return aiohttp.ClientSession(headers=headers, cookie_jar=aiohttp.DummyCookieJar())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.close()
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        if "session" in self.__dict__:
            await self.session.close()
        await asyncio.sleep(0)  # lets the closed connections be released

    def route(self, url: URL) -> Route:
        return route_to(url, self._headers)

    def watch(self, leaves_s: float | None = None) -> ProgressWatch:
        """Make the watch for one request; the caller may `end` it.

        At second `leaves_s` of the run the client of the trace gave up: the request is cancelled.
        """
        leaves_s = math.inf if leaves_s is None else leaves_s
        return ProgressWatch(self._clock, self._first_token_s, self._stall_s, leaves_s)

    async def send(
        self, url: URL, body: bytes, exchange: ClientExchange, watch: ProgressWatch
    ) -> None:
        """Send `body`, wait for the end of the answer, and fill in `exchange`."""
        ended = asyncio.get_running_loop().create_future()
        self.begin(self.route(url), body, exchange, watch, {}, ended.set_result)
        try:
            await ended
        finally:
            watch.finish()

    def begin(
        self,
        route: Route,
        body: bytes,
        exchange: ClientExchange,
        watch: ProgressWatch,
        headers: Mapping[str, str],
        on_end: Callable[[ClientExchange], None],
    ) -> None:
        """Send `body` now; `on_end` is called with the exchange when its answer has ended."""
        lines = self._default_lines if not headers else _lines({**self._defaults, **headers})
        head = b"%bx-request-id: %b\r\n%bcontent-length: %d\r\n\r\n" % (
            route.start,
            exchange.request_id.encode("latin-1"),
            lines,
            len(body),
        )
        whole = headers.get("accept") == "application/json"
        reader = AnswerReader(exchange, self._clock, watch, whole, on_end)
        connection = self._pool.take(route)
        exchange.sent_s = self._clock.now()
        if connection is not None:
            reader.send(connection, head, body)
        else:
            task = asyncio.ensure_future(self._connect(route, reader, head, body))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
            reader.connect_by(task)
        watch.start(exchange.events, reader.give_up)

    async def _connect(self, route: Route, reader: AnswerReader, head: bytes, body: bytes) -> None:
        try:
            connection = await self._pool.connect(route)
        except (OSError, TimeoutError) as error:
            reader.broken(error)
        else:
            reader.send(connection, head, body)


def _lines(headers: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")


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


def _plain_token(payload: bytes) -> str:
    """Return the text of an event with one choice with text and nothing else, as nearly all are.

    This shortcut halves the cost of an event; `parse_event` handles all others, which are "" here.
    """
    try:
        body = orjson.loads(payload)
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
        told = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        return str(told.get("content") or "")
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
