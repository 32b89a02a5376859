"""The model families whose layers are counted here, the kinds of their layers, their adapters.

A `config.json` is an open format: a key that stays unread changes sizes silently. So a family is
counted if it is listed, and refused otherwise.
"""

from dataclasses import dataclass
from typing import Any

from forebay.replay.engine.hardware.hf_fields import Fields, Uncounted
from forebay.replay.engine.hardware.layers import Heads, Indexer, Recurrent
from forebay.traces.ground.errors import InputError

DENSE = frozenset({
    "baichuan", "cohere", "cohere2", "ernie4_5", "exaone", "exaone4", "falcon", "gemma", "gemma2",
    "gemma3", "gemma3_text", "glm", "glm4", "glm4v_text", "gpt_bigcode", "gpt_neox", "granite",
    "hunyuan_v1_dense", "internlm2", "internlm3", "llama", "mimo", "ministral", "ministral3",
    "mistral", "nemotron", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen2_vl",
    "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3", "qwen3_vl_text", "seed_oss",
    "smollm3", "stablelm", "starcoder2", "nemotron-nas", "qwen3_5_text",
})  # fmt: skip
MIXTURES = frozenset({
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "gemma4_text", "glm4_moe",
    "glm4v_moe_text", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoehybrid", "kimi_k2",
    "kimi_linear", "llama4_text", "mimo_v2_flash", "minimax_m2", "minimax_m3", "minimax_m3_vl",
    "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe",
    "qwen3_next", "qwen3_vl_moe_text", "step3p7",
})  # fmt: skip
KNOWN = DENSE | MIXTURES


@dataclass(frozen=True, slots=True)
class AdaptedProducts:
    """The products of a family that vLLM gives LoRA matrices: of all layers, and some more.

    Attributes:
        qkv, up: matrices A of the product of queries, keys and values, and of gate and up: one for
            each part that is a matrix of its own in checkpoints.
        gated: the MLP has a gate in addition to its up projection.
        embedding, head: the input embedding and the head take adapters, too.
    """

    qkv: int = 3
    up: int = 2
    gated: bool = True
    embedding: bool = False
    head: bool = False


_LAYERS = AdaptedProducts()
_ALL = AdaptedProducts(embedding=True, head=True)
_WITH_EMBEDDING = AdaptedProducts(embedding=True)
ADAPTED = {
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3_text", "glm4", "ministral3", "mistral", "qwen2"), _LAYERS
    ),
    **dict.fromkeys(("ernie4_5", "exaone4", "granite", "llama", "qwen3"), _ALL),
    **dict.fromkeys(("cohere", "cohere2"), _WITH_EMBEDDING),
    "nemotron": AdaptedProducts(up=1, gated=False, embedding=True, head=True),
    "phi3": AdaptedProducts(qkv=1, up=1, embedding=True, head=True),
}
"""Families by `model_type` whose adapters are counted as by vLLM 0.32, equal to the byte."""

_STATE = "a recurrent state beside the KV cache"
UNCOUNTED = {
    "attn_layer_indices": _STATE,
    "attn_layer_period": _STATE,
    "full_attn_idxs": _STATE,
    "lru_width": _STATE,
    "compress_ratios": "compressed attention with several caches of its own",
    "num_kv_shared_layers": "layers that share the cache of others",
    "cross_attention_layers": "cross attention to images",
}
"""Keys that change the cache or the computation of a layer, and their meaning."""
_STATE_KEYS = (
    "full_attention_interval", "hybrid_override_pattern", "layers_block_type",
    "linear_attn_config",
)  # fmt: skip
_STATE_PREFIXES = ("mamba_", "ssm_", "linear_attn_", "linear_num_", "linear_key_")
_SPARSE_KEYS = ("index_topk", "sparse_attention_config")
_UNEQUAL_KEYS = ("global_head_dim", "swa_head_dim", "hybrid_layer_pattern", "block_configs")
_COUNTED = {
    _STATE: {
        "granitemoehybrid", "kimi_linear", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text",
        "qwen3_next",
    },
    "sparse attention with a cache of its own": {
        "deepseek_v32", "glm_moe_dsa", "minimax_m3", "minimax_m3_vl",
    },
    "layers of different sizes": {"gemma4_text", "mimo_v2_flash", "nemotron-nas"},
}  # fmt: skip
"""Families whose layers of these kinds have the sizes of vLLM 0.32."""


def _reason(fields: Fields, key: str) -> str | None:
    """Return the meaning of a key that changes the cache, None if the family's is counted."""
    if key in UNCOUNTED:
        return UNCOUNTED[key]
    state, sparse, unequal = _COUNTED
    linear = key == "attn_type_list" and 0 in (fields.listed(key) or ())
    if linear or key in _STATE_KEYS or key.startswith(_STATE_PREFIXES):
        why = state
    elif key in _SPARSE_KEYS:
        why = sparse
    elif key in _UNEQUAL_KEYS:
        why = unequal
    else:
        return None
    return None if fields.model_type in _COUNTED[why] else why


def check_architecture(fields: Fields) -> None:
    """Raise InputError, naming the key, for a model whose layers are not counted here."""
    if fields.get("is_encoder_decoder"):
        raise _uncounted(fields, "is_encoder_decoder", "an encoder and cross attention")
    kind = fields.model_type
    for key in sorted(fields.names(), key=lambda name: name not in UNCOUNTED):
        why = _reason(fields, key)
        if why is not None and fields.get(key):
            raise _uncounted(fields, key, why)
    if kind not in KNOWN:
        if not kind:
            fields.needed("num_attention_heads")  # a file of something else names no sizes
        said = f"model_type is {kind!r}" if kind else "model_type is missing"
        raise Uncounted(
            f"{fields.path}: {said}: its layers are not counted here; known are "
            f"{', '.join(sorted(KNOWN))}"
        )


def _uncounted(fields: Fields, key: str, why: str) -> Uncounted:
    return Uncounted(
        f"{fields.path}: {key}: this model has {why}, which is not counted here; measure it with "
        "a real vLLM"
    )


FULL, NEAR, STATE, MLP, EXPERTS = "full", "near", "state", "mlp", "experts"
_KINDS = {
    "full_attention": FULL, "attention": FULL, "*": FULL, "deepseek_sparse_attention": FULL,
    "sliding_attention": NEAR, "chunked_attention": NEAR,
    "linear_attention": STATE, "mamba": STATE, "M": STATE,
    "mlp": MLP, "-": MLP, "moe": EXPERTS, "E": EXPERTS,
}  # fmt: skip
"""Kinds of layers by their names in config.json. Nemotron-H counts an MLP as a layer of its own."""
_KIND_OF = _KINDS | {kind: kind for kind in _KINDS.values()}


def layer_kinds(fields: Fields) -> list[str] | None:
    """Return the kind of each layer, None where the configuration does not list them.

    Raises:
        InputError: an unknown kind, or another number of layers.
    """
    # Kinds by their names in the file, None for an unknown one.
    count = fields.whole("num_hidden_layers")
    key, names = _listed_kinds(fields) or ("layer_types", _counted_kinds(fields, count or 0))
    if names is None:
        return None
    states = fields.model_type in _COUNTED[_STATE]
    kinds = [_KIND_OF.get(str(name)) for name in names]
    kinds = [kind if states or kind != STATE else None for kind in kinds]
    # One kind for each layer, all of them counted here.
    if None in kinds:
        raise InputError(
            f"{fields.path}: {key} holds {names[kinds.index(None)]!r}, whose state is not counted "
            f"here; known are {', '.join(_KINDS)}"
        )
    if count and len(kinds) != count:
        raise InputError(
            f"{fields.path}: {key} has {len(kinds)} entries, num_hidden_layers is {count}"
        )
    return [kind for kind in kinds if kind]


def _listed_kinds(fields: Fields) -> tuple[str, list[Any]] | None:
    """Return the key that lists a kind for each layer of a hybrid, and its list."""
    if pattern := fields.get("hybrid_override_pattern"):
        return "hybrid_override_pattern", list(pattern)
    if types := fields.listed("layers_block_type"):
        return "layers_block_type", types
    if fields.section("linear_attn_config") and fields.whole("num_hidden_layers"):
        return None
    key = "hybrid_layer_pattern"
    near = fields.listed(key)
    return (key, [NEAR if flag else FULL for flag in near]) if near else None


def _counted_kinds(fields: Fields, count: int) -> list[Any] | None:
    """Return `layer_types`, or the kinds of `count` layers by another rule of the file."""
    layers = range(count)
    if count and (linear := fields.part("linear_attn_config")):
        full = linear.listed("full_attn_layers") or ()
        return [FULL if n + 1 in full else STATE for n in layers]
    types = fields.listed("layer_types")
    if types is not None or not count:
        return types
    if every := fields.whole("full_attention_interval"):
        return [STATE if (n + 1) % every else FULL for n in layers]
    pattern = fields.get("sliding_window_pattern")
    if isinstance(pattern, str):
        return [FULL if pattern[n % len(pattern)] == "G" else NEAR for n in layers]
    return None


def read_heads(fields: Fields, heads: int, kv_heads: int, head_dim: int) -> tuple[Heads, Heads]:
    """Return the heads of layers with the whole context, and of layers with a window."""
    gated = bool(fields.get("attn_output_gate")) or fields.model_type == "qwen3_next"
    value = fields.whole("v_head_dim") if fields.get("swa_head_dim") else None
    base = Heads(heads, kv_heads, head_dim, value or head_dim, gated)
    if size := fields.whole("global_head_dim"):  # Gemma 4
        tied = bool(fields.get("attention_k_eq_v"))
        few = fields.whole("num_global_key_value_heads") if tied else None
        return Heads(heads, few or kv_heads, size, size, gated, tied), base
    if size := fields.whole("swa_head_dim"):  # MiMo
        near = Heads(
            fields.whole("swa_num_attention_heads") or heads,
            fields.whole("swa_num_key_value_heads") or kv_heads,
            size,
            fields.whole("swa_v_head_dim") or size,
        )
        return base, near
    return base, base


def read_state(fields: Fields, kinds: list[str]) -> Recurrent | None:
    """Return the layers with a recurrent state, None without any (InputError: missing sizes)."""
    layers, first = kinds.count(STATE), kinds[0] == STATE
    if not layers:
        return None
    # The sizes of each kind of state have keys of their own.
    if linear := fields.part("linear_attn_config"):  # Kimi Delta Attention
        heads, size = linear.needed("num_heads"), linear.needed("head_dim")
        inner = heads * size
        return Recurrent(
            layers, 4 * inner + heads + size, inner, linear.needed("short_conv_kernel_size") - 1,
            3 * inner, inner * size, exports="gate_lower_bound" in linear.names(), first=first,
        )  # fmt: skip
    if fields.get("linear_num_value_heads"):  # Gated DeltaNet
        heads, size = fields.needed("linear_num_value_heads"), fields.needed("linear_key_head_dim")
        inner = heads * fields.needed("linear_value_head_dim")
        channels = 2 * fields.needed("linear_num_key_heads") * size + inner
        width = 4 if fields.get("mamba_ssm_dtype") == "float32" else 2
        taps = fields.needed("linear_conv_kernel_dim") - 1
        inputs = channels + inner + 2 * heads
        return Recurrent(layers, inputs, inner, taps, channels, inner * size, width, first=first)
    # Mamba-2.
    heads = fields.needed("mamba_num_heads", "mamba_n_heads")
    size = fields.needed("ssm_state_size", "mamba_d_state")
    inner = heads * fields.needed("mamba_head_dim", "mamba_d_head")
    groups = fields.needed("n_groups", "mamba_n_groups")
    wide = fields.get("mamba_ssm_cache_dtype") or (
        "float32" if fields.model_type == "nemotron_h" else ""
    )
    return Recurrent(
        layers, 2 * inner + 2 * groups * size + heads, inner,
        fields.needed("conv_kernel", "mamba_d_conv") - 1, inner, inner * size,
        4 if wide == "float32" else 2, groups, 2 * size, exports=True, first=first,
    )  # fmt: skip


def read_index(fields: Fields, layers: int) -> Indexer | None:
    """Return the indexer of sparse attention, None without it (InputError: missing sizes)."""
    if blocks := fields.part("sparse_attention_config"):  # MiniMax M3
        sparse = sum(map(bool, blocks.listed("sparse_attention_freq") or ()))
        width, size = blocks.needed("sparse_index_dim"), blocks.needed("sparse_block_size")
        return Indexer(
            sparse, sparse, blocks.needed("sparse_num_index_heads"), width, 0,
            blocks.needed("sparse_topk_blocks") * size, fields.needed("hidden_size"), size,
        )  # fmt: skip
    chosen = fields.whole("index_topk")
    if not chosen:
        return None
    # Layers that share the choice of another have no indexer, as in vLLM's DeepseekV32Attention.
    pattern, every = fields.get("index_topk_pattern"), fields.whole("index_topk_freq") or 1
    offset = fields.whole("index_skip_topk_offset")
    before = (2 if offset is None else offset) - 1
    own = [
        pattern[n] != "S" if pattern and n < len(pattern) else max(n - before, 0) % every == 0
        for n in range(layers)
    ]
    width = fields.needed("index_head_dim")
    return Indexer(
        sum(own), layers, fields.needed("index_n_heads"), width, width + width // 128 * 4, chosen,
        fields.needed("q_lora_rank"), 64,
    )  # fmt: skip
