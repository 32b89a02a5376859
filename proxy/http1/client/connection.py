"""One HTTP/1.1 connection to a backend, and the response on it.

aiohttp's client wakes a task for every piece of a body, copies each piece twice, and hangs when a
chunk is malformed in mid-stream. Here bytes go from the socket to their reader in one call. Parsing
is llhttp's (httptools), which refuses what could be read in two ways.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools

from forebay.proxy.http1.client.backend_errors import (
    BrokenAnswer,
    LostConnection,
    UpstreamFault,
    read_fault,
)
from forebay.proxy.http1.client.content_coding import CODINGS, ContentDecoder
from forebay.proxy.http1.server.read_turns import LARGE_READ_BYTES, ReadTurns

HEAD_BYTES = 64 << 10  # bound of a status line with headers, or of the head of a chunk
COPIED_BYTES = 16 << 10  # a body up to this is copied: cheaper than a second buffer
PIECE_BYTES = 512 << 10  # size of a large request's pieces: the loop may do other work between them
BUFFER_BYTES = 256 << 10  # most unread bytes of a body: with more, the backend must wait

Sink = Callable[[bytes], bool]
"""Takes a piece of a body at once. Returns False when it wants no more for now."""


class Connection(asyncio.Protocol):
    """One connection to a backend, for one request at a time."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        keep: Callable[["Connection"], None],
        turns: ReadTurns,
    ) -> None:
        self.loop = loop  # get_running_loop() makes a system call (Python 3.11)
        self._keep = keep
        self._turns = turns
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._response: UpstreamResponse | None = None
        self._unsent = memoryview(b"")
        self._writable = True
        self._head_bytes = 0  # since the last byte of a body came
        self._header_bytes = 0
        self._silent = True
        self._can_keep = False
        self._paused = False
        self._waits = False  # it waits for its turn to read again
        self._at_chunk = False  # the parser has just seen the end of a chunk
        self.served = 0
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, head: bytes, body: bytes) -> "UpstreamResponse":
        assert self._transport is not None
        self._response = response = UpstreamResponse(self)
        self._head_bytes, self._header_bytes = 0, 0
        self._silent, self._can_keep, self._at_chunk = True, False, False
        if len(body) > PIECE_BYTES:
            self._transport.write(head)
            self._unsent = memoryview(body)
            self._send_more()
        elif len(body) > COPIED_BYTES:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head + body)
        return response

    def _send_more(self) -> None:
        if self._unsent and self._writable and self._transport is not None and self.usable:
            piece, self._unsent = self._unsent[:PIECE_BYTES], self._unsent[PIECE_BYTES:]
            if not self._unsent:
                self._unsent = memoryview(b"")  # an empty slice would keep the whole body alive
            self._transport.write(piece)
            self._turns.wait(self._send_more)

    def pause(self, paused: bool) -> None:
        """Stop or resume reading. TCP's flow control makes the backend wait."""
        if self._transport is not None and paused != self._paused and self.usable:
            self._paused = paused
            if paused:
                self._transport.pause_reading()
            elif not self._waits:
                self._transport.resume_reading()

    def _wait_turn(self) -> None:
        if self._transport is not None and not self._waits and self.usable:
            self._waits = True
            self._transport.pause_reading()
            self._turns.wait(self._read_on)

    def _read_on(self) -> None:
        self._waits = False
        if self._transport is not None and not self._paused and self.usable:
            self._transport.resume_reading()

    def close(self) -> None:
        """Close at once: unsent bytes are dropped, and the backend notices now."""
        self._unsent = memoryview(b"")
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            self.close()  # there is no request
            return
        if len(data) >= LARGE_READ_BYTES:
            self._wait_turn()
        if self._at_chunk and (take := response._chunk_sink) is not None and take(data):
            return  # nearly always a token of a stream, which the parser need not see
        self._silent = False
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(read_fault(error))
            return
        if self._head_bytes > HEAD_BYTES and self._response is response:
            self._fail(BrokenAnswer("the headers are too large", "large_head"))
        if self._at_chunk and not data.endswith(b"\r\n"):
            self._at_chunk = False  # the size of the next chunk has begun

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = None
        response = self._response
        if response is None:
            return
        if response.ends_with_connection and exc is None:
            self._complete()
        else:
            self._fail(LostConnection(stale=self.served > 0 and self._silent))

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._send_more()

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._response is None:
            raise httptools.HttpParserError("a response without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._response is not None
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > HEAD_BYTES:  # they may have come in one read, with a body
            raise BrokenAnswer("the headers are too large", "large_head")
        if not self._response.status:  # headers after the body are trailers, which are ignored
            # The first header of a name counts, as everywhere in this proxy.
            headers = self._response.headers
            headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        response, status = self._response, self._parser.get_status_code()
        assert response is not None
        if self._parser.get_http_version() not in ("1.1", "1.0"):
            raise httptools.HttpParserError("another version of HTTP")
        if status < 200:
            response.headers.clear()  # an interim response; the final one follows
        else:
            response.start(status)

    def on_body(self, data: bytes) -> None:
        self._head_bytes = 0
        response = self._response
        if response is None:
            return
        decoder = response._decoder
        for piece in (data,) if decoder is None else decoder.pieces(data):
            sink = response._sink  # called directly: every token of a stream comes this way
            if sink is None:
                response.feed(piece)
            elif not sink(piece):
                response.enough()

    def on_chunk_header(self) -> None:
        self._at_chunk = False

    def on_chunk_complete(self) -> None:
        self._at_chunk = True

    def on_message_complete(self) -> None:
        response = self._response
        if response is not None and response.status:
            self._can_keep = bool(self._parser.should_keep_alive())
            self._complete()

    def _complete(self) -> None:
        response, self._response = self._response, None
        assert response is not None
        self.served += 1
        sent = self._transport is not None and not self._transport.get_write_buffer_size()
        if self._can_keep and sent and not self._unsent:
            self.pause(False)
            self._keep(self)
        else:
            self.close()
        whole = response._decoder is None or response._decoder.ended
        response.end(None if whole else BrokenAnswer("the compressed body was cut", "bad_coding"))

    def _fail(self, fault: BaseException) -> None:
        response, self._response = self._response, None
        self.close()
        if response is not None:
            response.end(fault)


@dataclass(slots=True, eq=False)
class UpstreamResponse:
    """One response: its head, then its body. Close it after use.

    Attributes:
        status: 0 until the head has come.
        headers: names in lower case.
    """

    _connection: Connection
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    _buffered: list[bytes] = field(default_factory=list)
    _buffered_bytes: int = 0
    _sink: Sink | None = None
    _chunk_sink: Sink | None = None
    _decoder: ContentDecoder | None = None
    _paused: bool = False
    _ended: bool = False
    _fault: BaseException | None = None
    _waiter: asyncio.Future[None] | None = None

    @property
    def content_type(self) -> str:
        """Return the content type in lower case, without parameters, or ""."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def length(self) -> int | None:
        """Return the length of the body in bytes, or None if it is not known before its end."""
        stated = self.headers.get("content-length")
        return int(stated) if stated is not None and self._decoder is None else None

    @property
    def ended(self) -> bool:
        """All of the response has come, or no more will."""
        return self._ended

    @property
    def ends_with_connection(self) -> bool:
        """The body has no stated length: the end of the connection ends it (RFC 9112, 6.3)."""
        framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        return self.status > 0 and not framed

    async def head(self) -> None:
        """Wait for status and headers. Raises UpstreamFault."""
        while not self.status:
            self._raise()
            await self._wait()

    async def read(self) -> bytes:
        """Return the bytes of the body that have come, b"" at its end. Raises UpstreamFault."""
        while not self._buffered:
            self._raise()
            if self._ended:
                return b""
            self._resume()
            await self._wait()
        data = self._buffered[0] if len(self._buffered) == 1 else b"".join(self._buffered)
        self._buffered.clear()
        self._buffered_bytes = 0
        return data

    async def pour(self, sink: Sink, chunk_sink: Sink | None = None) -> bool:
        """Pass the body to `sink` as it comes, each piece in the call that received it.

        Returns True at its end. Returns False once the sink wants no more for now: it has taken
        that piece, and the backend waits until the next `pour` or `read`. Raises UpstreamFault.

        Args:
            chunk_sink: is offered received bytes that begin with a chunk, framing included. It
                takes all of them, or returns False to leave them to the parser and `sink`. It
                calls `enough` when it wants no more for now.
        """
        while self._buffered:
            self._buffered_bytes -= len(self._buffered[0])
            if not sink(self._buffered.pop(0)):
                return False
        self._raise()
        if self._ended:
            return True
        self._resume()
        self._sink, self._chunk_sink = sink, None if self._decoder else chunk_sink
        try:
            await self._wait()
        finally:
            self._sink = self._chunk_sink = None
        # A sink that wants no more learns of a fault at its next call.
        if not self._paused:
            self._raise()
        return self._ended and not self._paused and not self._buffered

    def fail(self, fault: UpstreamFault) -> None:
        """End the response from outside: reading it raises `fault`."""
        if not self._ended:  # otherwise the connection is kept, or serves another request
            self._connection.close()
        self.end(fault)

    def close(self) -> None:
        """Stop reading. Closes the connection to the backend, unless the response is complete."""
        if not self._ended:
            self._connection._response = None
            self._connection.close()
            self._ended = True

    # Called by the connection.

    def start(self, status: int) -> None:
        self.status = status
        coding = self.headers.get("content-encoding")
        if coding is not None and coding.lower() in CODINGS:
            del self.headers["content-encoding"]
            self._decoder = ContentDecoder()
        self._wake()

    def feed(self, data: bytes) -> None:
        """Keep a piece of the body until it is read."""
        self._buffered.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes > BUFFER_BYTES:
            self._pause()
        self._wake()

    def enough(self) -> None:
        """Pause: the sink wants no more for now."""
        self._sink = self._chunk_sink = None
        self._pause()
        self._wake()

    def end(self, fault: BaseException | None) -> None:
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
