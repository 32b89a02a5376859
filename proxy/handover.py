"""Stop listening on a port that another process listens on too, and lose nobody.

The kernel deals new connections out among the sockets that listen on a port (SO_REUSEPORT), and
resets those that wait to be accepted on one that is closed. So they are accepted first.
"""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Awaitable, Iterator
from typing import cast

from aiohttp import web

from forebay.proxy.http_server import HttpServer
from forebay.proxy.tls import HANDSHAKE_S


async def stop_listening(runner: web.ServerRunner, server: HttpServer) -> None:
    """Close the listening sockets; connections that were made are served, open ones go on.

    Never fails: a drain follows, whatever the last clients do. Takes HANDSHAKE_S at most.
    """
    loop = asyncio.get_running_loop()
    accepted: list[tuple[socket.socket, web.BaseSite]] = []
    for site in list(runner.sites):
        listening = site._server
        assert listening is not None
        # Duplicates keep the sockets open when the loop closes its own, so that nothing can come
        # in between the last accept and the close but what comes in these microseconds.
        duplicates: list[socket.socket] = []
        for each in cast(asyncio.Server, listening).sockets:
            with contextlib.suppress(OSError):  # no descriptor is left: then nobody is accepted
                duplicates.append(socket.socket(fileno=os.dup(each.fileno())))
        await site.stop()
        for duplicate in duplicates:
            with duplicate:
                duplicate.setblocking(False)
                accepted += [(connection, site) for connection in _accepted(duplicate)]

    def serve(connection: socket.socket, tls: ssl.SSLContext | None) -> Awaitable[object]:
        connection.setblocking(False)
        return loop.connect_accepted_socket(
            server, connection, ssl=tls, ssl_handshake_timeout=HANDSHAKE_S if tls else None
        )

    # At once, for each may take HANDSHAKE_S; one that fails is closed, and nobody else's concern.
    await asyncio.gather(
        *(serve(connection, site._ssl_context) for connection, site in accepted),
        return_exceptions=True,
    )


def _accepted(listening: socket.socket) -> Iterator[socket.socket]:
    """Those who wait to be accepted, as far as there are descriptors for them."""
    while True:
        try:
            yield listening.accept()[0]
        except ConnectionAbortedError:
            continue  # it left while it waited
        except OSError:
            return  # nobody waits any more, or no descriptor is left
