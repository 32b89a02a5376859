"""Read a client's whole body, bounded in size and time, before the request is queued.

aiohttp stops reading while a body is not consumed, and then it does not see a disconnect. So a
request that queued with its body unread could not be cancelled.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from io import BytesIO
from typing import Any

from aiohttp import HttpVersion10, web

from forebay.proxy.http1.errors import ApiError
from forebay.proxy.http1.server.byte_budget import RequestMemory
from forebay.proxy.http1.server.request_checks import ShortChunks
from forebay.proxy.http1.server.request_coding import coding_of, decompressed

LEAST_BYTES_PER_S = 100_000  # a slower body is a slow loris
AHEAD_BYTES = 64 << 10  # part of a stated length that is reserved before it comes


async def read_client_body(
    request: web.BaseRequest,
    limit: int,
    patience_s: float,
    memory: RequestMemory,
    *,
    took: Callable[[float], None] | None = None,
    turn: Callable[[int, Coroutine[Any, Any, bytes]], Awaitable[bytes]] | None = None,
) -> bytes:
    """Return the body, decompressed. Raises ApiError 400, 408, 413, 415, or the full budget's.

    Room is reserved as bytes come, and for the next few of a stated length. A client that states
    much and sends nothing must not keep others out. A stated length that does not fit now is
    rejected at once. `100 Continue` is sent when only the bytes are missing.

    A body is too slow if it falls `patience_s` behind LEAST_BYTES_PER_S, counted from its beginning
    or from any later moment. A fast start buys no time for later silence.

    `took` gets the seconds that a body takes which has not come with its head, also if it does not
    come whole. `turn` gets the size of a compressed body, and runs its decompression.
    """
    coding = coding_of(request.headers)
    if request.content.is_eof() and "expect" not in request.headers:
        body = _already_here(request, limit, memory)
    else:
        clock = asyncio.get_running_loop().time
        began_at = clock()
        try:
            body = await _received(request, limit, patience_s, memory)
        finally:
            if took is not None:
                took(clock() - began_at)
    if not coding:
        return body
    plain = decompressed(body, coding, limit, memory)
    return await (plain if turn is None else turn(len(body), plain))


async def _received(
    request: web.BaseRequest, limit: int, patience_s: float, memory: RequestMemory
) -> bytes:
    """Return the body as it was sent. Raises ApiError."""
    # Reserve memory for the stated length, and let a client that asks first go on.
    length = request.content_length or 0
    if length > limit:
        raise _too_large(limit)
    if length > AHEAD_BYTES:
        memory.check(length)
    memory.reach(min(length, AHEAD_BYTES))
    if "expect" in request.headers and request.version != HttpVersion10 and request.can_read_body:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    if request.content.is_eof():
        return _already_here(request, limit, memory)
    # Read the rest. Each part moves the time limit.
    # A list of small parts would take 30 times their size. A BytesIO gives its content uncopied.
    body, size = BytesIO(), 0
    clock = asyncio.get_running_loop().time
    due = clock() + patience_s
    try:
        async with asyncio.timeout_at(due) as deadline:
            while part := await request.content.readany():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                memory.reach(max(size, min(length, size + AHEAD_BYTES)))
                body.write(part)
                due = min(due + len(part) / LEAST_BYTES_PER_S, clock() + patience_s)
                deadline.reschedule(due)
    except TimeoutError:
        raise ApiError(408, "request_timeout", "The body took too long.", close=True) from None
    except web.RequestPayloadError as error:
        raise _bad_body(error) from None
    return body.getvalue()


def _already_here(request: web.BaseRequest, limit: int, memory: RequestMemory) -> bytes:
    """Return a small body that has come with its head."""
    try:
        body = request.content.read_nowait()
    except web.RequestPayloadError as error:
        raise _bad_body(error) from None
    if len(body) > limit:
        raise _too_large(limit)
    if len(body) > memory.size:
        memory.reach(len(body))
    return body


def _bad_body(error: web.RequestPayloadError) -> ApiError:
    message = "The body is not valid HTTP."
    if isinstance(error, ShortChunks):
        message = "The body has too many short chunks: send it in larger ones."
    return ApiError(400, "bad_http", message, close=True)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "request_too_large", f"The body is larger than {limit} bytes.", close=True)
