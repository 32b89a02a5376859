"""Read a client's body whole, bounded in size and time, before anything waits for it.

A paused transport hides a disconnect (aiohttp stops reading when a body is not consumed), so a
request that queued with its body unread could not be cancelled.
"""

import asyncio

from aiohttp import web

from forebay.proxy.errors import ApiError

LEAST_BYTES_PER_S = 100_000  # a slower body is a slow loris


async def read_client_body(request: web.BaseRequest, limit: int, patience_s: float) -> bytes:
    """The body; raises ApiError 400, 408, 413, 415, 417."""
    headers = request.headers
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(
            415, "unsupported_encoding", "Send the body uncompressed.", param="content-encoding",
            close=True,
        )  # fmt: skip
    if headers.get("transfer-encoding", "chunked").lower() != "chunked":
        raise ApiError(501, "bad_http", "Only chunked transfer encoding is known.", close=True)
    length = request.content_length
    if length is not None and length > limit:
        raise _too_large(limit)
    if expect := headers.get("expect"):
        if expect.lower() != "100-continue":
            raise ApiError(417, "bad_http", "Only 100-continue can be expected.", close=True)
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    parts, size = [], 0
    try:
        async with asyncio.timeout(patience_s + (length or limit) / LEAST_BYTES_PER_S):
            while part := await request.content.readany():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, "request_timeout", "The body took too long.", close=True) from None
    except web.RequestPayloadError:
        raise ApiError(400, "bad_http", "The body is not valid HTTP.", close=True) from None
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "request_too_large", f"The body is larger than {limit} bytes.", close=True)
