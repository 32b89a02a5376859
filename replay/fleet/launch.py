"""Carry out the plan of `forebay fleet up`: start the servers, wait until they are up, stop them.

A server that dies stays down: `fleet up --systemd` and `--compose` write what restarts servers.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import aiohttp
import orjson

from forebay.replay.fleet.plan import FleetPlan
from forebay.replay.fleet.server_process import ServerProcess, last_line, last_words
from forebay.replay.fleet.state import (
    FleetState,
    ServerState,
    left_of,
    locked,
    read_state,
    remove_state,
    this_process,
    write_proxy_file,
    write_state,
)
from forebay.traces.errors import InputError

END_S = 15.0  # for a server without running answers to end after SIGTERM
ASK_S = 5.0  # longest answer of /health
ASK_EVERY_S = 0.5  # between health checks while servers start
REPORT_EVERY_S = 10.0  # between reports that a server is still starting
Report = Callable[[str], None]
Ends = Mapping["asyncio.Task[str]", ServerState]


class StartFailed(Exception):
    """A server did not come up. The message has its name and the end of its log."""


async def healthy(session: aiohttp.ClientSession, url: str, timeout_s: float = ASK_S) -> bool:
    """Return True if /health answers 200 in time."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.get(f"{url}/health", timeout=timeout) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def run_fleet(
    plan: FleetPlan, proxy_yaml: str, start_s: float, report: Report, as_json: bool
) -> bool:
    """Run the servers until SIGINT, SIGTERM, SIGHUP or their own end, and leave no process behind.

    A second signal ends running answers too. Returns True if all servers were up to the end.

    Args:
        start_s: longest start of a server.

    Raises:
        InputError: the folder is in use, or a command cannot be run.
    """
    folder = plan.options.folder.resolve()  # `status` may be asked from another folder
    with locked(folder):
        _check_nothing_left(plan)
        proxy_file = write_proxy_file(folder, proxy_yaml)
        servers = [
            ServerState(server.name, server.url, str(server.log.resolve()), server.gpu)
            for server in plan.servers
        ]
        stop_s = plan.options.drain_s + END_S
        model, version = plan.setting.profile.repository, plan.install.version
        state = FleetState(this_process(), model, version, str(proxy_file), stop_s, servers)
        stop, now = asyncio.Event(), asyncio.Event()
        _on_signals(stop, now, report, plan.options.drain_s)
        try:
            well = await _run(plan, state, folder, start_s, stop, now, report, as_json)
        except StartFailed as error:
            report(str(error))
            well = False
        finally:
            try:
                _clean(plan, folder)
            except OSError as error:
                report(f"{folder}: not cleaned up: {error.strerror}")
        report("stopped" if well else "stopped; not all servers were up")
        return well


async def _run(
    plan: FleetPlan,
    state: FleetState,
    folder: Path,
    start_s: float,
    stop: asyncio.Event,
    now: asyncio.Event,
    report: Report,
    as_json: bool,
) -> bool:
    started: list[tuple[ServerProcess, ServerState]] = []
    ends: dict[asyncio.Task[str], ServerState] = {}
    stopping = asyncio.create_task(stop.wait())
    try:
        for planned, server in zip(plan.servers, state.servers, strict=True):
            process = await ServerProcess.start(planned)
            started.append((process, server))
            server.process = process.identity
            ends[asyncio.create_task(process.wait())] = server
            report(f"{server.name}: starting as process {process.identity.pid}")
            _write(folder, state)
        # The first start is not repeated: its usual faults, such as a flag, would not go away.
        await _all_up(ends, stopping, start_s, report)
        if not stopping.done():
            _tell_all_up(state, report, as_json)
        # A server that ends leaves the others running, and the proxy sends to those.
        dead = 0
        while len(ends) > dead and not stopping.done():
            waiting = {task for task in ends if not task.done()}
            await asyncio.wait({*waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                if task.done() and not stopping.done():
                    dead += 1
                    server = ends[task]
                    report(f"{server.name} {task.result()}: {last_words(Path(server.log))}")
        return not dead
    finally:
        stopping.cancel()
        stops = (_stop(process, server, state.stop_s, now, report) for process, server in started)
        await asyncio.gather(*stops)
        for task in ends:
            task.cancel()


async def _all_up(
    ends: Ends, stopping: "asyncio.Task[bool]", start_s: float, report: Report
) -> None:
    """Wait until all servers are healthy, or the fleet is stopped. Raises StartFailed."""
    began = reported = time.monotonic()
    waiting = list(ends.values())
    async with aiohttp.ClientSession() as session:
        while waiting and not stopping.done():
            for task, server in ends.items():
                if task.done():
                    words = last_words(Path(server.log))
                    raise StartFailed(f"{server.name} {task.result()}: {words} (see {server.log})")
            well = await asyncio.gather(*(healthy(session, server.url) for server in waiting))
            took_s = time.monotonic() - began
            for server in [server for server, up in zip(waiting, well, strict=True) if up]:
                report(f"{server.name}: up after {took_s:.1f} s, {server.url}")
                waiting.remove(server)
            if waiting and took_s > start_s:
                server = waiting[0]
                line = last_line(Path(server.log))
                raise StartFailed(f"{server.name} was not up in {start_s:g} s: {line}")
            if took_s - (reported - began) >= REPORT_EVERY_S:
                reported = time.monotonic()
                for server in waiting:
                    line = last_line(Path(server.log))
                    log = f"; its log: {line}" if line else ""
                    report(f"{server.name}: not up yet after {took_s:.0f} s{log}")
            if waiting:
                await asyncio.wait(
                    {*ends, stopping}, timeout=ASK_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )


def _tell_all_up(state: FleetState, report: Report, as_json: bool) -> None:
    report(f"all {len(state.servers)} up; now: forebay proxy --config {state.proxy_config}")
    if as_json:
        data = {key: value for key, value in asdict(state).items() if key != "stop_s"}
        with suppress(OSError):  # the servers outlive the reader of stdout
            print(orjson.dumps(data).decode(), flush=True)


async def _stop(
    process: ServerProcess, server: ServerState, stop_s: float, now: asyncio.Event, report: Report
) -> None:
    if not await process.stop(stop_s, now):
        report(f"{server.name}: killed, it had not ended on SIGTERM")


def _on_signals(stop: asyncio.Event, now: asyncio.Event, report: Report, drain_s: int) -> None:
    """Let the first signal stop the fleet, and the second one end running answers too."""

    def on_signal(name: str) -> None:
        if stop.is_set():
            now.set()
            return
        stop.set()  # before the report, which may fail
        report(
            f"{name}: stopping; running answers have {drain_s} s; a second signal ends them at once"
        )

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup ignores SIGHUP from the start, so that the fleet outlives its terminal.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number.name)


def _write(folder: Path, state: FleetState) -> None:
    try:
        write_state(folder, state)
    except OSError as error:
        raise InputError(f"--dir {folder}: {error.strerror}") from error


def _clean(plan: FleetPlan, folder: Path) -> None:
    remove_state(folder)
    for server in plan.servers:
        for endpoint in (server.kv_events, server.kv_replay):
            if endpoint and endpoint.startswith("ipc://"):
                (folder / endpoint.rpartition("/")[2]).unlink(missing_ok=True)


def _check_nothing_left(plan: FleetPlan) -> None:
    """Raise InputError if servers of a killed `fleet up` are still running."""
    folder = plan.options.folder
    before = read_state(folder)
    left = [
        f"{server.name} (process {server.process.pid})"
        for server in (before.servers if before else [])
        if server.process and (server.process.alive or left_of(server.process))
    ]
    if left:
        raise InputError(
            f"--dir {folder}: {', '.join(left)} of a fleet whose supervisor is gone still run: "
            f"`forebay fleet down --dir {folder}` ends them"
        )
