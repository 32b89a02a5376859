"""Divide a GPU's memory as vLLM does: weights, adapters, activations, outside torch, KV cache.

vLLM measures these with a dry run at start-up. Here they follow from sizes and options. The
simulated engine takes its number of blocks from here, and `forebay kv` prints the budget.
"""

import math
from dataclasses import dataclass, replace

from forebay.replay.engine.hardware.architectures import ADAPTED, MIXTURES
from forebay.replay.engine.hardware.kv_layout import KvLayout, KvOptions, ModelShape, kv_layout
from forebay.replay.engine.hardware.specs import GIB, GpuSpec, ModelSpec
from forebay.traces.ground.errors import InputError

NON_TORCH_GIB = 0.13
"""Memory of driver and libraries outside torch's allocator, on one GPU (vLLM start-up logs)."""
NON_TORCH_PARALLEL_GIB = 0.55
"""Memory outside torch with tensor parallelism: NCCL's buffers (start-up logs, two H100)."""
SAMPLER_BYTES_PER_LOGIT = 38.5
"""Peak activation of the sampler: bytes for each of max_num_seqs x vocab (seven start-up logs of
text models, vLLM 0.11 on H100, published by llm-d-benchmark)."""
ACTIVATION_BYTES = 2
"""Activations and adapters are 16 bits wide, also where weights are quantised."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank in vLLM 0.32."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Room for adapters (LoRA) on the GPU, which vLLM allocates at its start.

    Attributes:
        slots: --max-loras, adapters in one batch.
        rank: --max-lora-rank, which every slot has room for.
    """

    slots: int = 1
    rank: int = 16

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise InputError(f"--max-loras {self.slots}: give a whole number of 1 or more")
        if self.rank not in LORA_RANKS:
            raise InputError(
                f"--max-lora-rank {self.rank}: give one of {', '.join(map(str, LORA_RANKS))}"
            )

    def bytes_of(self, shape: ModelShape, tensor_parallel: int) -> int:
        """Return the bytes of the LoRA tensors on one of `tensor_parallel` GPUs.

        A matrix A has the rank times a product's inputs, B its outputs times the rank. As in vLLM,
        only the side that the base layer divides is divided, and embedding and head not at all.

        Raises:
            InputError: a family whose adapters are not counted.
        """
        products = ADAPTED.get(shape.family)
        if products is None:
            kind = shape.family or shape.name
            why = " with experts" if kind in MIXTURES else ""
            raise InputError(
                f"--enable-lora: adapters of {kind} models{why} are not counted here, those of "
                f"{', '.join(sorted(ADAPTED))} are; leave it out, and lower "
                "--gpu-memory-utilization by their share"
            )
        # Rows and columns next to the rank, of one layer: qkv, o, gate and up, down.
        hidden, ffn = shape.hidden, shape.ffn // tensor_parallel
        queries = shape.heads // tensor_parallel * shape.head_dim
        keys = math.ceil(shape.kv_heads / tensor_parallel) * shape.head_dim
        attention = products.qkv * hidden + queries + 2 * keys + queries + hidden
        mlp = products.up * hidden + (2 if products.gated else 1) * ffn + ffn + hidden
        # Outside of the layers.
        ends = (products.embedding + products.head) * (shape.vocab + hidden)
        numbers = self.rank * (shape.layers * (attention + mlp) + ends)
        return self.slots * numbers * ACTIVATION_BYTES


def adapters_of(enabled: bool, slots: int, rank: int) -> Adapters | None:
    """Return the room that vLLM's three options ask for, None if it is not `enabled`."""
    return Adapters(slots, rank) if enabled else None


@dataclass(frozen=True, slots=True)
class MemoryOptions(KvOptions):
    """Options of `vllm serve` that determine the size of the KV cache.

    Attributes:
        non_torch_gib: None takes NON_TORCH_GIB, or NON_TORCH_PARALLEL_GIB with several GPUs.
        cuda_graph_gib: estimate for CUDA graphs, which vLLM 0.21 and later subtracts.
        adapters: room for adapters. None: without --enable-lora.
    """

    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 1024
    non_torch_gib: float | None = None
    cuda_graph_gib: float = 0.0
    adapters: Adapters | None = None


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """One GPU's memory in bytes. `pool` is the rest for the KV cache and may be negative.

    Attributes:
        blocks: KV blocks, the null block included. May be 0 or negative.
    """

    total: float
    requested: float
    weights: float
    activation: float
    non_torch: float
    cuda_graphs: float
    layout: KvLayout
    blocks: int
    adapters: int = 0

    @property
    def taken(self) -> float:
        """Return the bytes of everything but the KV cache."""
        return self.weights + self.adapters + self.activation + self.non_torch + self.cuda_graphs

    @property
    def pool(self) -> float:
        return self.requested - self.taken

    def concurrency(self, tokens: int) -> float:
        """Return vLLM's "Maximum concurrency": how many requests of `tokens` fit at once."""
        return self.blocks / self.layout.request_blocks(tokens)

    def whole_requests(self, tokens: int) -> int:
        """Return the number of whole requests that fit next to the null block."""
        return max(0, self.blocks - 1) // self.layout.request_blocks(tokens)

    def pool_tokens(self, context: int) -> int:
        """Return the pool's tokens. With sliding layers, for requests of `context`."""
        if self.layout.one_kind:
            return self.blocks * self.layout.block_size
        return int(self.concurrency(context) * context)

    def longest(self, context: int) -> int:
        """Return the longest single request that fits, tokens, at most `context`."""
        return self.layout.longest(max(0, self.blocks - 1), context)

    def least_utilization(self, tokens: int) -> float:
        """Return the smallest gpu_memory_utilization, in hundredths, for a request of `tokens`.

        The result is above 1 if the request cannot fit on this GPU.
        """
        needed = (self.layout.request_blocks(tokens) + 1) * self.layout.block_bytes
        return math.ceil((self.taken + needed) / self.total * 100 - 1e-9) / 100


def memory_budget(shape: ModelShape, memory_gib: float, options: MemoryOptions) -> MemoryBudget:
    """Compute the budget of one of `tensor_parallel` GPUs.

    Activations peak in the widest MLP step of a full batch (gate, up and their product, and three
    copies of the hidden state) or in the sampler's logits of a full batch of sequences.

    Args:
        memory_gib: total memory as the runtime reports it.
    """
    # The sizes of one GPU, before the KV cache.
    parallel = options.tensor_parallel
    per_token = 3 * shape.ffn / parallel + 3 * shape.hidden
    non_torch_gib = options.non_torch_gib
    if non_torch_gib is None:
        non_torch_gib = NON_TORCH_GIB if parallel == 1 else NON_TORCH_PARALLEL_GIB
    requested = memory_gib * options.gpu_memory_utilization * GIB
    weights = shape.weight_bytes / parallel
    activation = max(
        options.max_num_batched_tokens * per_token * ACTIVATION_BYTES,
        SAMPLER_BYTES_PER_LOGIT * options.max_num_seqs * shape.vocab,
    )
    non_torch, graphs = non_torch_gib * GIB, options.cuda_graph_gib * GIB
    room = options.adapters
    adapters = room.bytes_of(shape, parallel) if room is not None else 0
    # The rest is for blocks.
    layout = kv_layout(shape, options)
    return MemoryBudget(
        total=memory_gib * GIB,
        requested=requested,
        weights=weights,
        activation=activation,
        non_torch=non_torch,
        cuda_graphs=graphs,
        layout=layout,
        blocks=layout.blocks_in(requested - weights - adapters - activation - non_torch - graphs),
        adapters=adapters,
    )


def engine_budget(
    model: ModelSpec,
    gpu: GpuSpec,
    options: MemoryOptions,
    *,
    draft: ModelSpec | None = None,
) -> MemoryBudget:
    """Return the budget of an engine, with the number of its KV blocks. May be 0 or negative.

    A draft model takes its weights, and its layers a part of each block.
    """
    budget = memory_budget(model.shape, gpu.memory_gib, options)
    if draft is None:
        return budget
    own = kv_layout(draft.shape, replace(options, whole=True))
    left = budget.pool - draft.weight_bytes / options.tensor_parallel
    blocks = math.floor(left / (budget.layout.block_bytes + own.block_bytes))
    return replace(budget, blocks=blocks)
