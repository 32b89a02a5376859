"""Read a model's sizes from its Hugging Face `config.json`."""

import math
from pathlib import Path

from forebay.replay.engine.hardware.hf_fields import Fields, read_object
from forebay.replay.engine.hardware.hf_weights import (
    expert_width,
    shared_width,
    sparse_layers,
    weight_bytes,
)
from forebay.replay.engine.hardware.kv_layout import ModelShape
from forebay.replay.engine.hardware.specs import GIB
from forebay.traces.errors import InputError

_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}
"""Where the configuration does not say it, every n-th layer attends to the whole context."""

_STATES = (
    "hybrid_override_pattern", "layers_block_type", "attn_layer_period", "attn_type_list",
    "full_attention_interval", "linear_attn_config", "linear_num_value_heads", "mamba_d_state",
    "mamba_d_ssm", "ssm_state_size", "state_size",
)  # fmt: skip
"""Keys of models some layers of which keep a state in place of keys and values (Mamba and other
linear attention), where `layer_types` does not say so."""


def read_shape(path: Path, weights_gib: float | None = None) -> ModelShape:
    """Read the model in `path`, a config.json or a folder with one.

    Args:
        weights_gib: size of all weights; None: as the files say.

    Raises:
        InputError: naming the file, and the field that is missing or cannot be used.
    """
    file = path / "config.json" if path.is_dir() else path
    fields = Fields(file, read_object(file))
    _check_states(fields)
    heads = fields.needed("num_attention_heads")
    latent = fields.whole("kv_lora_rank") or 0
    head_dim, kv_heads = _head_dim(fields, heads, latent), _kv_heads(fields, heads)
    layers = fields.needed("num_hidden_layers")
    longest = _max_model_len(fields)
    window, sliding = _sliding(fields, layers, longest)
    if weights_gib is None:
        size, source = weight_bytes(fields, head_dim, kv_heads)
    else:
        size, source = int(weights_gib * GIB), "as given"
    return ModelShape(
        name=_name(fields, path),
        layers=layers,
        hidden=fields.needed("hidden_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=_width(fields, layers),
        vocab=fields.needed("vocab_size"),
        max_model_len=longest,
        weight_bytes=size,
        sliding_layers=sliding,
        sliding_window=window,
        latent=latent + fields.needed("qk_rope_head_dim") if latent else 0,
        weights_source=source,
    )


def _name(fields: Fields, path: Path) -> str:
    given = fields.get("_name_or_path")
    if isinstance(given, str) and given:
        return given.rstrip("/").rsplit("/", 1)[-1]
    folder = path if path.is_dir() else path.parent
    return folder.resolve().name


def _head_dim(fields: Fields, heads: int, latent: int) -> int:
    given = fields.whole("head_dim")
    if given:
        return given
    hidden = fields.needed("hidden_size")
    if hidden % heads and not latent:
        raise InputError(
            f"{fields.path}: head_dim is missing and hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}"
        )
    return hidden // heads


def _kv_heads(fields: Fields, heads: int) -> int:
    given = fields.whole("num_key_value_heads", "num_kv_heads")
    if given:
        return given
    return 1 if fields.get("multi_query") else heads


def _width(fields: Fields, layers: int) -> int:
    """Return the MLP width of one token in the widest layer."""
    sparse = sparse_layers(fields, layers)
    widths = []
    if sparse:
        chosen = fields.needed("num_experts_per_tok", "experts_per_token")
        widths.append(chosen * expert_width(fields) + shared_width(fields))
    if sparse < layers:
        widths.append(fields.needed("intermediate_size", "ffn_hidden_size"))
    return max(widths)


def _max_model_len(fields: Fields) -> int:
    """Return max_position_embeddings, or the length that YaRN stretches it to, as vLLM does."""
    given = fields.needed("max_position_embeddings", "max_sequence_length", "seq_length")
    rope = fields.section("rope_scaling") or fields.section("rope_parameters")
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if rope.get("rope_type", rope.get("type")) != "yarn" or original is None or factor is None:
        return given
    if not isinstance(original, int) or not isinstance(factor, int | float) or factor <= 0:
        raise InputError(
            f"{fields.path}: rope_scaling: original_max_position_embeddings {original!r} and "
            f"factor {factor!r} must be numbers"
        )
    return math.floor(original * factor)


def _sliding(fields: Fields, layers: int, longest: int) -> tuple[int, int]:
    """Return the window in tokens and the number of sliding layers; (0, 0) without any."""
    types = fields.listed("layer_types")
    if types is not None:
        _check_types(fields, types, layers)
    window = fields.whole("sliding_window")
    if not window or window >= longest or fields.get("use_sliding_window") is False:
        return 0, 0
    if types is not None:
        number = types.count("sliding_attention")
    elif fields.get("use_sliding_window") and fields.get("max_window_layers") is not None:
        number = layers - min(layers, fields.whole("max_window_layers") or 0)
    else:
        every = fields.whole("sliding_window_pattern", "_sliding_window_pattern")
        every = every or _PATTERNS.get(fields.model_type)
        number = layers - layers // every if every else layers
    return (window, number) if number else (0, 0)


def _check_states(fields: Fields) -> None:
    key = next((name for name in _STATES if fields.get(name)), None)
    if key is not None:
        raise InputError(
            f"{fields.path}: {key} says that some layers keep a state (Mamba or linear attention), "
            "which is not counted here; read the size of the cache from the start-up log of vLLM"
        )


def _check_types(fields: Fields, types: list[object], layers: int) -> None:
    # By default vLLM caches the whole context of chunked attention (Llama 4).
    known = ("full_attention", "sliding_attention", "chunked_attention")
    strange = next((one for one in types if one not in known), None)
    if strange is not None:
        raise InputError(
            f"{fields.path}: layer_types holds {strange!r}, whose state is not counted here; "
            f"known are {', '.join(known)}"
        )
    if len(types) != layers:
        raise InputError(
            f"{fields.path}: layer_types has {len(types)} entries, num_hidden_layers is {layers}"
        )
