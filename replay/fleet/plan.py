"""From the options of `forebay fleet up` to the servers to start; nothing is started here.

Every wrong option is an InputError before the first process, because vLLM would say it a minute
later and in a hundred lines.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.replay.fleet.flags import (
    Flag,
    Setting,
    environment,
    kv_events_flag,
    names_in,
    serve_flags,
    value_in,
)
from forebay.replay.fleet.gpus import Gpu
from forebay.replay.fleet.profiles import CPU_CHUNK, Profile, find_profile
from forebay.replay.fleet.sizes import kv_tokens, parse_bytes, sequences
from forebay.replay.fleet.vllm_install import VllmInstall
from forebay.traces.errors import InputError

GPU_BATCHED_TOKENS, CPU_BATCHED_TOKENS = 8192, 2048
CPU_KV_MEMORY = "1G"
SOCKET_PATH = 107  # bytes that a Unix socket's path may have
EVENTS_PORT, REPLAY_PORT = 1_000, 2_000  # beyond the server's, where sockets would not reach
OURS = {  # what the proxy's configuration hangs on, and the option that sets it
    "--model": "--model",
    "--host": "--host",
    "--port": "--port",
    "--served-model-name": "--served-model-name",
    "--max-model-len": "--max-model-len",
    "--max-num-seqs": "--max-num-seqs",
    "--gpu-memory-utilization": "--gpu-memory-utilization",
    "--kv-cache-memory-bytes": "--kv-cache-memory-bytes",
    "--shutdown-timeout": "--drain",
    "--kv-events-config": "--no-kv-events",
}
CHUNK_FLAG = "--long-prefill-token-threshold"
NOT_HERE = {"--tensor-parallel-size", "--data-parallel-size", "--pipeline-parallel-size"}
SHORT = {"-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size",
         "-pp": "--pipeline-parallel-size"}  # fmt: skip
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What was asked for; None: as it follows from model and machine.

    Attributes:
        folder: of the state file, logs, sockets and the proxy's configuration.
        drain_s: seconds that running answers may go on when the fleet is stopped.
        vllm_args: further flags, passed on as they are.
    """

    model: str
    folder: Path
    host: str = "127.0.0.1"
    served_model_name: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    utilization: float = 0.9
    kv_memory: str | None = None
    kv_events: bool = True
    drain_s: int = 30
    cache_root: Path | None = None
    vllm_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """One server; `gpu` is nvidia-smi's number, None on the CPU."""

    name: str
    url: str
    gpu: int | None
    command: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    kv_events: str | None
    kv_replay: str | None

    @property
    def shell(self) -> str:
        """The command as one would type it."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*words, *map(shlex.quote, self.command)])


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """All of it.

    Attributes:
        flags, variables: of the first server, explained; the others differ in numbers only.
        left_out: flags that this vLLM has not.
        notes: what the reader should know.
        kv_tokens: of one server, reckoned; None where the model's sizes are not known.
    """

    install: VllmInstall
    options: FleetOptions
    setting: Setting
    servers: tuple[ServerPlan, ...]
    flags: tuple[Flag, ...]
    variables: tuple[Flag, ...]
    left_out: tuple[Flag, ...]
    notes: tuple[str, ...]
    kv_tokens: int | None


def make_plan(
    options: FleetOptions, install: VllmInstall, gpus: Sequence[Gpu], ports: Sequence[int]
) -> FleetPlan:
    """The plan for one server on each of `gpus`, on the CPU where there are none.

    Args:
        ports: one for each server; their number is the number of servers.

    Raises:
        InputError: for an option that vLLM would refuse, or a model that does not fit.
    """
    _check_options(options)
    profile = find_profile(options.model)
    context = _context(options, profile)
    batched = min([GPU_BATCHED_TOKENS, *(gpu.memory.batched_tokens for gpu in gpus)])
    batched = batched if gpus else CPU_BATCHED_TOKENS
    kv_memory = options.kv_memory
    if kv_memory is None and not gpus:
        kv_memory = CPU_KV_MEMORY
    tokens = kv_tokens(
        profile,
        context,
        gpus,
        kv_memory=kv_memory,
        utilization=options.utilization,
        batched_tokens=batched,
        seqs=options.max_num_seqs,
    )
    seqs, why = sequences(options.max_num_seqs, tokens)
    setting = Setting(
        profile=profile,
        release=install.release,
        served_name=options.served_model_name or _served_name(profile),
        context=context,
        seqs=seqs,
        seqs_why=why,
        batched_tokens=max(batched, seqs),
        chunk=_chunk(options, profile.chunk if gpus else CPU_CHUNK, context),
        utilization=options.utilization,
        kv_memory=parse_bytes(kv_memory) if kv_memory is not None else None,
        cpu_threads=None if gpus else max(1, len(os.sched_getaffinity(0)) // len(ports)),
        drain_s=options.drain_s,
        cache_root=str(options.cache_root or Path.home() / ".cache" / "forebay" / "vllm"),
        loopback=options.host in LOOPBACK,
    )
    wanted, left_out = serve_flags(setting)
    given = names_in(options.vllm_args)
    shared = [flag for flag in wanted if flag.name not in given]
    servers: list[ServerPlan] = []
    explained: tuple[list[Flag], list[Flag]] = [], []
    places: list[Gpu | None] = [*gpus] if gpus else [None] * len(ports)
    for number, (gpu, port) in enumerate(zip(places, ports, strict=True)):
        name = f"gpu{gpu.index}" if gpu else f"cpu{number}"
        endpoints = _endpoints(options, name, port)
        flags = [*shared, kv_events_flag(*endpoints)] if endpoints else shared
        variables = environment(setting, name, gpu.index if gpu else None)
        servers.append(
            ServerPlan(
                name=name,
                url=_url(options.host, port),
                gpu=gpu.index if gpu else None,
                command=_command(install, profile, options, port, flags),
                env={variable.name: variable.value or "" for variable in variables},
                log=options.folder / f"{name}.log",
                kv_events=_reached(endpoints, 0),
                kv_replay=_reached(endpoints, 1),
            )
        )
        explained = explained if number else (flags, variables)
    return FleetPlan(
        install=install,
        options=options,
        setting=setting,
        servers=tuple(servers),
        flags=tuple(explained[0]),
        variables=tuple(explained[1]),
        left_out=tuple(left_out),
        notes=(profile.note,) if profile.note and not options.max_model_len else (),
        kv_tokens=tokens,
    )


def _command(
    install: VllmInstall,
    profile: Profile,
    options: FleetOptions,
    port: int,
    flags: Sequence[Flag],
) -> tuple[str, ...]:
    words = [word for flag in flags for word in flag.words]
    where = ("--host", options.host, "--port", str(port))
    return (install.command, "serve", profile.repository, *where, *words, *options.vllm_args)


def _check_options(options: FleetOptions) -> None:
    if not 0 < options.utilization <= 1:
        raise InputError(
            f"--gpu-memory-utilization {options.utilization:g}: give a share in (0, 1], e.g. 0.9"
        )
    if options.vllm_args and not options.vllm_args[0].startswith("-"):
        raise InputError(
            f"{options.vllm_args[0]}: only flags of `vllm serve` stand here, after `--`"
        )
    long = [SHORT.get(word.partition("=")[0], word) for word in options.vllm_args]
    for flag in sorted(names_in(long)):
        if flag in NOT_HERE:
            raise InputError(f"{flag}: a fleet has one server on each GPU; leave it out")
        if flag in OURS:
            raise InputError(
                f"{flag} after `--`: the proxy's configuration hangs on it; give {OURS[flag]} "
                "before the `--`"
            )


def _context(options: FleetOptions, profile: Profile) -> int | None:
    asked, longest = options.max_model_len, profile.context
    if asked is not None and longest is not None and asked > longest:
        raise InputError(f"--max-model-len {asked}: {profile.repository} holds {longest:,} tokens")
    return asked or longest


def _chunk(options: FleetOptions, usual: int, context: int | None) -> int:
    """As given after `--`, because the proxy reckons with it too; else what fits the context."""
    given = value_in(options.vllm_args, CHUNK_FLAG)
    if given is None:
        return min(usual, context or usual)
    if not given.isascii() or not given.isdecimal():
        raise InputError(f"{CHUNK_FLAG} {given}: give tokens, such as {usual}; 0: no limit")
    if context is not None and int(given) > context:
        raise InputError(f"{CHUNK_FLAG} {given}: a request holds {context:,} tokens at most")
    return int(given)


def _served_name(profile: Profile) -> str:
    """The repository as it is; of a folder its name."""
    name = profile.repository
    return Path(name).name if name.startswith("/") else name


def _url(host: str, port: int) -> str:
    reached = "127.0.0.1" if host in ("0.0.0.0", "localhost") else host
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def _endpoints(options: FleetOptions, name: str, port: int) -> tuple[str, str] | None:
    """Where it publishes KV events and replays them: Unix sockets where the proxy is beside it."""
    if not options.kv_events:
        return None
    if options.host not in LOOPBACK:
        if port + REPLAY_PORT > 65_535:
            raise InputError(
                f"--port {port}: KV events need ports {EVENTS_PORT} and {REPLAY_PORT} above it; "
                "give a lower one, or --no-kv-events"
            )
        # vLLM binds an endpoint with a `*` only, so these are open to whoever reaches the machine.
        return f"tcp://*:{port + EVENTS_PORT}", f"tcp://*:{port + REPLAY_PORT}"
    folder = options.folder.resolve()
    paths = [f"{folder / name}.{kind}" for kind in ("events", "replay")]
    if len(os.fsencode(paths[0])) > SOCKET_PATH:
        raise InputError(
            f"--dir {options.folder}: too long a path for a Unix socket ({SOCKET_PATH} bytes); "
            "give a shorter one, or --no-kv-events"
        )
    return f"ipc://{paths[0]}", f"ipc://{paths[1]}"


def _reached(endpoints: tuple[str, str] | None, which: int) -> str | None:
    """As the proxy on this machine reaches it."""
    return endpoints[which].replace("*", "127.0.0.1") if endpoints else None
