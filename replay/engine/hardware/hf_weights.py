"""Find the size of a model's weights: in its checkpoint's index, else counted from the shapes.

The count follows the layers of the public model classes: Llama, Mistral, Qwen, Gemma, Phi-3,
Mixtral, DeepSeek and similar ones. Small tensors of rarer families are left out.
"""

from forebay.replay.engine.hardware.architectures import EXPERTS, MLP, layer_kinds
from forebay.replay.engine.hardware.hf_fields import Fields, read_object
from forebay.replay.engine.hardware.hf_formats import weight_format
from forebay.replay.engine.hardware.layers import PLAIN, Latent, Mixers, Mixture
from forebay.traces.ground.errors import InputError

INDEX = "model.safetensors.index.json"
UNGATED = frozenset({
    "falcon", "gpt_bigcode", "gpt_neox", "nemotron", "nemotron_h", "opt", "phi", "starcoder2",
})  # fmt: skip
_FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text", "gemma4_text"}
_HEAD_NORMS = {"gemma3", "gemma3_text", "qwen3", "qwen3_moe"}
_TIED_BY_DEFAULT = {
    "gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2", "falcon", "gpt_bigcode",
}  # fmt: skip
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_CHOSEN = (
    "num_experts_per_tok", "experts_per_token", "num_experts_per_token", "top_k_experts",
)  # fmt: skip
ALONE = ", of the language model alone"
_LLAMA_4 = "llama4_text"


def weight_bytes(fields: Fields, mixers: Mixers, mlps: int) -> tuple[int, str]:
    """Return the bytes of the weights as served, and the source of the number.

    The size is in `model.safetensors.index.json` next to the configuration, if it exists. A
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
    experts, linear, attention, rest = counts = _count_parameters(fields, mixers, mlps)
    stored = weight_format(fields)
    quantised = experts * stored.expert_bits + linear * stored.linear_bits
    bits = quantised + attention * stored.attention_bits + rest * 16
    source = f"{sum(counts):,} parameters counted from config.json"
    if stored.least_bits != 16:
        source += f", quantised to {stored.least_bits:g} bits"
    if fields.several_kinds:
        source += ALONE
    return int(bits / 8), source


def _count_parameters(fields: Fields, mixers: Mixers, mlps: int) -> tuple[int, int, int, int]:
    """Count a dense or mixture-of-experts decoder (InputError: missing sizes).

    Returns the parameters of experts, of MLPs that every token takes, of attention, and the rest:
    embeddings, head and norms, which quantisation does not change.
    """
    hidden, kind = fields.needed("hidden_size"), fields.model_type
    # Attention and norms are in all layers. A state takes the place of attention.
    attention = sum(
        group.layers * sum(product.weights for product in group.products)
        for group in mixers.groups(hidden, 16)
    )
    norms = (2 if kind in _FOUR_NORMS else 1) * hidden * (mixers.count + mlps)
    # Experts, shared experts and routers are in sparse layers only.
    mixture, gated = read_mixture(fields, mlps), kind not in UNGATED
    experts = linear = routers = 0
    dense_layers = mlps if mixture is None else mixture.dense_layers
    if mixture is not None:
        sparse = mlps - dense_layers
        router, *products = mixture.products(hidden, gated, PLAIN)
        routers = sparse * router.weights
        sizes = [(product.experts, sparse * product.weights) for product in products]
        experts = sum(number * size for number, size in sizes if number > 1)
        linear = sum(size for number, size in sizes if number == 1)
    # Dense layers have one MLP. A tied head has no weights of its own.
    if dense_layers:
        linear += dense_layers * (3 if gated else 2) * hidden * dense_width(fields)
    said = fields.get("tie_word_embeddings")
    tied = kind in _TIED_BY_DEFAULT if said is None else said
    vocabulary = fields.needed("vocab_size") * hidden * (1 if tied else 2)
    rest = vocabulary + norms + mixers.layers * _small(fields, mixers) + routers + hidden
    return experts, linear, attention, rest


def read_mixture(fields: Fields, layers: int) -> Mixture | None:
    """Return the experts of the model, None without any (InputError: missing sizes)."""
    number = fields.whole(*_EXPERTS)
    sparse = sum(_sparse(fields, layers)) if number else 0
    if not number or not sparse:
        return None
    chosen = fields.needed(*_CHOSEN)
    if chosen > number:
        raise InputError(f"{fields.path}: num_experts_per_tok is {chosen} of {number} experts")
    width = fields.needed("moe_intermediate_size", "intermediate_size")
    several = fields.whole("n_shared_experts", "num_shared_experts")
    if fields.model_type == _LLAMA_4:
        shared = width
    else:
        wide = fields.whole("moe_shared_expert_intermediate_size")  # Nemotron 3: of all
        shared = (
            wide
            or (several or 0) * width
            or fields.whole("shared_expert_intermediate_size", "shared_intermediate_size")
            or 0
        )
    latent = fields.whole("moe_latent_size", "routed_expert_hidden_size") or 0
    dense = dense_width(fields) if fields.get("enable_moe_block") else 0
    return Mixture(number, chosen, width, shared, layers - sparse, latent, dense)


def dense_width(fields: Fields) -> int:
    """Return the MLP width of a layer without experts (InputError: it is missing)."""
    if fields.model_type == _LLAMA_4:
        return fields.needed("intermediate_size_mlp")
    hidden = fields.needed("hidden_size")
    if blocks := fields.listed("block_configs"):  # the mean of layers of different widths
        shares = [block["ffn"].get("ffn_mult") or 0 for block in blocks]
        return round(sum(2 * share * hidden / 3 for share in shares) / len(shares) / 256) * 256
    if fields.model_type == "gpt_bigcode" and fields.get("intermediate_size") is None:
        return 4 * hidden
    return fields.needed("dense_intermediate_size", "intermediate_size", "ffn_hidden_size")


def _sparse(fields: Fields, layers: int) -> list[bool]:
    """Return a flag for each layer with an MLP: True if it is a mixture of experts."""
    kinds = layer_kinds(fields) or []
    if own := [kind == EXPERTS for kind in kinds if kind in (MLP, EXPERTS)]:
        return own
    flags = fields.get("moe_layer_freq")
    if isinstance(flags, list):
        if len(flags) != layers or not set(flags) <= {0, 1}:
            raise InputError(f"{fields.path}: moe_layer_freq is not a list of {layers} 0 and 1")
        return [bool(flag) for flag in flags]
    first = fields.whole("first_k_dense_replace") or 0
    dense = {*range(first), *(fields.listed("mlp_only_layers") or ())}
    counted_from_one = ("decoder_sparse_step", "interleave_moe_layer_step")
    step = fields.whole(*counted_from_one, "moe_layer_freq") or 1
    offset = 1 if fields.whole(*counted_from_one) else 0
    return [n not in dense and (n + offset) % step == 0 for n in range(layers)]


def read_latent(fields: Fields) -> Latent | None:
    """Return the sizes of latent attention, None without it (InputError: missing sizes)."""
    rank = fields.whole("kv_lora_rank")
    if not rank:
        return None
    return Latent(
        query_rank=fields.whole("q_lora_rank") or 0,
        rank=rank,
        rope=fields.needed("qk_rope_head_dim"),
        nope=fields.needed("qk_nope_head_dim"),
        value=fields.needed("v_head_dim"),
    )


def _small(fields: Fields, mixers: Mixers) -> int:
    """Count the biases and norms of one layer's attention."""
    latent, heads, hidden = mixers.latent, mixers.full, fields.needed("hidden_size")
    if latent is not None:
        return latent.query_rank + latent.rank
    own, shared = heads.heads * heads.key, heads.kv_heads * heads.key
    small = 2 * heads.key if fields.model_type in _HEAD_NORMS else 0
    if fields.get("attention_bias"):
        small += own + 2 * shared + hidden
    elif fields.model_type in ("qwen2", "qwen2_moe"):
        small += own + 2 * shared
    return small
