"""Send each prepared request when it is due; the open and the closed loop.

Every request that is sent is a task of its own, so that a slow answer delays no other arrival.
Only `max_in_flight` go on at once; an arrival that has to wait for that is late by `cap_wait` and
sent all the same: nothing is skipped, no due time is moved.
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
    """Sends what is in a window to the targets in turn.

    Attributes:
        sent: requests that left; always the first so many of the schedule.
    """

    def __init__(
        self,
        clock: Clock,
        client: Client,
        recorder: Recorder,
        window: PreparedQueue,
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
        self._window = window
        self._targets = [(target.name, target.url(path)) for target in targets]
        self._slots = asyncio.Semaphore(max_in_flight)
        self._freed_s: deque[float] = deque(maxlen=max_in_flight)  # when free slots became so
        self._run_id = run_id
        self._tasks = tasks
        self._watches: set[ProgressWatch] = set()

    async def open_loop(self, times_s: Sequence[float]) -> None:
        """Send every request at its time."""
        blocked_until_s = 0.0  # when the limit last let go of us
        async with Pacer(self._clock) as pacer:
            while (job := await self._window.get()) is not None:
                due_s = times_s[job.index]
                await pacer.until(due_s)
                if self._slots.locked():
                    await self._slots.acquire()
                    blocked_until_s = self._clock.now()
                else:
                    await self._slots.acquire()
                # Whoever came due while an earlier arrival waited was held by the limit as well.
                self._start(job, due_s, max(0.0, blocked_until_s - due_s))

    async def closed_loop(self, duration_s: float | None) -> None:
        """Send the next request whenever a slot is free, up to `duration_s`.

        It is due from the moment its slot was free: that we were busy, or had no body ready, is lag
        of ours. The first ones, whose slots were always free, are due when their turn comes.
        """
        while True:
            await self._slots.acquire()
            now_s = self._clock.now()
            if duration_s is not None and now_s >= duration_s:
                return
            due_s = self._freed_s.popleft() if self._freed_s else now_s
            job = await self._window.get()
            if job is None:
                return
            self._start(job, due_s, 0.0)
            await asyncio.sleep(0)  # it leaves before the next one is due: no burst of our making

    def give_up(self) -> None:
        """End everything in flight as cancelled by us."""
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
