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
from forebay.traces.errors import InputError

END_S = 15.0  # for a server without running answers to end after SIGTERM
ASK_S = 5.0  # longest answer of /health
LOOK_EVERY_S = 0.1  # between looks whether a server has ended
ASK_EVERY_S = 0.5  # between health checks while servers start
REPORT_EVERY_S = 10.0  # between reports that a server is still starting
LOG_TAIL = 50_000  # bytes
LINE_WIDTH = 160  # characters of a log's line in a message
_ERROR = re.compile(r"^(?!.*\bWARNING\b).*?(\b\w*(?:Error|Exception): .+|\berror: .+)")
Report = Callable[[str], None]
Popen = subprocess.Popen[bytes]


class StartFailed(Exception):
    """A server did not come up. The message has its name and the end of its log."""


def start_fleet(plan: FleetPlan, proxy_yaml: str, start_s: float, report: Report) -> FleetState:
    """Start the servers, and return when all are healthy. Otherwise leave no process behind.

    Args:
        start_s: longest start of a server.

    Raises:
        InputError: a fleet is up in the folder, or a command cannot be run.
        StartFailed: a server ended, or was not healthy in time.
    """
    folder = plan.options.folder.resolve()  # `status` may be asked from another folder
    model, stop_s = plan.setting.profile.repository, plan.options.drain_s + END_S
    state = FleetState(model, plan.install.version, str(folder / PROXY), stop_s)
    create_state(folder, state)
    with ExitStack() as unless_up:
        unless_up.callback(remove_state, folder)
        unless_up.callback(stop_servers, state)
        write_file(folder / PROXY, proxy_yaml)
        started = []
        for server in plan.servers:
            process = _start(server)
            identity = Process(process.pid, start_time(process.pid))
            log = str(server.log.resolve())
            state.servers.append(ServerState(server.name, server.url, log, server.gpu, identity))
            started.append(process)
            report(f"{server.name}: starting as process {process.pid}")
            write_state(folder, state)
        _wait_until_up(started, state.servers, start_s, report)
        unless_up.pop_all()
    return state


def _start(plan: ServerPlan) -> Popen:
    """Start a server that appends to its log (InputError: it cannot be run)."""
    try:
        with plan.log.open("ab", buffering=0) as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {plan.shell}\n".encode())
            return subprocess.Popen(
                plan.command,
                env={**os.environ, **plan.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # its engine joins the group, and Ctrl-C does not reach it
            )
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from error


def _wait_until_up(
    processes: Sequence[Popen], servers: Sequence[ServerState], start_s: float, report: Report
) -> None:
    """Wait until all servers are healthy. Raises StartFailed."""
    began = reported = time.monotonic()
    waiting = list(servers)
    while waiting:
        for process, server in zip(processes, servers, strict=True):
            if (status := process.poll()) is not None:
                how = f"ended with status {status}"
                if status < 0:
                    how = f"killed by {signal.Signals(-status).name}"
                words = last_words(Path(server.log))
                raise StartFailed(f"{server.name} {how}: {words} (see {server.log})")
        health = asyncio.run(healthy([server.url for server in waiting]))
        now = time.monotonic()
        for server in [server for server, up in zip(waiting, health, strict=True) if up]:
            report(f"{server.name}: up after {now - began:.1f} s, {server.url}")
            waiting.remove(server)
        if waiting and now - began > start_s:
            server = waiting[0]
            words = last_words(Path(server.log))
            raise StartFailed(f"{server.name} was not up in {start_s:g} s: {words}")
        if now - reported >= REPORT_EVERY_S:
            reported = now
            for server in waiting:
                words = last_words(Path(server.log))
                report(f"{server.name}: not up yet after {now - began:.0f} s: {words}")
        if waiting:
            time.sleep(ASK_EVERY_S)


async def healthy(urls: Sequence[str]) -> list[bool]:
    """Return for each server whether its /health answers 200 in time."""

    async def answers(url: str) -> bool:
        try:
            async with session.get(f"{url}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as session:
        return await asyncio.gather(*map(answers, urls))


def fleet_status(state: FleetState) -> dict[str, Any]:
    """Combine the state file with each server's health. `well`: every server is healthy.

    Another process may have taken a port: a server whose process has ended is not asked.
    """
    alive = [server for server in state.servers if server.process.alive]
    health = asyncio.run(healthy([server.url for server in alive]))
    well = {server.name for server, up in zip(alive, health, strict=True) if up}
    return {
        "well": bool(state.servers) and len(well) == len(state.servers),
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
                "healthy": server.name in well,
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
    lines.append(f"proxy: forebay proxy --config {status['proxy_config']}")
    return "\n".join(lines)


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
    """Return the last exception in the log, or its last line."""
    lines = _tail(log)
    errors = [match[1] for line in lines if (match := _ERROR.search(line))]
    return (errors or lines or ["its log is empty"])[-1][:LINE_WIDTH]


def _tail(log: Path) -> list[str]:
    """Return the last non-empty lines of the log since the last start."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LOG_TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    text = text.rpartition("\n--- ")[2].partition("\n")[2] if "--- " in text else text
    parts = (part.rpartition("\r")[2].strip() for part in text.splitlines())
    return [part for part in parts if part]
