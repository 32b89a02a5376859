"""`forebay fleet up` once everything is decided: hold the folder, write the files, supervise."""

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
    held,
    left_of,
    read_state,
    remove_state,
    this_process,
)
from forebay.replay.fleet.supervisor import StartFailed, Supervisor
from forebay.traces.errors import InputError

END_S = 15.0  # for a server without running answers, from SIGTERM to its end


async def run_fleet(
    plan: FleetPlan,
    proxy_yaml: str,
    policy: RestartPolicy,
    say: Callable[[str], None],
    as_json: bool,
) -> bool:
    """Until SIGINT, SIGTERM, SIGHUP or the last server is given up; whether all went well.

    A second signal ends running answers too. Raises InputError when the folder is in use.
    """
    folder = plan.options.folder.resolve()  # asked about from anywhere
    with held(folder):
        _check_nothing_left(plan)
        proxy_file = folder / PROXY
        new = folder / f"{PROXY}.new"
        try:
            new.write_text(proxy_yaml, encoding="utf-8")
            new.replace(proxy_file)  # a proxy that runs watches it
        except OSError as error:
            raise InputError(f"--dir {folder}: {PROXY}: {error.strerror}") from error
        state = FleetState(
            supervisor=this_process(),
            model=plan.setting.profile.repository,
            vllm=plan.install.version,
            proxy_config=str(proxy_file),
            stop_s=plan.options.drain_s + END_S,
            servers=[
                ServerState(one.name, one.url, str(one.log.resolve()), one.gpu)
                for one in plan.servers
            ],
        )

        def all_up() -> None:
            line = f"all {len(state.servers)} up; now: forebay proxy --config {proxy_file}"
            say(line)
            notify.ready(line)
            if as_json:
                data = {key: value for key, value in asdict(state).items() if key != "stop_s"}
                with suppress(OSError):  # a reader that left is no reason to end the servers
                    print(orjson.dumps(data).decode(), flush=True)

        plans = {one.name: one for one in plan.servers}
        supervisor = Supervisor(plans, state, folder, policy, say, all_up)
        loop = asyncio.get_running_loop()

        def told(name: str) -> None:
            if supervisor.stop.is_set():
                supervisor.now.set()
                return
            supervisor.stop.set()  # first: nothing that is said decides whether servers live
            say(f"{name}: stopping; running answers have {plan.options.drain_s} s, again: none")
            notify.stopping(name)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Ignored from the start: nohup, which is to outlive its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, told, number.name)
        try:
            well = await supervisor.run()
        except StartFailed as error:
            say(str(error))
            well = False
        finally:
            try:
                _clean(plan, folder)
            except OSError as error:
                say(f"{folder}: not cleaned up: {error.strerror}")
        say("stopped" if well else "stopped; not all was well")
        return well


def _clean(plan: FleetPlan, folder: Path) -> None:
    remove_state(folder)
    for server in plan.servers:
        for endpoint in (server.kv_events, server.kv_replay):
            if endpoint and endpoint.startswith("ipc://"):
                (folder / endpoint.rpartition("/")[2]).unlink(missing_ok=True)


def _check_nothing_left(plan: FleetPlan) -> None:
    """Raise InputError where servers of a supervisor that was killed still run."""
    folder = plan.options.folder
    before = read_state(folder)
    left = [
        one
        for one in (before.servers if before else [])
        if one.process and (one.process.alive or left_of(one.process))
    ]
    if left:
        names = ", ".join(f"{one.name} (process {one.process.pid})" for one in left if one.process)
        raise InputError(
            f"--dir {folder}: {names} of a fleet whose supervisor is gone still run: "
            f"`forebay fleet down --dir {folder}` ends them"
        )
