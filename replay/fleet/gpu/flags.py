"""The flags and environment variables of a server, each with the reason for it.

Nothing here looks at the machine: `Setting` holds the facts that were found.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from forebay.replay.engine.hardware.memory import Adapters
from forebay.replay.fleet.gpu.profiles import Profile
from forebay.traces.errors import InputError

SINCE = {"--max-num-queued-reqs": (0, 29), "--shutdown-timeout": (0, 20)}
"""First vLLM version known to have each flag. 0.11 has the others (read in the wheels of 0.11.2,
0.14.1, 0.17.1, 0.20.2, 0.23.0, 0.26.0, 0.29.0 and 0.32.0)."""
ROPE_PARAMETERS_SINCE = (0, 14)  # before it: rope_scaling, with rope_theta outside of it
POLICY_FLAG = "--scheduling-policy"
CHUNK_FLAG = "--long-prefill-token-threshold"
CLASS_FLAG = "--scheduler-cls"
OPTIONAL = {
    CLASS_FLAG,
    "--enable-prefix-caching",
    "--enable-chunked-prefill",
    "--max-num-batched-tokens",
    CHUNK_FLAG,
    "--max-num-queued-reqs",
    "--enable-prompt-tokens-details",
    "--enable-request-id-headers",
    "--disable-uvicorn-access-log",
    "--shutdown-timeout",
}
"""Flags that a fleet can do without."""
YARN_BASE = 32_768
YARN_THETA = 1_000_000.0  # Qwen2.5's, repeated because an override replaces the whole section


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of `vllm serve`, or one environment variable, and the reason for it."""

    name: str
    value: str | None
    why: str

    @property
    def words(self) -> list[str]:
        return [self.name] if self.value is None else [self.name, self.value]


@dataclass(frozen=True, slots=True)
class Setting:
    """Facts about model, machine and vLLM that the flags follow from.

    Attributes:
        release: vLLM's major and minor version.
        served_name: the model's name for clients.
        context: --max-model-len. None leaves it to the model's config.json.
        seqs, seqs_why: --max-num-seqs and the reason for it.
        batched_tokens: token budget of a step.
        chunk: most tokens of the budget that a document gets. 0: no limit.
        policy: --scheduling-policy: priority or fcfs.
        kv_memory: --kv-cache-memory-bytes. None: the memory that the GPU has left.
        cpu_threads: threads of one server. None on a GPU.
        drain_s: seconds that running answers get after SIGTERM.
        cache_root: VLLM_CACHE_ROOT of all servers. Each has a folder in it.
        loopback: True if the servers listen on this machine only.
        ranks: GPUs of one server, by tensor parallelism.
        quantization, kv_cache_dtype: vLLM's options. None: its defaults.
        adapters: room for adapters. None: without --enable-lora.
        has_class: True if the servers run with Forebay's scheduler class.
    """

    profile: Profile
    release: tuple[int, int]
    served_name: str
    context: int | None
    seqs: int
    seqs_why: str
    batched_tokens: int
    chunk: int
    policy: str
    utilization: float
    kv_memory: int | None
    cpu_threads: int | None
    drain_s: int
    cache_root: str
    loopback: bool
    ranks: int = 1
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    adapters: Adapters | None = None
    has_class: bool = False


def serve_flags(
    s: Setting, available: Collection[str] | None = None
) -> tuple[list[Flag], list[Flag]]:
    """Return the flags that all servers share, and the flags that this vLLM lacks.

    Args:
        available: flags of the installed vLLM. None: the flags of its version count.

    Raises:
        InputError: if vLLM lacks a flag that the fleet needs.
    """
    # All flags, with the reason for each.
    flags = [
        Flag("--served-model-name", s.served_name, "the value of `model` in clients' requests"),
        *_context(s),
        *_placement(s),
        Flag("--enable-prefix-caching", None, "a document is computed once, not on every request"),
        Flag("--enable-chunked-prefill", None, "chats go on during a document's prefill"),
        Flag(
            "--max-num-batched-tokens",
            str(s.batched_tokens),
            "tokens of a step: more make documents faster, and chats beside them slower",
        ),
        *_scheduler(s),
        Flag(
            POLICY_FLAG,
            s.policy,
            "priority: the proxy's order of classes and tenants holds in the server's queue too",
        ),
        Flag("--max-num-seqs", str(s.seqs), s.seqs_why),
        Flag(
            "--max-num-queued-reqs",
            str(2 * s.seqs),
            f"503 beyond it, for requests that bypass the proxy, which sends at most {s.seqs}",
        ),
        *_memory(s),
        Flag(
            "--enable-prompt-tokens-details",
            None,
            "usage has cached_tokens: the proxy learns the cache, replays count prefix hits",
        ),
        Flag("--enable-request-id-headers", None, "one x-request-id in proxy, server and logs"),
        Flag("--disable-uvicorn-access-log", None, "no log line for each /health, every second"),
        Flag(
            "--shutdown-timeout",
            str(s.drain_s),
            "running answers may finish; else SIGTERM ends them with finish_reason abort",
        ),
    ]  # fmt: skip
    if not s.drain_s:
        flags.pop()
    # An old vLLM may lack a flag: leave it out if a fleet can do without it.
    have, lack = [], []
    for flag in flags:
        since = SINCE.get(flag.name, (0, 0))
        if since > s.release:
            why = f"vLLM has it from {_release(since)} on: {flag.why}"
            lack.append(Flag(flag.name, flag.value, why))
        elif available is None or flag.name in available:
            have.append(flag)
        elif flag.name in OPTIONAL:
            why = f"`vllm serve --help` does not list it: {flag.why}"
            lack.append(Flag(flag.name, flag.value, why))
        else:
            raise lacks(flag.name)
    return have, lack


def _scheduler(s: Setting) -> list[Flag]:
    """Return the flags that let short prompts pass."""
    flags = []
    if s.has_class:
        why = "bounds the time of a step, so that chats do not pause behind long prompts"
        flags.append(Flag(CLASS_FLAG, "forebay.proxy.vllm_scheduler.ForebayScheduler", why))
    if s.chunk or not s.has_class:
        why = (
            f"a document gets at most {s.chunk:,} tokens of a step, so that short prompts fit "
            "beside it and no gap between tokens is longer than such a step"
        )
        flags.append(Flag(CHUNK_FLAG, str(s.chunk), why))
    return flags


def lacks(name: str) -> InputError:
    """Make the error for a flag that is needed, and that the installed vLLM does not have."""
    return InputError(
        f"{name}: this vLLM has no such flag (see `vllm serve --help=all`); leave it out, or give "
        "another --vllm"
    )


def _release(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def _context(s: Setting) -> list[Flag]:
    if s.context is None:
        return []
    flags = [Flag("--max-model-len", str(s.context), "most tokens of prompt and answer together")]
    if s.profile.native and s.context > s.profile.native:
        scaling = {
            "rope_type": "yarn",
            "factor": s.context / YARN_BASE,
            "original_max_position_embeddings": YARN_BASE,
        }
        section = "rope_scaling"
        if s.release >= ROPE_PARAMETERS_SINCE:
            section, scaling = "rope_parameters", {**scaling, "rope_theta": YARN_THETA}
        value = json.dumps({section: scaling, "max_position_embeddings": s.context})
        why = f"YaRN: the model's own context is {s.profile.native:,} tokens"
        flags.append(Flag("--hf-overrides", value, why))
    return flags


def _placement(s: Setting) -> list[Flag]:
    flags = []
    if s.ranks > 1:
        why = "GPUs that share each layer of one server"
        flags.append(Flag("--tensor-parallel-size", str(s.ranks), why))
    if s.quantization is not None:
        flags.append(Flag("--quantization", s.quantization, "smaller weights, as given"))
    if s.kv_cache_dtype is not None:
        flags.append(Flag("--kv-cache-dtype", s.kv_cache_dtype, "size of a cached number"))
    if s.adapters is not None:
        flags += [
            Flag("--enable-lora", None, "answers of adapters, beside those of the model"),
            Flag("--max-loras", str(s.adapters.slots), "adapters in one batch"),
            Flag("--max-lora-rank", str(s.adapters.rank), "highest rank of an adapter"),
        ]
    return flags


def _memory(s: Setting) -> list[Flag]:
    if s.kv_memory is not None:
        why = "memory for the KV cache of one server" + (
            "; without it each would take all free memory" if s.cpu_threads else ""
        )
        flags = [Flag("--kv-cache-memory-bytes", str(s.kv_memory), why)]
    else:
        why = "share of GPU memory; the rest is for the driver, CUDA graphs and peaks"
        flags = [Flag("--gpu-memory-utilization", f"{s.utilization:g}", why)]
    if s.cpu_threads is not None:
        flags += [
            Flag("--enforce-eager", None, "no torch.compile: starts in seconds, needs no compiler"),
            Flag(
                "--distributed-executor-backend",
                "uni",
                "the worker runs inside the engine; two processes would spin on two cores",
            ),
        ]
    return flags


def kv_events_flag(publish: str, replay: str) -> Flag:
    """Return one server's --kv-events-config."""
    value = json.dumps(
        {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "topic": "kv-events",
            "endpoint": publish,
            "replay_endpoint": replay,
        }
    )
    return Flag("--kv-events-config", value, "the proxy learns exactly which blocks are cached")


def environment(s: Setting, name: str, gpus: Sequence[int]) -> list[Flag]:
    """Return the environment variables of the server `name` on `gpus`, empty on the CPU."""
    variables = []
    if gpus:
        which = "one server, one GPU" if s.ranks == 1 else f"one server, {s.ranks} GPUs"
        variables += [
            Flag("CUDA_VISIBLE_DEVICES", ",".join(map(str, gpus)), which),
            Flag("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "GPU numbers as nvidia-smi's"),
        ]
    variables.append(
        Flag(
            "VLLM_CACHE_ROOT",
            f"{s.cache_root}/{name}",
            "compiled graphs survive a restart; one folder for each server avoids races",
        )
    )
    if s.loopback:
        variables.append(Flag("VLLM_HOST_IP", "127.0.0.1", "internal ports listen here only"))
    variables.append(Flag("VLLM_NO_USAGE_STATS", "1", "vLLM sends no usage statistics"))
    if s.cpu_threads is not None:
        variables += [
            Flag("VLLM_ENABLE_V1_MULTIPROCESSING", "0", "required by executor backend uni"),
            Flag("OMP_NUM_THREADS", str(s.cpu_threads), "this server's share of the cores"),
        ]
    return variables


def without(words: Sequence[str], name: str) -> tuple[str, ...]:
    """Leave out the flag `name` and its value."""
    rest, is_value = [], False
    for word in words:
        if not is_value and names_in([word]) != {name}:
            rest.append(word)
        is_value = not is_value and names_in([word]) == {name} and "=" not in word
    return tuple(rest)


def value_in(words: Sequence[str], name: str) -> str | None:
    """Return the value of the flag `name` in `words`: empty without a value, None if it is absent.

    The last occurrence counts, as for vLLM.
    """
    last = None
    for word, after in zip(words, [*words, ""][1:], strict=True):
        flag, written, value = word.partition("=")
        if names_in([flag]) == {name}:
            last = value if written else after
    return last


def names_in(words: Sequence[str]) -> set[str]:
    """Return the names of the flags in `words` in the form `--max-num-seqs`."""
    return {
        "--" + word[2:].partition("=")[0].removeprefix("no-").replace("_", "-")
        for word in words
        if word.startswith("--")
    }
