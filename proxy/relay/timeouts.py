"""End requests that stall: one task checks every wait of every request four times a second.

A timer for each chunk would cost 2.7 us a chunk.
"""

import asyncio
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from forebay.proxy.backends.link import BackendLink
from forebay.proxy.http1.client.backend_errors import OwnLimit
from forebay.proxy.http1.client.connection import Sink, UpstreamResponse
from forebay.proxy.http1.client.patience import ended_by_limit

try:
    from fcntl import ioctl
    from termios import TIOCOUTQ
except ImportError:  # Windows: the bytes in the kernel are not counted
    ioctl = None  # type: ignore[assignment]

TICK_S = 0.25
LOOK_S = 1.0  # interval at which clients that are slow to read are counted
# A client that takes this much within `client_write` goes on, even with a large answer: by default
# 550 bytes/s. A bound of one byte would let a client hold an answer for ever.
PROGRESS_BYTES = 16 << 10
# A healthy backend may be silent for this many times `idle`: vLLM holds a tool call back while it
# parses the arguments. Doubled: a response that never goes on keeps its slot for 20 minutes.
HEALTHY_IDLE = 10.0


class StalledUpstream(OwnLimit):
    """The backend sent nothing for too long, or the proxy stopped waiting for it."""


@dataclass(slots=True, eq=False)
class Limit:
    """Ends a `with` block by TimeoutError at a time, or when `end` is called.

    `asyncio.timeout` does the same. A timer of its own would cost every request 14 us.

    Attributes:
        at: when to end the block, on the clock of the event loop.
        text: the limit and its key, such as "120 s (timeouts.first_token)".
        limits: all limits whose blocks run.
        expired: `end` was called.
    """

    at: float
    text: str
    loop: asyncio.AbstractEventLoop  # get_running_loop() makes a system call (Python 3.11)
    limits: "dict[Limit, None]"
    expired: bool = False
    _cancelling: int = 0
    _task: asyncio.Task[object] | None = None

    def __enter__(self) -> None:
        task = self._task = asyncio.current_task(self.loop)
        assert task is not None
        self._cancelling = task.cancelling()
        self.limits[self] = None

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        task, self._task = self._task, None
        del self.limits[self]
        if self.expired and task is not None and ended_by_limit(task, self._cancelling, kind):
            raise TimeoutError from error

    def end(self) -> None:
        """End the block, if it runs and was not ended yet."""
        if self._task is not None and not self.expired:
            self.expired = True
            self._task.cancel()


class Beating(Protocol):
    """A client that must not hear nothing for long.

    Attributes:
        next_at: when `beat` is to be called, on the clock of the event loop.
    """

    next_at: float

    async def beat(self, now: float) -> None:
        """Let the client hear something. Waits for nothing."""


@dataclass(slots=True, eq=False)
class TimeoutWatch:
    """One request under the watchdog: the peer that it waits for now, and since when.

    Attributes:
        response: the backend's; None when only the client is waited for.
        link: the backend, None without a response.
        heard: bytes came since the last tick. Setting this costs less than reading the clock.
        untaken: bytes that the client had yet to take when it last made progress.
    """

    request: web.BaseRequest
    response: UpstreamResponse | None
    watchdog: "Watchdog"
    link: BackendLink | None
    heard: bool = False
    untaken: int = 0
    reading_since: float | None = None
    writing_since: float | None = None

    def __enter__(self) -> "TimeoutWatch":
        self.watchdog._watches.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.watchdog._watches.remove(self)

    async def pour(self, sink: Sink, chunk_sink: Sink | None = None) -> bool:
        """Pass the response to `sink` until it wants no more, then wait for the client.

        Returns True at its end. Raises UpstreamFault, or ConnectionError if the client has left.
        """
        assert self.response is not None
        self.reading_since = self.watchdog.clock()
        try:
            if await self.response.pour(sink, chunk_sink):
                return True
        finally:
            self.reading_since = None
        if self.request.transport is None or self.request.transport.is_closing():
            raise ConnectionResetError
        self.writing_since = self.watchdog.clock()
        await self.request.writer.drain()
        self.writing_since = None
        return False


class Watchdog:
    """Checks the watched requests while `run` runs: as long as the proxy lives.

    Attributes:
        clock: the time of the event loop.
        beating: clients that get heartbeats.
        untaken_s: seconds, added up over requests, in which a client had yet to take
            PROGRESS_BYTES or more.
    """

    def __init__(self, idle_s: float, client_write_s: float) -> None:
        self._idle_s = idle_s
        self._client_write_s = client_write_s
        self._watches: set[TimeoutWatch] = set()
        self._limits: dict[Limit, None] = {}  # in order of their blocks' start
        self._loop = asyncio.get_running_loop()
        self.clock = self._loop.time
        self.beating: set[Beating] = set()
        self.untaken_s = 0.0

    def reconfigure(self, idle_s: float, client_write_s: float) -> None:
        self._idle_s, self._client_write_s = idle_s, client_write_s

    def watching(
        self,
        request: web.BaseRequest,
        response: UpstreamResponse | None = None,
        link: BackendLink | None = None,
    ) -> TimeoutWatch:
        """Watch a request during a `with` block."""
        return TimeoutWatch(request, response, self, link)

    def limit(self, seconds: float, key: str) -> Limit:
        """Return a limit that ends its block `seconds` from now, at the next look.

        Args:
            key: the key of the configuration that sets it.
        """
        text = f"{seconds:g} s ({key})"
        return Limit(self.clock() + seconds, text, self._loop, self._limits)

    def end_all(self, why: str) -> None:
        """Fail every response that is being read from a backend. `why` is a sentence."""
        for watch in list(self._watches):
            if watch.response is not None:
                watch.response.fail(StalledUpstream(why))

    async def run(self) -> None:
        """Look at the watched requests again and again."""
        looked_at = self.clock()
        while True:
            await asyncio.sleep(TICK_S)
            now = self.clock()
            if now - looked_at >= LOOK_S:
                self._count_untaken(now - looked_at)
                looked_at = now
            for limit in self._limits:
                if now > limit.at:
                    limit.end()
            for watch in list(self._watches):
                self._check(watch, self.clock())
            for client in list(self.beating):
                if (now := self.clock()) >= client.next_at:
                    await client.beat(now)

    def _count_untaken(self, seconds: float) -> None:
        """Count the clients that are slow to take their answers."""
        for watch in self._watches:
            transport = watch.request.transport
            if transport is not None and _untaken_bytes(transport) >= PROGRESS_BYTES:
                self.untaken_s += seconds

    def _check(self, watch: TimeoutWatch, now: float) -> None:
        if watch.heard:
            watch.heard = False
            if watch.reading_since is not None:
                watch.reading_since = now
        transport = watch.request.transport
        if watch.writing_since is not None and transport is not None:
            untaken = _untaken_bytes(transport)
            if untaken <= watch.untaken - PROGRESS_BYTES:
                watch.writing_since = now
                watch.untaken = untaken
            watch.untaken = max(watch.untaken, untaken)  # more was written
        if watch.writing_since is not None and now - watch.writing_since > self._client_write_s:
            if transport is not None:
                transport.abort()  # this cancels the handler
        elif watch.response is not None and watch.reading_since is not None:
            healthy = watch.link is not None and not watch.link.silent
            idle_s = self._idle_s * (HEALTHY_IDLE if healthy else 1.0)
            if now - watch.reading_since > idle_s:
                why = "timeouts.idle"
                why = f"ten times {why}" if healthy else f"{why}, as its health checks fail"
                watch.response.fail(StalledUpstream(f"No output for {idle_s:g} s ({why})."))


def _untaken_bytes(transport: asyncio.Transport) -> int:
    """Return the bytes that were written and not acknowledged, those in the kernel included.

    The kernel holds megabytes, and asks for more only once a third of them is acknowledged.
    """
    held, kernel = transport.get_write_buffer_size(), bytes(4)
    wire = transport.get_extra_info("socket")
    if wire is not None and ioctl is not None:
        with suppress(OSError):  # not there for this kind of socket, or closed
            kernel = ioctl(wire.fileno(), TIOCOUTQ, kernel)
    return held + int(struct.unpack("i", kernel)[0])
