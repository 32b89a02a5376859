"""`forebay fleet`: start, look at and stop real vLLM servers, one on each GPU."""

import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import typer

from forebay.proxy.command import new_app
from forebay.replay.engine.flags import PlacementFlags
from forebay.replay.fleet.options import DIR, Folder, UpOptions
from forebay.traces.command_line.messages import print_json
from forebay.traces.command_line.options import AsJson, takes_options
from forebay.traces.errors import InputError

if TYPE_CHECKING:
    from forebay.replay.fleet.gpu.gpus import Gpu
    from forebay.replay.fleet.gpu.vllm_install import VllmInstall
    from forebay.replay.fleet.plan import FleetPlan

HELP = """Real vLLM servers, one on each GPU or group of GPUs, for long documents beside chats.

Example:

  forebay fleet up --model llama-3.1-8b --gpus 0,1

  forebay fleet status

  forebay fleet down
"""
UP_HELP = """Start `vllm serve` on each GPU.

With --tensor-parallel-size, a server has that many GPUs. The command explains the flags, writes the
proxy's configuration, and ends when all servers are up: they run until `forebay fleet down`. With
--systemd or --compose it starts nothing, and writes what starts the servers and restarts those that
die.

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
def up(options: UpOptions, placement: PlacementFlags) -> None:
    options.check()
    notes: list[str] = []
    install = _install(options, notes)
    gpus = [] if options.cpu else _gpus(options, notes)
    plan, configuration = _plan(options, placement, install, gpus, notes)
    for line in notes:
        _report(line)
    if options.dry_run:
        _print_plan(plan, configuration, as_json=options.as_json)
    elif options.systemd or options.compose:
        _write_units(options, plan, configuration)
    else:
        _run(options, plan, gpus, configuration)


@app.command(help=STATUS_HELP)
def status(folder: Folder = DIR, as_json: AsJson = False) -> None:
    from forebay.replay.fleet.servers import fleet_status, status_text
    from forebay.replay.fleet.state import read_state

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
    from forebay.replay.fleet.servers import stop_servers
    from forebay.replay.fleet.state import read_state, remove_state

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


def _install(options: UpOptions, notes: list[str]) -> "VllmInstall":
    """Find vLLM. A dry run without vLLM assumes the newest version and notes it."""
    from forebay.replay.fleet.gpu.vllm_install import (
        NEWEST,
        VllmInstall,
        find_vllm,
        listed_flags,
        release_of,
    )

    if options.vllm_version is not None:
        release_of(options.vllm_version)
        return VllmInstall(options.vllm or "vllm", options.vllm_version)
    # Without vLLM, only a dry run can go on.
    try:
        install = find_vllm(options.vllm)
    except InputError:
        if options.vllm or not options.dry_run:
            raise
        newest = f"{NEWEST[0]}.{NEWEST[1]}"
        notes.append(
            f"vllm is not installed here: planned for {newest}; --vllm-version for another"
        )
        return VllmInstall("vllm", newest)
    # A dry run starts nothing, so it asks vLLM for nothing more.
    if not options.dry_run and ("+cpu" in install.version) is not options.cpu:
        _check_build(install, options.cpu)
    if options.dry_run:
        return install
    flags = listed_flags(install.command)
    if flags is None:
        notes.append(f"`{install.command} serve --help` lists no flags: they are not checked")
    return replace(install, flags=flags)


def _check_build(install: "VllmInstall", cpu: bool) -> None:
    named = f"{install.command} is vLLM {install.version}"
    if not cpu:
        raise InputError(f"{named}, built for the CPU: give --cpu or --vllm")
    _report(f"{named}; its version does not show that it was built for the CPU")


def _gpus(options: UpOptions, notes: list[str]) -> "list[Gpu]":
    """Choose the GPUs to serve on. A dry run without GPUs assumes GPUs called --gpu."""
    from forebay.replay.fleet.gpu.gpus import choose_gpus, found_gpus, parse_indexes

    indexes, gpus = parse_indexes(options.gpus, os.environ), found_gpus()
    if not gpus and options.dry_run:
        gpus = _assumed(options.gpu, indexes)
        notes.append(f"no GPU here: planned for {gpus[0].name}; --gpu names another")
    return choose_gpus(indexes, gpus)


def _assumed(name: str, indexes: list[int] | None) -> "list[Gpu]":
    from forebay.replay.engine.hardware.gpu_memory import find_gpu_memory
    from forebay.replay.fleet.gpu.gpus import Gpu

    try:
        memory = find_gpu_memory(name)
    except InputError as error:
        raise InputError(str(error).partition("; or give --gpu-memory-gib")[0]) from None
    return [Gpu(index, memory.name, memory.gib, memory.gib) for index in indexes or (0, 1)]


def _plan(
    options: UpOptions,
    placement: PlacementFlags,
    install: "VllmInstall",
    gpus: "list[Gpu]",
    notes: list[str],
) -> "tuple[FleetPlan, str]":
    """Return the plan of the fleet and the proxy's configuration for it."""
    from forebay.replay.fleet.plan import make_plan
    from forebay.replay.fleet.proxy_file import NEEDS_EXTRA, proxy_yaml

    fleet_options = replace(options.fleet(), **placement.placement())
    servers = -(-len(gpus) // fleet_options.tensor_parallel_size) or options.servers or 1
    ports = _ports(options.host, options.port, servers, options.dry_run)
    plan = make_plan(fleet_options, install, gpus, ports)
    can_follow = options.kv_events and all(map(find_spec, ("zmq", "msgspec")))
    if options.kv_events and not can_follow:
        notes.append(NEEDS_EXTRA)
    return plan, proxy_yaml(plan, options.config, kv_events=can_follow)


def _print_plan(plan: "FleetPlan", configuration: str, *, as_json: bool) -> None:
    from forebay.replay.fleet.show import plan_data, plan_text

    if as_json:
        print_json(plan_data(plan, configuration))
        return
    print(plan_text(plan, commands=True))
    print(f"\n{plan.options.folder / 'proxy.yaml'}:\n{configuration}", end="")


def _run(options: UpOptions, plan: "FleetPlan", gpus: "list[Gpu]", configuration: str) -> None:
    """Start the fleet. Exit with status 1 unless all servers come up."""
    from forebay.replay.fleet.gpu.gpus import check_free
    from forebay.replay.fleet.servers import StartFailed, start_fleet
    from forebay.replay.fleet.show import plan_text

    if options.kv_cache_memory_bytes is None:
        check_free(gpus, options.gpu_memory_utilization)
    print(plan_text(plan, commands=False), file=sys.stderr)
    # A stop during the start is like Ctrl-C: no server is left. nohup ignores SIGHUP.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    try:
        state = start_fleet(plan, configuration, options.start_timeout, _report)
    except StartFailed as error:
        _report(str(error))
        raise typer.Exit(1) from None
    _report(f"all {len(state.servers)} up; now: forebay proxy --config {state.proxy_config}")
    if options.as_json:
        print_json(asdict(state))


def _write_units(options: UpOptions, plan: "FleetPlan", configuration: str) -> None:
    from forebay.replay.fleet.units import write_units

    written = write_units(plan, configuration, compose=options.compose)
    if options.as_json:
        print_json({"files": list(map(str, written))})
    for path in written:
        _report(f"wrote {path}")
    if options.compose:
        _report(f"next: docker compose -f {written[-1]} up -d")
    else:
        paths = " ".join(map(str, written[1:]))
        _report(f"next: systemctl --user enable --now {paths}")


def _ports(host: str, first: int, count: int, dry_run: bool) -> list[int]:
    """Return a port for each server (InputError: a port is taken)."""
    if first == 0:
        return _free_ports(host, count)
    ports = list(range(first, first + count))
    if ports[-1] > 65_535:
        raise InputError(
            f"--port {first}: {count} servers need ports beyond 65535; give a lower one"
        )
    for port in ports if not dry_run else ():
        try:
            _listen(host, port).close()
        except OSError as error:
            raise InputError(
                f"--port {first}: cannot listen on {host}:{port}: {error.strerror}; give another "
                "--port, or 0 for free ones"
            ) from error
    return ports


def _free_ports(host: str, count: int) -> list[int]:
    taken: list[socket.socket] = []
    try:
        for _ in range(count):
            taken.append(_listen(host, 0))
        return [int(listener.getsockname()[1]) for listener in taken]
    except OSError as error:
        raise InputError(f"--host {host}: {error.strerror or error}") from error
    finally:
        for listener in taken:
            listener.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def _report(line: str) -> None:
    with suppress(OSError):  # the terminal may be gone, and the servers must outlive it
        print(f"fleet: {line}", file=sys.stderr, flush=True)
