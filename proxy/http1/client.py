"""Ask a backend over HTTP/1.1: kept-alive connections, and bodies given on as they arrive.

aiohttp's client wakes a task for every piece of a body, copies each twice and hangs when a chunk is
malformed in mid-stream; here the bytes of an answer go from the socket to whoever reads them in one
call. Parsing is llhttp's (httptools), which refuses what could be read in two ways.
"""

import asyncio
import errno
import re
import ssl
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

HEAD_BYTES = 64 << 10  # of an answer's status line and headers, or of a chunk's
SMALL_BYTES = 16 << 10  # of a request's body: below, a copy is cheaper than another buffer
PIECE_BYTES = 512 << 10  # of a large request: the loop may do other work between two
HELD_BYTES = 256 << 10  # of a body that nobody reads: then the backend must wait
IDLE_S = 3.0  # vLLM closes idle connections after 5 s; what we keep must not be that old

# What this side lacks: descriptors, memory, local ports. glibc says EBUSY when it has none left to
# look a name up with.
_OURS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EBUSY}
)
_ERRNO = re.compile(r"\[Errno (\d+)\]")

Sink = Callable[[bytes], bool]
"""Takes a piece of a body at once; False when it wants no more for now."""


class UpstreamFault(Exception):
    """The backend did not answer as it should."""


class ConnectFault(UpstreamFault):
    """No connection: refused, unreachable or too slow."""


class TlsFault(ConnectFault):
    """TLS failed; it says why in OpenSSL's own words, without addresses."""


class LocalShortage(UpstreamFault):
    """No connection for want of something here: the backend was not asked and is not to blame."""


class BrokenAnswer(UpstreamFault):
    """What came is not HTTP, or HTTP that could be read in two ways."""


class LostConnection(UpstreamFault):
    """The connection ended before the answer did.

    Attributes:
        stale: it had been kept, and ended before a byte of the answer came: perhaps a race with the
            backend, which closes idle connections.
    """

    def __init__(self, stale: bool) -> None:
        super().__init__("the connection was lost")
        self.stale = stale


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, given_back: Callable[["Connection"], None]
    ) -> None:
        self.loop = loop  # asking which it is takes a system call each time (Python 3.11)
        self._given_back = given_back
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: UpstreamResponse | None = None
        self._unsent = memoryview(b"")
        self._writable = True
        self._head_bytes = 0  # since the last byte of a body
        self._header_bytes = 0
        self._silent = True
        self._can_keep = False
        self._paused = False
        self._at_chunk = False  # the last thing the parser saw was the end of a chunk
        self.served = 0
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes) -> "UpstreamResponse":
        assert self._transport is not None
        self._answer = answer = UpstreamResponse(self)
        self._head_bytes, self._header_bytes = 0, 0
        self._silent, self._can_keep, self._at_chunk = True, False, False
        if len(body) > PIECE_BYTES:
            self._transport.write(head)
            self._unsent = memoryview(body)
            self._send_more()
        elif len(body) > SMALL_BYTES:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head + body)
        return answer

    def _send_more(self) -> None:
        if self._unsent and self._writable and self._transport is not None and self.usable:
            piece, self._unsent = self._unsent[:PIECE_BYTES], self._unsent[PIECE_BYTES:]
            if not self._unsent:
                self._unsent = memoryview(b"")  # the empty end would keep the whole body
            self._transport.write(piece)
            self.loop.call_soon(self._send_more)

    def pause(self, paused: bool) -> None:
        """Read no more for now, or again: the backend is held up by TCP's own flow control."""
        if self._transport is not None and paused != self._paused and self.usable:
            self._paused = paused
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def close(self) -> None:
        """Close at once: what is unsent is dropped, and the backend sees it now."""
        self._unsent = memoryview(b"")
        if self._transport is not None:
            self._transport.abort()

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.close()  # nothing was asked
            return
        if self._at_chunk and (take := answer._chunk_sink) is not None and take(data):
            return  # a token of a stream, nearly always: the parser need not know of it
        self._silent = False
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(BrokenAnswer(f"not HTTP: {type(error).__name__}"))
            return
        if self._head_bytes > HEAD_BYTES and self._answer is answer:
            self._fail(BrokenAnswer("the headers are too large"))
        if self._at_chunk and not data.endswith(b"\r\n"):
            self._at_chunk = False  # the next chunk's size has begun

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = None
        answer = self._answer
        if answer is None:
            return
        if answer.ends_with_connection and exc is None:
            self._complete()
        else:
            self._fail(LostConnection(stale=self.served > 0 and self._silent))

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._send_more()

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._answer is None:
            raise httptools.HttpParserError("an answer to no request")

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._answer is not None
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > HEAD_BYTES:  # although they came in one piece, with a body
            raise httptools.HttpParserError("the headers are too large")
        if not self._answer.started:  # afterwards they are trailers, which nobody reads
            # The first of its name counts, as it does for every header that we look at.
            self._answer.headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        answer, status = self._answer, self._parser.get_status_code()
        assert answer is not None
        if self._parser.get_http_version() not in ("1.1", "1.0"):
            raise httptools.HttpParserError("another version of HTTP")
        if status < 200:
            answer.headers.clear()  # an interim answer: the real one follows
        else:
            answer.start(status)

    def on_body(self, data: bytes) -> None:
        self._head_bytes = 0
        answer = self._answer
        if answer is None:
            return
        sink = answer._sink  # called from here: every token of a stream comes this way
        if sink is None:
            answer.feed(data)
        elif not sink(data):
            answer.enough()

    def on_chunk_header(self) -> None:
        self._at_chunk = False

    def on_chunk_complete(self) -> None:
        self._at_chunk = True

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is not None and answer.started:
            self._can_keep = bool(self._parser.should_keep_alive())
            self._complete()

    def _complete(self) -> None:
        answer, self._answer = self._answer, None
        assert answer is not None
        self.served += 1
        sent = self._transport is not None and not self._transport.get_write_buffer_size()
        if self._can_keep and sent and not self._unsent:
            self.pause(False)
            self._given_back(self)
        else:
            self.close()
        answer.end(None)

    def _fail(self, fault: UpstreamFault) -> None:
        answer, self._answer = self._answer, None
        self.close()
        if answer is not None:
            answer.end(fault)


class UpstreamResponse:
    """One answer: its head, then its body. Close it when you are done with it.

    Attributes:
        status: 0 until the head has come.
        headers: names in lower case.
    """

    __slots__ = (
        "_chunk_sink",
        "_connection",
        "_ended",
        "_fault",
        "_held",
        "_held_bytes",
        "_paused",
        "_sink",
        "_waiter",
        "headers",
        "status",
    )

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.status = 0
        self.headers: dict[str, str] = {}
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._sink: Sink | None = None
        self._chunk_sink: Sink | None = None
        self._paused = False
        self._ended = False
        self._fault: UpstreamFault | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def content_type(self) -> str:
        """In lower case, without parameters; "" if it has none."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def ended(self) -> bool:
        """All of it has come, or no more will."""
        return self._ended

    @property
    def started(self) -> bool:
        return self.status > 0

    @property
    def ends_with_connection(self) -> bool:
        """The body has no length of its own (RFC 9112, 6.3)."""
        framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        return self.started and not framed

    async def head(self) -> None:
        """Wait for status and headers; raises UpstreamFault."""
        while not self.started:
            self._raise()
            await self._wait()

    async def read(self) -> bytes:
        """What has come of the body, at least one byte; b"" at its end. Raises UpstreamFault."""
        while not self._held:
            self._raise()
            if self._ended:
                return b""
            self._resume()
            await self._wait()
        data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        return data

    async def pour(self, sink: Sink, chunk_sink: Sink | None = None) -> bool:
        """Give the body to `sink` as it comes, each piece in the call that received it.

        Returns True at its end, False once the sink has had enough: it has taken that piece, and
        the backend waits until the next `pour` or `read`. Raises UpstreamFault.

        Args:
            chunk_sink: is offered what came where a chunk begins, with its framing. It takes whole
                chunks, or leaves all of it to `sink` by False. Once it has taken some, it says by
                `enough` that it wants no more.
        """
        while self._held:
            self._held_bytes -= len(self._held[0])
            if not sink(self._held.pop(0)):
                return False
        self._raise()
        if self._ended:
            return True
        self._resume()
        self._sink, self._chunk_sink = sink, chunk_sink
        try:
            await self._wait()
        finally:
            self._sink = self._chunk_sink = None
        if not self._paused:
            self._raise()
        return self._ended and not self._paused and not self._held

    def fail(self, fault: UpstreamFault) -> None:
        """End it from outside: whoever reads gets `fault`."""
        if not self._ended:  # else the connection is kept, or another's already
            self._connection.close()
        self.end(fault)

    def close(self) -> None:
        """No more is wanted: unless all has come, the backend's connection is closed."""
        if not self._ended:
            self._connection._answer = None
            self._connection.close()
            self._ended = True

    # What the connection calls.

    def start(self, status: int) -> None:
        self.status = status
        self._wake()

    def feed(self, data: bytes) -> None:
        """Keep a piece of the body until somebody reads."""
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > HELD_BYTES:
            self._pause()
        self._wake()

    def enough(self) -> None:
        """A sink took a piece and wants no more for now."""
        self._sink = self._chunk_sink = None
        self._pause()
        self._wake()

    def end(self, fault: UpstreamFault | None) -> None:
        if not self._ended:
            self._ended, self._fault = True, fault
            self._wake()

    def _raise(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _pause(self) -> None:
        self._paused = True
        if not self._ended:
            self._connection.pause(True)

    def _resume(self) -> None:
        self._paused = False
        if not self._ended:
            self._connection.pause(False)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._connection.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Origin:
    """Where one backend is, and the connections kept to it. Use from one loop only.

    Args:
        url: such as http://127.0.0.1:8001, with no path.
        connect_s: for a connection, TLS included.
        tls: for an https URL; the system's certificates by default.
    """

    def __init__(self, url: str, connect_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._host_header = f"host: {parts.netloc.rpartition('@')[2]}\r\n"
        self.connect_s = connect_s
        self._idle: list[Connection] = []
        self._closed = False

    async def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes = b"",
        *,
        fresh: bool = False,
    ) -> UpstreamResponse:
        """Send a request and wait for the head of its answer; close the result when done.

        Args:
            target: as it goes on the wire; nothing about it is changed.
            headers: names and values; what frames the body is added here.
            fresh: on a new connection.

        Raises ConnectFault, LocalShortage, LostConnection or BrokenAnswer; ValueError for a header
        of two lines, or one that is not latin-1.
        """
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
            raise ValueError("a header of more than one line")
        framing = f"content-length: {len(body)}\r\n" if body or method == "POST" else ""
        text = f"{method} {target} HTTP/1.1\r\n{self._host_header}{lines}{framing}\r\n"
        head = text.encode("latin-1")  # before there is a connection that would be left open
        connection = (None if fresh else self._kept()) or await self._connect()
        answer = connection.send(head, body)
        try:
            await answer.head()
        except BaseException:
            answer.close()
            raise
        return answer

    def _kept(self) -> Connection | None:
        now = self._loop.time()
        while self._idle:
            connection = self._idle.pop()  # the latest: the others may grow old
            if connection.usable and now - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        name = self._host if self._tls else None
        try:
            async with asyncio.timeout(self.connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._loop, self._give_back), self._host, self._port,
                    ssl=self._tls, server_hostname=name,
                )  # fmt: skip
        except ssl.SSLCertVerificationError as error:
            raise TlsFault(error.verify_message) from error
        except ssl.SSLError as error:
            raise TlsFault(error.reason or "the handshake failed") from error
        except (OSError, TimeoutError) as error:
            if _is_ours(error):
                raise LocalShortage(type(error).__name__) from error
            raise ConnectFault(type(error).__name__) from error
        except UnicodeError as error:  # a name that IDNA refuses
            raise ConnectFault("no name of a host") from error
        return connection

    def _give_back(self, connection: Connection) -> None:
        if self._closed:
            connection.close()
            return
        now = connection.idle_since = self._loop.time()
        while self._idle and now - self._idle[0].idle_since >= IDLE_S:
            self._idle.pop(0).close()
        self._idle.append(connection)

    def close(self) -> None:
        """Keep no connection any more; answers under way come to their end."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()


def _is_ours(error: OSError) -> bool:
    """Whether every address failed for want of something on this side.

    Every one: without IPv6 the ::1 of localhost has "no address", whatever its 127.0.0.1 says. Of
    several failures asyncio leaves only the words.
    """
    tried = [error.errno] if error.errno else [int(n) for n in _ERRNO.findall(str(error))]
    return bool(tried) and all(number in _OURS for number in tried)
