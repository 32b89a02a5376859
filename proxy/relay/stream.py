"""Relay one streamed response from a backend to a client."""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from forebay.proxy.backends.failures import MID_STREAM, MOVED, Failure, event_failure
from forebay.proxy.backends.link import BackendLink
from forebay.proxy.backends.retries import Retry
from forebay.proxy.http1.client.backend_errors import (
    BrokenAnswer,
    LostConnection,
    OwnLimit,
    UpstreamFault,
)
from forebay.proxy.http1.client.connection import Sink, UpstreamResponse
from forebay.proxy.http1.errors import stream_error_event, upstream_error
from forebay.proxy.http1.headers import to_client
from forebay.proxy.http1.server.byte_budget import SMALL_BYTES
from forebay.proxy.relay.backend_request import BackendRequest, StreamListener
from forebay.proxy.relay.delivery import (
    CLIENT_LEFT,
    UNTAKEN_BYTES,
    end_with,
    is_chunked,
    piece_sink,
)
from forebay.proxy.relay.timeouts import StalledUpstream, TimeoutWatch, Watchdog
from forebay.proxy.relay.token_chunks import TokenChunks
from forebay.traces.ground.sse import (
    BYTE_ORDER_MARK,
    EventScanner,
    EventTooLarge,
    MalformedStream,
    StreamEvent,
    parse_event,
)

UPSTREAM_ERRORS = (UpstreamFault, MalformedStream)
DONE_GRACE_S = 1.0  # wait for the end of the framing after [DONE], to keep the connection


class Stream:
    """A streamed response: its first event decides about a retry, then `relay` sends it on.

    Args:
        headers: our headers of the response.
        event_bytes: the limit of one event.
    """

    def __init__(
        self,
        request: BackendRequest,
        link: BackendLink,
        response: UpstreamResponse,
        headers: dict[str, str],
        listener: StreamListener,
        watchdog: Watchdog,
        event_bytes: int,
    ) -> None:
        # The request, and how its API begins and ends a stream.
        dialect, opening = request.dialect, request.opening
        self._incoming = request.incoming
        self._hides_usage = request.hides_usage
        # The text that the client has, perhaps from another backend.
        self._sent = sent = request.sent
        self.outgoing = request.outgoing
        self._joins = request.outgoing is not None
        # The event types of the API.
        self._until_done = dialect is not None
        self._opens = dialect.opens if dialect is not None else frozenset()
        self._ping = dialect.ping if dialect is not None else ""
        self._ends = [f'"{kind}"'.encode() for kind in dialect.ends] if dialect is not None else []
        # The two connections, and the objects that are told about them.
        self._link = link
        self._response = response
        self._headers = headers
        self._opening = opening if opening is not None and opening.on else None
        self._listener = listener
        self._watchdog = watchdog
        self._clock = watchdog.clock
        # How far the stream has come.
        # The last event looks like any other, or the names of events are replaced.
        self._reads_each = bool(self._ends) or self._joins
        self._scanner = EventScanner(event_bytes)
        self._event_bytes = event_bytes
        self._memory = request.memory
        self._memory_before = request.memory.size
        self._chunks = TokenChunks(self._scanner, sent)
        self._event_count = 0  # each carries about one token
        self._relayed: Callable[[], int] = lambda: 0  # calls of `send_chunks` that sent something
        self._ready = bytearray()  # whole events, received and not yet sent on
        self._usage: dict[str, Any] = {}
        self._response_id = ""
        self._done = self._failed = self._moved = False
        self._fault: Exception | None = None
        self._limit = ""  # of this proxy, that ended it

    @property
    def status(self) -> int:
        return self._response.status

    async def first_event(self, request: BackendRequest) -> None:
        """Wait for the first event after the opening events. Raises Failure if it is an error.

        Opening events before it are kept, as another backend may still answer. So are comments and
        pings, unless `opening` passes them on. All of these are bounded. `request.heartbeats`
        becomes True if there were heartbeats only.
        """
        seen, size = False, 0
        while not seen:
            chunk = await self._response.read()
            if not chunk:
                raise BrokenAnswer("the stream ended before its first event")
            self._link.heard = True
            before, held, heartbeats = len(self._ready), bytearray(), bytearray()
            for raw, payload in self._events(chunk):
                if payload and not seen:
                    seen = self._check_first(payload)
                self._take_event(raw, payload)
                part = heartbeats if self._is_heartbeat(raw, payload) else held
                part += raw
                size += len(raw)
            if not seen and size > self._event_bytes:
                raise MalformedStream("comments without end")
            request.heartbeats = bool(heartbeats or request.heartbeats) and not seen
            if not seen and heartbeats and self._opening is not None:
                self._ready[before:] = held
                await self._opening.pass_on(bytes(heartbeats), self._all_headers())

    def _is_heartbeat(self, raw: bytes, payload: bytes) -> bool:
        """True if an event shows only that the backend is alive: a comment, or a ping."""
        if not payload:
            return raw.startswith(b":")
        ping = self._ping
        return bool(ping) and ping.encode() in payload and parse_event(payload).kind == ping

    def _all_headers(self) -> dict[str, str]:
        return {**self._headers, **to_client(self._response.headers, self.status)}

    def _check_first(self, payload: bytes) -> bool:
        """True if an event shows a first token. Raises Failure for an error.

        A 503 can arrive as the first event of a 200.
        """
        if payload == b"[DONE]":
            raise Failure("empty", upstream_error())
        event = parse_event(payload)
        if event.error is not None:
            raise event_failure(event.error, self._headers)
        if event.finish_reason == "abort":
            raise Failure("abort", upstream_error())
        if event.kind in self._opens:
            return False
        self._listener.first_event()
        return True

    async def relay(self) -> web.StreamResponse:
        """Send the stream on to the client, from its first event to its end.

        Raises Failure where the backend has stopped and another backend could go on.
        """
        # The client may have an open response already: heartbeats came before the first event, or
        # a part of the answer from another backend.
        outgoing = self.outgoing
        if outgoing is None and self._opening is not None:
            outgoing = self._opening.close()
        if outgoing is None:
            outgoing = web.StreamResponse(status=self.status, headers=self._all_headers())
        elif self._ready.startswith(BYTE_ORDER_MARK):
            del self._ready[: len(BYTE_ORDER_MARK)]  # the stream does not begin here
        self.outgoing = outgoing
        # A client that leaves ends the stream, and each way out closes the backend's response.
        with self._watchdog.watching(self._incoming, self._response, self._link) as watch:
            try:
                watch.writing_since = self._clock()
                await outgoing.prepare(self._incoming)
                await self._send_ready(outgoing)
                watch.writing_since = None
                is_whole = await self._relay_events(outgoing, watch)
                watch.writing_since = self._clock()
                if is_whole:
                    await outgoing.write_eof()
                    watch.writing_since = None
                    await self._end_of_framing()
                elif self._can_go_on():
                    raise self._stopped()
                else:
                    await self._cut(outgoing)
            except CLIENT_LEFT:
                pass
            finally:
                self._response.close()
        return outgoing

    async def _cut(self, outgoing: web.StreamResponse) -> None:
        self._listener.cut(self._limit)
        error = stream_error_event(self._limit, typed=bool(self._ends))
        await end_with(error, self._incoming, outgoing, self._watchdog, whole=False)

    async def _relay_events(self, outgoing: web.StreamResponse, watch: TimeoutWatch) -> bool:
        """Send events on until the stream ends. False if it was cut or ended with an error."""
        if self._incoming.transport is None:
            raise ConnectionResetError
        send, send_chunks = self._sinks(self._incoming.transport, watch, is_chunked(outgoing))
        if self._opening is not None:
            self._opening.go_on(watch, outgoing)
        try:
            while not (self._done or self._failed):
                if await watch.pour(send, send_chunks):
                    break
        except UPSTREAM_ERRORS as error:
            self._fault = error
            self._limit = str(error) if isinstance(error, OwnLimit) else ""
            return False
        finally:
            if self._opening is not None:
                self._opening.close()
        # After [DONE] nothing is missing, however the connection ends. Without [DONE] even a clean
        # end is a cut, unless the stream has none.
        return self._done or not (self._until_done or self._failed or self._scanner.mid_event)

    @property
    def movable(self) -> bool:
        """True if another backend could go on with it now."""
        return self._sent is not None and not (self._sent.lost or self._sent.ended)

    def move(self) -> None:
        """Stop here, so that another backend goes on."""
        self._moved = True
        self._response.fail(UpstreamFault("the backend is drained"))

    def _can_go_on(self) -> bool:
        """True if another backend may go on. An event that is too large would be so again."""
        if self._sent is None or self._sent.lost:
            return False
        return not self._limit or isinstance(self._fault, StalledUpstream)

    def _stopped(self) -> Failure:
        """Return the failure of a backend in the middle of its answer."""
        if self._moved:
            return Failure(MOVED, upstream_error(), "reserved", "nothing")
        self._link.poke.set()
        if self._sent is not None:
            self._sent.limit = self._limit
        lost = isinstance(self._fault, LostConnection)  # it works on nothing any more
        retry: Retry = "lost" if lost else "shared"
        return Failure(MID_STREAM, upstream_error(), retry, "nothing", limit=self._limit)

    def _sinks(
        self, transport: asyncio.Transport, watch: TimeoutWatch, chunked: bool
    ) -> tuple[Sink, Sink | None]:
        """Make the two functions that send received bytes on, in the call that received them.

        No task is woken for them: they run for every token. For the same reason all they need is
        looked up once, and lives in closures.
        """
        # Look up everything that the closures need.
        link, response, write = self._link, self._response, transport.write
        sent, feed = self._sent, self._scanner.feed
        plain: Callable[[bytes], bool] = self._scanner.plain
        plain_chunks: Callable[[bytes], bool] = self._chunks.plain
        if self._reads_each:
            plain = plain_chunks = _never
        is_closing, untaken = transport.is_closing, transport.get_write_buffer_size
        send_piece = piece_sink(transport, chunked=chunked)
        relayed = 0
        self._relayed = lambda: relayed

        def send(piece: bytes) -> bool:
            link.heard = watch.heard = True
            if plain(piece):
                self._event_count += piece.count(b"\n\n")
                if sent is not None:
                    for payload in feed(piece):
                        sent.add(payload)
                return send_piece(piece)
            whole = self._scanned(piece)
            return (not whole or send_piece(whole)) and not (self._done or self._failed)

        def send_chunks(chunks: bytes) -> bool:
            """Send whole chunks as they are: the backend's framing is the client's too."""
            nonlocal relayed
            if not plain_chunks(chunks) or is_closing():
                return False
            link.heard = watch.heard = True
            relayed += 1
            write(chunks)
            if untaken() > UNTAKEN_BYTES:
                response.enough()
            return True

        return send, send_chunks if chunked else None

    def _events(self, piece: bytes) -> list[tuple[bytes, bytes]]:
        """Return the events that `piece` completes. Raises OwnLimit if one is too large."""
        try:
            events = self._scanner.events(piece)
        except EventTooLarge as error:
            bound = f"larger than {error.limit} bytes (limits.event)"
            raise OwnLimit(f"An event of the response is {bound}.") from error
        if self._scanner.partial or self._memory.size > self._memory_before:
            self._reserve_partial(len(self._scanner.partial))
        return events

    def _reserve_partial(self, size: int) -> None:
        """Reserve memory for a large incomplete event. Raises OwnLimit if there is no room."""
        if size <= SMALL_BYTES:
            self._memory.shrink(self._memory_before)
            return
        needed = self._memory_before + size
        if not self._memory.has_room(needed):
            raise OwnLimit(
                f"No memory is left for an event of {size} bytes of the response "
                "(limits.queue_bytes)."
            )
        self._memory.reach(needed)

    def _scanned(self, piece: bytes) -> bytes:
        """Return the whole events that can be sent on after `piece`. No events after the end."""
        try:
            for raw, payload in self._events(piece):
                self._take_event(raw, payload)
        except UPSTREAM_ERRORS as error:
            self._failed = True
            self._limit = str(error) if isinstance(error, OwnLimit) else ""
        ready, self._ready = bytes(self._ready), bytearray()
        return ready

    async def _end_of_framing(self) -> None:
        if self._response.ended:
            return
        try:
            async with asyncio.timeout(DONE_GRACE_S):
                while await self._response.read():
                    pass
        except (TimeoutError, UpstreamFault):
            pass  # the connection is closed instead of kept: the response was whole

    def _take_event(self, raw: bytes, payload: bytes) -> None:
        """Keep one event to be sent on, unless it ends the stream with an error."""
        if self._failed or self._done:
            return
        if self._joins and self._sent is not None:
            raw, payload = self._sent.joined(raw, payload)
        if payload == b"[DONE]" or self._is_last(payload):
            self._done = True
            self._report_end()
        elif b'"usage"' in payload or b'"abort"' in payload or b'"error"' in payload:
            event = parse_event(payload)
            self._failed = event.error is not None or event.finish_reason == "abort"
            if self._failed or self._is_hidden(event):
                return
        self._event_count += payload != b""  # comments carry nothing
        if payload and self._sent is not None:
            self._sent.add(payload)
        self._ready += raw

    def _is_hidden(self, event: StreamEvent) -> bool:
        """Note the usage of an event. True if it has only usage that the client did not ask for."""
        if not event.has_usage:
            return False
        self._usage = event.usage or {}
        return self._hides_usage and not (event.has_output or event.finish_reason)

    def _is_last(self, payload: bytes) -> bool:
        """True if the stream ends with this event, by its type."""
        if not any(end in payload for end in self._ends):
            return False
        event = parse_event(payload)
        if f'"{event.kind}"'.encode() not in self._ends:
            return False  # a text that holds the name
        if event.has_usage:
            self._usage = event.usage or {}
        self._response_id = event.response_id
        return True

    def _report_end(self) -> None:
        if self._usage:
            self._listener.usage(self._usage)
        else:
            events = self._event_count + self._relayed() + self._chunks.more_events
            if self._joins and self._sent is not None:
                events += self._sent.tokens
            self._listener.no_usage(events)
        if self._response_id:
            self._listener.response_kept(self._response_id)

    async def _send_ready(self, outgoing: web.StreamResponse) -> None:
        if self._ready:
            data, self._ready = bytes(self._ready), bytearray()
            await outgoing.write(data)


def _never(piece: bytes) -> bool:
    return False
