"""End what stalls: one task looks at everything that is being waited for, four times a second.

One task instead of a timer a chunk (2.7 us each).
"""

import asyncio
from collections.abc import Callable
from types import TracebackType

from aiohttp import web

from forebay.proxy.http1.client import UpstreamFault, UpstreamResponse

TICK_S = 0.25


class StalledUpstream(UpstreamFault):
    """The backend sent nothing for too long, or its answer is not waited for any more."""


class Limit:
    """Ends a `with` block by TimeoutError, as `asyncio.timeout` does, when its holder says so.

    A timer of its own would take 14 us of every request.

    Attributes:
        at: when to end it, by the clock of the event loop.
        expired: it was told to.
    """

    __slots__ = ("_cancelling", "_loop", "_task", "at", "expired")

    def __init__(self, at: float, loop: asyncio.AbstractEventLoop) -> None:
        self.at = at
        self._loop = loop  # asking which it is takes a system call (Python 3.11)
        self.expired = False
        self._cancelling = 0
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> None:
        task = self._task = asyncio.current_task(self._loop)
        assert task is not None
        self._cancelling = task.cancelling()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if (
            self.expired
            and task is not None
            and task.uncancel() <= self._cancelling  # else it was cancelled by another as well
            and kind is asyncio.CancelledError
        ):
            raise TimeoutError from error

    def end(self) -> None:
        """End the block, if it runs and was not told yet."""
        if self._task is not None and not self.expired:
            self.expired = True
            self._task.cancel()


class TimeoutWatch:
    """What is watched of one answer: what it now waits for, and since when.

    Attributes:
        answer: the backend's; None when only the client is waited for.
        heard: something came since the last tick; setting it costs less than asking the time.
    """

    __slots__ = ("_watches", "answer", "heard", "reading_since", "request", "writing_since")

    def __init__(
        self,
        request: web.BaseRequest,
        answer: UpstreamResponse | None,
        watches: "set[TimeoutWatch]",
    ) -> None:
        self._watches = watches
        self.request = request
        self.answer = answer
        self.heard = False
        self.reading_since: float | None = None
        self.writing_since: float | None = None

    def __enter__(self) -> "TimeoutWatch":
        self._watches.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._watches.remove(self)


class Watchdog:
    """Use as a context around the life of the proxy.

    Attributes:
        on_tick: told the time, every TICK_S.
    """

    def __init__(self, idle_s: float, client_write_s: float) -> None:
        self._idle_s = idle_s
        self._client_write_s = client_write_s
        self._watches: set[TimeoutWatch] = set()
        self._task: asyncio.Task[None] | None = None
        self.on_tick: Callable[[float], None] = lambda now: None

    def reconfigure(self, idle_s: float, client_write_s: float) -> None:
        self._idle_s, self._client_write_s = idle_s, client_write_s

    async def __aenter__(self) -> "Watchdog":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def watching(self, request: web.BaseRequest, answer: UpstreamResponse | None) -> TimeoutWatch:
        """Watch a request for the time of a `with` block."""
        return TimeoutWatch(request, answer, self._watches)

    def end_all(self, why: str) -> None:
        """Fail every answer that is being read from a backend."""
        for watch in list(self._watches):
            if watch.answer is not None:
                watch.answer.fail(StalledUpstream(why))

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(TICK_S)
            self.on_tick(clock())
            for watch in list(self._watches):
                self._look(watch, clock())

    def _look(self, watch: TimeoutWatch, now: float) -> None:
        if watch.heard:
            watch.heard = False
            if watch.reading_since is not None:
                watch.reading_since = now
        if watch.writing_since is not None and now - watch.writing_since > self._client_write_s:
            if watch.request.transport is not None:
                watch.request.transport.abort()  # the handler is cancelled by that
        elif (
            watch.answer is not None
            and watch.reading_since is not None
            and now - watch.reading_since > self._idle_s
        ):
            watch.answer.fail(StalledUpstream("nothing came"))
