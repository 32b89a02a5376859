"""Stop listening on a port that another process listens on too, without losing a client.

The kernel distributes new connections among the sockets that listen on a port (SO_REUSEPORT). When
such a socket is closed, connections that wait to be accepted on it are reset. So they are accepted
first. A connection between the last accept and the close would still be reset: therefore the
kernel drops SYNs to that socket beforehand (socket(7), SO_ATTACH_FILTER). The client sends its SYN
again a second later, and another process answers.
"""

import asyncio
import contextlib
import ctypes
import os
import socket
import ssl
import struct
import sys
from collections.abc import Awaitable, Iterator, Sequence
from typing import cast

from aiohttp import web

from forebay.proxy.http1.server.server import HttpServer
from forebay.proxy.http1.tls import HANDSHAKE_S

TCP_HANDSHAKE_S = 0.005  # time for handshakes that began before the filter: a few round trips
SO_ATTACH_FILTER = 26  # Linux on x86 and ARM; Python has no name for it
# Classic BPF, (code, jump if true, jump if false, constant) each; the TCP header is at 0.
IGNORE_SYN = (
    (0x30, 0, 0, 13),  # load the byte of the flags
    (0x54, 0, 0, 0x12),  # and SYN | ACK
    (0x15, 0, 1, 0x02),  # is it SYN alone?
    (0x06, 0, 0, 0),  # then drop it
    (0x06, 0, 0, 0xFFFFFFFF),  # else accept the whole packet
)


async def stop_listening(runner: web.ServerRunner, server: HttpServer) -> None:
    """Close the listening sockets. Connections that were made are served.

    Never fails, as a drain follows. Takes HANDSHAKE_S at most.
    """
    loop = asyncio.get_running_loop()
    for site in runner.sites:
        for each in _listening(site):
            _ignore_syn(each)
    await asyncio.sleep(TCP_HANDSHAKE_S)
    accepted: list[tuple[socket.socket, web.BaseSite]] = []
    for site in list(runner.sites):
        # Duplicates keep the sockets open when the loop closes its own and stops accepting.
        duplicates: list[socket.socket] = []
        for each in _listening(site):
            with contextlib.suppress(OSError):  # no descriptor is left: nothing is accepted
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

    # All at once, because each may take HANDSHAKE_S. One that fails is closed.
    await asyncio.gather(
        *(serve(connection, site._ssl_context) for connection, site in accepted),
        return_exceptions=True,
    )


def _listening(site: web.BaseSite) -> Sequence[socket.socket]:
    assert site._server is not None
    return cast(asyncio.Server, site._server).sockets


def _ignore_syn(listening: socket.socket) -> None:
    """Let the kernel drop new attempts to connect. Without filters they are reset."""
    if sys.platform != "linux":
        return
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in IGNORE_SYN))
    program = struct.pack("HP", len(IGNORE_SYN), ctypes.addressof(code))
    with contextlib.suppress(OSError):  # a sandbox may not allow filters
        listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def _accepted(listening: socket.socket) -> Iterator[socket.socket]:
    """Accept the waiting connections, as far as there are descriptors for them."""
    while True:
        try:
            yield listening.accept()[0]
        except ConnectionAbortedError:
            continue  # the client has left
        except OSError:
            return  # none waits any more, or no descriptor is left
