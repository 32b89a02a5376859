"""An aiohttp server as a proxy needs it: no router, JSON errors, bounded waits for clients.

aiohttp's own answers to malformed requests are text/plain with a traceback in the log that quotes
the bytes; here they are OpenAI-shaped and silent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from forebay.proxy.errors import CLIENT, SERVER, ApiError, error_body
from forebay.proxy.headers import REQUEST_ID, request_id
from forebay.proxy.headers import SERVER as SERVER_NAME

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
KEEPALIVE_S = 75.0


def error_response(
    error: ApiError, id_: str, extra: Mapping[str, str] | None = None
) -> web.Response:
    """The answer to a request that failed before anything was sent."""
    headers = {**(extra or {}), **error.headers, REQUEST_ID: id_, "Server": SERVER_NAME}
    response = web.Response(
        status=error.status, body=error.body(), headers=headers, content_type="application/json"
    )
    if error.close:
        response.force_close()
    return response


class _Protocol(web.RequestHandler):
    """One connection."""

    __slots__ = ("_header_timer",)

    def __init__(self, server: "HttpServer", *, loop: asyncio.AbstractEventLoop, **kw: Any) -> None:
        super().__init__(server, loop=loop, **kw)
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        server = self._manager
        assert isinstance(server, HttpServer)
        if len(server.connections) > server.max_connections:
            transport.close()
            return
        self._header_timer = self._loop.call_later(server.client_headers_s, self._too_slow)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
        super().connection_lost(exc)

    def _too_slow(self) -> None:
        if self._request_count == 0 and self.transport is not None:
            body = error_body("The request headers took too long.", CLIENT, "request_timeout")
            self.transport.write(
                b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\n"
                + f"{REQUEST_ID}: {request_id({})}\r\ncontent-length: {len(body)}\r\n".encode()
                + b"connection: close\r\n\r\n"
                + body
            )
            self.transport.close()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Say nothing: parse errors quote what the client sent."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer is not None and request.writer.output_size > 0:
            raise ConnectionError("an answer was begun: it can only be cut")
        if isinstance(exc, LineTooLong):
            error = ApiError(431, "headers_too_large", "The request headers are too large.")
        elif status >= 500:
            server = self._manager
            if isinstance(server, HttpServer):
                server.failed(exc)
            error = ApiError(500, "internal_error", "Something went wrong here.", SERVER)
        else:
            error = ApiError(status, "bad_http", "The request is not valid HTTP.")
        error.close = True
        return error_response(error, request_id({}))


class HttpServer(web.Server):
    """Gives every connection to `handler`.

    Attributes:
        failed: told of an exception that nobody expected.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        header_bytes: int = 16 << 10,
        client_headers_s: float = 10.0,
        max_connections: float = float("inf"),
        failed: Callable[[BaseException | None], None] = lambda _: None,
    ) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=1.0,
            max_line_size=header_bytes,
            max_field_size=header_bytes,
            access_log=None,
        )
        self.client_headers_s = client_headers_s
        self.max_connections = max_connections
        self.failed = failed

    def __call__(self) -> _Protocol:
        return _Protocol(self, loop=self._loop, **self._kwargs)


async def listen(
    server: HttpServer, host: str, port: int, *, reuse_port: bool = False
) -> tuple[web.ServerRunner, int]:
    """Start listening; the runner, and the port that was taken."""
    runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, host, port, reuse_port=reuse_port or None)
    try:
        await site.start()
    except OSError:
        await runner.cleanup()
        raise
    return runner, int(runner.addresses[0][1])
