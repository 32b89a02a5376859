"""vLLM's flags as options of commands: how a model is placed on GPUs, how the engine schedules."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from forebay.replay.engine.vllm_versions import NEWEST, RELEASES
from forebay.traces.ground.errors import InputError

NOT_SIMULATED = {
    "data_parallel_size": "ranks of a dense model are servers of their own: leave it out and count "
    "them as servers (--gpus of simulate and tune); ranks that share experts are not simulated",
    "pipeline_parallel_size": "stages are not simulated; leave it out, or give "
    "--tensor-parallel-size",
    "enable_expert_parallel": "experts that are whole on each GPU are not simulated; leave it out: "
    "--tensor-parallel-size divides every expert",
}
"""vLLM's flags that are rejected by name, with the remedy."""


def flag_of(name: str) -> str:
    """Return the flag on a command line: `--max-num-seqs` for `max_num_seqs`."""
    return "--" + name.replace("_", "-")


MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest context, tokens; default: the model's.")
]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option(help="Token budget of a step; default by the GPU's memory.")
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(help="Most requests in a step; default by the GPU's memory.")
]
SchedulerCls = Annotated[
    str | None,
    typer.Option(help="vllm: vLLM's own scheduler class; forebay: Forebay's. Default: vllm."),
]
LongPrefillTokenThreshold = Annotated[
    int, typer.Option(help="Most prefill tokens of one request in a step; 0: no cap.")
]
GpuMemoryUtilization = Annotated[float, typer.Option(help="Share of GPU memory that vLLM uses.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFlags:
    """vLLM's flags that place a model on GPUs.

    `engine`, `simulate`, `size`, `search`, `fleet up` and `kv` share them.
    """

    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size",
            "--tp",
            min=1,
            show_default=False,
            help="GPUs that share each layer of one server; default: 1.",
        ),
    ] = 1
    quantization: Annotated[
        str | None,
        typer.Option(help="fp8, awq or gptq, for a model in 16 bits; default: the checkpoint's."),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            show_default=False, help="auto (16 bits, or the checkpoint's) or fp8; default: auto."
        ),
    ] = "auto"
    enable_lora: Annotated[
        bool,
        typer.Option(
            "--enable-lora",
            help="Take the memory of adapters from the KV cache; their time, and the waits for "
            "--max-loras, are not simulated.",
        ),
    ] = False
    max_loras: Annotated[
        int,
        typer.Option(
            show_default=False, help="Adapters in a batch, all in GPU memory; default: 1."
        ),
    ] = 1
    max_lora_rank: Annotated[
        int, typer.Option(show_default=False, help="Highest rank of an adapter; default: 16.")
    ] = 16

    data_parallel_size: Annotated[
        int | None, typer.Option("--data-parallel-size", "-dp", hidden=True)
    ] = None
    pipeline_parallel_size: Annotated[
        int | None, typer.Option("--pipeline-parallel-size", "-pp", hidden=True)
    ] = None
    enable_expert_parallel: Annotated[
        bool, typer.Option("--enable-expert-parallel", "-ep", hidden=True)
    ] = False

    def __post_init__(self) -> None:
        for name, remedy in NOT_SIMULATED.items():
            value = getattr(self, name)
            if value is True or (value or 1) != 1:
                words = flag_of(name) if value is True else f"{flag_of(name)} {value}"
                raise InputError(f"{words}: {remedy}")
        for name in ("max_loras", "max_lora_rank") if not self.enable_lora else ():
            if name in self.placement():
                raise InputError(
                    f"{flag_of(name)}: acts with --enable-lora only; add it or leave this out"
                )

    def placement(self) -> dict[str, Any]:
        """Return the flags that differ from vLLM's defaults, as arguments of `EngineConfig`."""
        return _changed(self, PlacementFlags)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags(PlacementFlags):
    """The flags above, and vLLM's flags of speculative decoding, windows and the scheduler class.

    `engine`, `simulate`, `size` and `search` share them.
    """

    speculative_config: Annotated[
        str | None,
        typer.Option(
            help="JSON as vLLM's: method (ngram, draft_model, eagle, eagle3 or mtp), "
            "num_speculative_tokens, and the model of a draft_model.",
        ),
    ] = None
    acceptance: Annotated[
        float | None,
        typer.Option(help="Probability that a proposed token is accepted if all before it were."),
    ] = None
    disable_hybrid_kv_cache_manager: Annotated[
        bool,
        typer.Option(
            "--disable-hybrid-kv-cache-manager",
            help="Let layers with a window keep the whole context, too.",
        ),
    ] = False
    scheduler_cls: SchedulerCls = None
    additional_config: Annotated[
        str | None,
        typer.Option(help='JSON; of {"forebay": {"pause": 0.1}} the pause acts, in seconds.'),
    ] = None

    def of_model(self) -> dict[str, Any]:
        """Return the flags that differ from vLLM's defaults, as arguments of `EngineConfig`."""
        return _changed(self, ModelFlags)


def _changed(flags: PlacementFlags, kind: type[PlacementFlags]) -> dict[str, Any]:
    return {
        flag.name: getattr(flags, flag.name)
        for flag in fields(kind)
        if flag.name not in NOT_SIMULATED and getattr(flags, flag.name) != flag.default
    }


def changed_words(engine: Any) -> Iterator[str]:
    """Yield the flags of an `EngineConfig` that differ from vLLM's defaults, with their values."""
    for flag in fields(EngineFlags):
        value = flag.default if flag.name in NOT_SIMULATED else getattr(engine, flag.name)
        if isinstance(value, bool) and value != flag.default:
            yield flag_of(flag.name if value else f"no_{flag.name}")
        elif value != flag.default:
            yield f"{flag_of(flag.name)} {value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags(ModelFlags):
    """The flags above, and vLLM's flags that decide how a server schedules."""

    max_model_len: MaxModelLen = None
    max_num_batched_tokens: MaxNumBatchedTokens = None
    max_num_seqs: MaxNumSeqs = None
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Reuse the KV blocks of equal prefixes.")
    ] = True
    gpu_memory_utilization: GpuMemoryUtilization = 0.9
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.")] = 16
    long_prefill_token_threshold: LongPrefillTokenThreshold = 0
    enable_chunked_prefill: Annotated[
        bool, typer.Option(help="Split the prefill of long prompts over several steps.")
    ] = True
    scheduling_policy: Annotated[str, typer.Option(help="fcfs or priority.")] = "fcfs"
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(help="Number of KV blocks; default: as many as fit the GPU.")
    ] = None
    vllm_version: Annotated[
        str,
        typer.Option(
            help=f"vLLM version whose rules and defaults hold: {', '.join(RELEASES)}. TPOT differs "
            "by 5 to 30 % between them."
        ),
    ] = NEWEST
    kv_offloading_size: Annotated[
        float | None,
        typer.Option(
            help="GiB of the host's memory for copies of KV blocks, for all GPUs of an engine "
            "together; default: none."
        ),
    ] = None
    watermark: Annotated[
        float, typer.Option(help="Share of KV blocks kept free when a request is admitted.")
    ] = 0.0
    scheduler_reserve_full_isl: Annotated[
        bool | None,
        typer.Option(
            "--scheduler-reserve-full-isl/--no-scheduler-reserve-full-isl",
            help="Admit a request when its whole prompt fits, not just the first chunk; default: "
            "yes from 0.20 on.",
        ),
    ] = None
    long_prefill_token_threshold_adaptive: Annotated[
        bool, typer.Option(help="Raise the threshold to a fair share of the token budget.")
    ] = False
    max_num_active_seqs: Annotated[
        int | None, typer.Option(help="Most running requests; default: --max-num-seqs.")
    ] = None
    prefill_schedule_interval: Annotated[
        int,
        typer.Option(
            help="While answers decode, prefill once in this many steps; acts from 0.33 on."
        ),
    ] = 1
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            "--async-scheduling/--no-async-scheduling",
            help="Plan a step while the step before is running; default: yes from 0.20 on.",
        ),
    ] = None
    api_server_count: Annotated[
        int, typer.Option(help="Processes of the API server, each with an event loop.")
    ] = 1
    renderer_num_workers: Annotated[
        int, typer.Option(help="Workers that tokenize, in each of these processes.")
    ] = 1

    def values(self) -> dict[str, Any]:
        """Return all flags and their values, as arguments of `EngineConfig`."""
        return {
            flag.name: getattr(self, flag.name)
            for flag in fields(EngineFlags)
            if flag.name not in NOT_SIMULATED
        }
