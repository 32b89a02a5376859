"""Faults of requests as HTTP: faults that aiohttp's parser finds, and faults that it accepts."""

from itertools import chain

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_exceptions import LineTooLong

from forebay.proxy.http1.errors import ApiError
from forebay.proxy.http1.headers import unforwardable

TARGET_BYTES = 8190  # bound of a request's target; a longer one is a 414


class ShortChunks(web.RequestPayloadError):
    """A body has too many short chunks to be parsed in time."""


def headers_too_large() -> ApiError:
    return ApiError(
        431, "headers_too_large", "The request headers are too large or too many.", close=True
    )


def _bad(message: str, status: int = 400) -> ApiError:
    return ApiError(status, "bad_http", message, close=True)


def parse_error(exc: BaseException | None) -> ApiError:
    """Return the error for a request that the parser rejected."""
    if isinstance(exc, LineTooLong):
        # The bounds of target and headers differ, so the bound shows which was too long.
        if exc.args[1] == TARGET_BYTES:
            return ApiError(414, "uri_too_long", "The request target is too long.", close=True)
        return headers_too_large()
    if "Too many headers" in str(exc):
        return headers_too_large()
    return _bad("The request is not valid HTTP.")


def head_fault(request: web.BaseRequest, header_bytes: int) -> ApiError | None:
    """Return the fault of a head that the parser accepted, or None."""
    headers = request.headers
    if request._message.version not in (HttpVersion10, HttpVersion11):
        request._version = HttpVersion10  # the response must not claim their version
        return _bad("HTTP/1.0 or HTTP/1.1 is needed.", 505)
    fields = request.raw_headers
    if sum(map(len, chain.from_iterable(fields))) + 4 * len(fields) > header_bytes:
        return headers_too_large()
    if (coding := headers.get("transfer-encoding")) is not None:
        if coding.lower() != "chunked":
            return _bad("The only supported transfer encoding is chunked.", 501)
        if request.version == HttpVersion10:
            return _bad("HTTP/1.0 has no transfer encoding.")
    if headers.get("expect", "100-continue").lower() != "100-continue":
        return _bad("The only supported expectation is 100-continue.", 417)
    if request.method == "CONNECT":
        error = _bad("This is not a forward proxy.", 405)
        error.headers = {"Allow": "GET, HEAD, POST, OPTIONS"}
        return error
    if name := unforwardable(headers):
        return _bad(f"The header {name} must be printable ASCII, and given once.")
    return None


def answer_target(request: web.BaseRequest, target: str) -> web.Response:
    """Answer `OPTIONS *`. Raises ApiError 400 for any other target that is not a path."""
    if target == "*" and request.method == "OPTIONS":
        return web.Response(status=204, headers={"Allow": "GET, HEAD, POST, OPTIONS"})
    raise ApiError(400, "bad_http", "The request target must be a path in ASCII.", close=True)
