"""Send one prepared request and read its stream, recording when each event arrived.

The client decides nothing: no retry, no redirect, no rate. Every request ends as an outcome in its
`ClientExchange`, never as an exception. A network read gets one time stamp, taken before its bytes
are parsed.
"""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import orjson
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from forebay.proxy.http1.sse import EventScanner, MalformedStream, parse_event
from forebay.replay import outcome
from forebay.replay.clock import Clock
from forebay.replay.measure import OutputEvents

KEEP_ALIVE_S = 3.0  # below the 5 s of uvicorn, so that no request meets a closing connection
CONNECT_TIMEOUT_S = 10.0
MAX_ERROR_BYTES = 64 << 10


class Body(aiohttp.Payload):
    """Bytes that are written to the connection unchanged; aiohttp's payload warns above 1 MiB."""

    _default_content_type = "application/json"

    def __init__(self, value: bytes) -> None:
        super().__init__(value)
        self._size = len(value)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        await writer.write(self._value)


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
        self._scope = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._entered = False
        self._flowing = False

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._entered = True
        if self.reason is None:
            self._arm()
        else:  # cancelled before its task first ran
            self._scope.reschedule(asyncio.get_running_loop().time())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._scope.__aexit__(kind, error, trace)

    def progress(self, at_s: float) -> None:
        """Record output at `at_s`; from now on a gap without output is a stall."""
        self._due_s = at_s + self._stall_s
        if not self._flowing:  # the timer is still set to the first-token limit, usually later
            self._flowing = True
            self._arm()

    def end(self, reason: str) -> None:
        """Stop waiting now; the scope raises TimeoutError."""
        if self.reason is None:
            self.reason = reason
            if self._entered:
                self._scope.reschedule(asyncio.get_running_loop().time())

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left = self._clock.wall(min(self._due_s, self._leaves_s) - self._clock.now())
        self._timer = asyncio.get_running_loop().call_later(max(left, 0.001), self._look)

    def _look(self) -> None:
        now_s = self._clock.now()
        if now_s >= self._leaves_s:
            self.end("cancelled")
        elif now_s < self._due_s:
            self._arm()
        else:
            self.end("stall" if self._flowing else "timeout")


class Client:
    """One session for a whole run; it keeps connections, and nothing else."""

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
        headers = {
            "content-type": "application/json",
            "accept": "text/event-stream",
            "accept-encoding": "identity",
        }
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=2**16,
            auto_decompress=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.session.close()

    def watch(self, leaves_s: float | None = None) -> ProgressWatch:
        """Make the watch for one `send`; the caller may `end` it.

        At second `leaves_s` of the run the client of the trace gave up: the request is cancelled.
        """
        leaves_s = math.inf if leaves_s is None else leaves_s
        return ProgressWatch(self._clock, self._first_token_s, self._stall_s, leaves_s)

    async def send(
        self,
        url: URL,
        body: bytes,
        exchange: ClientExchange,
        watch: ProgressWatch,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send `body` and fill in `exchange`; raises only cancellation."""
        sent = {"x-request-id": exchange.request_id, **(headers or {})}
        try:
            async with watch:
                await self._send(url, body, exchange, watch, sent)
        except TimeoutError as error:
            # Without a reason from the watch, the connection timed out.
            if exchange.outcome != "ok":
                exchange.fail(watch.reason or _failure(error, exchange))
        except (aiohttp.ClientError, OSError) as error:
            if exchange.outcome != "ok":
                exchange.fail(_failure(error, exchange))
        except MalformedStream:
            exchange.fail("malformed")
        exchange.done_s = self._clock.now()

    async def _send(
        self,
        url: URL,
        body: bytes,
        exchange: ClientExchange,
        watch: ProgressWatch,
        headers: dict[str, str],
    ) -> None:
        payload = Body(body)
        exchange.sent_s = self._clock.now()
        async with self.session.post(
            url,
            data=payload,
            headers=headers,
            allow_redirects=False,
        ) as response:
            self._headers(response, exchange)
            if response.status != 200:
                raw = await _read_error(response.content)
                exchange.outcome, exchange.reason = outcome.of_status(response.status, raw)
                exchange.reject_latency_s = self._clock.now() - exchange.sent_s
            elif "application/json" == response.content_type == headers.get("accept"):
                self._whole(await response.read(), exchange)
            elif response.content_type != "text/event-stream":
                exchange.fail("malformed")
            else:
                await self._read(response.content, exchange, watch)

    def _whole(self, raw: bytes, exchange: ClientExchange) -> None:
        """Read an answer in one piece (`stream: false`): all of it is one output event."""
        at_s = self._clock.now()
        event = parse_event(raw)
        counted = _usage(event.usage, exchange) if event.usage is not None else None
        if event.error is not None:
            exchange.fail(outcome.of_stream_error(event.error))
            return
        exchange.events.add(at_s, counted)
        if exchange.pieces is not None:
            exchange.pieces.append(answer_text(raw))
        exchange.ok()

    def _headers(self, response: aiohttp.ClientResponse, exchange: ClientExchange) -> None:
        headers, scale = response.headers, self._clock.scale
        exchange.status = response.status
        exchange.backend = headers.get("x-forebay-backend", exchange.backend)
        exchange.queue_ms = outcome.seconds_header(headers.get("x-forebay-queue-ms"), scale)
        exchange.retry_after_s = outcome.seconds_header(headers.get("retry-after-ms"), scale / 1e3)
        if exchange.retry_after_s is None:
            exchange.retry_after_s = outcome.seconds_header(headers.get("retry-after"), scale)

    async def _read(
        self, content: aiohttp.StreamReader, exchange: ClientExchange, watch: ProgressWatch
    ) -> None:
        scanner = EventScanner()
        while chunk := await content.readany():
            at_s = self._clock.now()
            if exchange.outcome == "ok":
                continue  # after [DONE] only the end of the HTTP framing follows
            for payload in scanner.feed(chunk):
                if text := _plain_token(payload):
                    exchange.events.add(at_s)
                    watch.progress(at_s)
                    if exchange.pieces is not None:
                        exchange.pieces.append(text)
                    continue
                event = parse_event(payload)
                if event.done:
                    if exchange.reason is None:
                        exchange.ok()
                    break
                if event.error is not None:
                    exchange.fail(outcome.of_stream_error(event.error))
                    return
                if event.finish_reason == "abort":  # vLLM shutting down ends its streams cleanly
                    exchange.fail("truncated")
                counted = _usage(event.usage, exchange) if event.usage is not None else None
                if event.has_output:
                    exchange.events.add(at_s, counted)
                    watch.progress(at_s)
                    if exchange.pieces is not None:
                        exchange.pieces.append(answer_text(payload))
        if exchange.outcome != "ok" and exchange.reason is None:
            exchange.fail("truncated")


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


async def _read_error(content: aiohttp.StreamReader) -> bytes:
    """Read an error body to its end, or up to MAX_ERROR_BYTES."""
    raw = b""
    while len(raw) < MAX_ERROR_BYTES and (chunk := await content.read(MAX_ERROR_BYTES)):
        raw += chunk
    return raw


def _failure(error: Exception, exchange: ClientExchange) -> str:
    if isinstance(error, aiohttp.ClientSSLError):
        return "tls"
    if isinstance(error, aiohttp.ClientResponseError):
        return "malformed"  # the answer is not HTTP
    return "connect" if exchange.status is None else "truncated"
