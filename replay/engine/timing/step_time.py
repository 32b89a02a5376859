"""Compute how long one engine step takes: a roofline with fitted constants.

    gpu  = L*layer_s + sequence_s*n + L * sum over {qkv, o, gate_up, down} of gemm(T)
           + L * elementwise bytes(T) / bandwidth + lm_head gemm(sampled)
    step = step_s + gpu, or with asynchronous scheduling the larger of step_s and gpu
           + decode attention(sum of contexts) + sum over chunks of prefill attention(chunk)
           but with chunks at least L*launch_s

A step with prefill chunks has no CUDA graph of the whole step. The CPU launches its kernels, and
that takes longer than the GPU's work if the step is small. Nothing was tuned to a run of the
simulator.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import fsum

from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.replay.engine.timing.step_constants import Calibration, calibration_of

LARGEST_GRAPH = 512
"""Tokens of the largest CUDA graph that vLLM captures by default."""


@dataclass(slots=True)
class StepWork:
    """The work of one step.

    Attributes:
        tokens: all scheduled tokens, prefill and decode.
        sequences: requests in the step.
        sampled: requests that produce a token.
        decode_context: context tokens read by requests with one token, summed.
        chunks: length and offset of each prefill chunk, in tokens. A chunk has several tokens.
    """

    tokens: int = 0
    sequences: int = 0
    sampled: int = 0
    decode_context: int = 0
    chunks: list[tuple[int, int]] = field(default_factory=list)


@lru_cache(64)
def step_time_model(
    model: ModelSpec, gpu: GpuSpec, constants: Calibration, async_scheduling: bool = False
) -> "StepTimeModel":
    """Return one model for all engines of a kind, so that they share its computed results."""
    return StepTimeModel(model, gpu, constants, async_scheduling=async_scheduling)


class StepTimeModel:
    """Computes the seconds of one step of `model` on `gpu`.

    Attributes:
        pair_s: seconds of one pair of query and key in prefill attention, in all layers.
    """

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        calibration: Calibration | None = None,
        *,
        async_scheduling: bool = False,
    ) -> None:
        """Prepare the terms.

        Args:
            async_scheduling: the CPU prepares a step while the GPU computes the step before.
        """
        c = calibration or calibration_of(model, gpu)
        self.calibration = c
        self.pair_s = (
            4 * model.layers * model.heads * model.head_dim / (gpu.peak_flops * c.prefill_compute)
        )
        self._async = async_scheduling
        self._layer_gemms = _layer_gemms(model, gpu, c)
        self._head_gemm = _gemm(model.vocab, model.hidden, model, gpu, c)
        # Computed results by number of rows: the tokens of a step, and the sampled ones.
        self._layers_s: dict[int, float] = {}
        self._head_s: dict[int, float] = {}
        self._context_s = model.kv_bytes_per_token / (gpu.bandwidth * c.decode_bandwidth)
        self._power = c.roofline_power
        self._step_s = c.step_s
        self._kernels_s = model.layers * c.layer_s
        self._token_s = model.layers * model.elementwise_bytes / (gpu.bandwidth * c.gemm_bandwidth)
        self._sequence_s = c.sequence_s
        self._graph_launch_s = model.layers * c.graph_launch_s
        self._eager_launch_s = model.layers * c.eager_launch_s

    def step_s(self, work: StepWork) -> float:
        """Return the seconds that the step takes."""
        rows = work.tokens
        layers_s = self._layers_s.get(rows)
        if layers_s is None:
            layers_s = self._layers_s[rows] = self._layer_gemms(rows)
        seconds = (
            self._kernels_s + self._sequence_s * work.sequences + layers_s + self._token_s * rows
        )
        sampled = work.sampled
        if sampled:
            head_s = self._head_s.get(sampled)
            if head_s is None:
                head_s = self._head_s[sampled] = self._head_gemm(sampled)
            seconds += head_s
        # The CPU's part is compared without attention: decode steps stay affine in their context.
        if not self._async:
            seconds += self._step_s
        elif seconds < self._step_s:
            seconds = self._step_s
        seconds += self._context_s * work.decode_context
        if work.chunks:
            for count, offset in work.chunks:
                seconds += self.chunk_attention_s(count, offset)
            launch_s = self._graph_launch_s if rows <= LARGEST_GRAPH else self._eager_launch_s
            if seconds < launch_s:
                seconds = launch_s
        return seconds

    def admit_s(self, prompt_tokens: int) -> float:
        """Return the seconds that the engine stops to take in a request."""
        return self.calibration.admit_s + self.calibration.admit_token_s * prompt_tokens

    def decode_terms(self, sequences: int) -> tuple[float, float]:
        """Return the seconds of a step of `sequences` decodes and nothing else, in two parts.

        The first is without any context, the second is added by each token of context.
        """
        work = StepWork(tokens=sequences, sequences=sequences, sampled=sequences)
        return self.step_s(work), self._context_s

    def chunk_attention_s(self, count: int, offset: int) -> float:
        """Return the seconds of attention of `count` tokens behind `offset` tokens.

        Each token is paired with all tokens up to itself, and keys and values are read once, at the
        same time: a roofline.
        """
        compute = self.pair_s * count * (offset + 0.5 * count)
        memory = self._context_s * (offset + count)
        power = self._power
        return float((compute**power + memory**power) ** (1 / power))


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
        return float((compute**power + memory**power) ** (1 / power))

    return seconds


def _layer_gemms(model: ModelSpec, gpu: GpuSpec, c: Calibration) -> Callable[[int], float]:
    products = [_gemm(outputs, inputs, model, gpu, c) for outputs, inputs in model.linear_shapes]

    def seconds(rows: int) -> float:
        return model.layers * fsum(product(rows) for product in products)

    return seconds
