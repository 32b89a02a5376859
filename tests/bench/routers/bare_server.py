"""A bare aiohttp server on uvloop, to compare costs with: python bare_server.py PORT [BACKEND PORT]

It reads a request and answers by itself: the yardstick of Python's own cost on this machine. With
the port of a backend it asks that for the answer instead, by Forebay's own client and with nothing
decided: the least that any proxy in Python costs.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvloop
from aiohttp import web
from routers.mock_backend import WHOLE

from forebay.proxy.http1.client.client import Origin, read_all

MOST_BYTES = 64 << 20


async def answer(request: web.BaseRequest) -> web.Response:
    await request.read()
    return web.Response(body=WHOLE, content_type="application/json")


def forward(port: int) -> Callable[[web.BaseRequest], Awaitable[web.Response]]:
    """Return a handler that passes whole requests and whole answers on."""
    origin = Origin(f"http://127.0.0.1:{port}", 5.0)

    async def passed_on(request: web.BaseRequest) -> web.Response:
        body = await request.read()
        headers = {"content-type": request.headers["content-type"]}
        response = await origin.ask("POST", request.raw_path, headers, body)
        try:
            kept = await read_all(response, MOST_BYTES)
        finally:
            response.close()
        return web.Response(status=response.status, body=kept, content_type="application/json")

    return passed_on


async def main(port: int, backend: int | None = None) -> None:
    handler = answer if backend is None else forward(backend)
    server = web.Server(handler, access_log=None)
    runner = web.ServerRunner(server)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(*map(int, sys.argv[1:])))
