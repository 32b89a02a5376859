"""What a model keeps of every token: bytes a layer, blocks that layers share, a request's blocks.

The one place for these formulas; the simulated engine and `forebay kv` both use it. Sizes are per
GPU. Nothing here knows how much memory there is.
"""

import math
from dataclasses import dataclass

LATENT_PADDING = 128
"""vLLM 0.7's Triton kernel stored MLA rows padded to a multiple of this: 576 numbers became 640
(a start-up log of DeepSeek-R1 on 8 H200 with 0.7 holds 18,418 blocks, 10 % less than unpadded)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the memory of a served decoder depends on; sizes as in its `config.json`.

    Attributes:
        layers: attention layers, sliding ones included.
        ffn: MLP width that one token passes through (mixture of experts: of all it is sent to).
        weight_bytes: of the whole model as served, before tensor parallelism.
        max_model_len: longest context, tokens.
        sliding_layers: how many of the layers keep only a window of the context.
        sliding_window: tokens of that window.
        latent: numbers a token and layer of multi-head latent attention (MLA) keeps; 0: not MLA.
        weights_source: where weight_bytes comes from, for people.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_model_len: int
    weight_bytes: int
    sliding_layers: int = 0
    sliding_window: int = 0
    latent: int = 0
    weights_source: str = "published parameter count"

    @property
    def attention(self) -> str:
        """MHA, GQA, MQA or MLA."""
        if self.latent:
            return "MLA"
        if self.kv_heads == self.heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"


@dataclass(frozen=True, slots=True)
class KvOptions:
    """How the cache is stored.

    Attributes:
        value_bytes: of one cached number: 2, or 1 with fp8.
        draft_layers: layers that a draft head adds (EAGLE: 1).
        pad_latent: MLA rows padded as vLLM 0.7 does.
    """

    block_size: int = 16
    value_bytes: int = 2
    tensor_parallel: int = 1
    max_num_batched_tokens: int = 8192
    draft_layers: int = 0
    pad_latent: bool = False


def layer_bytes(shape: ModelShape, options: KvOptions | None = None) -> int:
    """KV-cache bytes of one token in one layer on one GPU.

    Keys and values of the KV heads that lie on a GPU (at least one: heads are replicated when there
    are fewer than GPUs); MLA keeps one latent row (kv_lora_rank + qk_rope_head_dim) on every GPU.
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
class KvLayout:
    """How vLLM lays a model's layers out in blocks.

    Layers of one kind share a block; with two kinds (full and sliding) both are cut into groups of
    the same number of layers, the last padded, and every group takes blocks of its own from one
    pool (vLLM 0.11, `kv_cache_utils.py`).

    Attributes:
        group_layers: layers whose keys and values of `block_size` tokens one block holds.
        full_groups, sliding_groups: groups of layers; a request needs blocks for each.
        window_tokens: most tokens a sliding layer holds: window - 1 + max_num_batched_tokens.
    """

    layers: int
    layer_bytes: int
    block_size: int
    group_layers: int
    full_groups: int
    sliding_groups: int
    window_tokens: int

    @property
    def bytes_per_token(self) -> int:
        """Of one token in all layers, while it is inside every window."""
        return self.layers * self.layer_bytes

    @property
    def one_kind(self) -> bool:
        """Whether all layers keep the same tokens, the whole context."""
        return self.full_groups == 1 and not self.sliding_groups

    @property
    def block_bytes(self) -> int:
        return self.group_layers * self.layer_bytes * self.block_size

    def blocks_in(self, pool_bytes: float) -> int:
        """Blocks that fit; a part of a block is no block. 0 or negative where nothing fits."""
        return math.floor(pool_bytes / self.block_bytes)

    def request_blocks(self, tokens: int) -> int:
        """Blocks one request of `tokens` holds; a window adds one, as it need not start on one."""
        blocks = self.full_groups * math.ceil(tokens / self.block_size)
        if self.sliding_groups:
            held = math.ceil(min(tokens, self.window_tokens) / self.block_size) + 1
            blocks += self.sliding_groups * held
        return blocks

    def longest(self, blocks: int, limit: int) -> int:
        """Longest request, tokens, that `blocks` hold: `limit`, or whole blocks below it."""
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
    """How `shape` is laid out with `options`."""
    full = shape.layers - shape.sliding_layers + options.draft_layers
    sliding = shape.sliding_layers
    if full and sliding:
        group = min(full, sliding)
        if max(full, sliding) < 1.25 * group:  # vLLM: rather pad a little than make a third group
            group = max(full, sliding)
    else:
        group = full + sliding
    return KvLayout(
        layers=full + sliding,
        layer_bytes=layer_bytes(shape, options),
        block_size=options.block_size,
        group_layers=group,
        full_groups=math.ceil(full / group),
        sliding_groups=math.ceil(sliding / group),
        window_tokens=max(0, shape.sliding_window - 1) + options.max_num_batched_tokens,
    )
