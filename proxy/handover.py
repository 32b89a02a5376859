"""Stop listening on a port that another process listens on too, and lose nobody.

The kernel deals new connections out among the sockets that listen on a port (SO_REUSEPORT), and
resets those that wait to be accepted on one that is closed. So they are accepted first.
"""

import asyncio
import os
import socket
from typing import cast

from aiohttp import web

from forebay.proxy.http_server import HttpServer
from forebay.proxy.tls import HANDSHAKE_S


async def stop_listening(runner: web.ServerRunner, server: HttpServer) -> None:
    """Close the listening sockets; connections that were made are served, open ones go on."""
    loop = asyncio.get_running_loop()
    accepted: list[tuple[socket.socket, web.BaseSite]] = []
    for site in list(runner.sites):
        listening = site._server
        assert listening is not None
        # Duplicates keep the sockets open when the loop closes its own, so that nothing can come
        # in between the last accept and the close but what comes in these microseconds.
        duplicates = [
            socket.socket(fileno=os.dup(each.fileno()))
            for each in cast(asyncio.Server, listening).sockets
        ]
        await site.stop()
        for duplicate in duplicates:
            with duplicate:
                duplicate.setblocking(False)
                try:
                    while True:
                        accepted.append((duplicate.accept()[0], site))
                except BlockingIOError:
                    pass  # nobody waits any more
    for connection, site in accepted:
        connection.setblocking(False)
        tls = site._ssl_context
        await loop.connect_accepted_socket(
            server, connection, ssl=tls, ssl_handshake_timeout=HANDSHAKE_S if tls else None
        )
