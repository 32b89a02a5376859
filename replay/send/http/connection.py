"""Keep-alive connections of the load generator: only sockets and time stamps.

A read gets one time stamp and is kept. Streams are parsed later, when the run has time for it: a
client that parses at each read is late for the next reads. No task is woken and no buffer copied.
Idle connections are kept, and the last used connection is taken first.
"""

import asyncio
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from yarl import URL

from forebay.replay.clock.clock import Clock
from forebay.replay.clock.spare_time import SpareTime

KEEP_ALIVE_S = 3.0  # below the 5 s of uvicorn, so that no request meets a closing connection
CONNECT_TIMEOUT_S = 10.0
MOST_UNREAD = 256  # times and bytes of network reads, for each answer
_SHORT_BYTES = 8  # a shorter read may be part of the end of an answer


@dataclass(frozen=True, slots=True)
class Route:
    """The address of requests (host, port, TLS), and the first lines of their heads."""

    address: tuple[str, int, bool]
    start: bytes


def route_to(url: URL, headers: Mapping[str, str]) -> Route:
    """Make the route to `url`, with headers that all requests share."""
    address = url.raw_host or "", url.port or 80, url.scheme == "https"
    lines = [f"POST {url.raw_path_qs} HTTP/1.1", f"host: {url.raw_authority}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return Route(address, "\r\n".join([*lines, ""]).encode("latin-1"))


class Reader(Protocol):
    """Takes the answer to a request.

    Attributes:
        unread: times and bytes, in turn, of network reads that are not parsed yet.
        head: the head of a stream in chunks, empty until it is parsed.
    """

    unread: list[Any]
    head: bytes

    def read(self) -> None: ...

    def came_whole(self) -> None: ...

    def lost(self, error: Exception | None) -> None: ...


class HttpConnection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, clock: Clock, pool: "ConnectionPool", key: tuple[str, int, bool]) -> None:
        self.freed_s = 0.0
        self._now = clock.now
        self._pool = pool
        self._spare = pool.spare
        self._key = key
        self._transport: asyncio.Transport | None = None
        self._descriptor: int | None = None
        self._answer: Reader | None = None
        self._in_chunks = False  # the answer is a stream in chunks, which can be read later

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, answer: Reader, head: bytes, body: Sequence[bytes]) -> None:
        """Send a request, whose answer goes to `answer`."""
        transport = self._transport
        assert transport is not None
        self._answer, self._in_chunks = answer, False
        pieces = [head, *body]
        if self._descriptor is not None and not transport.get_write_buffer_size():
            # The transport of uvloop would write after the next reads.
            try:
                written = os.writev(self._descriptor, pieces)
            except OSError:  # the transport gets it, too, and reports it
                written = 0
            if written == sum(map(len, pieces)):
                return
            pieces = _rest(pieces, written)
        transport.writelines(pieces)

    def release(self, *, keep: bool) -> None:
        """After a complete answer, `keep` the connection for the next request, or close it."""
        self._answer = None
        if keep:
            self._pool.put(self._key, self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once, without a further call of the answer."""
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        socket = transport.get_extra_info("socket")
        if socket is not None and transport.get_extra_info("ssl_object") is None:
            self._descriptor = socket.fileno()

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # bytes without a request
            self.abort()
            return
        unread = answer.unread
        now_s = self._now()
        if self._spare.wanted:
            self._spare.offer(now_s)
        unread.append(now_s)
        unread.append(data)
        if not self._in_chunks and len(unread) == 2 and not answer.head:
            head = self._pool.known_head
            self._in_chunks = data[: len(head)] == head != b""
            if self._in_chunks and len(data) == len(head):
                return
        if self._in_chunks:
            if data[-4:] != b"\r\n\r\n" and len(data) > _SHORT_BYTES and len(unread) < MOST_UNREAD:
                return
            if data[-7:] == b"\r\n0\r\n\r\n" or data == b"0\r\n\r\n":
                self.release(keep=True)
                answer.came_whole()
                return
        answer.read()
        if answer.head:
            self._in_chunks, self._pool.known_head = True, answer.head

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.forget(self._key, self)
        self._transport = self._descriptor = None
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.lost(error)


def _rest(pieces: list[bytes], written: int) -> list[bytes]:
    """Return the unwritten rest of `pieces`, after `written` bytes."""
    for number, piece in enumerate(pieces):
        if written < len(piece):
            return [piece[written:], *pieces[number + 1 :]]
        written -= len(piece)
    return []


class ConnectionPool:
    """The connections of a run, without a limit, because an open loop must not wait.

    Attributes:
        known_head: head of some stream in chunks. Other streams often have an equal head.
    """

    def __init__(self, clock: Clock, spare: SpareTime) -> None:
        self.known_head = b""
        self.spare = spare
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._idle: dict[tuple[str, int, bool], list[HttpConnection]] = {}
        self._tls: ssl.SSLContext | None = None

    def take(self, route: Route) -> HttpConnection | None:
        """Return an open and idle connection, or None."""
        idle = self._idle.get(route.address)
        while idle:
            connection = idle.pop()
            if not connection.usable:
                continue
            if self._loop.time() - connection.freed_s <= KEEP_ALIVE_S:
                return connection
            connection.abort()
        return None

    async def connect(self, route: Route) -> HttpConnection:
        """Open a connection (OSError, ssl.SSLError, TimeoutError: it cannot be opened)."""
        host, port, tls = route.address
        if tls and self._tls is None:
            self._tls = ssl.create_default_context()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await self._loop.create_connection(
                lambda: HttpConnection(self._clock, self, route.address),
                host,
                port,
                ssl=self._tls if tls else None,
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
