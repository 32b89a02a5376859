"""Stop listening on a port that another process listens on too, and lose nobody.

The kernel deals new connections out among the sockets that listen on a port (SO_REUSEPORT), and
resets those that wait to be accepted on one that is closed. So they are accepted first. Who comes
between the last accept and the close would still be reset: a socket that is about to be closed
does not hear SYNs (a filter of the kernel's, socket(7) SO_ATTACH_FILTER), so such a client sends
its SYN again, a second later, and another process answers.
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

from forebay.proxy.http1.server import HttpServer
from forebay.proxy.http1.tls import HANDSHAKE_S

TCP_HANDSHAKE_S = 0.005  # what was begun before the filter; a few round trips of a data centre
SO_ATTACH_FILTER = 26  # Linux on x86 and ARM; Python has no name for it
# Classic BPF, (code, jump if true, jump if false, constant) each; the TCP header is at 0.
IGNORE_SYN = (
    (0x30, 0, 0, 13),  # load the byte of the flags
    (0x54, 0, 0, 0x12),  # and SYN | ACK
    (0x15, 0, 1, 0x02),  # is it SYN alone?
    (0x06, 0, 0, 0),  # then drop it
    (0x06, 0, 0, 0xFFFFFFFF),  # else take it whole
)


async def stop_listening(runner: web.ServerRunner, server: HttpServer) -> None:
    """Close the listening sockets; connections that were made are served, open ones go on.

    Never fails: a drain follows, whatever the last clients do. Takes HANDSHAKE_S at most.
    """
    loop = asyncio.get_running_loop()
    for site in runner.sites:
        for each in _listening(site):
            _ignore_syn(each)
    await asyncio.sleep(TCP_HANDSHAKE_S)
    accepted: list[tuple[socket.socket, web.BaseSite]] = []
    for site in list(runner.sites):
        # Duplicates keep the sockets open when the loop closes its own: it accepts no more.
        duplicates: list[socket.socket] = []
        for each in _listening(site):
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


def _listening(site: web.BaseSite) -> Sequence[socket.socket]:
    assert site._server is not None
    return cast(asyncio.Server, site._server).sockets


def _ignore_syn(listening: socket.socket) -> None:
    """Have the kernel drop new attempts to connect; where it cannot, they are reset."""
    if sys.platform != "linux":
        return
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in IGNORE_SYN))
    program = struct.pack("HP", len(IGNORE_SYN), ctypes.addressof(code))
    with contextlib.suppress(OSError):  # a sandbox may know no filters
        listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def _accepted(listening: socket.socket) -> Iterator[socket.socket]:
    """Those who wait to be accepted, as far as there are descriptors for them."""
    while True:
        try:
            yield listening.accept()[0]
        except ConnectionAbortedError:
            continue  # it left while it waited
        except OSError:
            return  # nobody waits any more, or no descriptor is left
