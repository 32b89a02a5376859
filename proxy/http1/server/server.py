"""An aiohttp server for a proxy: no router, OpenAI-shaped errors, bounded waits for clients.

aiohttp answers malformed requests with text/plain, and logs a traceback that quotes the bytes. Here
these errors are OpenAI-shaped and not logged. Requests that its parser accepts and a proxy must not
(HTTP versions but 1.0 and 1.1, transfer codings, expectations) are rejected before the handler. If
the end of a request is in doubt, the connection is closed after the response.
"""

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, cast

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader

from forebay.proxy.http1 import errors
from forebay.proxy.http1.error_response import error_response, raw_error_response
from forebay.proxy.http1.errors import SERVER, ApiError
from forebay.proxy.http1.headers import REQUEST_ID, request_id
from forebay.proxy.http1.headers import SERVER as SERVER_NAME
from forebay.proxy.http1.server.idle import IdleConnections, client_address
from forebay.proxy.http1.server.read_turns import LARGE_READ_BYTES, ReadTurns
from forebay.proxy.http1.server.request_checks import (
    TARGET_BYTES,
    ShortChunks,
    head_fault,
    headers_too_large,
    parse_error,
)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
KEEPALIVE_S = 75.0
# A chunk takes aiohttp's parser 2 us, however short it is: 256 KiB of one-byte chunks, 0.1 s. So a
# body may have this many chunks, and one more for each SHORT_CHUNK bytes of it. After
# CHUNKS_AT_ONCE the event loop does other work first.
MOST_CHUNKS, SHORT_CHUNK, CHUNKS_AT_ONCE = 1024, 64, 128
# Parsed before the chunks are counted: little, and more after a part that had few of them.
LEAST_READ_BYTES, FEW_CHUNKS = 1 << 10, 4


def _chunks_of(payload: StreamReader | None) -> int:
    """Return the number of chunks that have been parsed and not yet been read."""
    return len(payload._http_chunk_splits or ()) if payload is not None else 0


class _Protocol(web.RequestHandler):
    """One client connection."""

    __slots__ = (
        "_broken",
        "_chunks",
        "_cut_timer",
        "_dropping",
        "_head_bytes",
        "_head_timer",
        "_last_payload",
        "_length",
        "_server",
        "_unparsed",
        "_waits",
        "_wire",
        "address",
        "idle",
    )

    def __init__(self, server: "HttpServer", *, loop: asyncio.AbstractEventLoop, **kw: Any) -> None:
        super().__init__(server, loop=loop, **kw)
        self._server = server
        self.address = ""
        self.idle: dict[_Protocol, None] = {}  # idle connections of this address
        self._broken = False  # it is not known where the next request begins
        self._dropping = False  # the last request is answered
        self._chunks = 0  # received of the body that is being received
        self._unparsed = b""  # received after more than is parsed at once
        self._waits = False  # it waits for its turn to go on
        self._head_bytes = 0  # bytes of a head that is not complete
        self._head_timer: asyncio.TimerHandle | None = None
        self._last_payload: StreamReader | None = None
        self._length = 0  # bytes of the body that is being received; 0 if not stated
        self._wire: asyncio.Transport | None = None  # kept, as aiohttp drops its reference on close
        self._cut_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        super().connection_made(transport)
        server = self._server
        self.address = client_address(transport)
        self.idle = server.idle.opened(self.address)
        if server.open_connections > server.max_connections:
            surplus = server.idle.surplus(self.address)
            if surplus is None:
                self._refuse(errors.too_many_connections())
                return
            surplus._end(errors.too_many_connections())
        self.idle[self] = None
        self._start_head_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_head_timer()
        self._wire = None
        self._server.idle.closed(self, self.address)
        if self._cut_timer is not None:
            self._cut_timer.cancel()
        super().connection_lost(exc)
        self._last_payload = None  # it refers to this, and such rings take long to collect

    async def start(self) -> None:
        """Serve one request after another. aiohttp closes the connection when this ends."""
        try:
            await super().start()
        except asyncio.CancelledError:
            pass  # its traceback refers to the task that would keep it
        finally:
            self._cut_later()

    def _cut_later(self) -> None:
        """Cut a closed connection if its client does not take the rest in time.

        A closed transport waits until its buffer is taken: for ever if the client never reads.
        """
        wire = self._wire
        if wire is not None and wire.is_closing() and self._cut_timer is None:
            self._cut_timer = self._loop.call_later(self._server.client_write_s, wire.abort)

    def drop_rest(self) -> None:
        """Parse no more: the request is answered, and the connection closes in a while."""
        self._dropping = True
        self._unparsed = b""

    def data_received(self, data: bytes) -> None:
        if self._dropping:
            if len(data) >= LARGE_READ_BYTES:
                self._pause_transport_reading()
                self._wait_turn()
            return
        if self._unparsed and data:
            self._unparsed += data
            return
        began = perf_counter()
        if len(data) <= self._left():
            self._received(data)
            self._pause_in_body(len(data))
        elif len(data) <= LEAST_READ_BYTES:
            self._received(data)
        else:
            self._receive_in_parts(data)
        self._server.parsing_s += perf_counter() - began

    def _left(self) -> int:
        """Return the bytes of a body of stated length that are still to come."""
        payload = self._last_payload
        if not self._length or payload is None or payload.is_eof():
            return 0
        return self._length - payload.total_bytes

    def _receive_in_parts(self, data: bytes) -> None:
        start, parsed, size, requests = 0, 0, LEAST_READ_BYTES, self._request_count
        while start < len(data) and not self._broken:
            before = self._chunks
            self._received(data[start : start + size])
            start += size
            chunks = max(0, self._chunks - before)
            parsed += chunks
            size = min(4 * size, LARGE_READ_BYTES) if chunks <= FEW_CHUNKS else LEAST_READ_BYTES
            if start >= LARGE_READ_BYTES or (parsed > CHUNKS_AT_ONCE and start < len(data)):
                self._unparsed = data[start:]
                if parsed > CHUNKS_AT_ONCE and self._request_count != requests:
                    self.pause_reading()  # until the handler reads the body: it may not want it
                else:
                    self._pause_transport_reading()
                    self._wait_turn()
                return

    def _wait_turn(self) -> None:
        if not self._waits and self._wire is not None:
            self._waits = True
            self._server.turns.wait(self._go_on)

    def _pause_in_body(self, size: int) -> None:
        """Let others go on after a read of `size` bytes of a body, unless it soon ends."""
        if not self._broken and (size >= LARGE_READ_BYTES or self._left() > LARGE_READ_BYTES):
            self._pause_transport_reading()
            self._wait_turn()

    def _go_on(self) -> None:
        """Parse the received bytes, then read again."""
        self._waits = False
        if self._reading_paused or self._buffer_paused:
            return  # its end begins this again
        data, self._unparsed = self._unparsed, b""
        if data:
            self.data_received(data)
        if not (self._waits or self._reading_paused or self._buffer_paused):
            self._resume_transport_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        if self._reading_paused:  # aiohttp calls this for every chunk that is read
            super().resume_reading(resume_parser)

    def _resume_transport_reading(self) -> None:
        if self._broken:
            return  # nothing more is wanted, and the connection ends soon
        if self._unparsed:
            self._wait_turn()
        elif not self._waits:
            super()._resume_transport_reading()

    def _received(self, data: bytes) -> None:
        if self._broken:
            return
        last, count = self._last_payload, self._request_count
        in_head = last is None or last.is_eof()
        chunks = 0 if in_head else _chunks_of(last)
        super().data_received(data)
        if self._request_count != count:
            chunks = 0
            self._begin(last)
        elif data and in_head:
            self._partial_head(len(data))
        payload = self._last_payload
        if payload is not None and not payload.is_eof():
            self._chunks += _chunks_of(payload) - chunks
            if self._chunks > MOST_CHUNKS + payload.total_bytes // SHORT_CHUNK:
                # Nothing more of this connection is parsed, also while a rejected body is dropped.
                self._broken = True
                self._pause_transport_reading()
                payload.set_exception(ShortChunks("the chunks of the body are too short"))

    def _begin(self, last: StreamReader | None) -> None:
        """Note a request whose head is complete. `last` is the body of the last request."""
        self._chunks = self._head_bytes = 0
        self._stop_head_timer()
        message, self._last_payload = self._messages[-1]
        if not isinstance(message, RawRequestMessage):
            self._broken = True
            # The parser reports this to the queue of requests, not to the request whose body it was
            # reading. Its handler would wait for the rest until its time-out.
            payload = self._messages[-2][1] if len(self._messages) > 1 else last
            if payload is not None and not payload.is_eof():
                payload.set_exception(web.RequestPayloadError("not valid HTTP"))
        elif not self._last_payload.is_eof():
            self._length = 0 if message.chunked else int(message.headers.get("content-length", 0))

    def _partial_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._server.header_bytes + TARGET_BYTES:
            self._broken = True
            self._end(headers_too_large())
        elif self._head_timer is None:
            self._start_head_timer()

    def _start_head_timer(self) -> None:
        self._head_timer = self._loop.call_later(self._server.client_headers_s, self._too_slow)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        self._broken = True
        message = "The request headers took too long."
        self._end(ApiError(408, "request_timeout", message, close=True))

    def _end(self, error: ApiError) -> None:
        """Close with an error response. A response that is being written goes out first."""
        if self._waiter is None or self._waiter.done():  # not idle
            self.close()
        elif self._head_bytes:
            self._refuse(error)
        elif self.transport is not None:
            self.transport.close()  # no request has begun, so there is nothing to answer
            self._cut_later()

    def _refuse(self, error: ApiError) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(raw_error_response(error))
            self.transport.close()
            self._cut_later()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log nothing: parse errors quote the client's bytes."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer is not None and request.writer.output_size > 0:
            raise ConnectionError("a response has begun: it can only be cut")
        if status >= 500:
            if self._wire is not None:
                self._server.failed(exc)
            error = ApiError(500, "internal_error", "Internal error of the proxy.", SERVER)
            error.close = True
        else:
            error = parse_error(exc)
        return error_response(error, request_id(request.headers))


class HttpServer(web.Server):
    """Serves requests by `handler`.

    Attributes:
        header_bytes: bound of all header fields of a request together; more is a 431.
        client_write_s: time for a client to take the rest when its connection is closed.
        idle: the connections, by the address of their client.
        failed: called with unexpected exceptions.
        parsing_s: time that parsing requests has taken, before anything is known of their senders.
        turns: the read order of connections with large bodies.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        header_bytes: int = 16 << 10,
        client_headers_s: float = 10.0,
        client_write_s: float = 30.0,
        max_connections: float = float("inf"),
        failed: Callable[[BaseException | None], None] = lambda _: None,
    ) -> None:
        super().__init__(
            self._checked,
            handler_cancellation=True,
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=1.0,
            max_line_size=TARGET_BYTES,
            max_field_size=max(header_bytes, TARGET_BYTES + 1),
            access_log=None,
        )
        self._handler = handler
        self.header_bytes = header_bytes
        self.client_headers_s = client_headers_s
        self.client_write_s = client_write_s
        self.max_connections = max_connections
        self.failed = failed
        self.parsing_s = 0.0
        self.turns = ReadTurns(self._loop)
        self.idle: IdleConnections[_Protocol] = IdleConnections()

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    async def _checked(self, request: web.BaseRequest) -> web.StreamResponse:
        protocol: _Protocol = request._protocol  # type: ignore[assignment]
        if error := head_fault(request, self.header_bytes):
            return error_response(error, request_id(request.headers))
        protocol.idle.pop(protocol, None)
        try:
            response = await self._handler(request)
        finally:
            if protocol.transport is not None:
                protocol.idle[protocol] = None
        if not response.prepared:  # a response of the admin port, which has no id yet
            response.headers.setdefault(REQUEST_ID, request_id(request.headers))
            response.headers.setdefault("Server", SERVER_NAME)
            if cannot_go_on(request):
                response.force_close()
        if not request._payload.is_eof():
            protocol.drop_rest()
        return response

    def __call__(self) -> _Protocol:
        return _Protocol(self, loop=self._loop, **self._kwargs)


def client_of(request: web.BaseRequest) -> str:
    """Return the address of the client. Of IPv6 the half that names a customer."""
    protocol: _Protocol = request._protocol  # type: ignore[assignment]
    return protocol.address


def cannot_go_on(request: web.BaseRequest) -> bool:
    """True if the connection must be closed after this request.

    After a request to change the protocol the parser stops, or drops later bytes. And a client
    whose body was not waited for (Expect) may send its next request instead.
    """
    return bool(request._message.upgrade) or not request._payload.is_eof()
