"""A bare aiohttp server on uvloop, to compare costs with: python bare_server.py PORT

It reads a request and answers by itself: the yardstick of Python's own cost on this machine.
"""

import asyncio
import sys

import uvloop
from aiohttp import web
from mock_backend import WHOLE


async def answer(request: web.BaseRequest) -> web.Response:
    await request.read()
    return web.Response(body=WHOLE, content_type="application/json")


async def main(port: int) -> None:
    runner = web.ServerRunner(web.Server(answer, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
