"""Send prepared requests over keep-alive connections, and give each answer to its reader.

The client makes no decision: no retry, no redirect, no rate. Every request ends as an outcome in
its `ClientExchange`, never as an exception. No task runs for a request.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import aiohttp
from yarl import URL

from forebay.replay.clock.clock import Clock
from forebay.replay.clock.spare_time import SpareTime
from forebay.replay.send.http.answer_reader import AnswerReader
from forebay.replay.send.http.connection import ConnectionPool, Route, route_to
from forebay.replay.send.http.exchange import ClientExchange, ProgressWatch, WatchLine


class Client:
    """Sends the requests of a run, and keeps only connections.

    Attributes:
        spare: turns for other work between reads.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        first_token_timeout_s: float,
        stall_timeout_s: float,
        api_key: str | None = None,
    ) -> None:
        self.spare = SpareTime(clock)
        self._clock = clock
        self._defaults = {"accept": "text/event-stream"}
        if api_key:
            self._defaults["authorization"] = f"Bearer {api_key}"
        self._default_lines = _lines(self._defaults)
        self._pool = ConnectionPool(clock, self.spare)
        self._line = WatchLine(clock, first_token_timeout_s, stall_timeout_s)
        self._connecting: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """A session for requests that are not measured: model lists, metrics."""
        if self._session is None:
            headers = {k: v for k, v in self._defaults.items() if k == "authorization"}
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(headers=headers, cookie_jar=jar)
        return self._session

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pool.close()
        self._line.close()
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        await asyncio.sleep(0)  # lets the closed connections be released

    def route(self, url: URL) -> Route:
        return route_to(url, {"content-type": "application/json"})

    def watch(self, leaves_s: float | None = None) -> ProgressWatch:
        """Make the watch for one request. The caller may `end` it.

        It cancels the request at second `leaves_s` of the run, when the trace's client gave up.
        """
        return ProgressWatch(self._line, math.inf if leaves_s is None else leaves_s)

    async def send(
        self, url: URL, body: bytes, exchange: ClientExchange, watch: ProgressWatch
    ) -> None:
        """Send `body`, wait for the end of the answer, and fill in `exchange`."""
        ended = asyncio.get_running_loop().create_future()
        self.begin(self.route(url), (body,), exchange, watch, {}, ended.set_result)
        try:
            await ended
            exchange.settle()
        finally:
            watch.finish()

    def begin(
        self,
        route: Route,
        body: Sequence[bytes],
        exchange: ClientExchange,
        watch: ProgressWatch,
        headers: Mapping[str, str],
        on_end: Callable[[ClientExchange], None],
    ) -> None:
        """Send the pieces of `body` now. `on_end` is called at the end of the answer."""
        lines = self._default_lines if not headers else _lines({**self._defaults, **headers})
        head = b"%bx-request-id: %b\r\n%bcontent-length: %d\r\n\r\n" % (
            route.start,
            exchange.request_id.encode("latin-1"),
            lines,
            sum(map(len, body)),
        )
        whole = headers.get("accept") == "application/json"
        reader = AnswerReader(exchange, self._clock, watch, whole, on_end)
        connection = self._pool.take(route)
        exchange.sent_s = self._clock.now()
        if connection is not None:
            reader.send(connection, head, body)
        else:
            task = asyncio.ensure_future(self._connect(route, reader, head, body))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
            reader.connecting = task
        watch.start(exchange.sent_s, exchange.events, reader.read, reader.give_up)

    async def _connect(
        self, route: Route, reader: AnswerReader, head: bytes, body: Sequence[bytes]
    ) -> None:
        try:
            connection = await self._pool.connect(route)
        except (OSError, TimeoutError) as error:
            reader.lost(error)
        else:
            reader.send(connection, head, body)


def _lines(headers: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")
