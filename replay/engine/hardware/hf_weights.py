"""Find the size of a model's weights: in its checkpoint's index, else counted from the shapes.

The count follows the layers of the public model classes: Llama, Mistral, Qwen, Gemma, Phi-3,
Mixtral, DeepSeek and similar ones. Small tensors of rarer families are left out.
"""

from dataclasses import dataclass
from typing import Any

from forebay.replay.engine.hardware.hf_fields import Fields, read_object
from forebay.traces.errors import InputError

INDEX = "model.safetensors.index.json"
_UNGATED = {"falcon", "gpt_bigcode", "gpt_neox", "nemotron", "opt", "phi", "starcoder2"}
_FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text"}
_HEAD_NORMS = {"gemma3", "gemma3_text", "qwen3", "qwen3_moe"}
_TIED_BY_DEFAULT = {"gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2", "falcon"}
_GROUPED = ("awq", "gptq", "compressed-tensors")  # quantised with one scale for a group of weights


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters by kind; quantisation changes `experts` and `linear`.

    `rest` are embeddings, head and norms.
    """

    experts: int
    linear: int
    rest: int

    @property
    def total(self) -> int:
        return self.experts + self.linear + self.rest


def weight_bytes(fields: Fields, head_dim: int, kv_heads: int) -> tuple[int, str]:
    """Return the bytes of the weights as served, and the source of the number.

    The size is that of `model.safetensors.index.json` beside the configuration, if it exists. A
    32-bit checkpoint is halved, as vLLM loads it in 16 bits. Raises InputError where the size is
    unknown.
    """
    index = fields.path.parent / INDEX
    if index.exists():
        metadata = read_object(index).get("metadata")
        size = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(size, bool) or not isinstance(size, int | float) or size <= 0:
            raise InputError(f"{index}: no metadata.total_size; remove the file to have it counted")
        wide = str(fields.get("torch_dtype", "dtype")) == "float32"
        return int(size) // (2 if wide else 1), f"total_size in {INDEX}"
    count = count_parameters(fields, head_dim, kv_heads)
    expert_bits, linear_bits = _bits(fields)
    size = (count.experts * expert_bits + count.linear * linear_bits + count.rest * 16) / 8
    source = f"{count.total:,} parameters counted from config.json"
    if linear_bits != 16 or expert_bits != 16:
        source += f", quantised to {min(linear_bits, expert_bits):g} bits"
    return int(size), source


def count_parameters(fields: Fields, head_dim: int, kv_heads: int) -> ParameterCount:
    """Count a dense or mixture-of-experts decoder; raises InputError for missing sizes."""
    layers, hidden = fields.needed("num_hidden_layers"), fields.needed("hidden_size")
    kind = fields.model_type
    attention, small = _attention(fields, head_dim, kv_heads)
    matrices = 2 if kind in _UNGATED else 3
    norms = (4 if kind in _FOUR_NORMS else 2) * hidden
    sparse = sparse_layers(fields, layers)
    experts = linear = routers = 0
    if sparse:
        width = expert_width(fields)
        number = fields.needed(*EXPERTS)
        experts = sparse * number * matrices * hidden * width
        linear = sparse * matrices * hidden * shared_width(fields)
        routers = sparse * number * hidden
    if sparse < layers:
        ffn = fields.needed("intermediate_size", "ffn_hidden_size")
        linear += (layers - sparse) * matrices * hidden * ffn
    tied = fields.get("tie_word_embeddings")
    if tied is None:
        tied = kind in _TIED_BY_DEFAULT
    vocabulary = fields.needed("vocab_size") * hidden * (1 if tied else 2)
    rest = vocabulary + layers * (norms + small) + routers + hidden
    return ParameterCount(experts, linear + layers * attention, rest)


EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


def sparse_layers(fields: Fields, layers: int) -> int:
    """Count the layers whose MLP is a mixture of experts."""
    if not fields.whole(*EXPERTS):
        return 0
    first = fields.whole("first_k_dense_replace") or 0
    dense = {*range(first), *(fields.listed("mlp_only_layers") or ())}
    step = fields.whole("decoder_sparse_step", "moe_layer_freq") or 1
    offset = 1 if fields.whole("decoder_sparse_step") else 0
    return sum(1 for n in range(layers) if n not in dense and (n + offset) % step == 0)


def expert_width(fields: Fields) -> int:
    return fields.needed("moe_intermediate_size", "intermediate_size")


def shared_width(fields: Fields) -> int:
    """Return the MLP width of the experts that every token passes through."""
    shared = fields.whole("n_shared_experts")
    if shared:
        return shared * expert_width(fields)
    return fields.whole("shared_expert_intermediate_size") or 0


def _attention(fields: Fields, head_dim: int, kv_heads: int) -> tuple[int, int]:
    """Count the parameters of one layer's attention: matrices, and biases with norms."""
    hidden, heads = fields.needed("hidden_size"), fields.needed("num_attention_heads")
    rank = fields.whole("kv_lora_rank")
    if rank:
        rope, plain = fields.needed("qk_rope_head_dim"), fields.needed("qk_nope_head_dim")
        value, query_rank = fields.needed("v_head_dim"), fields.whole("q_lora_rank") or 0
        width = heads * (plain + rope)
        queries = (hidden + width) * query_rank if query_rank else hidden * width
        keys = hidden * (rank + rope) + rank * heads * (plain + value)
        return queries + keys + heads * value * hidden, query_rank + rank
    own, shared = heads * head_dim, kv_heads * head_dim
    small = 2 * head_dim if fields.model_type in _HEAD_NORMS else 0
    if fields.get("attention_bias"):
        small += own + 2 * shared + hidden
    elif fields.model_type in ("qwen2", "qwen2_moe"):
        small += own + 2 * shared
    return 2 * hidden * own + 2 * hidden * shared, small


def _bits(fields: Fields) -> tuple[float, float]:
    """Return the bits of one weight, scales included: of the experts, of the other matrices."""
    config = fields.section("quantization_config")
    if not config:
        return 16, 16
    method = str(config.get("quant_method", ""))
    if method in ("fp8", "fbgemm_fp8"):
        return 8, 8
    if method == "mxfp4":  # gpt-oss: experts only, one 8-bit scale for 32 weights
        return 4 + 8 / 32, 16
    section = _quantised_weights(config) if method in _GROUPED else {}
    bits = section.get("bits", section.get("num_bits"))
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 < bits <= 16:
        raise InputError(
            f"{fields.path}: quantization_config.quant_method {method!r}: size of the weights "
            f"unknown; put {INDEX} beside it or give --weights-gib"
        )
    size = section.get("group_size")
    scales = (16 + bits) / size if isinstance(size, int) and size > 0 else 0
    return bits + scales, bits + scales


def _quantised_weights(config: dict[str, Any]) -> dict[str, Any]:
    """Return the section that describes weights: the first group's, or the whole configuration."""
    groups = config.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else config
    return weights if isinstance(weights, dict) else {}
