"""Plan the servers of a fleet from the options of `forebay fleet up`, without starting any.

A wrong option is an InputError before the first process starts, because vLLM would report it a
minute later and in a hundred lines.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forebay.replay.engine.hardware.find import find_model
from forebay.replay.engine.hardware.memory import adapters_of
from forebay.replay.engine.placement import check_kv_dtype, check_parallel, served_model
from forebay.replay.fleet.gpu.flags import (
    CHUNK_FLAG,
    POLICY_FLAG,
    Flag,
    Setting,
    environment,
    kv_events_flag,
    lacks,
    names_in,
    serve_flags,
    value_in,
    without,
)
from forebay.replay.fleet.gpu.gpus import Gpu
from forebay.replay.fleet.gpu.profiles import CPU_CHUNK, Profile, find_profile
from forebay.replay.fleet.gpu.sizes import kv_tokens, parse_bytes, sequences
from forebay.replay.fleet.gpu.vllm_install import VllmInstall
from forebay.traces.errors import InputError

GPU_BATCHED_TOKENS, CPU_BATCHED_TOKENS = 8192, 2048
CPU_KV_MEMORY = "1G"
SOCKET_PATH = 107  # longest path of a Unix socket, bytes
EVENTS_PORT, REPLAY_PORT = 1_000, 2_000  # added to the server's port, without Unix sockets
FIXED = {  # flags that the proxy's configuration depends on, and the option that sets each
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
NOT_HERE = {
    "--tensor-parallel-size": "give --tensor-parallel-size before the `--`",
    "--data-parallel-size": "leave it out",
    "--pipeline-parallel-size": "leave it out",
}
SHORT = {"-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size",
         "-pp": "--pipeline-parallel-size"}  # fmt: skip
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The user's choices. None: the value follows from model and machine.

    Attributes:
        folder: folder of the state file, logs, sockets and the proxy's configuration.
        drain_s: seconds that running answers get when the fleet is stopped.
        vllm_args: further flags, passed on unchanged.
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
    tensor_parallel_size: int = 1
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    vllm_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """One server.

    Attributes:
        gpu: nvidia-smi's number. Of several GPUs the first, None on the CPU.
    """

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
        """Return the command as one would type it."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*words, *map(shlex.quote, self.command)])


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The plan of a whole fleet.

    Attributes:
        flags, variables: the first server's, explained. Other servers differ in numbers only.
        left_out: flags that this vLLM version does not have.
        notes: remarks for the user.
        kv_tokens: computed KV cache size of one server. None where the model's sizes are unknown.
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
    """Plan one server on each of `gpus` or on groups of them, or servers on the CPU.

    Args:
        ports: one for each server, so their number is the number of servers.

    Raises:
        InputError: vLLM would reject an option, or the model does not fit.
    """
    _check_options(options)
    options = replace(options, vllm_args=_known_args(options, install))
    # The flags that all servers share. The user's own flags go first.
    setting, tokens = _setting(options, install, gpus, len(ports))
    flags, left_out = serve_flags(setting, install.flags)
    if CHUNK_FLAG in {flag.name for flag in left_out}:
        setting = replace(setting, chunk=0)  # the proxy must not count on it
    own_names = names_in(options.vllm_args)
    shared = [flag for flag in flags if flag.name not in own_names]
    # Servers differ in GPU, port, log and sockets only.
    places = _groups(gpus, options.tensor_parallel_size) if gpus else [()] * len(ports)
    planned = [
        _server(
            setting, install, options, shared, f"gpu{on[0].index}" if on else f"cpu{n}", on, port
        )
        for n, (on, port) in enumerate(zip(places, ports, strict=True))
    ]
    profile = setting.profile
    return FleetPlan(
        install=install,
        options=options,
        setting=setting,
        servers=tuple(server for server, _, _ in planned),
        flags=planned[0][1],
        variables=planned[0][2],
        left_out=tuple(left_out),
        notes=(profile.note,) if profile.note and not options.max_model_len else (),
        kv_tokens=tokens,
    )


def _groups(gpus: Sequence[Gpu], ranks: int) -> list[Sequence[Gpu]]:
    """Divide the GPUs among servers of `ranks` GPUs each (InputError: some GPUs are left over)."""
    if len(gpus) % ranks:
        raise InputError(
            f"--tensor-parallel-size {ranks}: {len(gpus)} GPUs are no whole number of servers; "
            f"name a multiple of {ranks} with --gpus"
        )
    return [gpus[first : first + ranks] for first in range(0, len(gpus), ranks)]


def _setting(
    options: FleetOptions, install: VllmInstall, gpus: Sequence[Gpu], servers: int
) -> tuple[Setting, int | None]:
    """Return the facts that flags follow from, and the KV cache size of a server in tokens."""
    # Sizes: the model's context, the budget of a step and the KV cache.
    profile = _placed(options, find_profile(options.model))
    context = _context(options, profile)
    batched = min([GPU_BATCHED_TOKENS, *(gpu.memory.batched_tokens for gpu in gpus)])
    batched = batched if gpus else CPU_BATCHED_TOKENS
    kv_memory = options.kv_memory
    if kv_memory is None and not gpus:
        kv_memory = CPU_KV_MEMORY
    adapters = adapters_of(options.enable_lora, options.max_loras, options.max_lora_rank)
    tokens = kv_tokens(
        profile,
        context,
        gpus,
        kv_memory=kv_memory,
        utilization=options.utilization,
        batched_tokens=batched,
        seqs=options.max_num_seqs,
        ranks=options.tensor_parallel_size,
        kv_cache_dtype=options.kv_cache_dtype or "auto",
        adapters=adapters,
    )
    # Flags follow from these sizes, the machine and the user's options.
    seqs, why = sequences(options.max_num_seqs, tokens)
    has_class = install.runs_class(options.vllm_args)
    setting = Setting(
        profile=profile,
        release=install.release,
        served_name=options.served_model_name or _served_name(profile),
        context=context,
        seqs=seqs,
        seqs_why=why,
        batched_tokens=max(batched, seqs),
        chunk=_chunk(options, has_class, profile.chunk if gpus else CPU_CHUNK, context),
        policy=value_in(options.vllm_args, POLICY_FLAG) or "priority",
        utilization=options.utilization,
        kv_memory=parse_bytes(kv_memory) if kv_memory is not None else None,
        cpu_threads=None if gpus else max(1, len(os.sched_getaffinity(0)) // servers),
        drain_s=options.drain_s,
        cache_root=str(options.cache_root or Path.home() / ".cache" / "forebay" / "vllm"),
        loopback=options.host in LOOPBACK,
        ranks=options.tensor_parallel_size,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        adapters=adapters,
        has_class=has_class,
    )
    return setting, tokens


def _placed(options: FleetOptions, profile: Profile) -> Profile:
    """Return the profile of the model as it is served (InputError: vLLM would not serve it).

    Weights that vLLM quantises while it loads them are smaller in memory.
    """
    check_kv_dtype(options.kv_cache_dtype or "auto")
    shape = profile.shape
    if shape is None:
        return profile
    check_parallel(
        shape.name, options.tensor_parallel_size, heads=shape.heads,
        kv_heads=shape.heads if shape.latent else shape.kv_heads,
    )  # fmt: skip
    if options.quantization is None:
        return profile
    served = served_model(find_model(options.model), options.quantization, "auto")
    return replace(profile, shape=served.shape)


def _server(
    setting: Setting,
    install: VllmInstall,
    options: FleetOptions,
    shared: Sequence[Flag],
    name: str,
    gpus: Sequence[Gpu],
    port: int,
) -> tuple[ServerPlan, tuple[Flag, ...], tuple[Flag, ...]]:
    """Plan one server, and return it with its flags and its environment variables."""
    endpoints = _endpoints(options, name, port)
    flags = (*shared, kv_events_flag(*endpoints)) if endpoints else tuple(shared)
    variables = tuple(environment(setting, name, [gpu.index for gpu in gpus]))
    plan = ServerPlan(
        name=name,
        url=_url(options.host, port),
        gpu=gpus[0].index if gpus else None,
        command=_command(install, setting.profile, options, port, flags),
        env={variable.name: variable.value or "" for variable in variables},
        log=options.folder / f"{name}.log",
        kv_events=_reachable(endpoints, 0),
        kv_replay=_reachable(endpoints, 1),
    )
    return plan, flags, variables


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
        raise InputError(f"{options.vllm_args[0]}: only flags of `vllm serve` may follow `--`")
    long = [SHORT.get(word.partition("=")[0], word) for word in options.vllm_args]
    for flag in sorted(names_in(long)):
        if flag in NOT_HERE:
            raise InputError(f"{flag}: a fleet has one server on each GPU; {NOT_HERE[flag]}")
        if flag in FIXED:
            raise InputError(
                f"{flag} after `--`: the proxy's configuration depends on it; give {FIXED[flag]} "
                "before the `--`"
            )


def _known_args(options: FleetOptions, install: VllmInstall) -> tuple[str, ...]:
    """Return the flags given after `--` (InputError: a flag that this vLLM lacks).

    A prefill threshold of 0 is vLLM's default, and is left out where vLLM has no such flag.
    """
    words = options.vllm_args
    if install.flags is None:
        return words
    if options.kv_events and "--kv-events-config" not in install.flags:
        raise InputError("--kv-events-config: this vLLM has no such flag; give --no-kv-events")
    if CHUNK_FLAG not in install.flags and value_in(words, CHUNK_FLAG) == "0":
        words = without(words, CHUNK_FLAG)
    for name in sorted(names_in(words)):
        if name.partition(".")[0] not in install.flags:
            raise lacks(name)
    return words


def _context(options: FleetOptions, profile: Profile) -> int | None:
    length, longest = options.max_model_len, profile.context
    if length is not None and longest is not None and length > longest:
        raise InputError(f"--max-model-len {length}: {profile.repository} holds {longest:,} tokens")
    return length or longest


def _chunk(options: FleetOptions, has_class: bool, usual: int, context: int | None) -> int:
    """Return the prefill threshold: as given after `--`, else what fits the context.

    The scheduler class needs none. The proxy's configuration contains it too.
    """
    text = value_in(options.vllm_args, CHUNK_FLAG)
    if text is None:
        return 0 if has_class else min(usual, context or usual)
    if not text.isascii() or not text.isdecimal():
        raise InputError(f"{CHUNK_FLAG} {text}: give tokens, such as {usual}; 0: no limit")
    if context is not None and int(text) > context:
        raise InputError(f"{CHUNK_FLAG} {text}: a request holds {context:,} tokens at most")
    return int(text)


def _served_name(profile: Profile) -> str:
    """Return the repository unchanged, or the name of a folder."""
    name = profile.repository
    return Path(name).name if name.startswith("/") else name


def _url(host: str, port: int) -> str:
    reached = "127.0.0.1" if host in ("0.0.0.0", "localhost") else host
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def _endpoints(options: FleetOptions, name: str, port: int) -> tuple[str, str] | None:
    """Return where a server publishes KV events and replays them.

    A fleet that listens on the loopback only uses Unix sockets, because its proxy is on the same
    machine.
    """
    if not options.kv_events:
        return None
    if options.host not in LOOPBACK:
        if port + REPLAY_PORT > 65_535:
            raise InputError(
                f"--port {port}: KV events need ports {EVENTS_PORT} and {REPLAY_PORT} above it; "
                "give a lower one, or --no-kv-events"
            )
        # vLLM binds only endpoints with a `*`, so every host that reaches the machine can connect.
        return f"tcp://*:{port + EVENTS_PORT}", f"tcp://*:{port + REPLAY_PORT}"
    folder = options.folder.resolve()
    paths = [f"{folder / name}.{kind}" for kind in ("events", "replay")]
    if len(os.fsencode(paths[0])) > SOCKET_PATH:
        raise InputError(
            f"--dir {options.folder}: too long a path for a Unix socket ({SOCKET_PATH} bytes); "
            "give a shorter one, or --no-kv-events"
        )
    return f"ipc://{paths[0]}", f"ipc://{paths[1]}"


def _reachable(endpoints: tuple[str, str] | None, which: int) -> str | None:
    """Return the endpoint's address for a proxy on this machine."""
    return endpoints[which].replace("*", "127.0.0.1") if endpoints else None
