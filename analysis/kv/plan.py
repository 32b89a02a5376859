"""Turn the options of `forebay kv` into a memory budget. Errors name values that would fit."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from forebay.replay.engine.flags import PlacementFlags, flag_of
from forebay.replay.engine.hardware.find import find_model
from forebay.replay.engine.hardware.gpu_memory import GpuMemory, find_gpu_memory
from forebay.replay.engine.hardware.hf_config import read_shape
from forebay.replay.engine.hardware.kv_layout import KV_VALUE_BYTES, ModelShape
from forebay.replay.engine.hardware.memory import (
    MemoryBudget,
    MemoryOptions,
    adapters_of,
    memory_budget,
)
from forebay.replay.engine.hardware.specs import GIB
from forebay.replay.engine.placement import check_kv_dtype, check_parallel, served_model
from forebay.replay.engine.vllm_versions import NEWEST
from forebay.traces.ground.errors import InputError

USUAL_LENGTHS = (8192, 32_768, 131_072)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices(PlacementFlags):
    """The engine flags (InputError: a value that cannot work)."""

    gpu_memory_utilization: Annotated[
        float,
        typer.Option(show_default=False, help="Share of GPU memory that vLLM uses; default: 0.9."),
    ] = 0.9
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Token budget of a step; default: vLLM's for the GPU."),
    ] = None
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Requests in a step; default: vLLM's for the GPU.")
    ] = None
    block_size: Annotated[
        int, typer.Option(min=1, show_default=False, help="Tokens of a KV block; default: 16.")
    ] = 16
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest context, tokens; default: the model's.")
    ] = None
    draft_layers: Annotated[
        int,
        typer.Option(min=0, show_default=False, help="KV layers of a draft head (EAGLE: 1)."),
    ] = 0
    non_torch_gib: Annotated[
        float | None, typer.Option(help="GiB allocated outside torch, if known.")
    ] = None
    cuda_graph_gib: Annotated[
        float,
        typer.Option(show_default=False, help="GiB that vLLM reserves for CUDA graphs."),
    ] = 0.0
    vllm_version: Annotated[
        str,
        typer.Option(
            show_default=False,
            help="vLLM version whose rules hold; default: the log's, or 0.11 if a log names none; "
            f"without a log {NEWEST}.",
        ),
    ] = NEWEST

    def __post_init__(self) -> None:
        PlacementFlags.__post_init__(self)
        check_kv_dtype(self.kv_cache_dtype)
        for name in ("non_torch_gib", "cuda_graph_gib"):
            gib = getattr(self, name)
            if gib is not None and not 0 <= gib < inf:
                raise InputError(f"{flag_of(name)} {gib}: give GiB, 0 or more")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InputError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization}: give a share in (0, 1]"
            )

    @property
    def steps_in_flight(self) -> int:
        """Return the steps whose tokens sliding layers keep, with asynchronous scheduling."""
        return 2 if _minor(self.vllm_version) >= 26 else 1


@dataclass(frozen=True, slots=True)
class Plan:
    """A model on a GPU with its options, and the resulting memory budget."""

    shape: ModelShape
    gpu: GpuMemory
    options: MemoryOptions
    max_model_len: int
    budget: MemoryBudget


def _minor(version: str) -> int:
    """Return the minor version of vLLM 0.x. Raises InputError."""
    match = re.match(r"v?0\.(\d+)", version)
    if not match:
        raise InputError(f"--vllm-version {version}: give one such as {NEWEST}")
    return int(match[1])


def choose_model(
    name: str,
    weights_gib: float | None = None,
    *,
    quantization: str | None = None,
    vllm_version: str = NEWEST,
) -> ModelShape:
    """A built-in model by name, or a model from a config.json or its folder."""
    path, stretches_yarn = Path(name), _minor(vllm_version) < 30
    if path.is_file() or (path / "config.json").is_file():
        if quantization is None:
            return read_shape(path, weights_gib, stretches_yarn=stretches_yarn)
    elif path.suffix == ".json":
        raise InputError(f"--model {name}: no such file")
    model = find_model(name, stretches_yarn=stretches_yarn)
    shape = served_model(model, quantization, "auto").shape
    if weights_gib is None:
        return shape
    return replace(shape, weight_bytes=int(weights_gib * GIB), weights_source="as given")


def choose_gpu(name: str | None, memory_gib: float | None) -> GpuMemory:
    """A GPU by name, by its memory, or by both. The memory takes precedence."""
    if memory_gib is not None and not 0 < memory_gib < inf:
        raise InputError(f"--gpu-memory-gib {memory_gib}: give GiB, more than 0")
    if name is None:
        if memory_gib is None:
            raise InputError("--gpu: give one, such as h200, or --gpu-memory-gib")
        return GpuMemory(f"{memory_gib:g} GiB GPU", memory_gib)
    if memory_gib is not None:
        return GpuMemory(name.lower(), memory_gib)
    return find_gpu_memory(name)


def make_plan(shape: ModelShape, gpu: GpuMemory, choices: Choices) -> Plan:
    """Compute the budget. Raises InputError for invalid options, not for lack of memory."""
    # The model must be divisible among its GPUs.
    check_parallel(
        shape.name, choices.tensor_parallel_size, heads=shape.heads,
        kv_heads=shape.heads if shape.latent else shape.kv_heads, option="--tp",
    )  # fmt: skip
    value_bytes = shape.kv_value_bytes
    if choices.kv_cache_dtype != "auto":
        value_bytes = KV_VALUE_BYTES[choices.kv_cache_dtype]
    # vLLM's defaults depend on the GPU, the model's on its configuration.
    options = MemoryOptions(
        block_size=choices.block_size,
        value_bytes=value_bytes,
        tensor_parallel=choices.tensor_parallel_size,
        max_num_batched_tokens=choices.max_num_batched_tokens or gpu.batched_tokens,
        draft_layers=choices.draft_layers,
        steps_in_flight=choices.steps_in_flight,
        gpu_memory_utilization=choices.gpu_memory_utilization,
        max_num_seqs=choices.max_num_seqs or gpu.sequences,
        non_torch_gib=choices.non_torch_gib,
        cuda_graph_gib=choices.cuda_graph_gib,
        adapters=adapters_of(choices.enable_lora, choices.max_loras, choices.max_lora_rank),
    )
    longest = choices.max_model_len or shape.default_len or shape.max_model_len
    if longest > shape.max_model_len:
        raise InputError(
            f"--max-model-len {longest}: {shape.name} takes at most {shape.max_model_len:,} tokens"
        )
    return Plan(shape, gpu, options, longest, memory_budget(shape, gpu.gib, options))


def check_fits(plan: Plan, asked_len: int | None) -> None:
    """Raise InputError if vLLM would not start, with the missing GiB and options that help.

    Args:
        asked_len: --max-model-len if given. One such request must fit.
    """
    budget = plan.budget
    tokens = asked_len or budget.layout.block_size
    if budget.whole_requests(tokens):
        return
    needed = (budget.layout.request_blocks(tokens) + 1) * budget.layout.block_bytes
    missing = (needed - budget.pool) / GIB
    what = f"one request of {tokens:,} tokens" if asked_len else "the model"
    raise InputError(
        f"{plan.shape.name} on {plan.gpu.name}: {what} does not fit by {missing:.1f} GiB "
        f"({plan.options.gpu_memory_utilization:g} of {plan.gpu.gib:.1f} GiB less "
        f"{budget.taken / GIB:.1f} for weights and the rest leaves {budget.pool / GIB:.1f}); "
        f"{_cure(plan, asked_len)}"
    )


def _cure(plan: Plan, asked_len: int | None) -> str:
    tokens = asked_len or min(USUAL_LENGTHS[0], plan.max_model_len)  # room for a useful request
    cures = []
    share = plan.budget.least_utilization(tokens)
    if share <= 0.95:  # vLLM's own advice; above it, driver and other processes lack memory
        cures.append(f"--gpu-memory-utilization {share:g}")
    if asked_len and (longest := plan.budget.longest(asked_len)):
        cures.append(f"--max-model-len {longest}")
    if plan.options.value_bytes > 1 and _fits(plan, tokens, replace(plan.options, value_bytes=1)):
        cures.append("--kv-cache-dtype fp8")
    for tp in (2, 4, 8, 16):
        more = tp > plan.options.tensor_parallel and plan.shape.heads % tp == 0
        if more and _fits(plan, tokens, replace(plan.options, tensor_parallel=tp)):
            cures.append(f"--tp {tp}")
            break
    return (
        f"try {' or '.join(cures)}" if cures else "use a smaller or quantised model, or more GPUs"
    )


def _fits(plan: Plan, tokens: int, options: MemoryOptions) -> bool:
    budget = memory_budget(plan.shape, plan.gpu.gib, options)
    return budget.whole_requests(tokens) > 0


def parse_lengths(text: str | None, longest: int) -> Sequence[int]:
    """Parse `8192,32768`. The default is USUAL_LENGTHS up to `longest`."""
    if text is None:
        return [n for n in USUAL_LENGTHS if n <= longest] or [longest]
    lengths = []
    for word in text.split(","):
        if not word.strip().isdecimal() or not int(word):
            raise InputError(f"--lengths {text}: give tokens, such as 8192,32768,131072")
        lengths.append(int(word))
    return lengths
