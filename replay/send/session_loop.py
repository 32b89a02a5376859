"""Send a trace whose turns wait for answers, each request at the due time of its agenda.

Bodies are rendered before they are due: first requests with known due times, in order, then turns
whose predecessor is in progress. With `history="answers"` a turn has the real answer of the turn
before, so its body is completed after that answer.
"""

import asyncio
from heapq import heapify, heappop, heappush
from math import inf

from forebay.replay.plan.agenda import Agenda
from forebay.replay.plan.history import History
from forebay.replay.plan.plan import ReplayPlan
from forebay.replay.send.bodies import (
    MAX_AHEAD,
    MAX_AHEAD_BYTES,
    PreparedRequest,
    RequestStyle,
    prepare,
)
from forebay.replay.send.dispatch import Dispatch
from forebay.replay.send.http.exchange import ClientExchange
from forebay.replay.send.pacer import Pacer


class SessionLoop:
    """Sends the requests of an agenda, in an open loop or with a fixed number of sessions.

    A closed loop has its think time from the end of a session to the next session. No request that
    is due at or after the duration is sent.
    """

    def __init__(
        self, plan: ReplayPlan, agenda: Agenda, dispatch: Dispatch, style: RequestStyle
    ) -> None:
        options, sessions = plan.options, plan.schedule.arrivals.closed
        self.sent: set[int] = set()
        self._agenda = agenda
        self._dispatch = dispatch
        self._style = style
        self._clock = dispatch.clock
        self._until_s = inf if options.duration_s is None else options.duration_s
        answers = options.history == "answers"
        self._history = History(agenda, options.salt or "") if answers else None
        self._think_s = options.think_s
        # The two heaps: requests to send, and requests to render.
        self._due: list[tuple[float, int]] = []  # requests whose time is known
        self._to_render: list[tuple[float, int]] = []
        self._bodies: dict[int, PreparedRequest] = {}
        self._bytes = 0
        self._in_flight = 0
        self._changed = asyncio.Event()
        self._rendered = asyncio.Event()
        self._pacer: Pacer | None = None
        self._roots = iter(agenda.roots)
        # A closed loop starts its first sessions. An open loop knows the times of all roots.
        dispatch.on_end = self._ended
        for _ in range(sessions):
            self._next_session(0.0)
        if not sessions:
            for root, due_s in zip(agenda.roots, plan.schedule.times_s, strict=False):
                agenda.start(root, due_s)
                self._due.append((due_s, root))
            heapify(self._due)
            self._to_render = list(self._due)
        self._closed = bool(sessions)

    async def run(self) -> None:
        """Send every request, and return when no request is unsent or in progress."""
        rendering = asyncio.ensure_future(self._render())
        try:
            async with Pacer(self._clock, self._dispatch.spare) as self._pacer:
                while self._left():
                    if not self._due or self._due[0][0] >= self._until_s:
                        self._changed.clear()
                        await self._changed.wait()
                    elif await self._pacer.until(self._due[0][0]):
                        due_s, index = heappop(self._due)
                        await self._send(index, due_s)
        finally:
            rendering.cancel()
            await asyncio.gather(rendering, return_exceptions=True)

    async def fill(self) -> None:
        """Render the first requests before the run begins."""
        await self._render(once=True)

    def _left(self) -> bool:
        return self._in_flight > 0 or (bool(self._due) and self._due[0][0] < self._until_s)

    async def _send(self, index: int, due_s: float) -> None:
        job = self._bodies.pop(index, None)
        if job is None:
            job = await self._prepare(index)
        else:
            self._bytes -= job.size
        self.sent.add(index)
        self._in_flight += 1
        if self._history is None:
            for follower in self._agenda.followers(index):
                heappush(self._to_render, (inf, follower))
        self._rendered.set()
        await self._dispatch.send(job, due_s)

    def _ended(self, index: int, exchange: ClientExchange) -> None:
        now_s = exchange.done_s if exchange.done_s is not None else self._clock.now()
        if self._history is not None:
            self._history.ended(index, exchange.answer)
        for due_s, turn in self._agenda.ended(index, now_s):
            heappush(self._due, (due_s, turn))
            heappush(self._to_render, (due_s, turn))
        if self._agenda.session_over(index) and self._closed:
            self._next_session(now_s + self._think_s)
        self._in_flight -= 1
        self._changed.set()
        self._rendered.set()
        if self._pacer is not None:
            self._pacer.wake()

    def _next_session(self, due_s: float) -> None:
        root = next(self._roots, None)
        if root is not None:
            self._agenda.start(root, due_s)
            heappush(self._due, (due_s, root))
            heappush(self._to_render, (due_s, root))

    async def _render(self, *, once: bool = False) -> None:
        """Render the next due requests while there is room. The first request always has room."""
        while True:
            while self._to_render and self._has_room():
                _, index = heappop(self._to_render)
                if index not in self._bodies and index not in self.sent:
                    job = await self._prepare(index)
                    if index not in self.sent:  # it may have been sent during that
                        self._bodies[index] = job
                        self._bytes += job.size
                await asyncio.sleep(0)
            if once:
                return
            self._rendered.clear()
            await self._rendered.wait()

    def _has_room(self) -> bool:
        return not self._bodies or (len(self._bodies) < MAX_AHEAD and self._bytes < MAX_AHEAD_BYTES)

    async def _prepare(self, index: int) -> PreparedRequest:
        row, prompt = self._agenda.rows[index], None
        if self._history is not None:
            row, prompt = self._history.row_to_send(index)
        return await prepare(index, row, self._style, prompt)
