"""Compute the KV cache of a model: bytes of a token, layout in blocks, blocks of a request.

The simulated engine and `forebay kv` both use these formulas. Sizes are per GPU, whose
memory plays no part here.
"""

import math
from dataclasses import KW_ONLY, dataclass, field

from forebay.replay.engine.hardware.layers import Heads, Indexer, Recurrent

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

STATE_ALIGNMENT_LATENT = 128
"""A block of a model with recurrent states and MLA is a multiple of this (platforms/interface.py of
vLLM 0.32)."""

PADDED_UP_TO = 1.5
"""vLLM 0.32 pads the kind with fewer layers rather than cut a third group, up to this ratio."""


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Sizes of a decoder as in its `config.json`: for its memory and for its step times.

    Attributes:
        layers: attention layers, sliding ones included.
        sliding_layers: number of layers that keep only a window of the context.
        sliding_window: tokens of that window.
        sliding_first: the first layer slides.
        chunked: the window starts at multiples of its length (Llama 4), and not at any token.
        kv_value_bytes: bytes of a cached number with --kv-cache-dtype auto.
        default_len: context without --max-model-len. 0: `max_model_len`.
        family: `model_type`, which decides what takes adapters.
        value_dim: numbers of one head's value. 0: `head_dim`.
        gated_attention, tied_values: `gated` and `tied` of `Heads`.
        near: heads of sliding layers. None: as in other layers.
        state: layers with a recurrent state, in addition to attention layers.
        index: indexer of sparse attention.
        mlps: number of MLPs. 0: as many as layers with attention.
        language_only: the model also reads images or sounds, whose weights are not counted.
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
    _: KW_ONLY
    sliding_layers: int = 0
    sliding_window: int = 0
    sliding_first: bool = False
    chunked: bool = False
    kv_value_bytes: int = 2
    default_len: int = 0
    family: str = ""
    value_dim: int = 0
    gated_attention: bool = False
    tied_values: bool = False
    near: Heads | None = None
    state: Recurrent | None = None
    index: Indexer | None = None
    mlps: int = 0
    language_only: bool = False


@dataclass(frozen=True, slots=True)
class ModelShape(DecoderSizes):
    """Sizes that the memory of a served decoder depends on.

    Attributes:
        ffn: MLP width of one token. With a mixture of experts, of all its experts together.
        weight_bytes: bytes of the whole model as served, before tensor parallelism.
        long_window: all layers have a window that is not shorter than the context.
        latent: cached numbers for each token and layer of multi-head latent attention (MLA). 0:
            not MLA.
        weights_source: source of weight_bytes, as text.
    """

    weight_bytes: int
    _: KW_ONLY
    latent: int = 0
    weights_source: str = "published parameter count"
    long_window: bool = field(default=False, compare=False)
    # A longrope model called by its name has its long context.
    default_len: int = field(default=0, compare=False)
    family: str = field(default="", compare=False)
    language_only: bool = field(default=False, compare=False)

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
        steps_in_flight: steps whose tokens sliding layers keep in addition to the window: 2 with
            asynchronous scheduling from vLLM 0.26 on (`VllmConfig.max_in_flight_tokens`).
        caches_prefixes: prefix caching is on, so that a recurrent state has several blocks.
        whole: every layer keeps the whole context, sliding ones too, as with
            --disable-hybrid-kv-cache-manager.
    """

    block_size: int = 16
    value_bytes: int = 2
    tensor_parallel: int = 1
    max_num_batched_tokens: int = 8192
    draft_layers: int = 0
    steps_in_flight: int = 1
    caches_prefixes: bool = True
    whole: bool = False

    @property
    def tokens_in_flight(self) -> int:
        """Return the most tokens of steps that have not ended."""
        return self.steps_in_flight * self.max_num_batched_tokens


_SPARSE_FP8_ROW = 656
"""Bytes of a latent row that sparse attention reads in fp8: 512 numbers, their scales, and the
rotated key in 16 bits (`fp8_ds_mla`, flashmla_sparse.py of vLLM 0.32)."""


def layer_bytes(shape: ModelShape, options: KvOptions | None = None) -> int:
    """Return the KV-cache bytes of one token in one layer with the whole context, on one GPU.

    A GPU caches keys and values of its share of the KV heads, and of at least one: with fewer heads
    than GPUs, heads are replicated. MLA keeps one latent row (kv_lora_rank + qk_rope_head_dim) on
    every GPU.
    """
    chosen = options or KvOptions()
    if shape.latent:
        if shape.index is not None and chosen.value_bytes == 1:
            return _SPARSE_FP8_ROW
        return shape.latent * chosen.value_bytes
    heads = math.ceil(shape.kv_heads / chosen.tensor_parallel)
    return heads * (shape.head_dim + (shape.value_dim or shape.head_dim)) * chosen.value_bytes


def near_bytes(shape: ModelShape, options: KvOptions) -> int:
    """Return the KV-cache bytes of one token in one sliding layer on one GPU."""
    if shape.near is None:
        return layer_bytes(shape, options)
    return shape.near.row(options.tensor_parallel) * options.value_bytes


def index_bytes(shape: ModelShape, options: KvOptions) -> int:
    """Return the bytes of one token in all caches of indexers, which every GPU keeps whole."""
    index = shape.index
    return index.layers * (index.row or index.width * options.value_bytes) if index else 0


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a table of blocks: each block has the same tokens of all of them.

    Attributes:
        window: tokens that these layers attend to, the token itself included. 0: all.
        state: they keep one recurrent state in place of keys and values.
        exports: a chunk also leaves its state at the last block boundary inside it.
        chunked: the window starts at multiples of its length.
        blocks: a block of these layers has this many times the tokens of `KvLayout.block_size`.
    """

    window: int = 0
    state: bool = False
    exports: bool = False
    chunked: bool = False
    blocks: int = 1


WHOLE = KvGroup()
"""Layers that attend to the whole context."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of a model's layers in vLLM's KV blocks.

    Layers of one kind share a block. With two kinds (full and sliding, or full and recurrent), both
    are divided into groups of the same number of layers, the last group padded. Every group takes
    its own blocks from one pool (vLLM 0.11, `kv_cache_utils.py`), and a block has as many bytes in
    each layer. So layers that cache less have more tokens in it, or a padded block.

    Attributes:
        bytes_per_token: bytes of one token in all layers, while it is inside every window.
        block_size: tokens of a block. With recurrent states a block is as large as a state.
        block_bytes: bytes of a block, of all layers that share it.
        groups: groups of layers, in the order of vLLM. A request needs blocks for each.
        tokens_in_flight: most tokens of steps that have not ended.
        window_tokens: most tokens a sliding layer holds: window - 1, or the chunk, and
            max_num_batched_tokens of each step in flight.
        chunked: a window starts at the start of a block.
        spare_blocks: blocks that a request reserves beyond its tokens.
        state_blocks: blocks of a request in each group of layers with a recurrent state.
        state_bytes: bytes of the states of one request in all layers, without padding.
    """

    layers: int
    bytes_per_token: int
    block_size: int
    block_bytes: int
    groups: tuple[KvGroup, ...]
    window_tokens: int
    tokens_in_flight: int
    chunked: bool = False
    spare_blocks: int = 0
    state_blocks: int = 0
    state_bytes: int = 0

    @property
    def one_kind(self) -> bool:
        """Return True if all layers keep the whole context."""
        return self.groups == (WHOLE,)

    @property
    def has_states(self) -> bool:
        """Return True if layers keep a recurrent state in place of keys and values."""
        return any(group.state for group in self.groups)

    def blocks_in(self, pool_bytes: float) -> int:
        """Return the whole blocks that fit. 0 or negative if no block fits."""
        return math.floor(pool_bytes / self.block_bytes)

    def request_blocks(self, tokens: int) -> int:
        """Return the blocks of one request of `tokens`.

        A window needs one more unless it is a chunk, because it may start inside a block. vLLM
        reserves it for a window of any length. A state is in one block, and with prefix caching
        until the next step in the block before, and at the end of a prompt in a third where a chunk
        leaves it there.
        """
        blocks = self.spare_blocks
        for group in self.groups:
            size = group.blocks * self.block_size
            if group.state:
                blocks += self.state_blocks
            elif group.window:
                blocks += -(-min(tokens, self.window_tokens) // size) + (not self.chunked)
            else:
                blocks += -(-tokens // size)
        return blocks

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
    other, state, ranks = shape.sliding_layers, shape.state, options.tensor_parallel
    # The tokens of a block, and the bytes of a token in each layer.
    row, near = layer_bytes(shape, options), near_bytes(shape, options)
    size, state_bytes = options.block_size, 0
    if shape.index is not None:
        size = _whole(size, shape.index.block)
    if state is not None:
        other, state_bytes = state.layers, state.bytes(ranks)
        step = max(size, STATE_ALIGNMENT_LATENT) if shape.latent else max(16, size)
        size = max(size, _whole(math.ceil(state_bytes / row), step))
        near = row
    # Layers that cache less than others have more tokens in a block of as many bytes.
    larger = max([row] * bool(full) + [near] * bool(other), default=near)
    whole_blocks, near_blocks = (larger // own if larger % own == 0 else 1 for own in (row, near))
    index = index_bytes(shape, options)
    per_token = full * row + shape.sliding_layers * near + index
    if options.whole and state is None:
        return KvLayout(
            layers=full + other, bytes_per_token=per_token, block_size=size,
            block_bytes=per_token * size, groups=(WHOLE,), window_tokens=options.tokens_in_flight,
            tokens_in_flight=options.tokens_in_flight, spare_blocks=int(shape.long_window),
        )  # fmt: skip
    # Equally many layers in each group.
    group = _group_layers(full, other)
    whole = (KvGroup(blocks=whole_blocks),) * math.ceil(full / group)
    kind = KvGroup(shape.sliding_window, chunked=shape.chunked, blocks=near_blocks)
    if state is not None:
        kind = KvGroup(state=True, exports=state.exports)
    others = (kind,) * math.ceil(other / group)
    first = shape.sliding_first if state is None else state.first
    layers = 0 if state is None else state.layers
    return KvLayout(
        layers=full + shape.sliding_layers,
        bytes_per_token=per_token,
        block_size=size,
        block_bytes=(group * larger + index) * size,
        groups=others + whole if first else whole + others,
        window_tokens=max(0, shape.sliding_window - (not shape.chunked)) + options.tokens_in_flight,
        tokens_in_flight=options.tokens_in_flight,
        chunked=shape.chunked,
        spare_blocks=int(shape.long_window),
        state_blocks=2 + kind.exports if options.caches_prefixes else 1,
        state_bytes=layers * state_bytes,
    )


def _group_layers(full: int, other: int) -> int:
    """Return the layers of a group, where two kinds of layers share the KV cache."""
    fewer, more = sorted((full, other))
    return more if more < PADDED_UP_TO * fewer or not fewer else fewer


def _whole(tokens: int, step: int) -> int:
    """Return `tokens`, rounded up to a multiple of `step`."""
    return math.ceil(tokens / step) * step
