"""Compute the KV cache of a model: bytes of a token, layout in blocks, blocks of a request.

The simulated engine and `forebay kv` both use these formulas. Sizes are per GPU, whose
memory plays no part here.
"""

import math
from dataclasses import dataclass, field

LATENT_PADDING = 128
"""vLLM 0.7's Triton kernel padded MLA rows to a multiple of this: 576 numbers became 640 (a
start-up log of DeepSeek-R1 on 8 H200 with 0.7 has 18,418 blocks, 10 % fewer than unpadded)."""

KV_VALUE_BYTES = {
    "auto": 2,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
}
"""Bytes of a cached number by --kv-cache-dtype. auto is 1 for a checkpoint that asks for it."""

PADDED_UP_TO = 1.5
"""vLLM 0.32 pads the kind with fewer layers rather than cut a third group, up to this ratio."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that the memory of a served decoder depends on, as in its `config.json`.

    Attributes:
        layers: attention layers, sliding ones included.
        ffn: MLP width of one token. With a mixture of experts, of all its experts together.
        weight_bytes: bytes of the whole model as served, before tensor parallelism.
        sliding_layers: number of layers that keep only a window of the context.
        sliding_first: the first layer slides.
        sliding_window: tokens of that window.
        long_window: all layers have a window that is not shorter than the context.
        chunked: the window starts at multiples of its length (Llama 4), and not at any token.
        latent: cached numbers for each token and layer of multi-head latent attention (MLA). 0:
            not MLA.
        weights_source: source of weight_bytes, as text.
        kv_value_bytes: bytes of a cached number with --kv-cache-dtype auto.
        default_len: context without --max-model-len. 0: `max_model_len`.
        family: `model_type`, which decides what takes adapters.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_model_len: int  # longest context, tokens
    weight_bytes: int
    sliding_layers: int = 0
    sliding_window: int = 0
    sliding_first: bool = False
    long_window: bool = field(default=False, compare=False)
    chunked: bool = False
    latent: int = 0
    weights_source: str = "published parameter count"
    kv_value_bytes: int = 2
    # A longrope model called by its name has its long context.
    default_len: int = field(default=0, compare=False)
    family: str = field(default="", compare=False)

    @property
    def attention(self) -> str:
        """Return the kind of attention: MHA, GQA, MQA or MLA."""
        if self.latent:
            return "MLA"
        if self.kv_heads == self.heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"


@dataclass(frozen=True, slots=True)
class KvOptions:
    """Options of vLLM that change how the cache is stored.

    Attributes:
        value_bytes: bytes of one cached number: 2, or 1 with fp8.
        draft_layers: layers that a draft head adds (EAGLE: 1).
        pad_latent: pad MLA rows as vLLM 0.7 does.
        steps_in_flight: steps whose tokens sliding layers keep in addition to the window: 2 with
            asynchronous scheduling from vLLM 0.26 on (`VllmConfig.max_in_flight_tokens`).
    """

    block_size: int = 16
    value_bytes: int = 2
    tensor_parallel: int = 1
    max_num_batched_tokens: int = 8192
    draft_layers: int = 0
    pad_latent: bool = False
    steps_in_flight: int = 1

    @property
    def tokens_in_flight(self) -> int:
        """Return the most tokens of steps that have not ended."""
        return self.steps_in_flight * self.max_num_batched_tokens


def layer_bytes(shape: ModelShape, options: KvOptions | None = None) -> int:
    """Return the KV-cache bytes of one token in one layer on one GPU.

    A GPU caches keys and values of its share of the KV heads, and of at least one: with fewer heads
    than GPUs, heads are replicated. MLA keeps one latent row (kv_lora_rank + qk_rope_head_dim) on
    every GPU.
    """
    chosen = options or KvOptions()
    if shape.latent:
        width = shape.latent
        if chosen.pad_latent:
            width = math.ceil(width / LATENT_PADDING) * LATENT_PADDING
        return width * chosen.value_bytes
    heads = math.ceil(shape.kv_heads / chosen.tensor_parallel)
    return 2 * heads * shape.head_dim * chosen.value_bytes


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a table of blocks: each block has the same tokens of all of them.

    Attributes:
        window: tokens that these layers attend to, the token itself included. 0: all.
        state: they keep one recurrent state in place of keys and values.
        exports: a chunk also leaves its state at the last block boundary inside it.
    """

    window: int = 0
    state: bool = False
    exports: bool = False


WHOLE = KvGroup()
"""Layers that attend to the whole context."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of a model's layers in vLLM's KV blocks.

    Layers of one kind share a block. With two kinds (full and sliding), both are divided into
    groups of the same number of layers, the last group padded. Every group takes its own blocks
    from one pool (vLLM 0.11, `kv_cache_utils.py`).

    Attributes:
        group_layers: layers that share a block of `block_size` tokens.
        groups: groups of layers, in the order of vLLM. A request needs blocks for each.
        tokens_in_flight: most tokens of steps that have not ended.
        window_tokens: most tokens a sliding layer holds: window - 1, or the chunk, and
            max_num_batched_tokens of each step in flight.
        chunked: a window starts at the start of a block.
        spare_blocks: blocks that a request reserves beyond its tokens.
    """

    layers: int
    layer_bytes: int
    block_size: int
    group_layers: int
    groups: tuple[KvGroup, ...]
    window_tokens: int
    tokens_in_flight: int
    chunked: bool = False
    spare_blocks: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token in all layers, while it is inside every window."""
        return self.layers * self.layer_bytes

    @property
    def full_groups(self) -> int:
        """Return the groups of layers that keep the whole context."""
        return self.groups.count(WHOLE)

    @property
    def sliding_groups(self) -> int:
        """Return the groups of layers with a window."""
        return sum(group.window > 0 for group in self.groups)

    @property
    def one_kind(self) -> bool:
        """Return True if all layers keep the whole context."""
        return self.groups == (WHOLE,)

    @property
    def block_bytes(self) -> int:
        return self.group_layers * self.layer_bytes * self.block_size

    def blocks_in(self, pool_bytes: float) -> int:
        """Return the whole blocks that fit. 0 or negative if no block fits."""
        return math.floor(pool_bytes / self.block_bytes)

    def request_blocks(self, tokens: int) -> int:
        """Return the blocks of one request of `tokens`.

        A window needs one more unless it is a chunk, because it may start inside a block. vLLM
        reserves it for a window of any length. A state is in one block, and until the next step in
        the block before, and at the end of a prompt in a third where a chunk leaves it there.
        """
        blocks = self.spare_blocks + self.full_groups * math.ceil(tokens / self.block_size)
        if self.sliding_groups:
            held = math.ceil(min(tokens, self.window_tokens) / self.block_size)
            held += not self.chunked
            blocks += self.sliding_groups * held
        return blocks + sum(2 + group.exports for group in self.groups if group.state)

    def longest(self, blocks: int, limit: int) -> int:
        """Return the longest request, tokens, that fits: `limit`, or whole blocks below it."""
        if self.request_blocks(limit) <= blocks:
            return limit
        low, high = 0, limit // self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            if self.request_blocks(middle * self.block_size) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low * self.block_size


def kv_layout(shape: ModelShape, options: KvOptions) -> KvLayout:
    """Return the layout of `shape` with `options`."""
    full = shape.layers - shape.sliding_layers + options.draft_layers
    sliding = shape.sliding_layers
    if full and sliding:
        group = min(full, sliding)
        if max(full, sliding) < PADDED_UP_TO * group:
            group = max(full, sliding)
    else:
        group = full + sliding
    groups = (WHOLE,) * math.ceil(full / group)
    windows = (KvGroup(shape.sliding_window),) * math.ceil(sliding / group)
    return KvLayout(
        layers=full + sliding,
        layer_bytes=layer_bytes(shape, options),
        block_size=options.block_size,
        group_layers=group,
        groups=windows + groups if shape.sliding_first else groups + windows,
        window_tokens=max(0, shape.sliding_window - (not shape.chunked)) + options.tokens_in_flight,
        tokens_in_flight=options.tokens_in_flight,
        chunked=shape.chunked,
        spare_blocks=int(shape.long_window),
    )
