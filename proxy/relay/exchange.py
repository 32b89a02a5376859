"""One exchange with a backend: send a request, and read the beginning of the response."""

from aiohttp import web

from forebay.proxy.backends.failures import (
    BUSY_STATUSES,
    EVENTS,
    Failure,
    check_head,
    check_status,
    check_type,
)
from forebay.proxy.backends.link import BackendLink
from forebay.proxy.backends.pool import Backends
from forebay.proxy.config.sections import Limits
from forebay.proxy.http1.client.connection import UpstreamResponse
from forebay.proxy.http1.errors import upstream_error
from forebay.proxy.http1.headers import to_client
from forebay.proxy.relay.backend_request import BackendRequest, StreamListener
from forebay.proxy.relay.stream import UPSTREAM_ERRORS, Stream
from forebay.proxy.relay.timeouts import TimeoutWatch, Watchdog
from forebay.proxy.relay.whole_answer import LargeAnswer, read_small

Answer = Stream | LargeAnswer | web.Response
"""A stream whose first event has come, a large response whose beginning has, or a whole one."""


class ObservedStream(Stream):
    """A stream that is sent on as it comes: comments, errors, and bytes that are no events.

    Its events only teach. Where it stops in the middle, so does the client's, and nothing is added.
    """

    _seen = False  # an event with output has come
    _over = False  # the last event has come
    _spoilt = False  # an error has come, or bytes that are no events: the rest teaches nothing

    async def first_event(self, request: BackendRequest) -> None:
        """Wait for the first bytes, of an event or not."""
        self._ready += self._scanned(await self._response.read())
        self._link.heard = True
        self._reads_each |= not self._seen

    def _scanned(self, piece: bytes) -> bytes:
        """Learn from a piece as far as it can be read, and return it."""
        try:
            for raw, payload in () if self._over or self._spoilt else self._events(piece):
                self._seen = self._seen or (payload != b"" and self._check_first(payload))
                self._take_event(raw, payload)
        except (Failure, *UPSTREAM_ERRORS):
            self._spoilt = True
            self._scanner.partial.clear()
            self._reserve_partial(0)
        self._over, self._spoilt = self._over or self._done, self._spoilt or self._failed
        self._done = self._failed = False  # neither ends the stream
        self._ready.clear()
        return piece

    async def _relay_events(self, outgoing: web.StreamResponse, watch: TimeoutWatch) -> bool:
        """Send everything on until the stream ends. False if it was cut."""
        await super()._relay_events(outgoing, watch)
        if self._fault is None and not self._over and (self._until_done or self._spoilt):
            self._listener.cut("")
        return self._fault is None

    async def _cut(self, outgoing: web.StreamResponse) -> None:
        if not self._over:
            self._listener.cut(self._limit)
        if self._incoming.transport is not None:
            self._incoming.transport.close()  # flushes, but for the last chunk


async def exchange(
    request: BackendRequest,
    link: BackendLink,
    listener: StreamListener,
    *,
    backends: Backends,
    watchdog: Watchdog,
    limits: Limits,
) -> Answer:
    """Ask one backend. Raises Failure and UpstreamFault while nothing but heartbeats was relayed.

    Args:
        listener: learns from a stream, or from a large response.
        limits: bytes of an event, and of a response that is not a stream.
    """
    response = await backends.open(
        request.method, link, request.target, request.body, request.headers,
        request.model, request.wrote,
    )  # fmt: skip
    # The connection is kept only for a response that is still being sent on.
    relaying = False
    try:
        check_head(response)
        # A stream is relayed from its first event on, any other response once it is read.
        if not request.observed:
            check_type(response)
        streams = request.streams is not False and request.method == "POST"
        headers = request.reply_headers()
        if streams and response.content_type == EVENTS and response.status == 200:
            kind = ObservedStream if request.observed and not request.hides_usage else Stream
            stream = kind(request, link, response, headers, listener, watchdog, limits.event)
            await stream.first_event(request)
            relaying = True
            return stream
        answer = await _read_whole(
            request, link, response, headers, listener, watchdog=watchdog, limit=limits.answer
        )
        relaying = isinstance(answer, LargeAnswer)
        return answer
    finally:
        if not relaying:
            response.close()


async def _read_whole(
    request: BackendRequest,
    link: BackendLink,
    response: UpstreamResponse,
    headers: dict[str, str],
    listener: StreamListener,
    *,
    watchdog: Watchdog,
    limit: int,
) -> web.Response | LargeAnswer:
    """Read a response that is not a stream. Raises Failure for a bad status."""
    with watchdog.watching(request.incoming, response, link) as watch:
        watch.reading_since = watchdog.clock()
        link.heard = True
        body, complete = await read_small(response, limit, request.memory, link, watch)
    if not complete:
        failed = response.status in BUSY_STATUSES or response.status >= 500
        if failed and not request.observed:
            raise Failure("5xx", upstream_error())
        return LargeAnswer(
            request.incoming, link, response, headers, listener, watchdog,
            begin=body, limit=limit, may_abort=request.observed,
        )  # fmt: skip
    headers = {**headers, **to_client(response.headers, response.status)}
    answer = web.Response(status=response.status, headers=headers, body=body)
    check_status(response, answer, observed=request.observed)
    return answer
