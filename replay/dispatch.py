"""Send each prepared request when it is due, in an open or a closed loop.

Every request runs in a task of its own, so that a slow answer delays no other arrival. At most
`max_in_flight` requests are in flight. An arrival that waits for this limit is late by `cap_wait`
and is still sent: no request is skipped and no due time is moved.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from yarl import URL

from forebay.replay.bodies import PreparedQueue, PreparedRequest
from forebay.replay.client import Client, ClientExchange, ProgressWatch
from forebay.replay.clock import Clock
from forebay.replay.pacer import Pacer
from forebay.replay.recorder import Recorder
from forebay.replay.target import Target


class Dispatch:
    """Sends prepared requests to the targets in turn.

    Attributes:
        sent: number of requests sent; always the first ones of the schedule.
        idle: set while no request is in flight.
    """

    def __init__(
        self,
        clock: Clock,
        client: Client,
        recorder: Recorder,
        prepared: PreparedQueue,
        targets: Sequence[Target],
        *,
        path: str,
        max_in_flight: int,
        run_id: str,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.sent = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._clock = clock
        self._client = client
        self._recorder = recorder
        self._prepared = prepared
        self._targets = [(target.name, target.url(path)) for target in targets]
        self._slots = asyncio.Semaphore(max_in_flight)
        self._freed_s: deque[float] = deque(maxlen=max_in_flight)  # when each free slot became free
        self._run_id = run_id
        self._tasks = tasks
        self._watches: set[ProgressWatch] = set()

    async def open_loop(self, times_s: Sequence[float]) -> None:
        """Send every request at its time."""
        blocked_until_s = 0.0  # end of the last wait for the in-flight limit
        async with Pacer(self._clock) as pacer:
            while (job := await self._prepared.get()) is not None:
                due_s = times_s[job.index]
                await pacer.until(due_s)
                if self._slots.locked():
                    await self._slots.acquire()
                    blocked_until_s = self._clock.now()
                else:
                    await self._slots.acquire()
                # The limit also delayed arrivals that became due while an earlier one waited.
                self._start(job, due_s, max(0.0, blocked_until_s - due_s))

    async def closed_loop(self, duration_s: float | None) -> None:
        """Send the next request whenever a slot is free, up to `duration_s`.

        A request is due when its slot becomes free. If this client was busy then, or no body was
        ready, that is lag of the client. Requests whose slots were always free are due at once.
        """
        while True:
            await self._slots.acquire()
            now_s = self._clock.now()
            if duration_s is not None and now_s >= duration_s:
                return
            due_s = self._freed_s.popleft() if self._freed_s else now_s
            job = await self._prepared.get()
            if job is None:
                return
            self._start(job, due_s, 0.0)
            await asyncio.sleep(0)  # let it leave before the next one is due, to make no burst

    def give_up(self) -> None:
        """Cancel all requests in flight."""
        for watch in self._watches:
            watch.end("cancelled")

    def _start(self, job: PreparedRequest, intended_s: float, cap_wait_s: float) -> None:
        name, url = self._targets[self.sent % len(self._targets)]
        exchange = ClientExchange(
            f"{self._run_id}-{job.index}", intended_s, cap_wait_s, self._clock.now(), backend=name
        )
        watch = self._client.watch()
        self._watches.add(watch)
        self.idle.clear()
        self.sent += 1
        self._recorder.live.sent += 1
        self._tasks.create_task(self._go(job, url, exchange, watch))

    async def _go(
        self, job: PreparedRequest, url: URL, exchange: ClientExchange, watch: ProgressWatch
    ) -> None:
        try:
            await self._client.send(url, job.body, exchange, watch)
        finally:
            self._freed_s.append(self._clock.now())
            self._slots.release()
            self._watches.discard(watch)
            if not self._watches:
                self.idle.set()
        self._recorder.finished(job.request, exchange)
