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
from forebay.proxy.relay.stream import Stream
from forebay.proxy.relay.timeouts import Watchdog
from forebay.proxy.relay.whole_answer import LargeAnswer, read_small

Answer = Stream | LargeAnswer | web.Response
"""A stream whose first event has come, a large response whose beginning has, or a whole one."""


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
        check_type(response)
        streams = request.streams is not False and request.method == "POST"
        headers = request.reply_headers()
        if streams and response.content_type == EVENTS and response.status == 200:
            stream = Stream(request, link, response, headers, listener, watchdog, limits.event)
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
        if response.status in BUSY_STATUSES or response.status >= 500:
            raise Failure("5xx", upstream_error())
        return LargeAnswer(
            request.incoming, link, response, headers, listener, watchdog,
            begin=body, limit=limit,
        )  # fmt: skip
    headers = {**headers, **to_client(response.headers, response.status)}
    answer = web.Response(status=response.status, headers=headers, body=body)
    check_status(response, answer)
    return answer
