"""JSON and errors as HTTP responses, of aiohttp or as bytes."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web

from forebay.proxy.http1.errors import ApiError
from forebay.proxy.http1.headers import REQUEST_ID, request_id
from forebay.proxy.http1.headers import SERVER as SERVER_NAME


def json_response(fields: Any, status: int = 200) -> web.Response:
    """Return a response with these fields, or with bytes that are JSON already."""
    body = fields if isinstance(fields, bytes) else orjson.dumps(fields)
    return web.Response(status=status, body=body, content_type="application/json")


def error_response(
    error: ApiError, id_: str, extra: Mapping[str, str] | None = None, *, typed: bool = False
) -> web.Response:
    """Return the response to a request that failed before anything was sent.

    Args:
        typed: as in `error_body`.
    """
    headers = {**(extra or {}), **error.headers, REQUEST_ID: id_, "Server": SERVER_NAME}
    response = web.Response(
        status=error.status,
        body=error.body(typed=typed),
        headers=headers,
        content_type="application/json",
    )
    if error.close:
        response.force_close()
    return response


def raw_error_response(error: ApiError) -> bytes:
    """Return an error response as bytes, for a connection without a request."""
    body = error.body()
    headers = {
        **error.headers, "content-type": "application/json", "content-length": str(len(body)),
        REQUEST_ID: request_id({}), "Server": SERVER_NAME, "connection": "close",
    }  # fmt: skip
    first = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"
    lines = [first, *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + body
