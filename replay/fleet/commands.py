"""Plan the commands of a fleet's servers from the options of `forebay fleet up`.

A wrong option is an InputError before the first process starts, because vLLM would report it a
minute later and in a hundred lines. docs/how-to/vllm-servers.md has the reason for each flag.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.replay.fleet.gpu.gpus import Gpu
from forebay.replay.fleet.gpu.profiles import Profile
from forebay.replay.fleet.gpu.vllm_install import VllmInstall, lacks, read_flags
from forebay.replay.fleet.options import FleetOptions
from forebay.replay.fleet.plan import (
    CHUNK_FLAG,
    CLASS_FLAG,
    POLICY_FLAG,
    FleetPlan,
    ServerPlan,
    find_facts,
)
from forebay.traces.ground.errors import InputError

SINCE = {"--max-num-queued-reqs": (0, 29), "--shutdown-timeout": (0, 20)}
"""First vLLM version known to have each flag. 0.11 has the others (read in the wheels of 0.11.2,
0.14.1, 0.17.1, 0.20.2, 0.23.0, 0.26.0, 0.29.0 and 0.32.0)."""
OPTIONAL = {
    *("--enable-prefix-caching", "--enable-chunked-prefill", "--max-num-batched-tokens"),
    *(CLASS_FLAG, CHUNK_FLAG, "--max-num-queued-reqs", "--enable-prompt-tokens-details"),
    *("--enable-request-id-headers", "--disable-uvicorn-access-log", "--shutdown-timeout"),
}
"""Flags that a fleet can do without."""
ROPE_PARAMETERS_SINCE = (0, 14)  # before it: rope_scaling, with rope_theta outside of it
YARN_BASE = 32_768
YARN_THETA = 1_000_000.0  # Qwen2.5's, repeated because an override replaces the whole section
SOCKET_PATH = 107  # longest path of a Unix socket, bytes
EVENTS_PORT, REPLAY_PORT = 1_000, 2_000  # added to the server's port, without Unix sockets


def make_plan(
    options: FleetOptions, install: VllmInstall, gpus: Sequence[Gpu], ports: Sequence[int]
) -> FleetPlan:
    """Plan one server on each of `gpus` or on groups of them, or servers on the CPU.

    Args:
        ports: one for each server, so their number is the number of servers.

    Raises:
        InputError: vLLM would reject an option, or the model does not fit.
    """
    ranks = options.tensor_parallel_size
    if len(gpus) % ranks:
        raise InputError(
            f"--tensor-parallel-size {ranks}: {len(gpus)} GPUs are no whole number of servers; "
            f"name a multiple of {ranks} with --gpus"
        )
    plan = find_facts(options, install, gpus, len(ports))
    flags, left_out = _known_flags(plan)
    chunk = 0 if CHUNK_FLAG in left_out else plan.chunk  # the proxy must not count on it
    servers = []
    for number, port in enumerate(ports):
        on = [gpu.index for gpu in gpus[number * ranks : (number + 1) * ranks]]
        name = f"gpu{on[0]}" if on else f"cpu{number}"
        servers.append(_server(plan, flags, name, on, port))
    return replace(plan, chunk=chunk, left_out=tuple(left_out), servers=tuple(servers))


def _known_flags(s: FleetPlan) -> tuple[list[str], list[str]]:
    """Return the flags that all servers share, and the names of flags that this vLLM lacks.

    Flags that the user gives after `--` are in neither (InputError: vLLM lacks a needed flag).
    """
    words: list[str] = []
    left_out = []
    for name, value in _flags(s).items():
        if value in (None, False) or name in read_flags(s.words):
            continue
        missing = s.install.lacks(name)
        if SINCE.get(name, (0, 0)) > s.install.release or (missing and name in OPTIONAL):
            left_out.append(name)
        elif missing:
            raise lacks(name)
        else:
            words += [name] if value is True else [name, str(value)]
    return words, left_out


def _flags(s: FleetPlan) -> dict[str, str | int | float | None]:
    """Return all flags and their values. True: the flag has no value. None: not for this fleet."""
    options, on_cpu = s.options, s.cpu_threads is not None
    return {
        "--served-model-name": options.served_model_name or s.profile.served_name,
        "--max-model-len": s.context,
        "--hf-overrides": _yarn(s.profile, s.context, s.install.release),
        "--tensor-parallel-size": ranks if (ranks := options.tensor_parallel_size) > 1 else None,
        "--quantization": options.quantization,
        "--kv-cache-dtype": None if options.kv_cache_dtype == "auto" else options.kv_cache_dtype,
        "--enable-lora": options.enable_lora,
        "--max-loras": options.max_loras if options.enable_lora else None,
        "--max-lora-rank": options.max_lora_rank if options.enable_lora else None,
        "--enable-prefix-caching": True,
        "--enable-chunked-prefill": True,
        "--max-num-batched-tokens": s.batched_tokens,
        CLASS_FLAG: "forebay.proxy.vllm_scheduler.ForebayScheduler" if s.has_class else None,
        CHUNK_FLAG: s.chunk or None,
        POLICY_FLAG: s.policy,
        "--max-num-seqs": s.seqs,
        "--max-num-queued-reqs": 2 * s.seqs,
        "--gpu-memory-utilization": None if s.kv_memory else options.gpu_memory_utilization,
        "--kv-cache-memory-bytes": s.kv_memory,
        "--enforce-eager": on_cpu,  # no torch.compile: starts in seconds, needs no compiler
        # On few cores two spinning processes would be slow: the worker runs inside the engine.
        "--distributed-executor-backend": "uni" if on_cpu else None,
        "--enable-prompt-tokens-details": True,
        "--enable-request-id-headers": True,
        "--disable-uvicorn-access-log": True,
        "--shutdown-timeout": options.drain or None,
    }


def _yarn(profile: Profile, context: int | None, release: tuple[int, int]) -> str | None:
    """Return the overrides that stretch a model's own context, None if it is long enough."""
    if not profile.native or (context or 0) <= profile.native:
        return None
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": (context or 0) / YARN_BASE,
        "original_max_position_embeddings": YARN_BASE,
    }
    section = "rope_scaling"
    if release >= ROPE_PARAMETERS_SINCE:
        section, scaling = "rope_parameters", {**scaling, "rope_theta": YARN_THETA}
    return json.dumps({section: scaling, "max_position_embeddings": context})


def _server(
    s: FleetPlan, shared: Sequence[str], name: str, gpus: Sequence[int], port: int
) -> ServerPlan:
    """Plan one server. Servers differ in GPU, port, log and sockets only."""
    options = s.options
    events: list[str] = []
    ends = _endpoints(options, name, port) if options.kv_events else None
    if ends is not None:
        keys = ("enable_kv_cache_events", "publisher", "topic", "endpoint", "replay_endpoint")
        values = dict(zip(keys, (True, "zmq", "kv-events", *ends), strict=True))
        events = ["--kv-events-config", json.dumps(values)]
    # vLLM binds an endpoint with a `*`. The proxy connects to this machine.
    publish, replay = (end.replace("*", "127.0.0.1") for end in ends or ("", ""))
    reached = "127.0.0.1" if options.host in ("0.0.0.0", "localhost") else options.host
    reached = f"[{reached}]" if ":" in reached else reached
    return ServerPlan(
        name=name,
        url=f"http://{reached}:{port}",
        gpu=gpus[0] if gpus else None,
        command=(
            *(s.install.command, "serve", s.profile.repository),
            *("--host", options.host, "--port", str(port), *shared, *events, *s.words),
        ),
        environment=_environment(s, name, gpus),
        log=str(options.folder.resolve() / f"{name}.log"),
        kv_events=publish or None,
        kv_replay=replay or None,
    )


def _environment(s: FleetPlan, name: str, gpus: Sequence[int]) -> dict[str, str]:
    """Return the variables of the server `name` on `gpus`, empty on the CPU."""
    root = os.environ.get("VLLM_CACHE_ROOT") or Path.home() / ".cache" / "forebay" / "vllm"
    variables = {"VLLM_CACHE_ROOT": f"{root}/{name}", "VLLM_NO_USAGE_STATS": "1"}
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if s.options.on_this_machine:
        variables["VLLM_HOST_IP"] = "127.0.0.1"
    if s.cpu_threads is not None:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the executor backend uni needs it
        variables["OMP_NUM_THREADS"] = str(s.cpu_threads)
    return variables


def _endpoints(options: FleetOptions, name: str, port: int) -> tuple[str, str]:
    """Return where a server publishes KV events and replays them.

    A fleet that listens on the loopback only uses Unix sockets, because its proxy is on the same
    machine.
    """
    if options.on_this_machine:
        path = str(options.folder.resolve() / name)
        if len(os.fsencode(f"{path}.events")) > SOCKET_PATH:
            raise InputError(
                f"--dir {options.folder}: too long a path for a Unix socket ({SOCKET_PATH} "
                "bytes); give a shorter one, or --no-kv-events"
            )
        return f"ipc://{path}.events", f"ipc://{path}.replay"
    if port + REPLAY_PORT > 65_535:
        raise InputError(
            f"--port {port}: KV events need ports {EVENTS_PORT} and {REPLAY_PORT} above it; give a "
            "lower one, or --no-kv-events"
        )
    # vLLM binds only endpoints with a `*`, so every host that reaches the machine can connect.
    return f"tcp://*:{port + EVENTS_PORT}", f"tcp://*:{port + REPLAY_PORT}"
