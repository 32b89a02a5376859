"""Compute the least FLOPs, bytes and seconds of a step from a GPU's data sheet.

Nothing is fitted: matrix products, attention, and bytes that must be read at least once. The result
rejects measurements that the GPU cannot have made, and shows the bottleneck of a step.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from forebay.replay.engine.hardware.gpu_sheet import product_flops
from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.replay.engine.timing.step_time import StepWork, window_pairs


@dataclass(frozen=True, slots=True)
class Least:
    """Least FLOPs and bytes of some steps, and the seconds of each at the data sheet's rates."""

    flops: float
    bytes: float
    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s)


def least(model: ModelSpec, gpu: GpuSpec, works: Iterable[StepWork]) -> Least:
    """Return the floor of `works`, steps that run one after the other.

    FLOPs: 2 for each weight and token, and the FLOPs of each query-key pair. Bytes: the weights of
    every layer once in a step (only of experts that the tokens reach), and keys and values of
    earlier tokens once. Tensor parallelism: of one GPU, without its links.
    """
    head = model.vocab * model.hidden
    flops = moved = compute_s = memory_s = 0.0
    for work in works:
        step_flops, step_bytes = 2.0 * head * (work.sampled + work.drafted), 0.0
        step_compute_s = step_flops / gpu.peak_flops
        # Matrix products: the weights of an expert are read only if a token reaches it.
        for group in model.layer_groups:
            for product in group.products:
                added_flops = 2.0 * group.layers * product.weights * product.chosen * work.tokens
                step_flops += added_flops
                step_compute_s += added_flops / product_flops(gpu, model.weights, product.bits)
                step_bytes += (
                    group.layers * product.bits / 8 * product.weights * product.touched(work.tokens)
                )
        # Attention, the weights of the head and the cache.
        attention = _attention_flops(model, work)
        step_flops += attention
        step_compute_s += attention / gpu.peak_flops
        step_bytes += model.bytes_per_value * head if work.sampled else 0
        step_bytes += _cache_bytes(model, work)
        flops += step_flops
        moved += step_bytes
        compute_s += step_compute_s
        memory_s += step_bytes / gpu.bandwidth
    return Least(flops, moved, compute_s, memory_s)


def _attention_flops(model: ModelSpec, work: StepWork) -> float:
    """Return the FLOPs of attention. A decoding query is at least a pair of a prefill."""
    pairs = sum(count * (offset + 0.5 * count) for count, offset in work.chunks)
    flops = model.full_layers * model.pair_flops * (pairs + work.decode_context)
    flops += model.index_pair_flops * (pairs + work.decode_context)
    if model.near_layers:
        window = model.attended_window
        near = sum(window_pairs(count, offset, window) for count, offset in work.chunks)
        flops += model.near_layers * model.near_pair_flops * (near + work.window_context)
    return float(flops)


def _cache_bytes(model: ModelSpec, work: StepWork) -> float:
    """Return the bytes of keys and values of earlier tokens."""
    context = work.decode_context + sum(offset for _, offset in work.chunks)
    size = float((model.full_layers * model.row_bytes + model.index_row_bytes) * context)
    size += 2 * model.state_bytes * work.sequences
    if model.near_layers:
        window = model.attended_window
        near = work.window_context + sum(min(offset, window) for _, offset in work.chunks)
        size += model.near_layers * model.near_row_bytes * near
    return size


OVERHEAD_SHARE = 0.4
"""If the roof is below this share of a time, the time is bound by overhead."""


def bound_by(floor: Least, seconds: float) -> str:
    """Return the bottleneck of `seconds`: compute, memory or overhead."""
    if floor.seconds < OVERHEAD_SHARE * seconds:
        return "overhead"
    return "compute" if floor.compute_s >= floor.memory_s else "memory"
