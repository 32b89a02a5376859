"""The model families whose layers are counted here, their adapters, keys of uncounted layers.

A `config.json` is an open format: a key that stays unread changes sizes silently. So a family is
counted if it is listed, and refused otherwise.
"""

from dataclasses import dataclass

from forebay.replay.engine.hardware.hf_fields import Fields, Uncounted

DENSE = frozenset({
    "baichuan", "cohere", "cohere2", "ernie4_5", "exaone", "exaone4", "falcon", "gemma", "gemma2",
    "gemma3", "gemma3_text", "glm", "glm4", "glm4v_text", "gpt_bigcode", "gpt_neox", "granite",
    "hunyuan_v1_dense", "internlm2", "internlm3", "llama", "mimo", "ministral", "ministral3",
    "mistral", "nemotron", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen2_vl",
    "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3", "qwen3_vl_text", "seed_oss",
    "smollm3", "stablelm", "starcoder2",
})  # fmt: skip
MIXTURES = frozenset({
    "deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "glm4v_moe_text", "gpt_oss", "granitemoe",
    "kimi_k2", "llama4_text", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_moe", "qwen3_vl_moe_text",
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
_SPARSE = "sparse attention with a cache of its own"
_UNEQUAL = "layers of different sizes"
UNCOUNTED = {
    "layers_block_type": _STATE,
    "hybrid_override_pattern": _STATE,
    "attn_layer_indices": _STATE,
    "attn_layer_period": _STATE,
    "attn_type_list": _STATE,
    "full_attention_interval": _STATE,
    "full_attn_idxs": _STATE,
    "lru_width": _STATE,
    "index_topk": _SPARSE,
    "compress_ratios": _SPARSE,
    "sparse_attention_config": _SPARSE,
    "global_head_dim": _UNEQUAL,
    "hybrid_layer_pattern": _UNEQUAL,
    "swa_head_dim": _UNEQUAL,
    "block_configs": _UNEQUAL,
    "num_kv_shared_layers": "layers that share the cache of others",
    "cross_attention_layers": "cross attention to images",
}
"""Keys that change the cache or the computation of a layer, and their meaning."""
_UNCOUNTED_PREFIXES = {"mamba_": _STATE, "ssm_": _STATE, "linear_attn_": _STATE,
                       "linear_num_": _STATE, "linear_key_": _STATE}  # fmt: skip


def check_architecture(fields: Fields) -> None:
    """Raise InputError, naming the key, for a model whose layers are not counted here."""
    if fields.get("is_encoder_decoder"):
        raise _uncounted(fields, "is_encoder_decoder", "an encoder and cross attention")
    for key in fields.names():
        why = UNCOUNTED.get(key) or next(
            (why for start, why in _UNCOUNTED_PREFIXES.items() if key.startswith(start)), None
        )
        if why is not None and fields.get(key):
            raise _uncounted(fields, key, why)
    kind = fields.model_type
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
