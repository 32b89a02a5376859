"""Compute how long one engine step takes: a roofline with fitted constants.

    gpu  = L*layer_s + sequence_s*n + L * sum over {qkv, o, gate_up, down} of gemm(T)
           + L * elementwise bytes(T) / bandwidth + lm_head gemm(sampled)
    step = step_s + gpu, or with asynchronous scheduling the larger of step_s and gpu
           + decode attention(sum of contexts)
           + sum over chunks of chunk_s + prefill attention(chunk)
           but with chunks at least L*launch_s

Several GPUs of one server compute their parts of every layer and add them up twice a layer: an
all-reduce, latency and bytes over the links. Of the experts, a step reads only the weights that its
tokens reach. Latent attention (MLA) reads one row for each token, and unpacks it for a chunk.
Sliding layers pair a token with a window. With speculative decoding a request has several rows in
a step, and the draft's own steps are added (`speculation`). These terms come from data sheets and
published fits (`step_constants`). One GPU with a dense model in 16 bits has none of them.

A step with prefill chunks has no CUDA graph of the whole step. The CPU launches its kernels, and
that takes longer than the GPU's work if the step is small. Nothing was tuned to a run of the
simulator.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import fsum

from forebay.replay.engine.hardware.gpu_sheet import features_of, product_flops
from forebay.replay.engine.hardware.layers import Product
from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.replay.engine.timing.kernels import EVEN_EXPERTS, experts_of, kernels_of
from forebay.replay.engine.timing.step_constants import (
    EAGER_LAUNCH_PARALLEL_S,
    FP8_KV_READ,
    GATHERED_BLOCKS,
    GRAPH_LAUNCH_PARALLEL_S,
    LINK_SHARE,
    NARROW_PRODUCT,
    SCAN_NUMBERS,
    SCAN_S,
    Calibration,
    calibration_of,
)

LARGEST_GRAPH = 512
"""Tokens of the largest CUDA graph that vLLM captures by default."""


@dataclass(slots=True)
class StepWork:
    """The work of one step.

    Attributes:
        tokens: all scheduled tokens, prefill and decode.
        sequences: requests in the step.
        sampled: requests that produce a token.
        decode_context: context tokens read by decoding requests, summed.
        chunks: length and offset of each prefill chunk, in tokens. A chunk has several tokens.
        window_context: decode_context with at most the window of sliding layers for each request.
        drafted: proposed tokens that decoding requests verify, in addition to one token for each.
    """

    tokens: int = 0
    sequences: int = 0
    sampled: int = 0
    decode_context: int = 0
    chunks: list[tuple[int, int]] = field(default_factory=list)
    window_context: int = 0
    drafted: int = 0


@lru_cache(64)
def step_time_model(
    model: ModelSpec,
    gpu: GpuSpec,
    constants: Calibration,
    async_scheduling: bool = False,
    draft: ModelSpec | None = None,
    proposed: int = 0,
) -> "StepTimeModel":
    """Return one model for all engines of a kind, so that they share its computed results."""
    return StepTimeModel(
        model, gpu, constants, async_scheduling=async_scheduling, draft=draft, proposed=proposed
    )


class StepTimeModel:
    """Computes the seconds of one step of `model` on `gpu`.

    Attributes:
        pair_s: seconds of one pair of query and key in prefill attention, in all layers that attend
            to the whole context.
        window_s: seconds of one token of context of a decoding request, in all sliding layers.
    """

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        calibration: Calibration | None = None,
        *,
        async_scheduling: bool = False,
        draft: ModelSpec | None = None,
        proposed: int = 0,
    ) -> None:
        """Prepare the terms.

        Args:
            model: the part of one GPU, if several share the model (`placement.rank_of`).
            async_scheduling: the CPU prepares a step while the GPU computes the step before.
            draft: the part of one GPU of a model that proposes tokens, computed in every step.
            proposed: tokens that are proposed for each decoding request. 0: no speculation.
        """
        c = calibration or calibration_of(model, gpu)
        self.calibration = c
        self._proposed = proposed
        # The draft runs in the same step, so the CPU's part of the step is not counted again.
        self._draft = None if draft is None else StepTimeModel(draft, gpu, replace(c, step_s=0.0))
        # Attention of chunks: FLOPs of query-key pairs at the reached share of the peak.
        pair_peak = gpu.peak_flops * c.prefill_compute
        self.pair_s = model.full_layers * model.pair_flops / pair_peak
        self.pair_s += model.index_pair_flops / pair_peak
        self._window_pair_s = model.near_layers * model.near_pair_flops / pair_peak
        self._window = model.attended_window
        # Each query of sparse attention reads rows of its own. Others share keys and values.
        self._gathered = 0.0
        if model.index is not None:
            self._gathered = 1.0 if model.latent is not None else GATHERED_BLOCKS
        self._async = async_scheduling
        self._layer_gemms = _layer_gemms(model, gpu, c)
        self._head_gemm = _head_gemm(model, gpu, c)
        # Computed results by number of rows: the tokens of a step, and the sampled ones.
        self._layers_s: dict[int, float] = {}
        self._head_s: dict[int, float] = {}
        self._power = c.roofline_power
        # Attention of decodes reads the context. Latent attention also has FLOPs for it.
        read = gpu.bandwidth * c.decode_bandwidth * (FP8_KV_READ if _narrow_kv(model) else 1.0)
        self._read_s = (model.full_layers * model.row_bytes + model.index_row_bytes) / read
        self.window_s = model.near_layers * model.near_row_bytes / read
        self._context_s = self._read_s
        self._unpack_s = 0.0  # a cached row into keys and values, for each chunk
        if model.latent is not None:
            queries = 1 + proposed
            flops = model.latent.decode_flops(model.heads)
            full = model.full_layers * flops + model.index_pair_flops
            self._context_s = self._roofline(queries * full / pair_peak, self._read_s)
            near_s = queries * model.near_layers * flops / pair_peak
            self.window_s = self._roofline(near_s, self.window_s)
            unpack = model.full_layers * model.latent.up_flops(model.heads)
            self._unpack_s = unpack / (gpu.peak_flops * c.gemm_compute)
        # The scan of a chunk: heads of all chunks run at the same time, on as many multiprocessors.
        state = model.state
        self._scan_s = 0.0 if state is None else state.layers * SCAN_S
        heads = 0.0 if state is None else state.numbers / SCAN_NUMBERS
        self._scan_share = heads / gpu.multiprocessors
        # Fixed costs of a step, and costs of each layer, token and sequence.
        self._step_s = c.step_s
        latent_s = kernels_of(gpu).latent_s if model.latent is not None else 0.0
        self._kernels_s = model.depth * c.layer_s + model.layers * latent_s
        self._token_s = model.depth * model.elementwise_bytes / (gpu.bandwidth * c.gemm_bandwidth)
        self._token_s += model.state_token_bytes / (gpu.bandwidth * c.gemm_bandwidth)
        self._sequence_s = c.sequence_s + 2 * model.state_bytes / read  # states: read and written
        self._chunk_s = c.chunk_s
        # The CPU launches the kernels of each layer, a floor for steps with chunks.
        graph_s, eager_s = c.graph_launch_s, c.eager_launch_s
        if model.ranks > 1:
            graph_s = min(graph_s, GRAPH_LAUNCH_PARALLEL_S)
            eager_s = min(eager_s, EAGER_LAUNCH_PARALLEL_S)
        self._graph_launch_s = model.depth * graph_s
        self._eager_launch_s = model.depth * eager_s

    def step_s(self, work: StepWork) -> float:
        """Return the seconds that the step takes."""
        # Matrix products and kernels take as long for equal numbers of rows.
        rows = work.tokens
        layers_s = self._layers_s.get(rows)
        if layers_s is None:
            layers_s = self._layers_s[rows] = self._layer_gemms(rows)
        seconds = (
            self._kernels_s + self._sequence_s * work.sequences + layers_s + self._token_s * rows
        )
        sampled = work.sampled + work.drafted
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
        # Attention of decodes grows with their context, attention of chunks with their pairs.
        seconds += self._context_s * work.decode_context
        if work.window_context:
            seconds += self.window_s * work.window_context
        if work.chunks:
            seconds += self._chunk_s * len(work.chunks)
            for count, offset in work.chunks:
                seconds += self.chunk_attention_s(count, offset)
            if self._scan_s:
                counts = [count for count, _ in work.chunks]
                seconds += self._scan_s * max(max(counts), sum(counts) * self._scan_share)
            launch_s = self._graph_launch_s if rows <= LARGEST_GRAPH else self._eager_launch_s
            if seconds < launch_s:
                seconds = launch_s
        if self._draft is not None:
            seconds += self._draft_s(self._draft, work)
        return seconds

    def _draft_s(self, draft: "StepTimeModel", work: StepWork) -> float:
        """Return the seconds in which the draft proposes tokens for the next step.

        Its first pass takes in all tokens of the step, as in vLLM's SpecDecodeBaseProposer. Each
        further pass takes one token of each request that decodes.
        """
        sampled = work.sampled
        seconds = draft.step_s(
            StepWork(
                work.tokens, work.sequences, sampled, work.decode_context, work.chunks,
                work.window_context,
            )
        )  # fmt: skip
        if sampled and self._proposed > 1:
            pass_work = StepWork(
                sampled, sampled, sampled, work.decode_context, window_context=work.window_context
            )
            seconds += (self._proposed - 1) * draft.step_s(pass_work)
        return seconds

    def admit_s(self, prompt_tokens: int) -> float:
        """Return the seconds that the engine stops to take in a request."""
        return self.calibration.admit_s + self.calibration.admit_token_s * prompt_tokens

    def decode_terms(self, sequences: int) -> tuple[float, float]:
        """Return the seconds of a step of `sequences` decodes and nothing else, in two parts.

        The first is without any context, the second is added by each token of context. Sliding
        layers are in neither (`window_s`).
        """
        drafted = self._proposed * sequences
        work = StepWork(sequences + drafted, sequences, sequences, drafted=drafted)
        per_token = self._context_s
        if self._draft is not None:
            per_token += self._proposed * self._draft.decode_terms(1)[1]
        return self.step_s(work), per_token

    def chunk_attention_s(self, count: int, offset: int) -> float:
        """Return the seconds of attention of `count` tokens behind `offset` tokens.

        Each token is paired with all tokens up to itself, and keys and values are read once, at the
        same time: a roofline.
        """
        compute = self.pair_s * count * (offset + 0.5 * count)
        memory = self._read_s * (offset + count)
        if self._unpack_s:
            compute += self._unpack_s * offset
        seconds = self._roofline(compute, memory)
        if self._window:
            pairs = window_pairs(count, offset, self._window)
            held = pairs * self._gathered or min(offset, self._window) + count
            seconds += self._roofline(self._window_pair_s * pairs, self.window_s * held)
        return seconds

    def _roofline(self, compute_s: float, memory_s: float) -> float:
        power = self._power
        return float((compute_s**power + memory_s**power) ** (1 / power))


def window_pairs(count: int, offset: int, window: int) -> float:
    """Return the pairs of `count` tokens behind `offset` tokens with the last `window` tokens."""
    growing = min(count, max(0, window - offset))
    return growing * (offset + 0.5 * growing) + float(count - growing) * window


def _narrow_kv(model: ModelSpec) -> bool:
    return model.kv_value_bytes < model.bytes_per_value


def product_time(
    product: Product, model: ModelSpec, gpu: GpuSpec, c: Calibration
) -> Callable[[int], float]:
    """Return the seconds of a (rows x inputs) @ (inputs x outputs) product, by rows."""
    # Arithmetic and bytes of a row, and the weights that a step reads once.
    width, power = model.bytes_per_value, c.roofline_power
    outputs, inputs, experts, chosen = (
        product.outputs, product.inputs, product.experts, product.chosen,
    )  # fmt: skip
    peak = product_flops(gpu, model.weights, product.bits)
    share = c.gemm_compute * (NARROW_PRODUCT if peak > gpu.peak_flops else 1.0)
    read = gpu.bandwidth * c.gemm_bandwidth
    per_row_compute = 2 * outputs * inputs / (peak * share)
    weights = product.bits / 8 * outputs * inputs / read
    per_row_memory = width * (outputs + inputs) / read
    block_s = kernels_of(gpu).block_s if model.weights.block and product.bits < 16 else 0.0

    def seconds(rows: int) -> float:
        compute, memory = per_row_compute * rows, weights + per_row_memory * rows
        return float((compute**power + memory**power) ** (1 / power)) + block_s

    # Experts have the rates of their grouped kernels.
    if experts == 1:
        return seconds
    reached, fixed_s = experts_of(gpu, model.weights, product.bits), 0.0
    if reached is not None:
        fixed_s = reached.fixed_s
        per_row_compute = 2 * outputs * inputs / (gpu.peak_flops * reached.compute)
        weights *= max(1.0, read / (reached.unpack * gpu.multiprocessors))

    # Of many experts the rare ones wait for their weights while the others compute: no overlap.
    apart = 1.0 if experts > EVEN_EXPERTS else power

    def of_experts(rows: int) -> float:
        compute = per_row_compute * rows * chosen
        memory = weights * product.touched(rows) + per_row_memory * rows * chosen
        return fixed_s + float((compute**apart + memory**apart) ** (1 / apart))

    return of_experts


def _layer_gemms(model: ModelSpec, gpu: GpuSpec, c: Calibration) -> Callable[[int], float]:
    """Return the seconds of all layers' products and all-reduces, by rows."""
    groups = [
        (group.layers, [product_time(product, model, gpu, c) for product in group.products])
        for group in model.layer_groups
    ]
    # Attention and MLP end with an all-reduce, and the embedding is one, too.
    sums = model.depth + (model.mlps or model.depth) + 1 if model.ranks > 1 else 0
    latency_s, byte_s = _all_reduce(model, gpu)

    def seconds(rows: int) -> float:
        total = 0.0
        for layers, products in groups:
            total += layers * fsum(product(rows) for product in products)
        if sums:
            total += sums * (latency_s + byte_s * model.bytes_per_value * model.hidden * rows)
        return total

    return seconds


def _head_gemm(model: ModelSpec, gpu: GpuSpec, c: Calibration) -> Callable[[int], float]:
    """Return the seconds of the head, by sampled tokens. The logits of all GPUs are gathered."""
    product = product_time(
        Product(model.vocab, model.hidden, 8 * model.bytes_per_value), model, gpu, c
    )
    if model.ranks == 1:
        return product
    latency_s, byte_s = _all_reduce(model, gpu)
    # A gather moves half the bytes of an all-reduce.
    row_s = 0.5 * byte_s * model.bytes_per_value * model.vocab * model.ranks
    return lambda rows: product(rows) + latency_s + row_s * rows


def _all_reduce(model: ModelSpec, gpu: GpuSpec) -> tuple[float, float]:
    """Return the seconds of an all-reduce of nothing, and of each byte."""
    features, ranks = features_of(gpu), model.ranks
    if ranks == 1 or features.link_bandwidth is None or features.link_latency_s is None:
        return 0.0, 0.0
    reached = features.link_bandwidth * LINK_SHARE
    if features.link_peers:
        reached *= min(1.0, (ranks - 1) / features.link_peers)
    return features.link_latency_s, 2.0 * (ranks - 1) / ranks / reached
