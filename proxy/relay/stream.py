"""One streamed answer on its way from a backend to a client."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from forebay.proxy.backends import Upstream
from forebay.proxy.http1.client import BrokenAnswer, UpstreamFault, UpstreamResponse
from forebay.proxy.http1.errors import stream_error_event, upstream_error
from forebay.proxy.http1.headers import to_client
from forebay.proxy.http1.sse import (
    MAX_EVENT_BYTES,
    EventScanner,
    MalformedStream,
    StreamEvent,
    parse_event,
)
from forebay.proxy.relay.failures import FULL, Failure, full
from forebay.proxy.relay.timeouts import TimeoutWatch, Watchdog
from forebay.proxy.relay.token_chunks import TokenChunks

UPSTREAM_ERRORS = (UpstreamFault, MalformedStream)
UNTAKEN_BYTES = 64 << 10  # written and not taken by the client: then it is waited for
DONE_GRACE_S = 1.0  # for the end of the framing after [DONE], so that the connection can be kept


class ClientGone(Exception):
    """The client cannot be written to any more."""


@dataclass(frozen=True, slots=True)
class StreamCallbacks:
    """Who is told what of a stream: `first` of its first event, `used` of its usage, `cut`."""

    first: Callable[[], None]
    used: Callable[[dict[str, Any]], None]
    cut: Callable[[], None]


class Stream:
    """The first event, then the rest.

    `until_done`: it is whole when `[DONE]` has come; else wherever it ends between two events.
    """

    def __init__(
        self,
        incoming: web.BaseRequest,
        upstream: Upstream,
        answer: UpstreamResponse,
        headers: dict[str, str],
        told: StreamCallbacks,
        watchdog: Watchdog,
        *,
        until_done: bool = True,
    ) -> None:
        self._incoming = incoming
        self._until_done = until_done
        self._upstream = upstream
        self._answer = answer
        self._headers = headers
        self._told = told
        self._watchdog = watchdog
        self._scanner = EventScanner()
        self._clock = asyncio.get_running_loop().time
        self._ready = bytearray()  # whole events, received and not yet given on
        self._usage: dict[str, Any] = {}
        self._done = False
        self._failed = False

    async def first_event(self) -> None:
        """Wait for the first event that is no comment; raises Failure if it is an error.

        Until then comments are kept, within a bound: giving them on would commit us to a status.
        """
        seen = False
        while not seen:
            chunk = await self._answer.read()
            if not chunk:
                raise BrokenAnswer("the stream ended before its first event")
            self._upstream.heard = True
            for raw, payload in self._scanner.events(chunk):
                if payload and not seen:
                    seen = True
                    self._check_first(payload)
                self._take(raw, payload)
            if not seen and len(self._ready) > MAX_EVENT_BYTES:
                raise MalformedStream("comments without end")

    def _check_first(self, payload: bytes) -> None:
        """A 503 can arrive as the first event of a 200: then it is the status."""
        if payload == b"[DONE]":
            raise Failure("empty", upstream_error())
        event = parse_event(payload)
        if event.error is not None:
            raise self._error(event.error)
        if event.finish_reason == "abort":
            raise Failure("abort", upstream_error())
        self._told.first()

    def _error(self, error: dict[str, Any]) -> Failure:
        code = error.get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 502
        headers = {**self._headers, "content-type": "application/json"}
        body = orjson.dumps({"error": error})
        answer = web.Response(status=status, headers=headers, body=body)
        if status in FULL:
            return full(answer, {})
        if status < 500:
            return Failure("4xx_event", answer, "never", "answered")
        return Failure("5xx_event", answer)

    async def relay(self) -> web.StreamResponse:
        """Give on what has come and what comes."""
        headers = {**self._headers, **to_client(self._answer.headers)}
        outgoing = web.StreamResponse(status=self._answer.status, headers=headers)
        with self._watchdog.watching(self._incoming, self._answer) as watch:
            try:
                await self._write(outgoing.prepare(self._incoming), watch)
                if await self._to_the_end(outgoing, watch):
                    await self._write(outgoing.write_eof(), watch)
                    await self._end_of_framing()
                else:
                    self._ready += stream_error_event()
                    await self._give_on(outgoing, watch)
                    self._told.cut()
                    if self._incoming.transport is not None:
                        self._incoming.transport.close()  # flushes, but for the last chunk
            except ClientGone:
                pass  # its connection is lost: aiohttp cancels or ends this handler
            finally:
                self._answer.close()
        return outgoing

    async def _to_the_end(self, outgoing: web.StreamResponse, watch: TimeoutWatch) -> bool:
        """Give events on until the stream ends; whether it ended as it should."""
        await self._give_on(outgoing, watch)
        transport = self._incoming.transport
        if transport is None:
            raise ClientGone
        chunked = outgoing.headers.get("transfer-encoding") == "chunked"
        # Looked up once: what follows is done for every token.
        upstream, answer, write = self._upstream, self._answer, transport.write
        plain, plain_chunks = self._scanner.plain, TokenChunks(self._scanner).plain
        is_closing, untaken = transport.is_closing, transport.get_write_buffer_size

        def pass_on(piece: bytes) -> bool:
            """In the call that received it: nobody is woken for it."""
            upstream.heard = watch.heard = True
            if plain(piece):
                more = True
            else:
                piece = self._looked_at(piece)
                more = not (self._done or self._failed)
                if not piece:
                    return more
            if is_closing():
                return False
            write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            return more and untaken() <= UNTAKEN_BYTES

        def pass_chunks(chunks: bytes) -> bool:
            """The backend's framing is the client's too."""
            if not plain_chunks(chunks) or is_closing():
                return False
            upstream.heard = watch.heard = True
            write(chunks)
            if untaken() > UNTAKEN_BYTES:
                answer.enough()
            return True

        while not (self._done or self._failed):
            watch.reading_since = self._clock()
            try:
                if await answer.pour(pass_on, pass_chunks if chunked else None):
                    break
            except UPSTREAM_ERRORS:
                return False
            finally:
                watch.reading_since = None
            if transport.is_closing():
                raise ClientGone
            await self._write(self._incoming.writer.drain(), watch)
        # However the connection ends after [DONE], nothing is missing; a clean end without is none.
        return self._done or not (self._until_done or self._failed or self._scanner.mid_event)

    def _looked_at(self, piece: bytes) -> bytes:
        """What can be given on now that `piece` has come: whole events, and none after the end."""
        try:
            for raw, payload in self._scanner.events(piece):
                self._take(raw, payload)
        except MalformedStream:
            self._failed = True
        ready, self._ready = bytes(self._ready), bytearray()
        return ready

    async def _end_of_framing(self) -> None:
        if self._answer.ended:
            return
        try:
            async with asyncio.timeout(DONE_GRACE_S):
                while await self._answer.read():
                    pass
        except (TimeoutError, UpstreamFault):
            pass  # the connection is closed instead of kept: the answer was whole

    def _take(self, raw: bytes, payload: bytes) -> None:
        """Look at one event, and keep it to be given on unless it ends the stream badly."""
        if self._failed or self._done:
            return
        if payload == b"[DONE]":
            self._done = True
            if self._usage:
                self._told.used(self._usage)
        elif b'"usage"' in payload or b'"abort"' in payload or b'"error"' in payload:
            event = parse_event(payload)
            if event.error is not None or event.finish_reason == "abort":
                self._failed = True
                return
            if has_usage(event):
                self._usage = event.usage or {}
        self._ready += raw

    async def _give_on(self, outgoing: web.StreamResponse, watch: TimeoutWatch) -> None:
        if self._ready:
            data, self._ready = bytes(self._ready), bytearray()
            await self._write(outgoing.write(data), watch)

    async def _write(self, writing: Awaitable[object], watch: TimeoutWatch) -> None:
        watch.writing_since = self._clock()
        try:
            await writing
        except (ConnectionError, aiohttp.ClientConnectionError) as error:
            raise ClientGone from error  # never to be taken for the backend's failure
        watch.writing_since = None


def has_usage(event: StreamEvent) -> bool:
    return event.usage is not None and bool(event.usage.get("completion_tokens"))
