"""The plan of a fleet, and the facts about model, memory and vLLM that it follows from."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.specs import H200_SXM
from forebay.replay.fleet.gpu.gpus import Gpu
from forebay.replay.fleet.gpu.profiles import Profile, find_profile
from forebay.replay.fleet.gpu.vllm_install import VllmInstall, lacks, read_flags
from forebay.replay.fleet.options import FleetOptions
from forebay.traces.ground.errors import InputError

POLICY_FLAG = "--scheduling-policy"
CHUNK_FLAG = "--long-prefill-token-threshold"
CLASS_FLAG = "--scheduler-cls"
CHAT_TOKENS = 5_000
"""Longest prompt of the bucket `chat`. --max-num-seqs follows from the number that fits."""
LEAST_SEQS, MOST_SEQS, USUAL_SEQS = 16, 256, 64
GPU_BATCHED_TOKENS, CPU_BATCHED_TOKENS = 8192, 2048
CPU_KV_MEMORY = "1G"
CPU_CHUNK = 512


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """One server.

    Attributes:
        gpu: nvidia-smi's number. Of several GPUs the first, None on the CPU.
        kv_events, kv_replay: endpoints for a proxy on this machine. None: no KV events.
    """

    name: str
    url: str
    gpu: int | None
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: str
    kv_events: str | None
    kv_replay: str | None

    @property
    def shell(self) -> str:
        """Return the command as one would type it."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*words, *map(shlex.quote, self.command)])


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The servers of a fleet, and the facts that their flags follow from.

    Attributes:
        words: flags as given after `--`.
        context: --max-model-len. None leaves it to the model's config.json.
        kv_memory: --kv-cache-memory-bytes. None: the memory that the GPU has left.
        kv_tokens: computed KV cache of a server. None where the model's sizes are unknown.
        seqs: --max-num-seqs.
        batched_tokens: token budget of a step.
        chunk: most tokens of the budget that a document gets. 0: no limit.
        policy: --scheduling-policy: priority or fcfs.
        cpu_threads: threads of one server. None on a GPU.
        has_class: True if the servers run with Forebay's scheduler class.
        left_out: flags that this vLLM version does not have.
    """

    options: FleetOptions
    install: VllmInstall
    profile: Profile
    words: tuple[str, ...]
    context: int | None
    kv_memory: str | None
    kv_tokens: int | None
    seqs: int
    batched_tokens: int
    chunk: int
    policy: str
    cpu_threads: int | None
    has_class: bool
    left_out: tuple[str, ...] = ()
    servers: tuple[ServerPlan, ...] = ()

    def text(self) -> str:
        """Describe the fleet, with the commands of its servers."""
        version = self.install.version
        parts = [f"{self.profile.repository} with vLLM {version}"]
        if self.left_out:
            title = f"left out, because vLLM {version} does not have them"
            parts.append("\n  ".join([title, *self.left_out]))
        parts += [f"{server.name} {server.url}\n{server.shell}" for server in self.servers]
        return "\n\n".join(parts)

    def data(self, proxy_config: str) -> dict[str, Any]:
        """Return the plan as data for programs."""
        return {
            "model": self.profile.repository,
            "served_model_name": self.options.served_model_name or self.profile.served_name,
            "vllm": self.install.version,
            "kv_tokens": self.kv_tokens,
            "left_out": list(self.left_out),
            "servers": list(map(asdict, self.servers)),
            "proxy_config": proxy_config,
        }


def find_facts(
    options: FleetOptions, install: VllmInstall, gpus: Sequence[Gpu], servers: int
) -> FleetPlan:
    """Find the facts (InputError: vLLM would reject an option, or the model does not fit)."""
    words = _known_words(options, install)
    own = read_flags(words)
    # Sizes: the model's context, the budget of a step and the KV cache.
    profile = find_profile(options.model)
    context = _context(options, profile)
    batched = min([GPU_BATCHED_TOKENS, *(gpu.memory.batched_tokens for gpu in gpus)])
    batched = max(batched if gpus else CPU_BATCHED_TOKENS, options.max_num_seqs or 0)
    kv_memory = options.kv_cache_memory_bytes or (None if gpus else CPU_KV_MEMORY)
    tokens = None
    if profile.model is not None and kv_memory is None:
        tokens = _kv_tokens(options, profile.model, context, gpus, batched)
    seqs = options.max_num_seqs or sequences(tokens)
    # Facts that follow from the flags after the dashes.
    has_class = install.has_class and not install.lacks(CLASS_FLAG)
    if CLASS_FLAG in own:
        has_class = own[CLASS_FLAG].startswith("forebay.")
    return FleetPlan(
        options=options,
        install=install,
        profile=profile,
        words=words,
        context=context,
        kv_memory=kv_memory,
        kv_tokens=tokens,
        seqs=seqs,
        batched_tokens=batched,
        chunk=_chunk(own.get(CHUNK_FLAG), has_class, profile.chunk if gpus else CPU_CHUNK, context),
        policy=own.get(POLICY_FLAG) or "priority",
        cpu_threads=None if gpus else max(1, len(os.sched_getaffinity(0)) // servers),
        has_class=has_class,
    )


def _known_words(options: FleetOptions, install: VllmInstall) -> tuple[str, ...]:
    """Return the flags given after `--` (InputError: a flag that this vLLM lacks).

    A prefill threshold of 0 is vLLM's default, and is left out where vLLM has no such flag.
    """
    words = tuple(options.vllm_args or ())
    if options.kv_events and install.lacks("--kv-events-config"):
        raise InputError("--kv-events-config: this vLLM has no such flag; give --no-kv-events")
    if install.lacks(CHUNK_FLAG) and read_flags(words).get(CHUNK_FLAG) == "0":
        first = next(n for n, word in enumerate(words) if CHUNK_FLAG in read_flags([word]))
        words = words[:first] + words[first + (1 if "=" in words[first] else 2) :]
    for name in read_flags(words):
        if install.lacks(name):
            raise lacks(name)
    return words


def _context(options: FleetOptions, profile: Profile) -> int | None:
    length, longest = options.max_model_len, profile.context
    if length is not None and longest is not None and length > longest:
        raise InputError(f"--max-model-len {length}: {profile.repository} holds {longest:,} tokens")
    return longest if length is None else length


def _kv_tokens(
    options: FleetOptions, model: str, context: int | None, gpus: Sequence[Gpu], batched: int
) -> int:
    """Return the tokens of the KV cache on the smallest GPU (InputError: the model does not fit).

    The simulated engine has the same cache. Of its GPU, only the memory counts here.
    """
    smallest = min(gpus, key=lambda gpu: gpu.total_gib)
    engine = EngineConfig(
        model=model,
        gpu=replace(H200_SXM, memory_gib=smallest.total_gib),
        max_model_len=context,
        max_num_batched_tokens=batched,
        max_num_seqs=options.max_num_seqs or MOST_SEQS,
        gpu_memory_utilization=options.gpu_memory_utilization,
        **options.placement(),
    )
    return engine.kv_budget.pool_tokens(engine.context)


def sequences(kv_tokens: int | None) -> int:
    """Return --max-num-seqs: the power of two below the number of chats that fit the KV cache."""
    if kv_tokens is None:
        return USUAL_SEQS
    power = 1 << max(0, (kv_tokens // CHAT_TOKENS).bit_length() - 1)
    return min(MOST_SEQS, max(LEAST_SEQS, power))


def _chunk(text: str | None, has_class: bool, usual: int, context: int | None) -> int:
    """Return the prefill threshold: as given after `--`, else at most the context.

    The scheduler class needs none. The proxy's configuration contains it too.
    """
    if text is None:
        return 0 if has_class else min(usual, context or usual)
    if not text.isascii() or not text.isdecimal():
        raise InputError(f"{CHUNK_FLAG} {text}: give tokens, such as {usual}; 0: no limit")
    if context is not None and int(text) > context:
        raise InputError(f"{CHUNK_FLAG} {text}: a request holds {context:,} tokens at most")
    return int(text)
