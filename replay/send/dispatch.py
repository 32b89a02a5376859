"""Send each prepared request when it is due, in an open or a closed loop.

No arrival waits for an answer to another arrival. At most `max_in_flight` requests are in flight.
An arrival that waits for this limit is late by `cap_wait`, and is still sent: no request is skipped
and no due time is moved.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from forebay.replay.clock.clock import Clock
from forebay.replay.plan.options import PATHS
from forebay.replay.plan.target import Target
from forebay.replay.send.bodies import PreparedQueue, PreparedRequest
from forebay.replay.send.http.client import Client
from forebay.replay.send.http.exchange import ClientExchange, ProgressWatch
from forebay.replay.send.pacer import Pacer
from forebay.traces.ground.schema import TraceRequest


class Dispatch:
    """Sends prepared requests to the targets in turn.

    Attributes:
        sent: number of requests sent, always the first requests of the schedule.
        idle: set while no request is in flight.
        spare: turns in which no request is due.
        on_end: called with the index of each request that has ended.
    """

    def __init__(
        self,
        clock: Clock,
        client: Client,
        prepared: PreparedQueue,
        targets: Sequence[Target],
        *,
        max_in_flight: int,
        run_id: str,
        tasks: asyncio.TaskGroup,
        on_sent: Callable[[], None],
        on_ended: Callable[[TraceRequest, ClientExchange], None],
        keep_answers: bool = False,
    ) -> None:
        self.sent = 0
        self.on_end: Callable[[int, ClientExchange], None] | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self.clock = clock
        self.spare = client.spare
        self._client = client
        self._on_sent, self._on_ended = on_sent, on_ended
        self._prepared = prepared
        self._targets = [
            (target.name, {path: client.route(target.url(path)) for path in PATHS.values()})
            for target in targets
        ]
        self._slots = max_in_flight  # free slots
        self._freed = asyncio.Event()
        self._freed_s: deque[float] = deque(maxlen=max_in_flight)  # times when slots became free
        self._blocked_until_s = 0.0  # end of the last wait for the in-flight limit
        self._run_id = run_id
        self._tasks = tasks
        self._keep_answers = keep_answers
        self._watches: set[ProgressWatch] = set()

    async def open_loop(self, times_s: Sequence[float]) -> None:
        """Send every request at its time."""
        async with Pacer(self.clock, self.spare) as pacer:
            while (job := await self._prepared.get()) is not None:
                due_s = times_s[job.index]
                await pacer.until(due_s)
                await self.send(job, due_s)

    async def send(self, job: PreparedRequest, due_s: float) -> None:
        """Send a request that is due, as soon as the in-flight limit allows it."""
        if not self._slots:
            await self._free_slot()
            self._blocked_until_s = self.clock.now()
        self._start(job, due_s)

    async def _free_slot(self) -> None:
        while not self._slots:
            self._freed.clear()
            await self._freed.wait()

    async def closed_loop(self, duration_s: float | None, think_s: float = 0.0) -> None:
        """Send the next request `think_s` after a slot became free, up to `duration_s`.

        If this client was busy when a request was due, or no body was ready, the delay counts as
        lag of the client. Requests whose slots were always free are due at once.
        """
        async with Pacer(self.clock, self.spare) as pacer:
            while True:
                await self._free_slot()
                due_s = self.clock.now()
                if self._freed_s:
                    due_s = self._freed_s.popleft() + think_s
                    if think_s:
                        await pacer.until(due_s)
                if duration_s is not None and self.clock.now() >= duration_s:
                    return
                job = await self._prepared.get()
                if job is None:
                    return
                self._start(job, due_s)
                # Let it leave before the next request is due, to avoid a burst.
                await asyncio.sleep(0)

    def give_up(self) -> None:
        """Cancel all requests in flight."""
        for watch in list(self._watches):
            watch.end("cancelled")

    def _start(self, job: PreparedRequest, intended_s: float) -> None:
        self._slots -= 1
        name, routes = self._targets[self.sent % len(self._targets)]
        # The limit also delayed arrivals that became due while an earlier arrival waited.
        cap_wait_s = max(0.0, self._blocked_until_s - intended_s)
        exchange = ClientExchange(
            f"{self._run_id}-{job.index}", intended_s, cap_wait_s, backend=name
        )
        if self._keep_answers:
            exchange.pieces = []
        limit_s = job.request.deadline_s
        watch = self._client.watch(None if limit_s is None else intended_s + limit_s)
        self._watches.add(watch)
        self.idle.clear()
        self.sent += 1
        self._on_sent()
        self._client.begin(
            routes[job.path],
            job.body,
            exchange,
            watch,
            job.headers,
            partial(self._ended, job, watch),
        )

    def _ended(self, job: PreparedRequest, watch: ProgressWatch, exchange: ClientExchange) -> None:
        self._freed_s.append(self.clock.now())
        self._slots += 1
        self._freed.set()
        self._watches.discard(watch)
        if not self._watches:
            self.idle.set()
        try:
            self._on_ended(job.request, exchange)
            if self.on_end is not None:
                exchange.settle()
                self.on_end(job.index, exchange)
        except Exception as error:  # a mistake in this code ends the run, not only this callback
            self._tasks.create_task(_raise(error))


async def _raise(error: Exception) -> None:
    raise error
