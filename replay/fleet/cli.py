"""`forebay fleet`: start, look at and stop real vLLM servers, one on each GPU."""

import os
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from importlib.util import find_spec

import typer

from forebay.replay.engine.hardware.gpu_memory import find_gpu_memory
from forebay.replay.fleet.commands import make_plan
from forebay.replay.fleet.gpu.gpus import Gpu, choose_gpus, found_gpus, parse_indexes
from forebay.replay.fleet.gpu.vllm_install import NEWEST, VllmInstall, find_vllm, listed_flags
from forebay.replay.fleet.options import DIR, FleetOptions, Folder
from forebay.replay.fleet.plan import FleetPlan
from forebay.replay.fleet.proxy_file import NEEDS_EXTRA, proxy_yaml
from forebay.replay.fleet.servers import (
    StartFailed,
    fleet_status,
    start_fleet,
    status_text,
    stop_servers,
)
from forebay.replay.fleet.state import read_state, remove_state
from forebay.replay.fleet.units import write_units
from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.messages import print_json
from forebay.traces.ground.command_line.options import AsJson, takes_options
from forebay.traces.ground.errors import InputError

HELP = """Real vLLM servers, one on each GPU or group of GPUs, for long documents beside chats.

Example:

  forebay fleet up --model llama-3.1-8b --gpus 0,1

  forebay fleet status

  forebay fleet down
"""
UP_HELP = """Start `vllm serve` on each GPU.

With --tensor-parallel-size, a server has that many GPUs. The command writes the proxy's
configuration, and ends when all servers are up: they run until `forebay fleet down`. With --systemd
or --compose it starts nothing, and writes what starts the servers and restarts those that die.

Example:

  forebay fleet up --model llama-3.1-8b --gpus 0,1

  forebay fleet up --model qwen2.5-14b --dry-run

  forebay fleet up --model ./tiny --cpu --servers 2 -- --load-format dummy
"""
STATUS_HELP = """Ask each server of the fleet for its health. Exit status 1: not all are healthy.

Example:

  forebay fleet status --json
"""
DOWN_HELP = """Stop the fleet. Running answers get the --drain seconds of `up`, then they are cut.

Ctrl-C cuts them at once.

Example:

  forebay fleet down
"""
app = new_app(help=HELP)


@app.callback()
def fleet() -> None:
    """Group the three commands, which share no options."""


@app.command(help=UP_HELP)
@takes_options
def up(options: FleetOptions) -> None:
    # The plan, from vLLM, GPUs and free ports.
    notes: list[str] = []
    install = _install(options, notes)
    gpus = [] if options.cpu else _gpus(options, notes)
    servers = -(-len(gpus) // options.tensor_parallel_size) or options.servers or 1
    plan = make_plan(options, install, gpus, _ports(options, servers))
    can_follow = options.kv_events and all(map(find_spec, ("zmq", "msgspec")))
    if options.kv_events and not can_follow:
        notes.append(NEEDS_EXTRA)
    configuration = proxy_yaml(plan, options.config, kv_events=can_follow)
    for note in notes:
        _report(note)
    # It is shown, written as units, or carried out.
    if options.dry_run and options.as_json:
        print_json(plan.data(configuration))
    elif options.dry_run:
        print(f"{plan.text()}\n\n{options.folder / 'proxy.yaml'}:\n{configuration}", end="")
    elif options.systemd or options.compose:
        _write_units(plan, configuration)
    else:
        _start(plan, configuration)


@app.command(help=STATUS_HELP)
def status(folder: Folder = DIR, as_json: AsJson = False) -> None:
    state = read_state(folder)
    answer = fleet_status(state) if state else {"well": False, "servers": []}
    if as_json:
        print_json(answer)
    elif state:
        print(status_text(answer))
    if state is None:
        _report(f"no fleet is up in {folder}")
    if not answer["well"]:
        raise typer.Exit(1)


@app.command(help=DOWN_HELP)
def down(folder: Folder = DIR, as_json: AsJson = False) -> None:
    state, ends = read_state(folder), {}
    if state is None:
        _report(f"no fleet is up in {folder}")
    else:
        _report(f"stopping the fleet in {folder}, at most {state.stop_s:.0f} s; Ctrl-C kills it")
        ends = stop_servers(state)
        remove_state(folder)
    for name, how in ends.items():
        _report(f"{name}: {how}")
    if as_json:
        print_json({"servers": ends})


def _install(options: FleetOptions, notes: list[str]) -> VllmInstall:
    """Find vLLM. A dry run without vLLM assumes the newest version and notes it."""
    if options.vllm_version is not None:
        return VllmInstall(options.vllm or "vllm", options.vllm_version)
    # Without vLLM, only a dry run can go on.
    try:
        install = find_vllm(options.vllm)
    except InputError:
        if options.vllm or not options.dry_run:
            raise
        notes.append(
            f"vllm is not installed here: planned for {NEWEST}; --vllm-version for another"
        )
        return VllmInstall("vllm", NEWEST)
    # A dry run starts nothing, so it asks vLLM for nothing more.
    if options.dry_run:
        return install
    if "+cpu" in install.version and not options.cpu:
        named = f"{install.command} is vLLM {install.version}"
        raise InputError(f"{named}, built for the CPU: give --cpu or --vllm")
    flags = listed_flags(install.command)
    if flags is None:
        notes.append(f"`{install.command} serve --help` lists no flags: they are not checked")
    return replace(install, flags=flags)


def _gpus(options: FleetOptions, notes: list[str]) -> list[Gpu]:
    """Choose the GPUs to serve on. A dry run without GPUs assumes one or two H200."""
    indexes, gpus = parse_indexes(options.gpus, os.environ), found_gpus()
    if not gpus and options.dry_run:
        memory = find_gpu_memory("h200")
        gpus = [Gpu(index, memory.name, memory.gib) for index in indexes or (0, 1)]
        notes.append(f"no GPU here: planned for {memory.name}")
    return choose_gpus(indexes, gpus)


def _ports(options: FleetOptions, count: int) -> list[int]:
    """Return a port for each server (InputError: a port is taken)."""
    ports = [options.port + number if options.port else 0 for number in range(count)]
    if ports[-1] > 65_535:
        raise InputError(
            f"--port {options.port}: {count} servers need ports beyond 65535; give a lower one"
        )
    if options.port and options.dry_run:
        return ports
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with ExitStack() as taken:
        try:
            listeners = [
                taken.enter_context(socket.create_server((options.host, port), family=family))
                for port in ports
            ]
        except OSError as error:
            raise InputError(
                f"--port {options.port}: cannot listen on {options.host}: {error.strerror or error}"
                "; give another --port, 0 for free ones, or another --host"
            ) from error
        return [int(listener.getsockname()[1]) for listener in listeners]


def _write_units(plan: FleetPlan, configuration: str) -> None:
    written = write_units(plan, configuration)
    for path in written:
        _report(f"wrote {path}")
    if plan.options.compose:
        _report(f"next: docker compose -f {written[-1]} up -d")
    else:
        _report(f"next: systemctl --user enable --now {' '.join(map(str, written[1:]))}")
    if plan.options.as_json:
        print_json({"files": list(map(str, written))})


def _start(plan: FleetPlan, configuration: str) -> None:
    """Start the fleet. Exit with status 1 unless all servers come up."""
    print(plan.text(), file=sys.stderr)
    # A stop during the start is like Ctrl-C: no server is left. nohup ignores SIGHUP.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    try:
        state = start_fleet(plan, configuration, _report)
    except StartFailed as error:
        _report(str(error))
        raise typer.Exit(1) from None
    _report(f"all {len(state.servers)} up; now: forebay proxy --config {state.proxy_config}")
    if plan.options.as_json:
        print_json(asdict(state))


def _report(line: str) -> None:
    with suppress(OSError):  # the terminal may be gone, and the servers must outlive it
        print(f"fleet: {line}", file=sys.stderr, flush=True)
