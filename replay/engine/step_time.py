"""How long one engine step takes on the GPU: a roofline with named constants.

    step = t_cpu + t_seq*n + L*t_layer
           + L * sum over {qkv, o, gate_up, down} of gemm(T)  + lm_head gemm(sampled)
           + prefill attention(sum(c*ctx + c^2/2))            + decode attention(sum ctx)

Every term needs aggregates only, so a step costs the same to price whatever it holds. Nothing
here schedules, and nothing was tuned to a run of the simulator.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from forebay.replay.engine.models import H200_NVL, H200_SXM, PHI_3_MINI, GpuSpec, ModelSpec

ROWS_PER_MULTIPROCESSOR = 96
"""Query rows times heads that keep one SM busy in prefill attention: chosen so that chunks of 256
tokens cost what the chunk table of the same study says; no kernel measurement behind it."""
LEAST_OCCUPANCY = 0.5
"""Below this, kernels split the keys between SMs instead (flash-decoding); an assumption."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What share of the data sheet is reached, and what a step costs besides.

    Attributes:
        gemm_compute: share of peak FLOP/s of large matrix products.
        gemm_bandwidth: share of bandwidth of small ones (weights are read once).
        gemm_launch_s: fixed seconds of one matrix product.
        roofline_power: how sharply a matrix product turns from memory to compute bound.
        prefill_compute: share of peak FLOP/s of prefill attention over a long context.
        prefill_half_tokens: context at which prefill attention reaches half of that.
        decode_bandwidth: share of bandwidth of decode attention.
        step_s: scheduling, input preparation, sampling and launches of one step, seconds.
        sequence_s: the same for each sequence in it.
        layer_s: kernels of a layer that are neither matrix products nor proportional to work.
        request_s: HTTP and tokenisation, once a request, before the scheduler sees it.
        source: where the numbers come from.
    """

    gemm_compute: float
    gemm_bandwidth: float
    gemm_launch_s: float
    roofline_power: float
    prefill_compute: float
    prefill_half_tokens: float
    decode_bandwidth: float
    step_s: float
    sequence_s: float
    layer_s: float
    request_s: float
    source: str


# Three rows of the published Phi-3-mini-128k table on H200 NVL (1,024, 32,768 and 128,000 tokens)
# give gemm_compute, prefill_compute and request_s; its decode line (9.37 ms a token at batch 1)
# gives step_s. The rows 4,096, 65,536 and the 120,000-token stall were not used.
_PHI_ON_NVL = Calibration(
    gemm_compute=0.61632,
    gemm_bandwidth=0.87,
    gemm_launch_s=4.2e-6,
    roofline_power=3.1,
    prefill_compute=0.65196,
    prefill_half_tokens=796.0,
    decode_bandwidth=0.88,
    step_s=6.43e-3,
    sequence_s=10e-6,
    layer_s=15.7e-6,
    request_s=8.26e-3,
    source="fitted to the published Phi-3-mini-128k TTFT and decode rows on H200 NVL",
)

# Kernel tables of H200 SXM (bf16): GEMM 0.70-0.82 of peak and 0.85-0.88 of bandwidth, 4.2 us a
# launch, power 3.1; prefill attention 0.717 at head size 128 with half speed at 796 tokens;
# decode attention 0.88 of bandwidth and 9.7 us a layer. The low end of the GEMM range, because
# end-to-end runs reach less than kernels alone. layer_s adds 6 us for the small kernels
# (assumed). step_s, sequence_s: middle of 1.0-1.5 ms and 4-15 us, current vLLM with CUDA graphs.
# request_s: fit of Llama-3.1-70B on H200 SXM.
_KERNEL_TABLE = Calibration(
    gemm_compute=0.70,
    gemm_bandwidth=0.87,
    gemm_launch_s=4.2e-6,
    roofline_power=3.1,
    prefill_compute=0.717,
    prefill_half_tokens=796.0,
    decode_bandwidth=0.88,
    step_s=1.25e-3,
    sequence_s=10e-6,
    layer_s=15.7e-6,
    request_s=17.6e-3,
    source="kernel tables of H200 SXM; not checked against a served request",
)

# On NVL the shares of peak that Phi-3-mini reached there are used; overheads as above.
_KERNEL_TABLE_NVL = replace(
    _KERNEL_TABLE,
    gemm_compute=_PHI_ON_NVL.gemm_compute,
    prefill_compute=_PHI_ON_NVL.prefill_compute,
    source="shares of peak from Phi-3-mini on H200 NVL, overheads from H200 SXM kernel tables",
)

_CALIBRATIONS = {
    (PHI_3_MINI.name, H200_NVL.name): _PHI_ON_NVL,
    (PHI_3_MINI.name, H200_SXM.name): replace(
        _PHI_ON_NVL, source="shares reached on H200 NVL carried over to SXM; not measured there"
    ),
}
_DEFAULTS = {H200_NVL.name: _KERNEL_TABLE_NVL, H200_SXM.name: _KERNEL_TABLE}


def calibration_of(model: ModelSpec, gpu: GpuSpec) -> Calibration:
    """The constants for one model on one GPU; kernel-table defaults where nothing is fitted."""
    return _CALIBRATIONS.get((model.name, gpu.name)) or _DEFAULTS.get(gpu.name, _KERNEL_TABLE)


@dataclass(slots=True)
class StepWork:
    """What one step computes, in sums.

    Attributes:
        tokens: all scheduled tokens, prefill and decode.
        sequences: requests in the step.
        sampled: requests that produce a token.
        prefill_tokens: tokens of chunks longer than one token.
        prefill_chunks: how many such chunks.
        prefill_pairs: sum of c*ctx + c^2/2 over them: query-key pairs under the causal mask.
        prefill_context: sum of ctx + c over them.
        decode_context: sum of the context read by the others.
    """

    tokens: int = 0
    sequences: int = 0
    sampled: int = 0
    prefill_tokens: int = 0
    prefill_chunks: int = 0
    prefill_pairs: float = 0.0
    prefill_context: int = 0
    decode_context: int = 0


class StepTimeModel:
    """Seconds of one step of `model` on `gpu`."""

    def __init__(
        self, model: ModelSpec, gpu: GpuSpec, calibration: Calibration | None = None
    ) -> None:
        c = calibration or calibration_of(model, gpu)
        self.calibration = c
        self.request_s = c.request_s
        self._layer_gemms = lru_cache(4096)(_layer_gemms(model, gpu, c))
        self._head_gemm = lru_cache(4096)(_gemm(model.vocab, model.hidden, model, gpu, c))
        self._pair_s = (
            4 * model.layers * model.heads * model.head_dim / (gpu.peak_flops * c.prefill_compute)
        )
        self._half_tokens = c.prefill_half_tokens
        self._full_rows = ROWS_PER_MULTIPROCESSOR * gpu.multiprocessors / model.heads
        self._context_s = model.kv_bytes_per_token / (gpu.bandwidth * c.decode_bandwidth)
        self._fixed_s = c.step_s + model.layers * c.layer_s
        self._sequence_s = c.sequence_s

    def step_s(self, work: StepWork) -> float:
        """Seconds the step takes."""
        seconds = (
            self._fixed_s
            + self._sequence_s * work.sequences
            + self._layer_gemms(work.tokens)
            + self._context_s * work.decode_context
        )
        if work.sampled:
            seconds += self._head_gemm(work.sampled)
        if work.prefill_chunks:
            seconds += self._prefill_attention_s(work)
        return seconds

    def decode_terms(self, sequences: int) -> tuple[float, float]:
        """A step in which `sequences` requests decode and nobody else computes anything: its
        seconds without any context, and those that each token of context adds."""
        work = StepWork(tokens=sequences, sequences=sequences, sampled=sequences)
        return self.step_s(work), self._context_s

    def _prefill_attention_s(self, work: StepWork) -> float:
        context = work.prefill_context / work.prefill_chunks
        ramp = context / (context + self._half_tokens)
        occupancy = min(1.0, max(LEAST_OCCUPANCY, work.prefill_tokens / self._full_rows))
        return max(
            self._pair_s * work.prefill_pairs / (ramp * occupancy),
            self._context_s * work.prefill_context,  # the keys and values are read at least once
        )


def _gemm(
    outputs: int, inputs: int, model: ModelSpec, gpu: GpuSpec, c: Calibration
) -> Callable[[int], float]:
    """Seconds of one (rows x inputs) @ (inputs x outputs) product as a function of the rows."""
    width, power = model.bytes_per_value, c.roofline_power
    per_row_compute = 2 * outputs * inputs / (gpu.peak_flops * c.gemm_compute)
    weights = width * outputs * inputs / (gpu.bandwidth * c.gemm_bandwidth)
    per_row_memory = width * (outputs + inputs) / (gpu.bandwidth * c.gemm_bandwidth)

    def seconds(rows: int) -> float:
        compute, memory = per_row_compute * rows, weights + per_row_memory * rows
        return float((compute**power + memory**power) ** (1 / power)) + c.gemm_launch_s

    return seconds


def _layer_gemms(model: ModelSpec, gpu: GpuSpec, c: Calibration) -> Callable[[int], float]:
    products = [_gemm(outputs, inputs, model, gpu, c) for outputs, inputs in model.linear_shapes]

    def seconds(rows: int) -> float:
        return model.layers * sum(product(rows) for product in products)

    return seconds
