"""Carry out the plan of `forebay fleet up`: lock the folder, write the files, supervise."""

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import orjson

from forebay.proxy.runtime import systemd as notify
from forebay.replay.fleet.plan import FleetPlan
from forebay.replay.fleet.restarts import RestartPolicy
from forebay.replay.fleet.state import (
    PROXY,
    FleetState,
    ServerState,
    left_of,
    locked,
    read_state,
    remove_state,
    this_process,
)
from forebay.replay.fleet.supervisor import StartFailed, Supervisor
from forebay.traces.errors import InputError

END_S = 15.0  # for a server without running answers to end after SIGTERM


async def run_fleet(
    plan: FleetPlan,
    proxy_yaml: str,
    policy: RestartPolicy,
    report: Callable[[str], None],
    as_json: bool,
) -> bool:
    """Supervise until SIGINT, SIGTERM, SIGHUP or all servers are given up.

    A second signal ends running answers too. Returns True if all servers were well to the end.
    Raises InputError when the folder is in use.
    """
    folder = plan.options.folder.resolve()  # `status` may be asked from another folder
    with locked(folder):
        _check_nothing_left(plan)
        # Replace the proxy's configuration before the first server starts.
        proxy_file = folder / PROXY
        new = folder / f"{PROXY}.new"
        try:
            new.write_text(proxy_yaml, encoding="utf-8")
            new.replace(proxy_file)  # atomic, because a running proxy watches the file
        except OSError as error:
            raise InputError(f"--dir {folder}: {PROXY}: {error.strerror}") from error
        state = FleetState(
            supervisor=this_process(),
            model=plan.setting.profile.repository,
            vllm=plan.install.version,
            proxy_config=str(proxy_file),
            stop_s=plan.options.drain_s + END_S,
            servers=[
                ServerState(server.name, server.url, str(server.log.resolve()), server.gpu)
                for server in plan.servers
            ],
        )

        def all_up() -> None:
            line = f"all {len(state.servers)} up; now: forebay proxy --config {proxy_file}"
            report(line)
            notify.ready(line)
            if as_json:
                data = {key: value for key, value in asdict(state).items() if key != "stop_s"}
                with suppress(OSError):  # the servers outlive the reader of stdout
                    print(orjson.dumps(data).decode(), flush=True)

        plans = {server.name: server for server in plan.servers}
        supervisor = Supervisor(plans, state, folder, policy, report, all_up)
        loop = asyncio.get_running_loop()

        # The first signal lets running answers finish, the second ends them.
        def on_signal(name: str) -> None:
            if supervisor.stop.is_set():
                supervisor.now.set()
                return
            supervisor.stop.set()  # before the report, which may fail
            report(
                f"{name}: stopping; running answers have {plan.options.drain_s} s; a second "
                "signal ends them at once"
            )
            notify.stopping(name)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP from the start, so that the fleet outlives its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, on_signal, number.name)
        try:
            well = await supervisor.run()
        except StartFailed as error:
            report(str(error))
            well = False
        finally:
            try:
                _clean(plan, folder)
            except OSError as error:
                report(f"{folder}: not cleaned up: {error.strerror}")
        report("stopped" if well else "stopped; not all servers were well")
        return well


def _clean(plan: FleetPlan, folder: Path) -> None:
    remove_state(folder)
    for server in plan.servers:
        for endpoint in (server.kv_events, server.kv_replay):
            if endpoint and endpoint.startswith("ipc://"):
                (folder / endpoint.rpartition("/")[2]).unlink(missing_ok=True)


def _check_nothing_left(plan: FleetPlan) -> None:
    """Raise InputError if servers of a killed supervisor are still running."""
    folder = plan.options.folder
    before = read_state(folder)
    left = [
        server
        for server in (before.servers if before else [])
        if server.process and (server.process.alive or left_of(server.process))
    ]
    if left:
        names = ", ".join(
            f"{server.name} (process {server.process.pid})" for server in left if server.process
        )
        raise InputError(
            f"--dir {folder}: {names} of a fleet whose supervisor is gone still run: "
            f"`forebay fleet down --dir {folder}` ends them"
        )
