"""Read a response that is not a stream: a small one whole, a large one only as fast as it is sent.

The client of a small response gets it once it is complete and found good: until then another
backend can be asked. The first bytes of a large one commit the proxy. Then a failure breaks the
framing, as in a stream. So no response takes more memory than WHOLE_BYTES and a few buffers.
"""

import re
from dataclasses import dataclass

from aiohttp import web

from forebay.proxy.backends.link import BackendLink
from forebay.proxy.http1.client.backend_errors import AnswerTooLarge, OwnLimit, UpstreamFault
from forebay.proxy.http1.client.connection import UpstreamResponse
from forebay.proxy.http1.headers import to_client
from forebay.proxy.http1.server.byte_budget import SMALL_BYTES, RequestMemory
from forebay.proxy.relay.backend_request import StreamListener
from forebay.proxy.relay.delivery import CLIENT_LEFT, is_chunked, piece_sink
from forebay.proxy.relay.timeouts import TimeoutWatch, Watchdog
from forebay.traces.ground.sse import read_object

WHOLE_BYTES = 256 << 10  # parsing this takes a millisecond
KEPT_BYTES = 2048  # end of a piece that is kept, as an object may have begun in it
MOST_USAGES = 8  # usages looked at in one piece, from the end
# In JSON a quote inside a string has a backslash before it: without one these are keys. The object
# may hold others, but not their objects.
_USAGE = re.compile(rb'"usage"\s*+:\s*+(\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\})')
_ENDS = re.compile(rb'(?<!\\)"finish_reason"\s*:\s*$')


async def read_small(
    response: UpstreamResponse,
    limit: int,
    memory: RequestMemory,
    link: BackendLink,
    watch: TimeoutWatch,
) -> tuple[bytes, bool]:
    """Read the body while it is small. Returns the bytes, and True if these are all.

    Raises AnswerTooLarge above `limit`, and UpstreamFault.

    Args:
        memory: gets the bytes of the body. Without room a body above SMALL_BYTES is large.
        link, watch: are told of every piece.
    """
    if (response.length or 0) > limit:
        raise AnswerTooLarge(limit)
    pieces, size, before = [], 0, memory.size
    while piece := await response.read():
        link.heard = watch.heard = True
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise AnswerTooLarge(limit)
        if size > WHOLE_BYTES or (size > SMALL_BYTES and not memory.has_room(before + size)):
            memory.shrink(before)
            return b"".join(pieces), False
        if size > SMALL_BYTES:
            memory.reach(before + size)
    return b"".join(pieces), True


@dataclass(slots=True)
class LargeAnswer:
    """A response whose beginning has come. `relay` sends it on while the rest comes.

    Args:
        headers: ours.
        begin: the first bytes of its body.
        limit: bytes of the whole body.
        may_abort: it is sent on even if it says that the backend has aborted it.
    """

    incoming: web.BaseRequest
    link: BackendLink
    response: UpstreamResponse
    headers: dict[str, str]
    listener: StreamListener
    watchdog: Watchdog
    begin: bytes
    limit: int
    may_abort: bool = False
    _size: int = 0  # bytes of the body so far
    _searched: bytes = b""
    _usage: bytes = b""
    _failed: bool = False
    _why: str = ""  # the limit of this proxy that ended it

    @property
    def status(self) -> int:
        return self.response.status

    def close(self) -> None:
        """Give the response up instead of sending it on."""
        self.response.close()

    async def relay(self) -> web.StreamResponse:
        """Send the response on to the client."""
        passed = to_client(self.response.headers, self.status)
        outgoing = web.StreamResponse(status=self.status, headers={**self.headers, **passed})
        outgoing.content_length = self.response.length
        with self.watchdog.watching(self.incoming, self.response, self.link) as watch:
            clock = self.watchdog.clock
            try:
                watch.writing_since = clock()
                await outgoing.prepare(self.incoming)
                if self.incoming.method != "HEAD":
                    await self._relay_body(outgoing, watch)
                    watch.writing_since = clock()
                if self._failed:
                    self._cut()
                else:
                    await outgoing.write_eof()
                    self._report_usage()
            except CLIENT_LEFT:
                pass
            finally:
                self.response.close()
        return outgoing

    async def _relay_body(self, outgoing: web.StreamResponse, watch: TimeoutWatch) -> None:
        # The bytes that came before the response began.
        begin, self.begin = self.begin, b""
        self._search(begin)
        await outgoing.write(begin)
        del begin
        watch.writing_since = None
        if self.incoming.transport is None:
            raise ConnectionResetError
        send_piece = piece_sink(self.incoming.transport, chunked=is_chunked(outgoing))

        def send(piece: bytes) -> bool:
            self.link.heard = watch.heard = True
            self._search(piece)
            return not self._failed and send_piece(piece)

        # The rest, as it comes.
        try:
            while not self._failed:
                if await watch.pour(send):
                    break
        except UpstreamFault as error:
            self._failed = True
            self._why = str(error) if isinstance(error, OwnLimit) else ""

    def _search(self, piece: bytes) -> None:
        """Look for the usage and for the mark of an aborted response, and bound the size."""
        data = self._searched + piece
        # The patterns alone would take a hundred times as long as these searches.
        at = data.rfind(b'"usage"')
        for _ in range(MOST_USAGES):
            if at < 0:
                break
            match = _USAGE.match(data, at, at + KEPT_BYTES)
            if match is not None and data[at - 1 : at] != b"\\":
                self._usage = match[1]
                break
            at = data.rfind(b'"usage"', 0, at)
        at = -1 if self.may_abort else data.find(b'"abort"')
        while at >= 0 and not self._failed:
            self._failed = _ENDS.search(data, max(0, at - 32), at) is not None
            at = data.find(b'"abort"', at + 1)
        self._size += len(piece)
        if self._size > self.limit:
            self._failed, self._why = True, str(AnswerTooLarge(self.limit))
        self._searched = data[-KEPT_BYTES:]

    def _report_usage(self) -> None:
        usage = read_object(self._usage) if self._usage and self.status == 200 else None
        if usage is not None:
            self.listener.usage(usage)

    def _cut(self) -> None:
        self.listener.cut(self._why)
        if self.incoming.transport is not None:
            self.incoming.transport.close()  # flushes the written bytes, which are too few
