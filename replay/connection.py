"""Keep-alive HTTP/1.1 connections of the load generator: nothing but sockets and a parser.

A read gets one time stamp, then its pieces go straight to the answer that waits for them: no task
is woken and no buffer copied. Connections that are not in use are kept, the last one used first.
"""

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import httptools
from yarl import URL

from forebay.replay.clock import Clock

KEEP_ALIVE_S = 3.0  # below the 5 s of uvicorn, so that no request meets a closing connection
CONNECT_TIMEOUT_S = 10.0
_KEPT = frozenset(
    {b"content-type", b"content-length", b"transfer-encoding", b"x-forebay-backend"}
    | {b"x-forebay-queue-ms", b"retry-after", b"retry-after-ms"}
)


class MalformedAnswer(Exception):
    """The bytes of an answer are not HTTP."""


class Receiver(Protocol):
    """Takes one answer; after `complete` or `broken` it gets nothing more."""

    def head(self, status: int, headers: Mapping[str, str]) -> None: ...
    def chunk(self, data: bytes, at_s: float) -> bool:
        """Take a whole chunk of a chunked body with its framing; False takes nothing of it."""
        ...

    def piece(self, data: bytes, at_s: float) -> bool:
        """Take a piece of the body; False ends the answer here, and closes the connection."""
        ...

    def complete(self) -> None: ...
    def broken(self, error: Exception | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Route:
    """Where requests go, and the first lines of their heads."""

    host: str
    port: int
    tls: bool
    start: bytes


def route_to(url: URL, headers: Mapping[str, str]) -> Route:
    """Make the route to `url`, with headers that all requests share."""
    host, port, tls = url.raw_host or "", url.port or 80, url.scheme == "https"
    lines = [f"POST {url.raw_path_qs} HTTP/1.1", f"host: {url.raw_authority}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return Route(host, port, tls, "\r\n".join([*lines, ""]).encode("latin-1"))


class HttpConnection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, clock: Clock, pool: "ConnectionPool", key: tuple[str, int, bool]) -> None:
        self.freed_s = 0.0
        self._clock = clock
        self._pool = pool
        self._key = key
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._headers: dict[str, str] = {}
        self._at_s = 0.0
        self._started = False
        self._chunk_ended = False  # the parser has read a chunk and its line end, and no more
        self._between_chunks = False

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, receiver: Receiver, head: bytes, body: Sequence[bytes]) -> None:
        """Send a request; its answer goes to `receiver`."""
        assert self._transport is not None
        self._receiver = receiver
        self._started = False
        self._transport.writelines((head, *body))

    def abort(self) -> None:
        """Close at once; the receiver hears nothing more."""
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._at_s = self._clock.now()
        receiver = self._receiver
        if receiver is None:  # bytes that no request asked for
            self._close()
            return
        # A parser that stands between two chunks need not see one that is taken whole.
        if self._between_chunks and receiver.chunk(data, self._at_s):
            return
        try:
            self._parser.feed_data(data)
            self._between_chunks = self._chunk_ended and data[-2:] == b"\r\n"
        except httptools.HttpParserError as error:
            self._break(MalformedAnswer(str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.forget(self._key, self)
        self._transport = None
        unbounded = "content-length" not in self._headers and (
            "transfer-encoding" not in self._headers
        )
        if self._receiver is not None and self._started and unbounded and error is None:
            receiver, self._receiver = self._receiver, None
            receiver.complete()  # the end of the connection is the end of this answer
        else:
            self._break(error)

    # httptools calls the methods below.

    def on_message_begin(self) -> None:
        self._headers = {}
        self._chunk_ended = False

    def on_chunk_header(self) -> None:
        self._chunk_ended = False

    def on_chunk_complete(self) -> None:
        self._chunk_ended = True

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _KEPT:
            self._headers[name.decode("ascii")] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._receiver is not None:
            self._started = True
            self._receiver.head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None and not self._receiver.piece(data, self._at_s):
            self.abort()

    def on_message_complete(self) -> None:
        self._chunk_ended = False
        if not self._started or self._receiver is None:  # the end of a 1xx answer
            return
        receiver, self._receiver = self._receiver, None
        self._started = False
        if self._parser.should_keep_alive():
            self._pool.put(self._key, self)
        else:
            self._close()
        receiver.complete()

    def _break(self, error: Exception | None) -> None:
        receiver, self._receiver = self._receiver, None
        self._close()
        if receiver is not None:
            receiver.broken(error)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class ConnectionPool:
    """The connections of a run; there is no limit, since an open loop must not wait for one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._idle: dict[tuple[str, int, bool], list[HttpConnection]] = {}
        self._tls: ssl.SSLContext | None = None

    def take(self, route: Route) -> HttpConnection | None:
        """Return a connection that is open and idle."""
        idle = self._idle.get((route.host, route.port, route.tls))
        while idle:
            connection = idle.pop()
            if not connection.usable:
                continue
            if self._loop.time() - connection.freed_s <= KEEP_ALIVE_S:
                return connection
            connection.abort()
        return None

    async def connect(self, route: Route) -> HttpConnection:
        """Open a connection; raises OSError, ssl.SSLError or TimeoutError."""
        key = (route.host, route.port, route.tls)
        if route.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await self._loop.create_connection(
                lambda: HttpConnection(self._clock, self, key),
                route.host,
                route.port,
                ssl=self._tls if route.tls else None,
            )
        return connection

    def put(self, key: tuple[str, int, bool], connection: HttpConnection) -> None:
        connection.freed_s = self._loop.time()
        self._idle.setdefault(key, []).append(connection)

    def forget(self, key: tuple[str, int, bool], connection: HttpConnection) -> None:
        idle = self._idle.get(key)
        if idle and connection in idle:
            idle.remove(connection)

    def close(self) -> None:
        for idle in self._idle.values():
            for connection in list(idle):
                connection.abort()
        self._idle.clear()
