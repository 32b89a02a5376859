"""`forebay fleet`: real vLLM servers, one on each GPU: start, watch, ask, stop."""

import asyncio
import os
import socket
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.proxy.command import new_app
from forebay.traces.errors import InputError

HELP = """Real vLLM servers, one on each GPU, with the flags that long documents beside chats want.

Example:

  forebay fleet up --model llama-3.1-8b --gpus 0,1

  forebay fleet status

  forebay fleet down
"""
UP_HELP = """Start `vllm serve` on each GPU, explain its flags, write the proxy's configuration,
wait until all are up, and restart what dies, until Ctrl-C, SIGTERM or `forebay fleet down`.

Example:

  forebay fleet up --model llama-3.1-8b --gpus 0,1

  forebay fleet up --model qwen2.5-14b --dry-run

  forebay fleet up --model ./tiny --cpu --servers 2 -- --load-format dummy
"""
STATUS_HELP = """Ask each server of the fleet how it is. Exit status 1: not all are well.

Example:

  forebay fleet status --json
"""
DOWN_HELP = """Stop the fleet: running answers may finish for --drain of `up`, then it is killed.

Example:

  forebay fleet down
"""
DIR = Path("runs/fleet")

app = new_app(help=HELP)
Folder = Annotated[
    Path, typer.Option("--dir", help="Where state, logs and the proxy's configuration are.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print data to stdout.")]


@app.callback()
def fleet() -> None:
    """The three words share nothing."""


@app.command(help=UP_HELP)
def up(
    model: Annotated[
        str,
        typer.Option(
            help="llama-3-8b, llama-3.1-8b, qwen2.5-14b, phi-3-mini-128k, a Hugging Face "
            "repository or a folder."
        ),
    ],
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[VLLM_FLAG]", help="After `--`: passed on to `vllm serve`."),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="Numbers as nvidia-smi's, e.g. 0,1; default: all.")
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="On the CPU, with a vLLM built for it.")
    ] = False,
    servers: Annotated[
        int | None, typer.Option(min=1, max=64, help="With --cpu: how many; default: 1.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Proxy configuration whose keys the written one keeps.")
    ] = None,
    folder: Folder = DIR,
    host: Annotated[str, typer.Option(help="Address the servers listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the first; then one each. 0: free ones.")
    ] = 8001,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call it; default: the repository's name.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Context, tokens; default: the model's.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Requests in a step; default: by the KV cache.")
    ] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Most of a GPU's memory.")] = 0.9,
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(help="Instead of that share, e.g. 4G.  [default on CPU: 1G]")
    ] = None,
    kv_events: Annotated[bool, typer.Option(help="Tell the proxy which blocks are held.")] = True,
    drain: Annotated[int, typer.Option(min=0, help="Seconds to finish in at the end.")] = 30,
    restarts: Annotated[
        int, typer.Option(min=0, help="In a row, of a server that dies; then it is given up.")
    ] = 5,
    start_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until /health; fetching a model counts.")
    ] = 900.0,
    cache_root: Annotated[
        Path | None,
        typer.Option(help="Of compiled graphs; default: VLLM_CACHE_ROOT, ~/.cache/forebay/vllm."),
    ] = None,
    vllm: Annotated[
        str | None, typer.Option(help="The vllm command; default: this environment's, or PATH's.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print flags, commands and configuration; no start.")
    ] = False,
    gpu: Annotated[
        str, typer.Option(help="With --dry-run where there is no GPU: reckon for this one.")
    ] = "h200",
    vllm_version: Annotated[
        str | None, typer.Option(help="With --dry-run: print for this vLLM, e.g. 0.26.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    from forebay.replay.fleet.gpus import check_free, choose_gpus, found_gpus, parse_indexes
    from forebay.replay.fleet.plan import FleetOptions, make_plan
    from forebay.replay.fleet.proxy_file import NEEDS_EXTRA, proxy_yaml
    from forebay.replay.fleet.show import plan_data, plan_text

    options = FleetOptions(
        model=model,
        folder=folder,
        host=host,
        served_model_name=served_model_name,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        utilization=gpu_memory_utilization,
        kv_memory=kv_cache_memory_bytes,
        kv_events=kv_events,
        drain_s=drain,
        cache_root=cache_root or _path(os.environ.get("VLLM_CACHE_ROOT")),
        vllm_args=tuple(vllm_args or ()),
    )
    if cpu and gpus is not None:
        raise InputError("--cpu and --gpus: give one of them")
    if servers is not None and not cpu:
        raise InputError("--servers goes with --cpu; on GPUs there is one on each of --gpus")
    if vllm_version is not None and not dry_run:
        raise InputError("--vllm-version goes with --dry-run; what is started is the vLLM found")
    talk: list[str] = []
    install = _install(vllm, vllm_version, dry_run, talk)
    if not dry_run and ("+cpu" in install.version) is not cpu:
        _check_build(install.command, install.version, cpu)
    chosen = []
    if not cpu:
        indexes, found = parse_indexes(gpus, os.environ), found_gpus()
        if not found and dry_run:
            found = _assumed(gpu, indexes)
            talk.append(f"no GPU here: reckoned for {found[0].name}; --gpu names another")
        chosen = choose_gpus(indexes, found)
    ports = _ports(host, port, len(chosen) or servers or 1, dry_run)
    plan = make_plan(options, install, chosen, ports)
    followed = kv_events and all(map(find_spec, ("zmq", "msgspec")))
    if kv_events and not followed:
        talk.append(NEEDS_EXTRA)
    configuration = proxy_yaml(plan, config, kv_events=followed)
    for line in talk:
        _say(line)
    if dry_run:
        if as_json:
            _print_json(plan_data(plan, configuration))
        else:
            print(plan_text(plan, commands=True))
            print(f"\n{folder / 'proxy.yaml'}:\n{configuration}", end="")
        return
    if kv_cache_memory_bytes is None:
        check_free(chosen, gpu_memory_utilization)
    print(plan_text(plan, commands=False), file=sys.stderr)
    from forebay.replay.fleet.restarts import RestartPolicy
    from forebay.replay.fleet.run import run_fleet

    policy = RestartPolicy(tries=restarts, start_s=start_timeout)
    if not asyncio.run(run_fleet(plan, configuration, policy, _say, as_json)):
        raise typer.Exit(1)


@app.command(help=STATUS_HELP)
def status(folder: Folder = DIR, as_json: AsJson = False) -> None:
    from forebay.replay.fleet.control import fleet_status
    from forebay.replay.fleet.show import status_text
    from forebay.replay.fleet.state import read_state

    state = read_state(folder)
    if state is None:
        if as_json:
            _print_json({"well": False, "supervisor": None, "servers": []})
        _say(f"no fleet is up in {folder}")
        raise typer.Exit(1)
    said = asyncio.run(fleet_status(state))
    if as_json:
        _print_json(said)
    else:
        print(status_text(said))
    if not said["well"]:
        raise typer.Exit(1)


@app.command(help=DOWN_HELP)
def down(folder: Folder = DIR, as_json: AsJson = False) -> None:
    from forebay.replay.fleet.control import stop_fleet
    from forebay.replay.fleet.state import read_state

    state = read_state(folder)
    if state is None:
        _say(f"no fleet is up in {folder}")
        if as_json:
            _print_json({"supervisor": None, "left_servers": {}})
        return
    _say(f"stopping the fleet in {folder}, which may take {state.stop_s:.0f} s")
    said = stop_fleet(folder, state)
    _say(f"supervisor {state.supervisor.pid}: {said['supervisor']}")
    for name, how in said["left_servers"].items():
        _say(f"{name}: {how}")
    if as_json:
        _print_json(said)


def _install(given: str | None, version: str | None, dry_run: bool, talk: list[str]) -> Any:
    from forebay.replay.fleet.vllm_install import NEWEST, VllmInstall, find_vllm, release_of

    if version is not None:
        release_of(version)
        return VllmInstall(given or "vllm", version)
    try:
        return find_vllm(given)
    except InputError:
        if given or not dry_run:
            raise
        newest = f"{NEWEST[0]}.{NEWEST[1]}"
        talk.append(f"vllm is not installed here: written for {newest}; --vllm-version for another")
        return VllmInstall("vllm", newest)


def _check_build(command: str, version: str, cpu: bool) -> None:
    if not cpu:
        raise InputError(f"{command} is vLLM {version}, built for the CPU: give --cpu or --vllm")
    _say(f"{command} is vLLM {version}, which does not say that it is built for the CPU")


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _assumed(name: str, indexes: list[int] | None) -> Any:
    from forebay.replay.engine.hardware.gpu_memory import find_gpu_memory
    from forebay.replay.fleet.gpus import Gpu

    try:
        memory = find_gpu_memory(name)
    except InputError as error:
        raise InputError(str(error).partition("; or give --gpu-memory-gib")[0]) from None
    return [Gpu(index, memory.name, memory.gib, memory.gib) for index in indexes or (0, 1)]


def _ports(host: str, first: int, count: int, dry_run: bool) -> list[int]:
    """One for each server; raises InputError where one is taken."""
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
        return [int(one.getsockname()[1]) for one in taken]
    except OSError as error:
        raise InputError(f"--host {host}: {error.strerror or error}") from error
    finally:
        for one in taken:
            one.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def _say(line: str) -> None:
    with suppress(OSError):  # the terminal may be gone, and the servers are not to go with it
        print(f"fleet: {line}", file=sys.stderr, flush=True)


def _print_json(data: dict[str, Any]) -> None:
    import orjson

    sys.stdout.write(orjson.dumps(data, option=orjson.OPT_INDENT_2).decode() + "\n")
    sys.stdout.flush()
