"""Query and stop a running fleet from another process."""

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from forebay.replay.fleet.launch import healthy
from forebay.replay.fleet.state import (
    FleetState,
    Process,
    ServerState,
    left_of,
    read_state,
    remove_state,
)

LOOK_EVERY_S = 0.1
SUPERVISOR_S = 10.0  # for `fleet up` to end after its servers


async def fleet_status(state: FleetState) -> dict[str, Any]:
    """Combine the state file with each server's health.

    `well` in the result: `fleet up` runs and every server is healthy.
    """
    async with aiohttp.ClientSession() as session:
        servers = await asyncio.gather(*(_server(server, session) for server in state.servers))
    supervised = state.supervisor.alive
    return {
        "well": supervised and all(server["healthy"] for server in servers),
        "supervisor": {"pid": state.supervisor.pid, "alive": supervised},
        "model": state.model,
        "vllm": state.vllm,
        "proxy_config": state.proxy_config,
        "servers": servers,
    }


async def _server(server: ServerState, session: aiohttp.ClientSession) -> dict[str, Any]:
    alive = server.process is not None and server.process.alive
    return {
        "name": server.name,
        "url": server.url,
        "gpu": server.gpu,
        "pid": server.process.pid if server.process and alive else None,
        "log": server.log,
        # Another process may have taken the port: query only a process of this fleet.
        "healthy": alive and await healthy(session, server.url),
    }


def status_text(status: dict[str, Any]) -> str:
    """Describe the fleet with one line for each server."""
    supervisor = status["supervisor"]
    watched = f"supervisor {supervisor['pid']}" + ("" if supervisor["alive"] else " is gone")
    lines = [f"{status['model']} with vLLM {status['vllm']}, {watched}"]
    for row in status["servers"]:
        ill = "not answering" if row["pid"] else f"not running (see {row['log']})"
        lines.append(f"{row['name']}  {row['url']}  {'healthy' if row['healthy'] else ill}")
    lines.append(f"proxy: forebay proxy --config {status['proxy_config']}")
    return "\n".join(lines)


def stop_fleet(folder: Path, state: FleetState) -> dict[str, Any]:
    """End `fleet up`, which ends its servers, and then this fleet's remaining processes.

    A process whose number belongs to another process by now is not touched.
    """
    supervisor = _end(state.supervisor, state.stop_s + SUPERVISOR_S)
    now = read_state(folder)  # gone after a clean end
    left = {}
    for server in now.servers if now else []:  # `fleet up` died, or had to be killed
        if server.process is None:
            continue
        if server.process.alive:
            left[server.name] = _end(server.process, state.stop_s, group=True)
        elif _kill_left(server.process):
            left[server.name] = "killed"
    remove_state(folder)
    return {"supervisor": supervisor, "left_servers": left}


def _kill_left(leader: Process) -> bool:
    """Kill the processes that a dead API server left behind. True if there were any."""
    left = left_of(leader)
    for process in left:
        if process.alive:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    return bool(left)


def _end(process: Process, patience_s: float, *, group: bool = False) -> str:
    """End a process. Returns `stopped`, `killed`, or `gone` when it had ended before.

    Args:
        group: send SIGKILL to the whole process group, of which `process` is the leader.
    """
    if not process.alive:
        return "gone"
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while process.alive and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)  # it is not our child, so it cannot be waited for
    how = "killed" if process.alive else "stopped"
    with suppress(ProcessLookupError):
        if group:
            os.killpg(process.pid, signal.SIGKILL)
        elif how == "killed":
            os.kill(process.pid, signal.SIGKILL)
    return how
