"""How a model is placed on GPUs: tensor parallelism, precision of weights and KV cache.

Each function takes a whole model and returns what one GPU computes, or says in one line why vLLM
would not start: the option, its value and the remedy.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from forebay.replay.engine.hardware.gpu_sheet import features_of
from forebay.replay.engine.hardware.kv_layout import KV_VALUE_BYTES, KvLayout
from forebay.replay.engine.hardware.layers import PLAIN, Heads, Mixture, Recurrent, WeightFormat
from forebay.replay.engine.hardware.memory import MemoryBudget
from forebay.replay.engine.hardware.specs import GIB, GpuFeatures, GpuSpec, ModelSpec
from forebay.replay.engine.vllm_versions import NEWEST, VllmRelease
from forebay.traces.ground.errors import InputError

TP = "--tensor-parallel-size"
Part = TypeVar("Part", Heads | None, Mixture | None, Recurrent | None)
_GROUP = 128
"""Weights that share a scale in most AWQ and GPTQ checkpoints."""
_INT4_BITS = 4 + (16 + 4) / _GROUP
QUANTIZATIONS = {
    "fp8": WeightFormat("fp8", 8, 8, 8, "fp8"),
    "awq": WeightFormat("int4", _INT4_BITS, _INT4_BITS, _INT4_BITS),
    "gptq": WeightFormat("int4", _INT4_BITS, _INT4_BITS, _INT4_BITS),
}
"""--quantization of a 16-bit model: vLLM makes FP8 from it, AWQ and GPTQ are other checkpoints."""


def check_kv_dtype(name: str) -> None:
    """Raise InputError for a --kv-cache-dtype that is not known."""
    if name not in KV_VALUE_BYTES:
        raise InputError(f"--kv-cache-dtype {name}: give one of {', '.join(KV_VALUE_BYTES)}")


def check_block_size(tokens: int) -> None:
    """Raise InputError unless `vllm serve` takes this --block-size."""
    if tokens not in (8, 16, 32, 64, 128, 256):
        raise InputError(f"--block-size {tokens}: give 8, 16, 32, 64, 128 or 256")


def check_groups(layout: KvLayout, release: VllmRelease, draft: ModelSpec | None) -> None:
    """Raise InputError if groups of layers with their own KV blocks are not simulated here."""
    if layout.one_kind:
        return
    cure = "add --disable-hybrid-kv-cache-manager, with which all layers keep the whole context"
    if layout.has_states:
        cure = f"give --vllm-version {NEWEST}, or a model without recurrent states"
    if not release.keeps_ends:
        raise InputError(
            f"--vllm-version {release.name}: the blocks of layers with a window or a state are "
            f"simulated as in 0.32 and 0.33; {cure}"
        )
    if draft is not None:
        if layout.has_states:
            cure = "leave it out"
        raise InputError(
            "--speculative-config: a draft's layers beside layers with a window or a state are not "
            f"simulated; {cure}"
        )


def check_room(budget: MemoryBudget, context: int) -> None:
    """Raise InputError if no request of `context` tokens fits in the KV cache."""
    holds = budget.longest(context)
    if holds == context:
        return
    cure = "lower it, or raise --gpu-memory-utilization or --num-gpu-blocks-override"
    if budget.blocks <= 1:
        cure = "the weights leave no room: more --tensor-parallel-size, or --quantization"
    if budget.adapters:
        cure += ", or fewer adapters: lower --max-loras or --max-lora-rank"
    raise InputError(f"--max-model-len {context}: the KV cache holds {holds} tokens; {cure}")


def check_step(tokens: int, seqs: int, whole: int) -> None:
    """Raise InputError if a step of `tokens` cannot hold a token of each sequence, or a prompt.

    Args:
        whole: tokens of the longest prompt that is computed at once. 0: chunks are.
    """
    if tokens < seqs:
        raise InputError(
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {seqs}: raise the "
            "first or lower the second"
        )
    if tokens < whole:
        raise InputError(
            f"--max-num-batched-tokens {tokens} is less than --max-model-len {whole}: without "
            "chunked prefill a step must hold a whole prompt"
        )


def check_parallel(
    name: str,
    ranks: int,
    *,
    heads: int,
    kv_heads: int,
    widths: Sequence[int] = (),
    block: int = 1,
    option: str = TP,
) -> None:
    """Raise InputError if vLLM cannot divide a model among `ranks` GPUs.

    Args:
        widths: MLP widths, each of which is divided.
        block: weights that share a scale and stay together.
        option: name of the option for the error.
    """
    if ranks < 1:
        raise InputError(f"{option} {ranks}: give 1 or more")
    if heads % ranks:
        raise InputError(
            f"{option} {ranks}: {name} has {heads} attention heads; "
            f"give a divisor: {_divisors(heads)}"
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise InputError(
            f"{option} {ranks}: {name} has {kv_heads} KV heads, which {ranks} GPUs neither share "
            f"nor copy evenly; give a divisor of {kv_heads} or a multiple of it"
        )
    for width in widths:
        if width % (ranks * block):
            what = f" in blocks of {block}" if block > 1 else ""
            fits = [n for n in range(1, ranks) if not width % (n * block) and not heads % n]
            raise InputError(
                f"{option} {ranks}: an MLP of {name} is {width} wide, which {ranks} GPUs "
                f"cannot divide{what}; give {fits[-1] if fits else 1}"
            )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def widths_of(model: ModelSpec) -> list[int]:
    """Return the MLP widths of a model that are not 0."""
    mixture = model.mixture
    routed = () if mixture is None else (mixture.width, mixture.shared_width, mixture.dense)
    return [width for width in (model.ffn, *routed) if width]


def rank_of(model: ModelSpec, ranks: int) -> ModelSpec:
    """Return the part of a model that one of `ranks` GPUs computes (InputError: no equal parts).

    Heads, MLPs and the vocabulary are divided. With fewer KV heads than GPUs, every GPU has one.
    """
    if ranks == 1:
        return model
    block = model.weights.block or 1
    check_parallel(
        model.name, ranks, heads=model.heads,
        kv_heads=model.heads if model.latent else model.kv_heads,
        widths=widths_of(model), block=block,
    )  # fmt: skip
    return replace(
        model,
        heads=model.heads // ranks,
        kv_heads=-(-model.kv_heads // ranks),
        ffn=model.ffn // ranks,
        vocab=-(-model.vocab // ranks),
        mixture=_share(model.mixture, ranks, ("width", "shared_width", "dense")),
        near=_share(model.near, ranks, ("heads",), ("kv_heads",)),
        state=_share(model.state, ranks, ("inputs", "inner", "channels", "numbers"), ("groups",)),
        ranks=ranks,
    )


def _share(part: Part, ranks: int, divided: Sequence[str], rounded_up: Sequence[str] = ()) -> Part:
    """Return a part of a model, if it has the part, with these sizes divided among GPUs."""
    if part is None:
        return None
    sizes = {name: getattr(part, name) // ranks for name in divided}
    sizes |= {name: -(-getattr(part, name) // ranks) for name in rounded_up}
    return replace(part, **sizes)


def served_model(model: ModelSpec, quantization: str | None, kv_cache_dtype: str) -> ModelSpec:
    """Return a model with --quantization and --kv-cache-dtype applied (InputError: wrong value)."""
    check_kv_dtype(kv_cache_dtype)
    if quantization is not None:
        model = _quantised(model, quantization)
    if kv_cache_dtype == "auto":
        return model
    return replace(model, kv_value_bytes=KV_VALUE_BYTES[kv_cache_dtype])


def _quantised(model: ModelSpec, name: str) -> ModelSpec:
    """Return the model as vLLM stores it with `--quantization` and this name."""
    stored = QUANTIZATIONS.get(name)
    if stored is None:
        raise InputError(
            f"--quantization {name}: give {', '.join(QUANTIZATIONS)}, or leave it out: a quantised "
            "checkpoint says so itself"
        )
    if model.weights != PLAIN:
        if model.weights.name == stored.name:
            return model
        raise InputError(
            f"--quantization {name}: {model.name} is a checkpoint in {model.weights.name}; leave "
            "the option out"
        )
    # Matrices of 16 bits shrink. The routers of a mixture of experts do not.
    matrices = sum(
        group.layers
        * sum(product.experts * product.weights for product in group.products if product.bits == 16)
        for group in model.layer_groups
    )
    routers = 0
    if model.mixture is not None:
        sparse = (model.mlps or model.layers) - model.mixture.dense_layers
        routers = sparse * model.mixture.experts * model.hidden
    saved = (matrices - routers) * (16 - stored.linear_bits) / 8
    return replace(model, weights=stored, served_bytes=round(model.weight_bytes - saved))


def check_precision(model: ModelSpec, gpu: GpuSpec, kv_cache_dtype: str = "auto") -> None:
    """Raise InputError if the GPU cannot compute the model's weights or KV cache.

    FP8 and FP4 weights are unpacked to 16 bits on a GPU without such units. Only NVIDIA's GPUs
    have kernels that unpack FP4.
    """
    features, stored = features_of(gpu), model.weights
    needs_fp8 = stored.arithmetic == "fp8" or (
        model.kv_value_bytes == 1 and kv_cache_dtype != "fp8_e5m2"
    )
    if needs_fp8 and features.fp8_flops is None:
        raise _unstated(gpu, "fp8_flops", "the FP8 FLOP/s of its data sheet, or 0 for none")
    if stored.arithmetic == "fp4" and features.fp4_flops is None:
        raise _unstated(gpu, "fp4_flops", "the FP4 FLOP/s of its data sheet, or 0 for none")
    if model.kv_value_bytes == 1 and not features.fp8_flops and kv_cache_dtype != "fp8_e5m2":
        raise InputError(
            f"--kv-cache-dtype {kv_cache_dtype}: {gpu.name} has no FP8 units for a cache in e4m3; "
            "give bfloat16 or fp8_e5m2, or another --gpu"
        )
    if stored.arithmetic == "fp4" and gpu.name == "mi300x":
        raise InputError(
            f"--gpu {gpu.name}: vLLM has no kernels for {stored.name} weights on it; take a "
            "checkpoint in FP8 or 16 bits"
        )


def check_links(gpu: GpuSpec, ranks: int) -> None:
    """Raise InputError if nothing is known of the links between several GPUs."""
    features = features_of(gpu)
    if ranks > 1 and features.link_bandwidth is None:
        raise _unstated(gpu, "link_bandwidth", "bytes/s in one direction, such as 450e9")
    if ranks > 1 and features.link_latency_s is None:
        raise _unstated(gpu, "link_latency_s", "seconds of a small all-reduce, such as 5e-6")


def host_limits(gib: float, gpu: GpuSpec, ranks: int, layout: KvLayout) -> dict[str, float]:
    """Return the KV blocks that the host's memory holds, and the seconds to load one.

    Args:
        ranks: GPUs that each have their own part of a block.

    Raises:
        InputError: copies in the host's memory cannot be simulated.
    """
    if not 0 < gib < math.inf:
        raise InputError(f"--kv-offloading-size {gib}: give GiB, more than 0")
    rate = features_of(gpu).host_bandwidth
    if rate is None:
        raise _unstated(gpu, "host_bandwidth", "bytes/s from the host's memory, such as 63e9")
    if not layout.one_kind:
        raise InputError(
            "--kv-offloading-size: only models whose layers all keep the whole context are "
            "simulated with it; leave it out"
        )
    blocks = int(gib * GIB / (layout.block_bytes * ranks))
    if not blocks:
        least = layout.block_bytes * ranks / GIB
        raise InputError(f"--kv-offloading-size {gib}: a block needs {least:.3g} GiB; give more")
    return {"host_blocks": blocks, "host_block_s": layout.block_bytes / rate}


def _unstated(gpu: GpuSpec, key: str, what: str) -> InputError:
    return InputError(f"--gpu {gpu.name}: its file does not state {key}; add {what}")


def unmeasured(model: ModelSpec, gpu: GpuSpec) -> list[str]:
    """Name the parts of a step whose time was measured on no GPU here.

    `model` is the part of one GPU.
    """
    features: GpuFeatures = features_of(gpu)
    parts = []
    if model.ranks > 1:
        parts.append("all-reduce from the data sheet's links")
    stored = model.weights
    if stored != PLAIN:
        units = {"fp8": features.fp8_flops, "fp4": features.fp4_flops}
        if stored.arithmetic != "bf16" and not units[stored.arithmetic]:
            parts.append(f"{stored.name} weights, multiplied in 16 bits")
        else:
            parts.append(f"{stored.name} weights")
    if model.kv_value_bytes == 1:
        parts.append("fp8 KV cache")
    if model.mixture is not None:
        parts.append("experts, chosen as in NVIDIA's op tables")
    if model.latent is not None:
        parts.append("latent attention (MLA)")
    if model.sliding_layers:
        parts.append("sliding windows")
    if model.index is not None:
        parts.append("sparse attention")
    if model.state is not None:
        parts.append("recurrent states")
    return parts
