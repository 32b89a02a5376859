"""Start the servers of a plan, wait until they are up, ask for their health, and stop them.

Nothing watches them in between: `fleet up --systemd` and `--compose` write what restarts servers.
"""

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp

from forebay.replay.fleet.plan import FleetPlan, ServerPlan
from forebay.replay.fleet.state import (
    PROXY,
    FleetState,
    Process,
    ServerState,
    create_state,
    remove_state,
    start_time,
    write_file,
    write_state,
)
from forebay.traces.ground.errors import InputError

END_S = 15.0  # time for a server without running answers to end after SIGTERM
ASK_S = 5.0  # longest answer of /health
LOOK_EVERY_S = 0.1  # between looks whether a server has ended
ASK_EVERY_S = 0.5  # between health checks while servers start
LOG_TAIL = 50_000  # bytes
LINE_WIDTH = 300  # characters of a log's line in a message
_ERROR = re.compile(r"^(?!.*\bWARNING\b).*?(\b\w*(?:Error|Exception): .+|\berror: .+)")
Report = Callable[[str], None]
Popen = subprocess.Popen[bytes]


class StartFailed(Exception):
    """A server did not come up. The message has its name and the end of its log."""


def start_fleet(plan: FleetPlan, proxy_yaml: str, report: Report) -> FleetState:
    """Start the servers, and return when all are healthy. Otherwise leave no process behind.

    Raises:
        InputError: a fleet is up in the folder, or a command cannot be run.
        StartFailed: a server ended, or was not healthy in time.
    """
    folder = plan.options.folder.resolve()  # `status` may be asked from another folder
    model, version = plan.profile.repository, plan.install.version
    state = FleetState(model, version, str(folder / PROXY), plan.options.drain + END_S)
    create_state(folder, state)
    with ExitStack() as unless_up:
        unless_up.callback(remove_state, folder)
        unless_up.callback(stop_servers, state)
        write_file(folder / PROXY, proxy_yaml)
        started = {}
        for planned in plan.servers:
            process = _start(planned)
            identity = Process(process.pid, start_time(process.pid))
            server = ServerState(planned.name, planned.url, planned.log, planned.gpu, identity)
            state.servers.append(server)
            started[server] = process
            report(f"{server.name}: starting as process {process.pid}; its log is {server.log}")
            write_state(folder, state)
        _wait_until_up(started, plan.options.start_timeout, report)
        unless_up.pop_all()
    return state


def _start(plan: ServerPlan) -> Popen:
    """Start a server that appends to its log (InputError: it cannot be run)."""
    try:
        with open(plan.log, "ab", buffering=0) as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {plan.shell}\n".encode())
            return subprocess.Popen(
                plan.command,
                env={**os.environ, **plan.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # its engine joins the group, and Ctrl-C does not reach it
            )
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from error


def _wait_until_up(waiting: dict[ServerState, Popen], start_s: float, report: Report) -> None:
    """Wait until all servers are healthy. Raises StartFailed."""
    began, started = time.monotonic(), dict(waiting)
    while waiting:
        for server, process in started.items():
            if (status := process.poll()) is not None:
                how = f"ended with status {status}"
                if status < 0:
                    how = f"killed by {signal.Signals(-status).name}"
                words = last_words(Path(server.log))
                raise StartFailed(f"{server.name} {how}: {words} (see {server.log})")
        took_s = time.monotonic() - began
        for server in asyncio.run(healthy(list(waiting))):
            report(f"{server.name}: up after {took_s:.1f} s, {server.url}")
            del waiting[server]
        if waiting and took_s > start_s:
            server = next(iter(waiting))
            words = last_words(Path(server.log))
            raise StartFailed(f"{server.name} was not up in {start_s:g} s: {words}")
        if waiting:
            time.sleep(ASK_EVERY_S)


async def healthy(servers: Sequence[ServerState]) -> list[ServerState]:
    """Return the servers whose /health answers 200 in time."""

    async def answers(server: ServerState) -> bool:
        try:
            async with session.get(f"{server.url}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as session:
        health = await asyncio.gather(*map(answers, servers))
    return [server for server, up in zip(servers, health, strict=True) if up]


def fleet_status(state: FleetState) -> dict[str, Any]:
    """Combine the state file with each server's health. `well`: every server is healthy.

    Another process may have taken a port: a server whose process has ended is not asked.
    """
    alive = [server for server in state.servers if server.process.alive]
    well = asyncio.run(healthy(alive))
    return {
        "well": well == state.servers,
        "model": state.model,
        "vllm": state.vllm,
        "proxy_config": state.proxy_config,
        "servers": [
            {
                "name": server.name,
                "url": server.url,
                "gpu": server.gpu,
                "pid": server.process.pid if server in alive else None,
                "log": server.log,
                "healthy": server in well,
            }
            for server in state.servers
        ],
    }


def status_text(status: dict[str, Any]) -> str:
    """Describe the fleet with one line for each server."""
    lines = [f"{status['model']} with vLLM {status['vllm']}"]
    for row in status["servers"]:
        ill = "not answering" if row["pid"] else f"not running (see {row['log']})"
        lines.append(f"{row['name']}  {row['url']}  {'healthy' if row['healthy'] else ill}")
    return "\n".join([*lines, f"proxy: forebay proxy --config {status['proxy_config']}"])


def stop_servers(state: FleetState) -> dict[str, str]:
    """Stop all servers, and return how each ended: `stopped`, `killed` or `gone` before.

    SIGTERM lets running answers finish. SIGKILL follows after `stop_s` seconds, or at once after an
    interrupt. It also ends the engine of a server that has died.
    """
    running = [server for server in state.servers if server.process.alive]
    for server in running:
        with suppress(ProcessLookupError):
            os.kill(server.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + state.stop_s
    with suppress(KeyboardInterrupt):
        while any(server.process.alive for server in running) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
    ends = {}
    for server in state.servers:
        stopped = server in running and not server.process.alive
        killed = _kill_group(server.process)
        ends[server.name] = "stopped" if stopped else "killed" if killed else "gone"
    return ends


def _kill_group(leader: Process) -> bool:
    """Kill the processes of a server's group. True if there were any.

    The kernel does not give the number of a group to another process while the group has members.
    """
    if leader.number_is_reused:
        return False
    try:
        os.killpg(leader.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def last_words(log: Path) -> str:
    """Return the last exception in the log since the last start, or its last line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"its log cannot be read: {error.strerror}"
    text = text.rpartition("\n--- ")[2].partition("\n")[2] if "--- " in text else text
    parts = (part.rpartition("\r")[2].strip() for part in text.splitlines())
    lines = [part for part in parts if part]
    errors = [match[1] for line in lines if (match := _ERROR.search(line))]
    return (errors or lines or ["its log is empty"])[-1][:LINE_WIDTH]
