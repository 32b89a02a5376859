"""Listen on a port, with or without TLS."""

import asyncio
import errno
import socket
import ssl

from aiohttp import web

from forebay.proxy.http1.server.server import HttpServer
from forebay.proxy.http1.tls import HANDSHAKE_S
from forebay.traces.ground.errors import InputError

SHUTDOWN_S = 0.25  # time for handlers to end, and again after they are cancelled


class _TlsSite(web.TCPSite):
    """A site with a bound on the TLS handshake. aiohttp's own has asyncio's 60 s."""

    async def start(self) -> None:
        await web.BaseSite.start(self)
        server = self._runner.server
        assert server is not None
        self._server = await asyncio.get_running_loop().create_server(
            server,
            self._host,
            self._port,
            ssl=self._ssl_context,
            backlog=self._backlog,
            reuse_address=self._reuse_address,
            reuse_port=self._reuse_port,
            ssl_handshake_timeout=HANDSHAKE_S,
        )


async def listen(
    server: HttpServer,
    host: str,
    port: int,
    *,
    reuse_port: bool = False,
    tls: ssl.SSLContext | None = None,
) -> tuple[web.ServerRunner, int]:
    """Start listening. Returns the runner and the port.

    Args:
        reuse_port: share the port with other processes that set this too.
        tls: None for plain HTTP.
    """
    runner = web.ServerRunner(server, handle_signals=False, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    kind = web.TCPSite if tls is None else _TlsSite
    site = kind(runner, host, port, ssl_context=tls, reuse_port=reuse_port or None)
    try:
        await site.start()
    except OSError:
        await runner.cleanup()
        raise
    return runner, int(runner.addresses[0][1])


def listen_fault(key: str, host: str, port: int, error: OSError) -> InputError:
    """Explain the fault of an address. `key` is `port` or `admin_port`."""
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        named = f"listen.{key.removesuffix('port')}host"
        return InputError(f"{named}: {host!r} is no address of this machine; give 0.0.0.0 for all")
    return InputError(f"listen.{key}: cannot listen on {host}:{port} ({error.strerror})")


def url_host(host: str) -> str:
    """Return a host as part of a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
