"""Look up the addresses of a backend's name, so that a slow name server hurts no other backend.

asyncio and uvloop look names up in a few threads that all share: one slow name soon occupies them,
holds up every other name, and the end of the process. Here each name has at most one thread, for
which nothing waits at the end, and the last good addresses stay in use.
"""

import asyncio
import errno
import socket
from contextlib import suppress
from ipaddress import ip_address
from math import inf
from threading import Thread

FRESH_S = 1.0  # addresses are used for this long without another look-up
PATIENCE_S = 0.25  # longest wait for a look-up while addresses of an earlier look-up exist


class HostName:
    """The addresses of one host. Use from one event loop only."""

    def __init__(self, host: str, loop: asyncio.AbstractEventLoop) -> None:
        self._host = host
        self._loop = loop
        self._error: Exception | None = None
        self._began_at = -inf
        self._ended = asyncio.Event()  # no look-up is in progress
        self._ended.set()
        self.known: list[str] = []
        self._fresh_until = -inf
        with suppress(ValueError):
            ip_address(host.partition("%")[0])
            self.known, self._fresh_until = [host], inf

    async def addresses(self) -> list[str]:
        """Return one or more addresses. Waits for the look-up if no address is known.

        Raises the error of the look-up, OSError or UnicodeError, if no address was ever found.
        """
        now = self._loop.time()
        if now >= self._fresh_until and self._ended.is_set():
            self._begin(now)
        if not self.known:
            await self._ended.wait()
            if not self.known:
                assert self._error is not None
                raise self._error
        elif now < self._began_at + PATIENCE_S:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._began_at + PATIENCE_S):
                    await self._ended.wait()
        return self.known

    def _begin(self, now: float) -> None:
        self._began_at = now
        thread = Thread(target=self._look_up, name=f"look-up of {self._host}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise OSError(errno.ENOMEM, "no thread for a look-up") from error
        self._ended.clear()

    def _look_up(self) -> None:
        """Run in the thread."""
        result: list[str] | Exception
        try:
            infos = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
            result = list(dict.fromkeys(str(info[4][0]) for info in infos))
        except Exception as error:  # raised again in the loop
            result = error
        with suppress(RuntimeError):  # the loop has closed, so no request waits any more
            self._loop.call_soon_threadsafe(self._end, result)

    def _end(self, result: list[str] | Exception) -> None:
        if isinstance(result, list):
            self.known = result
        else:
            self._error = result
        self._fresh_until = self._loop.time() + FRESH_S if self.known else -inf
        self._ended.set()
