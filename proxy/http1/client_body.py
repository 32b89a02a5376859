"""Read a client's body whole, bounded in size and time, before anything waits for it.

A paused transport hides a disconnect (aiohttp stops reading when a body is not consumed), so a
request that queued with its body unread could not be cancelled.
"""

import asyncio

from aiohttp import HttpVersion10, web

from forebay.proxy.http1 import errors
from forebay.proxy.http1.errors import ApiError

LEAST_BYTES_PER_S = 100_000  # a slower body is a slow loris
AHEAD_BYTES = 64 << 10  # of a stated length, held before they come


class ByteBudget:
    """The bytes that the bodies of all requests may hold at once; `status` refuses more."""

    def __init__(self, limit: int, status: int = 429) -> None:
        self.limit = limit
        self.status = status
        self.held = 0


class Hold:
    """What one request holds of a budget, given back at the end of the `with` block."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._held = 0

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.held -= self._held
        self._held = 0

    def check(self, size: int) -> None:
        """Raises ApiError when there is no room to hold `size` bytes now."""
        more = size - self._held
        if more > 0 and self._budget.held + more > self._budget.limit:
            raise errors.overfull(self._budget.status)

    def reach(self, size: int) -> None:
        """Hold `size` bytes if it is less now; raises ApiError when there is no room."""
        self.check(size)
        if size > self._held:
            self._budget.held += size - self._held
            self._held = size


async def read_client_body(
    request: web.BaseRequest, limit: int, patience_s: float, hold: Hold
) -> bytes:
    """The body; raises ApiError 400, 408, 413, 415, and that of a full budget.

    Room is held as bytes come, and for the next few of a stated length: whoever states much and
    sends nothing must not keep the others out. A stated length that does not fit now is refused at
    once. A body is too slow when, `patience_s` after it was begun or later, it has not come at
    LEAST_BYTES_PER_S. `100 Continue` is sent once nothing but the bytes themselves is wanting.
    """
    headers = request.headers
    if "content-encoding" in headers and any(
        coding.lower() != "identity" for coding in headers.getall("content-encoding")
    ):
        raise ApiError(
            415, "unsupported_encoding", "Send the body uncompressed.", param="content-encoding",
            close=True,
        )  # fmt: skip
    length = request.content_length or 0
    if length > limit:
        raise _too_large(limit)
    hold.check(length)
    hold.reach(min(length, AHEAD_BYTES))
    if "expect" in headers and request.version != HttpVersion10 and request.can_read_body:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    if request.content.is_eof():
        return _already_here(request, limit, hold)
    body = bytearray()  # not a list of parts: small ones would take 30 times their size
    since = asyncio.get_running_loop().time() + patience_s
    try:
        async with asyncio.timeout_at(since) as deadline:
            while part := await request.content.readany():
                size = len(body) + len(part)
                if size > limit:
                    raise _too_large(limit)
                hold.reach(max(size, min(length, size + AHEAD_BYTES)))
                body += part
                deadline.reschedule(since + size / LEAST_BYTES_PER_S)
    except TimeoutError:
        raise ApiError(408, "request_timeout", "The body took too long.", close=True) from None
    except web.RequestPayloadError:
        raise ApiError(400, "bad_http", "The body is not valid HTTP.", close=True) from None
    return bytes(body)


def _already_here(request: web.BaseRequest, limit: int, hold: Hold) -> bytes:
    """A small body has come with its head: nothing is to be waited for."""
    try:
        body = request.content.read_nowait()
    except web.RequestPayloadError:
        raise ApiError(400, "bad_http", "The body is not valid HTTP.", close=True) from None
    if len(body) > limit:
        raise _too_large(limit)
    hold.reach(len(body))
    return body


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "request_too_large", f"The body is larger than {limit} bytes.", close=True)
