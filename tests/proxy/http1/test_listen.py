"""An address that cannot be listened on is named by the key that is wrong."""

import asyncio
import socket

import pytest
from aiohttp import web

from forebay.proxy.http1.server.listen import listen, listen_fault
from forebay.proxy.http1.server.server import HttpServer


async def nothing(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response()


async def listen_on(host: str, port: int) -> None:
    await listen(HttpServer(nothing), host, port)


@pytest.mark.parametrize("host", ["203.0.113.9", "999.1.1.1"])
def test_a_host_that_is_not_here(host: str) -> None:
    with pytest.raises(OSError, match=r".") as raised:
        asyncio.run(listen_on(host, 0))
    said = str(listen_fault("admin_port", host, 1, raised.value))
    assert said.startswith(f"listen.admin_host: {host!r} is no address of this machine")


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=r".") as raised:
            asyncio.run(listen_on("127.0.0.1", port))
    said = str(listen_fault("port", "127.0.0.1", port, raised.value))
    assert said.startswith(f"listen.port: cannot listen on 127.0.0.1:{port}")
