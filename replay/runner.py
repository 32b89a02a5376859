"""Replay a trace against one or more targets, from options to a finished run folder.

All errors of the input are found before the first request is sent. Once sending has begun, all
measurements are kept: on Ctrl-C, when a target dies, and when draining takes too long.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from forebay.proxy.runtime.event_loop import short_collections
from forebay.proxy.telemetry.hlog import HlogWriter, IntervalLog
from forebay.replay.clock.clock import Clock
from forebay.replay.parts.divide import Part
from forebay.replay.plan.agenda import Agenda
from forebay.replay.plan.due_times import plan_schedule
from forebay.replay.plan.history import History
from forebay.replay.plan.options import PATHS, ReplayOptions
from forebay.replay.plan.schedule import Schedule
from forebay.replay.plan.slo import Slo, check_sessions
from forebay.replay.plan.source import Scan, TraceSource
from forebay.replay.plan.target import Served, Target, ask_served, parse_targets
from forebay.replay.plan.tasks import other_tasks
from forebay.replay.results.cache_warnings import cache_warnings
from forebay.replay.results.folder import RunFolder, check_folder
from forebay.replay.results.merge import Measured
from forebay.replay.results.progress import Progress, progress_for
from forebay.replay.results.provenance import Provenance, run_record
from forebay.replay.results.recorder import Recorder, flush_every_interval
from forebay.replay.results.summary import RunTotals
from forebay.replay.send.bodies import PreparedQueue, RequestStyle, body_slices, render
from forebay.replay.send.dispatch import Dispatch
from forebay.replay.send.drain import Stop, drain
from forebay.replay.send.http.client import Client
from forebay.replay.send.http.exchange import ClientExchange
from forebay.replay.send.session_loop import SessionLoop
from forebay.traces.errors import InputError
from forebay.traces.schema import TraceRequest


@dataclass(frozen=True, slots=True)
class Summary:
    """A finished run. `values` is `summary.json`.

    `ended` is "complete", "interrupted", or "drain timeout" if running answers were cancelled.
    """

    values: dict[str, Any]
    folder: Path
    ended: str

    @property
    def interrupted(self) -> bool:
        return self.ended == "interrupted"


@dataclass(frozen=True, slots=True)
class _Plan:
    options: ReplayOptions
    targets: tuple[Target, ...]
    slos: tuple[Slo, ...]
    served: Served
    source: TraceSource
    scan: Scan
    schedule: Schedule
    agenda: Agenda | None
    style: RequestStyle
    run_id: str
    part: Part | None = None
    watch: Progress | None = None


async def replay(
    options: ReplayOptions, stop: Stop | None = None, part: Part | None = None
) -> Summary:
    """Run one replay, or one `part` of it.

    Raises InputError for bad input, before it sends or overwrites anything, and for a process of
    several that fails.
    """
    # First check all input that needs no server.
    import numpy  # noqa: F401 - bulk recording uses it: import it now, not during the run

    options.check()
    targets = parse_targets(options.targets)
    check_folder(options.out, force=options.force)
    source = TraceSource(
        options.trace,
        format_name=options.format_name,
        skip_bad=options.skip_bad,
        too_long=options.too_long,
    )
    clock = Clock(options.time_scale)
    async with Client(
        clock,
        first_token_timeout_s=options.first_token_timeout_s,
        stall_timeout_s=options.stall_timeout_s,
        api_key=options.api_key,
    ) as client:
        # Errors of the trace or the rate can be found without a server: they are reported first.
        scan = source.scan()
        plan_schedule(options, source, scan)
        if part is not None:
            served = part.served
        elif options.ask_models or options.model is None:
            served = await ask_served(client.session, targets, options.model, scan.models)
        else:
            served = Served(options.model, None)
        plan = _make_plan(options, targets, served, source, scan)
        if part is None:
            _print_changes(plan)
        else:
            plan = _narrow(plan, part)
        if options.warmup:
            await _warm_up(client, plan)
        return await _run_into_folder(plan, client, clock, stop or Stop())


async def _run_into_folder(plan: _Plan, client: Client, clock: Clock, stop: Stop) -> Summary:
    options = plan.options
    with RunFolder(options.out, force=options.force, answers=options.keep_answers) as folder:
        try:
            report = None if plan.part is None else plan.part.report
            plan = replace(plan, watch=progress_for(options, report))
            totals = RunTotals([bucket.name for bucket in options.buckets], plan.slos)
            divided = plan.part is None and options.processes > 1
            run = _run_divided if divided else _run_here
            measured = await run(plan, client, clock, folder, totals, stop)
            return _commit(plan, folder, totals, measured)
        except* (InputError, OSError) as group:
            raise _first(group) from None


def _make_plan(
    options: ReplayOptions,
    targets: tuple[Target, ...],
    served: Served,
    source: TraceSource,
    scan: Scan,
) -> _Plan:
    limits = [n for n in (served.max_model_len, options.max_model_len) if n is not None]
    if limits:
        scan = source.limit_to(scan, min(limits))
    if options.keys and (unknown := sorted(scan.tenants - set(options.keys))):
        raise InputError(f"--keys: has no key of tenant {unknown[0]!r}; add it")
    schedule, agenda = plan_schedule(options, source, scan)
    source.check(scan, len(scan.arrivals_s) if agenda else schedule.count)
    style = RequestStyle(
        served.model,
        options.endpoint,
        options.salt,
        served.own_models,
        options.lengths,
        options.keys,
        options.time_scale,
    )
    slos = options.stated_slos()
    check_sessions(slos, scan.sessions)
    return _Plan(
        options, targets, slos, served, source, scan, schedule, agenda, style, token_hex(4)
    )


def _narrow(plan: _Plan, part: Part) -> _Plan:
    options, schedule, agenda = part.narrow(plan.options, plan.source, plan.schedule, plan.agenda)
    return replace(
        plan, options=options, schedule=schedule, agenda=agenda, run_id=part.run_id, part=part
    )


async def _run_divided(
    plan: _Plan, client: Client, clock: Clock, folder: RunFolder, totals: RunTotals, stop: Stop
) -> Measured:
    from forebay.replay.parts.run_parts import replay_in_processes

    return await replay_in_processes(
        replace(plan.options, trace=plan.source.rereadable),
        plan.served,
        plan.run_id,
        _count(plan),
        clock,
        folder,
        totals,
        _comments(plan),
        plan.watch,
        stop,
    )


async def _run_here(
    plan: _Plan, client: Client, clock: Clock, folder: RunFolder, totals: RunTotals, stop: Stop
) -> Measured:
    # Prepare the first bodies before the clock starts.
    options, schedule = plan.options, plan.schedule
    prepared, spare = PreparedQueue(), client.spare
    async with asyncio.TaskGroup() as tasks:
        background: list[asyncio.Task[None]] = []
        if plan.agenda is None:
            rendering = render(plan.source.requests(), schedule.count, prepared, plan.style, spare)
            background.append(tasks.create_task(rendering))
            await prepared.wait_filled()
        with short_collections():
            # Start the clock, the records and the sender.
            clock.restart()
            started_unix_s = time.time()
            log = IntervalLog(HlogWriter(folder.hlog, started_unix_s, _comments(plan)))
            task_of = {} if plan.agenda is None else other_tasks(plan.agenda.rows)
            recorder = Recorder(log, folder.table, totals, options.buckets, folder.answers, task_of)
            dispatch = Dispatch(
                clock,
                client,
                prepared,
                plan.targets,
                max_in_flight=_most_in_flight(plan),
                run_id=plan.run_id,
                tasks=tasks,
                on_sent=recorder.count_sent,
                on_ended=recorder.finished,
                keep_answers=options.keep_answers or options.history == "answers",
            )
            sessions = None if plan.agenda is None else _session_loop(plan, plan.agenda, dispatch)
            if sessions is not None:
                await sessions.fill()
                clock.restart()
            # Wait for the other parts of the run, then start its background tasks.
            if plan.part is not None:
                await plan.part.start(clock)
            background.append(tasks.create_task(flush_every_interval(recorder, clock, spare)))
            if plan.watch is not None:
                shown = plan.watch(recorder.live, _count(plan), clock)
                background.append(tasks.create_task(shown))
            # Send everything, and wait for the last answers.
            ended = await _send_all(plan, dispatch, sessions, stop)
            stopped_s = clock.now()
            ended = await drain(dispatch, clock, stop, ended, options.drain_timeout_s, _say(plan))
        for task in background:
            task.cancel()
    # Record the requests that were never sent.
    was_sent = range(dispatch.sent).__contains__ if sessions is None else sessions.sent.__contains__
    _count_never_sent(plan, recorder, was_sent, ended)
    recorder.close(clock.now())
    return Measured(log.totals, ended, stopped_s, dispatch.sent, started_unix_s)


def _commit(plan: _Plan, folder: RunFolder, totals: RunTotals, measured: Measured) -> Summary:
    options, schedule, ended = plan.options, plan.schedule, measured.ended
    window_s = 0.0 if plan.agenda is not None else schedule.window_after(measured.sent)
    summary = totals.summary(
        measured.histograms,
        measured.stopped_s if ended == "interrupted" else window_s,
        closed=bool(schedule.arrivals.closed),
        scale=options.time_scale,
        ended=ended,
    )
    summary["ended"] = ended
    counted = totals.counted_input_tokens
    summary["warnings"] = cache_warnings(plan.source, measured.sent, counted, summary)
    started_s = measured.started_unix_s
    provenance = Provenance(plan.targets, plan.served, plan.slos, plan.run_id, started_s)
    record = run_record(options, plan.source, plan.scan, schedule, provenance, ended)
    folder.commit(record, summary)
    return Summary(summary, folder.path, ended)


def _count(plan: _Plan) -> int:
    return plan.schedule.count if plan.agenda is None else len(plan.agenda.rows)


def _most_in_flight(plan: _Plan) -> int:
    """Return the in-flight limit. A closed loop of sessions has sub-agents in addition to them."""
    closed = plan.schedule.arrivals.closed
    return closed if closed and plan.agenda is None else plan.options.max_in_flight


def _session_loop(plan: _Plan, agenda: Agenda, dispatch: Dispatch) -> SessionLoop:
    options = plan.options
    return SessionLoop(
        agenda,
        dispatch,
        plan.style,
        times_s=plan.schedule.times_s,
        sessions=plan.schedule.arrivals.closed,
        think_s=options.think_s,
        until_s=options.duration_s,
        history=History(agenda, options.salt) if options.history == "answers" else None,
    )


async def _send_all(
    plan: _Plan, dispatch: Dispatch, sessions: SessionLoop | None, stop: Stop
) -> str:
    options = plan.options
    if sessions is not None:
        sending = asyncio.ensure_future(sessions.run())
    elif plan.schedule.arrivals.closed:
        sending = asyncio.ensure_future(dispatch.closed_loop(options.duration_s, options.think_s))
    else:
        sending = asyncio.ensure_future(dispatch.open_loop(plan.schedule.times_s))
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


def _count_never_sent(
    plan: _Plan, recorder: Recorder, was_sent: Callable[[int], bool], ended: str
) -> None:
    """Record scheduled requests that were not sent. A closed loop with a duration has none."""
    schedule = plan.schedule
    if ended != "interrupted" or (schedule.arrivals.closed and plan.options.duration_s is not None):
        return
    times = () if plan.agenda is not None else schedule.times_s
    for index, request in enumerate(plan.source.requests()):
        if plan.agenda is None and index >= schedule.count:
            break
        if not was_sent(index):
            recorder.never_sent(request, times[index] if times else None)


async def _warm_up(client: Client, plan: _Plan) -> None:
    """Open connections and warm up the servers with prompts that share nothing with the trace."""
    options = plan.options
    failed = 0
    for number in range(options.warmup):
        request = TraceRequest(f"warmup-{number}", 0.0, 64, 4)
        style = replace(plan.style, salt=f"warm-up {plan.run_id}")
        body = b"".join(body_slices(request, style))
        for target in dict.fromkeys(plan.targets):
            exchange = ClientExchange(f"{plan.run_id}-warmup-{number}", 0.0)
            url = target.url(PATHS[options.endpoint])
            await client.send(url, body, exchange, client.watch())
            failed += exchange.outcome != "ok"
    if failed:
        _print(f"{failed} warm-up requests were not answered")


def _comments(plan: _Plan) -> list[str]:
    options = plan.options
    return [
        "forebay replay: tags are metric.bucket, recorded when the request ended",
        f"seed {options.seed}, time scale {options.time_scale:g}, run {plan.run_id}",
        f"schedule sha256 {plan.schedule.sha256}",
    ]


def _print_changes(plan: _Plan) -> None:
    truncated = plan.scan.truncated(plan.schedule.count)
    for count, what in (
        (plan.scan.skipped, "bad rows skipped"),
        (plan.scan.dropped, "rows longer than the model's context dropped"),
        (truncated, "rows longer than the model's context shortened"),
    ):
        if count:
            _print(f"{plan.source.name}: {count} {what}")


def _say(plan: _Plan) -> Callable[[str], None]:
    """Return a function that prints a message, in the first process only."""
    return _print if plan.part is None or plan.part.number == 0 else lambda _: None


def _print(text: str) -> None:
    print(f"forebay replay: {text}", file=sys.stderr)


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
