"""Send the requests of a plan, from this process or from several, and measure the answers."""

import asyncio
import time
from dataclasses import replace
from typing import Any, Self

from forebay.replay.clock.clock import Clock
from forebay.replay.parts.divide import Part
from forebay.replay.parts.run_parts import replay_in_processes
from forebay.replay.plan.options import PATHS
from forebay.replay.plan.plan import ReplayPlan, say
from forebay.replay.plan.tasks import other_tasks
from forebay.replay.results.folder import RunFolder
from forebay.replay.results.merge import Measured
from forebay.replay.results.progress import Progress, watching
from forebay.replay.results.recorder import Recorder, flush_every_interval
from forebay.replay.results.server_metrics import MetricsSampler
from forebay.replay.results.summary import RunTotals
from forebay.replay.send.bodies import PreparedQueue, RequestStyle, body_slices, render
from forebay.replay.send.dispatch import Dispatch
from forebay.replay.send.drain import Stop, drain
from forebay.replay.send.http.client import Client
from forebay.replay.send.http.exchange import ClientExchange
from forebay.replay.send.session_loop import SessionLoop
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.event_loop import short_collections
from forebay.traces.ground.hlog import HlogWriter, IntervalLog
from forebay.traces.ground.schema import TraceRequest


class Sender:
    """Sends a plan, or the `part` of it that this process has. For `async with`, which warms up."""

    def __init__(self, plan: ReplayPlan, part: Part | None = None) -> None:
        options = plan.options
        self._plan = plan
        self._part = part
        self._style = RequestStyle(
            plan.served.model,
            options.endpoint,
            options.salt or "",
            plan.served.own_models,
            options.lengths,
            options.keys,
            options.time_scale,
        )
        self._clock = Clock(options.time_scale)
        self._client = Client(
            self._clock,
            first_token_timeout_s=options.first_token_timeout_s,
            stall_timeout_s=options.stall_timeout_s,
            api_key=options.api_key,
        )
        self._sampler = MetricsSampler(options.metrics)

    async def __aenter__(self) -> Self:
        try:
            await self._warm_up()
            await self._sampler.__aenter__()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._sampler.__aexit__()
        await self._client.__aexit__()

    async def run(self, folder: RunFolder, totals: RunTotals, stop: Stop) -> Measured:
        """Send everything, and wait for the last answers.

        Raises:
            InputError: a process of several fails.
        """
        plan, part, clock = self._plan, self._part, self._clock
        options, report = plan.options, None if part is None else part.report
        progress = watching(options, report, self._sampler, folder, self._client.spare)
        try:
            if part is None and (options.processes > 1 or options.ray is not None):
                measured = await replay_in_processes(plan, clock, folder, totals, progress, stop)
            else:
                measured = await self._run_here(folder, totals, progress, stop)
            await self._sampler.sample(clock, folder.metrics)
            return measured
        except* (InputError, OSError) as group:
            raise _first(group) from None

    async def _run_here(
        self, folder: RunFolder, totals: RunTotals, progress: Progress | None, stop: Stop
    ) -> Measured:
        # Prepare the first bodies before the clock starts.
        plan, clock, spare = self._plan, self._clock, self._client.spare
        prepared = PreparedQueue()
        async with asyncio.TaskGroup() as tasks:
            background: list[asyncio.Task[None]] = []
            if plan.agenda is None:
                rows = plan.source.requests()
                rendering = render(rows, plan.schedule.count, prepared, self._style, spare)
                background.append(tasks.create_task(rendering))
                await prepared.wait_filled()
            with short_collections():
                # Start the clock, the records and the sender.
                clock.restart()
                started_unix_s = time.time()
                log = IntervalLog(HlogWriter(folder.hlog, started_unix_s, plan.comments()))
                recorder = Recorder(
                    log,
                    folder.table,
                    totals,
                    plan.options.buckets,
                    folder.answers,
                    {} if plan.agenda is None else other_tasks(plan.agenda.rows),
                )
                dispatch = self._dispatch(prepared, recorder, tasks)
                sessions = None
                if plan.agenda is not None:
                    sessions = SessionLoop(plan, plan.agenda, dispatch, self._style)
                    await sessions.fill()
                    clock.restart()
                # Wait for the other parts of the run, then start its background tasks.
                if self._part is not None:
                    await self._part.start(clock)
                background.append(tasks.create_task(flush_every_interval(recorder, clock, spare)))
                if progress is not None:
                    shown = progress(recorder.live, plan, clock)
                    background.append(tasks.create_task(shown))
                # Send everything, and wait for the last answers.
                ended = await self._send_all(dispatch, sessions, stop)
                stopped_s = clock.now()
                first = self._part is None or self._part.job.number == 0  # others print nothing
                tell = say if first else lambda _: None
                timeout_s = plan.options.drain_timeout_s
                ended = await drain(dispatch, clock, stop, ended, timeout_s, tell)
            for task in background:
                task.cancel()
        # Record the requests that were never sent.
        if ended == "interrupted":
            sent = range(dispatch.sent) if sessions is None else sessions.sent
            for request, due_s in plan.unsent(sent.__contains__):
                recorder.never_sent(request, due_s)
        recorder.close(clock.now())
        return Measured(log.totals, ended, stopped_s, dispatch.sent, started_unix_s)

    def _dispatch(
        self, prepared: PreparedQueue, recorder: Recorder, tasks: asyncio.TaskGroup
    ) -> Dispatch:
        options = self._plan.options
        return Dispatch(
            self._clock,
            self._client,
            prepared,
            self._plan.targets,
            max_in_flight=self._plan.most_in_flight,
            run_id=self._plan.run_id,
            tasks=tasks,
            on_sent=recorder.count_sent,
            on_ended=recorder.finished,
            keep_answers=options.keep_answers or options.history == "answers",
        )

    async def _send_all(self, dispatch: Dispatch, sessions: SessionLoop | None, stop: Stop) -> str:
        options, schedule = self._plan.options, self._plan.schedule
        if sessions is not None:
            loop = sessions.run()
        elif schedule.arrivals.closed:
            loop = dispatch.closed_loop(options.duration_s, options.think_s)
        else:
            loop = dispatch.open_loop(schedule.times_s)
        sending = asyncio.ensure_future(loop)
        stopping = asyncio.ensure_future(stop.sending.wait())
        try:
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                return "complete"
            return "interrupted"
        finally:
            for task in (sending, stopping):
                task.cancel()
            await asyncio.gather(sending, stopping, return_exceptions=True)

    async def _warm_up(self) -> None:
        """Open connections, and warm up the servers with prompts of no row of the trace."""
        plan, client = self._plan, self._client
        style = replace(self._style, salt=f"warm-up {plan.run_id}")
        failed = 0
        for number in range(plan.options.warmup):
            body = b"".join(body_slices(TraceRequest(f"warmup-{number}", 0.0, 64, 4), style))
            for target in dict.fromkeys(plan.targets):
                exchange = ClientExchange(f"{plan.run_id}-warmup-{number}", 0.0)
                url = target.url(PATHS[plan.options.endpoint])
                await client.send(url, body, exchange, client.watch())
                failed += exchange.outcome != "ok"
        if failed:
            say(f"{failed} warm-up requests were not answered")


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
