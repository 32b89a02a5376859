"""Compute the least FLOPs, bytes and seconds of a step from a GPU's data sheet.

Nothing is fitted: matrix products, attention, and bytes that must be read at least once. The result
rejects measurements that the GPU cannot have made, and shows the bottleneck of a step.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.replay.engine.timing.step_time import StepWork


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

    FLOPs: 2 for each weight and token, 4*layers*heads*head_dim for each query-key pair. Bytes: the
    weights of every layer once in a step, keys and values of earlier tokens once.
    """
    weights = model.layers * sum(outputs * inputs for outputs, inputs in model.linear_shapes)
    head = model.vocab * model.hidden
    pair = 4 * model.layers * model.heads * model.head_dim
    flops = moved = compute_s = memory_s = 0.0
    for work in works:
        step_flops = 2.0 * weights * work.tokens + 2.0 * head * work.sampled
        pairs = sum(count * (offset + 0.5 * count) for count, offset in work.chunks)
        step_flops += pair * (pairs + work.decode_context)
        values = weights + (head if work.sampled else 0)
        context = work.decode_context + sum(offset for _, offset in work.chunks)
        step_bytes = float(model.bytes_per_value * values + model.kv_bytes_per_token * context)
        flops += step_flops
        moved += step_bytes
        compute_s += step_flops / gpu.peak_flops
        memory_s += step_bytes / gpu.bandwidth
    return Least(flops, moved, compute_s, memory_s)


OVERHEAD_SHARE = 0.4
"""If the roof is below this share of a time, the time is bound by overhead."""


def bound_by(floor: Least, seconds: float) -> str:
    """Return the bottleneck of `seconds`: compute, memory or overhead."""
    if floor.seconds < OVERHEAD_SHARE * seconds:
        return "overhead"
    return "compute" if floor.compute_s >= floor.memory_s else "memory"
