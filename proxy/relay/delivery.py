"""Send responses to clients, and cut off clients that do not take them."""

import asyncio

import aiohttp
from aiohttp import web

from forebay.proxy.relay.timeouts import Watchdog


async def send_whole(
    request: web.BaseRequest, response: web.StreamResponse, watchdog: Watchdog
) -> None:
    """Send a response that is ready."""
    with watchdog.watching(request, None) as watch:
        watch.writing_since = watchdog.clock()
        try:
            await response.prepare(request)
            await response.write_eof()
        except (ConnectionError, aiohttp.ClientConnectionError):
            pass  # the client has left


async def wait_taken(request: web.BaseRequest, watchdog: Watchdog) -> None:
    """Wait until the client has taken everything that was written.

    Writing waits only while more than 64 KiB are buffered. Nobody else would watch over the rest,
    and a proxy that ends would lose it.
    """
    transport = request.transport
    if transport is None or not transport.get_write_buffer_size():
        return
    await asyncio.sleep(0)  # uvloop writes at the end of the turn: mostly nothing is left then
    if transport.is_closing() or not transport.get_write_buffer_size():
        return
    with watchdog.watching(request, None) as watch:
        watch.writing_since = watchdog.clock()
        transport.set_write_buffer_limits(0)  # so that `drain` waits for all of it
        try:
            await request.writer.drain()
        except (ConnectionError, aiohttp.ClientConnectionError):
            return  # the client has left
        if not transport.is_closing():
            transport.set_write_buffer_limits()
