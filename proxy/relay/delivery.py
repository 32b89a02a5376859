"""Send responses to clients, begin streams early, and cut off clients that do not take them."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf

import aiohttp
import orjson
from aiohttp import HttpVersion11, web
from aiohttp.helpers import EMPTY_BODY_STATUS_CODES, rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE

from forebay.proxy.api.dialects import Dialect
from forebay.proxy.http1.client.connection import Sink
from forebay.proxy.http1.errors import ApiError, error_event, upstream_error
from forebay.proxy.http1.server.byte_budget import SMALL_BYTES
from forebay.proxy.relay.timeouts import TimeoutWatch, Watchdog
from forebay.proxy.telemetry.record import RequestRecord
from forebay.traces.ground.sse import read_object

UNTAKEN_BYTES = 64 << 10  # with more bytes buffered for a client, the proxy waits for it
CONTROLS = bytes({*range(32), 127} - {ord("\t")})  # characters that may not be in a header
AT_ONCE_BYTES = 16 << 10  # largest body that is copied behind its headers; far below UNTAKEN_BYTES
CLIENT_LEFT = (ConnectionError, aiohttp.ClientConnectionError)
"""Errors of a write to a client that has left. aiohttp cancels or ends its handler."""


def is_chunked(outgoing: web.StreamResponse) -> bool:
    """True if the body of a response whose head has been written goes out in chunks."""
    return outgoing.headers.get("transfer-encoding") == "chunked"


def piece_sink(transport: asyncio.Transport, *, chunked: bool) -> Sink:
    """Make a function that writes a piece of a body. It returns False to wait for the client."""
    # Looked up once, as the function may run for every token.
    is_closing, untaken = transport.is_closing, transport.get_write_buffer_size
    write = transport.write

    def send(piece: bytes) -> bool:
        if is_closing():
            return False
        write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        return untaken() <= UNTAKEN_BYTES

    return send


@dataclass(slots=True, eq=False)
class Opening:
    """A stream before its first event: comments and pings may begin the response early.

    From then on the status is 200, and another backend may answer all the same, as nothing was said
    yet. Use as a context around all that decides about the response.

    Args:
        every_s: seconds without a byte after which the client gets a heartbeat; 0: never, and those
            of the backend are not passed on either.
        headers: returns our headers, for a response that begins without a backend.

    Attributes:
        next_at: when the next heartbeat is due.
    """

    incoming: web.BaseRequest
    dialect: Dialect
    every_s: float
    headers: Callable[[], dict[str, str]]
    record: RequestRecord
    watchdog: Watchdog
    next_at: float = inf
    _response: web.StreamResponse | None = None
    _watch: TimeoutWatch | None = None

    @property
    def on(self) -> bool:
        """The client gets heartbeats."""
        return self.every_s > 0

    def __enter__(self) -> "Opening":
        if self.on:
            self.next_at = self.watchdog.clock() + self.every_s
            self.watchdog.beating.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> web.StreamResponse | None:
        """End the heartbeats. Returns the response if it has begun."""
        self.watchdog.beating.discard(self)
        return self._response

    def go_on(self, watch: TimeoutWatch, response: web.StreamResponse) -> None:
        """Send heartbeats within a stream that has begun, while its backend is silent."""
        self._watch, self._response = watch, response
        self.next_at = self.watchdog.clock() + self.every_s
        self.watchdog.beating.add(self)

    async def beat(self, now: float) -> None:
        """Send a heartbeat, unless the client has yet to take the bytes sent before."""
        transport = self.incoming.transport
        self.next_at = now + self.every_s
        if self._watch is not None:
            heard_at = self._watch.reading_since
            if heard_at is None or now < heard_at + self.every_s:
                self.next_at = (now if heard_at is None else heard_at) + self.every_s
                return
        if transport is not None and not transport.get_write_buffer_size():
            kind = {"content-type": "text/event-stream; charset=utf-8"}
            await self._send(transport, self.dialect.heartbeat, {**self.headers(), **kind})

    async def pass_on(self, heartbeats: bytes, headers: dict[str, str]) -> None:
        """Send comments and pings of a backend. A client that does not read does without them.

        Args:
            headers: ours and the backend's, if the response begins with these.
        """
        transport = self.incoming.transport
        if transport is not None and transport.get_write_buffer_size() <= UNTAKEN_BYTES:
            self.next_at = self.watchdog.clock() + self.every_s
            await self._send(transport, heartbeats, headers)

    async def _send(
        self, transport: asyncio.Transport, data: bytes, headers: dict[str, str]
    ) -> None:
        """Write without waiting for the client: its slowness must not look like the backend's."""
        if transport.is_closing():
            return  # aiohttp cancels this request
        if self._response is None:
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self.incoming)
            self.incoming.writer.send_headers()
        piece_sink(transport, chunked=is_chunked(self._response))(data)

    async def finished(self, response: web.StreamResponse) -> web.StreamResponse:
        """Return the response, sent as an event if a whole one came after heartbeats."""
        if self._response is None or response is self._response:
            return response
        if response.status == 200 and isinstance(response, web.Response):
            assert isinstance(response.body, bytes)
            return await self._end(b"data: %b\n\n" % response.body.replace(b"\n", b"\ndata: "))
        self.record.reason = "upstream_error"
        typed = self.dialect.types_events
        return await self._end(error_event(_backends_error(response, typed), typed=typed))

    async def failed(self, error: ApiError) -> web.StreamResponse:
        """Send the error as an event, or raise it while nothing has been sent."""
        if self._response is None:
            raise error
        self.record.reason = error.code
        typed = self.dialect.types_events
        return await self._end(error_event(error.body(typed=typed), typed=typed))

    async def _end(self, event: bytes) -> web.StreamResponse:
        response = self.close()
        assert response is not None
        await end_with(event, self.incoming, response, self.watchdog, whole=True)
        return response


def _backends_error(response: web.StreamResponse, typed: bool) -> bytes:
    """Return the error that a backend answered with as JSON in one line, or our own for it."""
    body = response.body if isinstance(response, web.Response) else None
    fields = read_object(body) if isinstance(body, bytes) else None
    error = None if fields is None else fields.get("error", fields)  # vLLM up to 0.10 has none
    if not isinstance(error, dict) or "message" not in error:
        return upstream_error().body(typed=typed)
    return orjson.dumps({"type": "error", "error": error} if typed else {"error": error})


async def end_with(
    event: bytes,
    request: web.BaseRequest,
    response: web.StreamResponse,
    watchdog: Watchdog,
    *,
    whole: bool,
) -> None:
    """Send the last event of a stream. The framing of a stream that is not whole is broken."""
    with watchdog.watching(request, None) as watch, suppress(*CLIENT_LEFT):
        watch.writing_since = watchdog.clock()
        await response.write(event)
        if whole:
            await response.write_eof()
        elif request.transport is not None:
            request.transport.close()  # flushes, but for the last chunk


async def send_whole(
    request: web.BaseRequest, response: web.StreamResponse, watchdog: Watchdog
) -> None:
    """Send a response that is ready."""
    if _sent_at_once(request, response):
        return
    with watchdog.watching(request) as watch, suppress(*CLIENT_LEFT):
        watch.writing_since = watchdog.clock()
        await response.prepare(request)
        await response.write_eof()


def _sent_at_once(request: web.BaseRequest, response: web.StreamResponse) -> bool:
    """Write a small response to a POST in one step, with the bytes that aiohttp would write.

    aiohttp takes ten steps, which cost a small request 4 % more instructions. False, and nothing is
    written, if the response may need another framing, or the client has left.
    """
    transport, headers = request.transport, response.headers
    body = response.body if type(response) is web.Response else None
    if (
        not isinstance(body, bytes)
        or len(body) > AT_ONCE_BYTES
        or _framed_otherwise(request, response)
    ):
        return False
    if transport is None or transport.is_closing():
        return False
    # The headers, with those that every response gets. (aiohttp's names are slow in an f-string.)
    lines = [name + ": " + value for name, value in headers.items()]
    lines.append(f"Content-Length: {len(body)}")
    if body and "Content-Type" not in headers:
        lines.append("Content-Type: application/octet-stream")
    if "Date" not in headers:
        lines.append(f"Date: {rfc822_formatted_time()}")
    if "Server" not in headers:
        lines.append(f"Server: {SERVER_SOFTWARE}")
    keep_alive = request.keep_alive and response.keep_alive is None
    if not keep_alive:
        lines.append("Connection: close")
    text = "\r\n".join((f"HTTP/1.1 {response.status} {response.reason}", *lines, "\r\n"))
    head = text.encode()
    if len(head) - len(head.translate(None, CONTROLS)) != 2 * len(lines) + 4:
        return False  # a header has a control character, which aiohttp answers with an error
    # The bytes. aiohttp looks at these attributes to see that the response has been sent.
    transport.write(head + body)
    request.writer.output_size += len(head) + len(body)
    response._keep_alive = keep_alive
    response._eof_sent = True
    return True


def _framed_otherwise(request: web.BaseRequest, response: web.StreamResponse) -> bool:
    """True if a response with a body is not framed by a `Content-Length` that we add."""
    headers = response.headers
    return (
        request.method != "POST"
        or request.version != HttpVersion11
        or response.status in EMPTY_BODY_STATUS_CODES
        or "Connection" in headers
        or "Content-Length" in headers
    )


def large_bytes(response: web.StreamResponse) -> int:
    """Return the bytes of a response that count in the budget of memory, 0 if it is small."""
    body = response.body if isinstance(response, web.Response) else None
    return len(body) if isinstance(body, bytes) and len(body) > SMALL_BYTES else 0


async def wait_taken(request: web.BaseRequest, watchdog: Watchdog) -> None:
    """Wait until the client has taken everything that was written.

    Writing waits only while more than 64 KiB are buffered. The rest has no other watchdog, and a
    proxy that ends would lose it.
    """
    transport = request.transport
    if transport is None or not transport.get_write_buffer_size():
        return
    await asyncio.sleep(0)  # uvloop writes at the end of the turn: mostly nothing is left then
    if transport.is_closing() or not transport.get_write_buffer_size():
        return
    with watchdog.watching(request) as watch:
        watch.writing_since = watchdog.clock()
        transport.set_write_buffer_limits(0)  # so that `drain` waits for all of it
        try:
            await request.writer.drain()
        except CLIENT_LEFT:
            return  # the client has left
        if not transport.is_closing():
            transport.set_write_buffer_limits()
