"""Compute how long one engine step takes on the GPU: a roofline with fitted constants.

    step = t_cpu + t_seq*n + L*t_layer
           + L * sum over {qkv, o, gate_up, down} of gemm(T)  + lm_head gemm(sampled)
           + prefill attention(sum(c*ctx + c^2/2))            + decode attention(sum ctx)

Every term needs only sums over the step, so the computation costs the same for every step. Nothing
was tuned to a run of the simulator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import fsum

from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.replay.engine.step_constants import Calibration, calibration_of

ROWS_PER_MULTIPROCESSOR = 96
"""Query rows times heads that keep one SM busy in prefill attention. Chosen so that chunks of 256
tokens cost as much as in a published table of chunk sizes; there is no kernel measurement."""
LEAST_OCCUPANCY = 0.5
"""Below this share, kernels split the keys between SMs (flash-decoding); an assumption."""


@dataclass(slots=True)
class StepWork:
    """The work of one step, in sums.

    Attributes:
        tokens: all scheduled tokens, prefill and decode.
        sequences: requests in the step.
        sampled: requests that produce a token.
        prefill_tokens: tokens of prefill chunks: chunks longer than one token.
        prefill_chunks: number of prefill chunks.
        prefill_pairs: sum of c*ctx + c^2/2 over prefill chunks: query-key pairs under the causal
            mask.
        prefill_context: sum of ctx + c over prefill chunks.
        decode_context: sum of the context read by the other requests.
    """

    tokens: int = 0
    sequences: int = 0
    sampled: int = 0
    prefill_tokens: int = 0
    prefill_chunks: int = 0
    prefill_pairs: float = 0.0
    prefill_context: int = 0
    decode_context: int = 0


@lru_cache(64)
def step_time_model(model: ModelSpec, gpu: GpuSpec, constants: Calibration) -> "StepTimeModel":
    """Return one model for all engines of a kind, so that they share its computed results."""
    return StepTimeModel(model, gpu, constants)


class StepTimeModel:
    """Computes the seconds of one step of `model` on `gpu`."""

    def __init__(
        self, model: ModelSpec, gpu: GpuSpec, calibration: Calibration | None = None
    ) -> None:
        c = calibration or calibration_of(model, gpu)
        self.calibration = c
        self.request_s = c.request_s
        self._layer_gemms = _layer_gemms(model, gpu, c)
        self._head_gemm = _gemm(model.vocab, model.hidden, model, gpu, c)
        # Computed results by number of rows: the tokens of a step, and the sampled ones.
        self._layers_s: dict[int, float] = {}
        self._head_s: dict[int, float] = {}
        self._pair_s = (
            4 * model.layers * model.heads * model.head_dim / (gpu.peak_flops * c.prefill_compute)
        )
        self._half_tokens = c.prefill_half_tokens
        self._full_rows = ROWS_PER_MULTIPROCESSOR * gpu.multiprocessors / model.heads
        self._context_s = model.kv_bytes_per_token / (gpu.bandwidth * c.decode_bandwidth)
        self._fixed_s = c.step_s + model.layers * c.layer_s
        self._sequence_s = c.sequence_s

    def step_s(self, work: StepWork) -> float:
        """Return the seconds that the step takes."""
        rows = work.tokens
        layers_s = self._layers_s.get(rows)
        if layers_s is None:
            layers_s = self._layers_s[rows] = self._layer_gemms(rows)
        seconds = (
            self._fixed_s
            + self._sequence_s * work.sequences
            + layers_s
            + self._context_s * work.decode_context
        )
        rows = work.sampled
        if rows:
            head_s = self._head_s.get(rows)
            if head_s is None:
                head_s = self._head_s[rows] = self._head_gemm(rows)
            seconds += head_s
        if work.prefill_chunks:
            seconds += self._prefill_attention_s(work)
        return seconds

    def decode_terms(self, sequences: int) -> tuple[float, float]:
        """Return the seconds of a step of `sequences` decodes and nothing else, in two parts.

        The first is without any context, the second is added by each token of context.
        """
        work = StepWork(tokens=sequences, sequences=sequences, sampled=sequences)
        return self.step_s(work), self._context_s

    def _prefill_attention_s(self, work: StepWork) -> float:
        context = work.prefill_context / work.prefill_chunks
        ramp = context / (context + self._half_tokens)
        occupancy = min(1.0, max(LEAST_OCCUPANCY, work.prefill_tokens / self._full_rows))
        return max(
            self._pair_s * work.prefill_pairs / (ramp * occupancy),
            self._context_s * work.prefill_context,  # keys and values are read at least once
        )


def _gemm(
    outputs: int, inputs: int, model: ModelSpec, gpu: GpuSpec, c: Calibration
) -> Callable[[int], float]:
    """Return the seconds of a (rows x inputs) @ (inputs x outputs) product, by rows."""
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
        return model.layers * fsum(product(rows) for product in products)

    return seconds
