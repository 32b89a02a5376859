"""Requests that web pages send to another origin than their own.

Public port: a page may read responses only if its origin is configured (CORS). Admin port: a page
of another site may not POST. That port has no keys, and a page can make a browser POST anywhere.
"""

from collections.abc import Mapping, Sequence

from aiohttp import web

from forebay.proxy.http1 import errors
from forebay.proxy.http1.error_response import error_response
from forebay.proxy.http1.errors import ApiError
from forebay.proxy.http1.headers import request_id

PREFLIGHT_S = 600
OWN_SITES = ("same-origin", "none")  # none: typed or bookmarked
_READABLE = (
    "x-request-id, x-forebay-queue-ms, x-forebay-bucket, retry-after, retry-after-ms, "
    "x-should-retry"
)


class Cors:
    """Makes the CORS headers. `origins` are exact, such as https://chat.example."""

    def __init__(self, origins: Sequence[str] = ()) -> None:
        self._origins = frozenset(origins)

    def answer(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return headers of any response to a request with these headers."""
        if not self._origins:
            return {}
        origin = headers.get("origin", "")
        if origin not in self._origins:
            return {"Vary": "Origin"}
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": _READABLE,
        }

    def preflight(self, headers: Mapping[str, str], methods: Sequence[str]) -> dict[str, str]:
        """Return more headers of the response to an OPTIONS request."""
        if (
            headers.get("origin", "") not in self._origins
            or "access-control-request-method" not in headers
        ):
            return {}
        return {
            "Access-Control-Allow-Methods": ", ".join(methods),
            "Access-Control-Allow-Headers": (
                "authorization, x-api-key, api-key, content-type, x-forebay-class, x-request-id, "
                "x-request-timeout"
            ),
            "Access-Control-Max-Age": str(PREFLIGHT_S),
        }


def answer_method(request: web.BaseRequest, methods: Sequence[str], cors: Cors) -> web.Response:
    """Answer OPTIONS. Raises ApiError 405 for other methods that a path has not."""
    allow = {"Allow": ", ".join((*methods, "OPTIONS"))}
    if request.method != "OPTIONS":
        raise ApiError(405, "method_not_allowed", f"Use {methods[0]}.", headers=allow)
    return web.Response(status=204, headers=allow | cors.preflight(request.headers, methods))


def cross_site_refusal(request: web.BaseRequest) -> web.Response | None:
    """Return a 403 for a POST that a page of another site made a browser send, else None.

    Browsers set the headers that are checked here, and pages cannot change them. curl and scripts
    send neither.
    """
    if request.method != "POST":
        return None
    headers = request.headers
    host = headers.get("host", "").lower()
    # Over plain HTTP, browsers send Sec-Fetch-Site to localhost only, so Origin counts too. A page
    # that hides its origin sends "null", which is never ours.
    own_origins = (f"http://{host}", f"https://{host}")
    sites = headers.getall("sec-fetch-site", ())
    origins = headers.getall("origin", ())
    if all(site in OWN_SITES for site in sites) and all(
        origin.lower() in own_origins for origin in origins
    ):
        return None
    return error_response(errors.cross_site(), request_id(headers))
