"""Read a model's sizes from its Hugging Face `config.json`."""

import math
from pathlib import Path
from typing import Any

from forebay.replay.engine.hardware.architectures import (
    EXPERTS,
    FULL,
    MLP,
    NEAR,
    check_architecture,
    layer_kinds,
    read_heads,
    read_index,
    read_state,
)
from forebay.replay.engine.hardware.hf_fields import Fields, read_object
from forebay.replay.engine.hardware.hf_formats import kv_value_bytes
from forebay.replay.engine.hardware.hf_weights import (
    ALONE,
    dense_width,
    read_latent,
    read_mixture,
    weight_bytes,
)
from forebay.replay.engine.hardware.kv_layout import ModelShape
from forebay.replay.engine.hardware.layers import Latent, Mixers
from forebay.replay.engine.hardware.specs import GIB
from forebay.traces.ground.errors import InputError

_PATTERNS = {"cohere2": 4, "gemma2": 2, "gemma3": 6, "gemma3_text": 6}
"""Where the configuration does not say it, every n-th layer attends to the whole context."""
_ATTEND_ONE_MORE = {"cohere2"}
"""Models whose window does not count the token itself."""


def read_shape(
    path: Path, weights_gib: float | None = None, *, stretches_yarn: bool = False
) -> ModelShape:
    """Read the model in `path`, a config.json or a folder with one.

    Args:
        weights_gib: size of all weights. None: the size in the files.
        stretches_yarn: use the rule of vLLM up to 0.29, see `_max_model_len`.

    Raises:
        InputError: naming the file, and the field that is missing or cannot be used.
    """
    return shape_of(read_fields(path), weights_gib, stretches_yarn=stretches_yarn)


def read_fields(path: Path) -> Fields:
    """Read a config.json, also from its folder. An InputError names the file."""
    file = path / "config.json" if path.is_dir() else path
    return Fields(file, read_object(file))


def shape_of(
    fields: Fields, weights_gib: float | None = None, *, stretches_yarn: bool = False
) -> ModelShape:
    """Return the sizes of a model, see `read_shape`."""
    check_architecture(fields)
    # Fields whose value depends on others come first.
    heads = fields.needed("num_attention_heads")
    latent = read_latent(fields)
    head_dim, kv_heads = _head_dim(fields, heads, latent), _kv_heads(fields, heads)
    kinds = layer_kinds(fields)
    layers, mlps = _counts(fields, kinds)
    longest = _max_model_len(fields, stretches_yarn)
    windows = _windows(fields, layers, longest, kinds)
    full, near = read_heads(fields, heads, kv_heads, head_dim)
    state = read_state(fields, kinds) if kinds else None
    mixers = Mixers(
        layers, windows["sliding_layers"], full, near, latent, state, read_index(fields, layers)
    )
    # The size of the weights, as given or by counting parameters.
    if weights_gib is None:
        size, source = weight_bytes(fields, mixers, mlps)
    else:
        size, source = int(weights_gib * GIB), "as given"
    return ModelShape(
        name=_name(fields),
        layers=layers,
        hidden=fields.needed("hidden_size"),
        heads=full.heads,
        kv_heads=full.kv_heads,
        head_dim=full.key,
        ffn=_width(fields, mlps),
        vocab=fields.needed("vocab_size"),
        max_model_len=longest,
        weight_bytes=size,
        **windows,
        latent=latent.rank + latent.rope if latent else 0,
        weights_source=source,
        language_only=source.endswith(ALONE),
        kv_value_bytes=kv_value_bytes(fields),
        default_len=_default_len(fields, longest),
        family=fields.family,
        value_dim=0 if full.value == full.key else full.value,
        gated_attention=full.gated,
        tied_values=full.tied,
        near=None if near == full else near,
        state=state,
        index=mixers.index,
        mlps=0 if mlps == layers else mlps,
    )


def _counts(fields: Fields, kinds: list[str] | None) -> tuple[int, int]:
    """Return the number of attention layers, and of MLPs: of one a layer, or as layers."""
    blocks = fields.listed("block_configs")
    if blocks is not None:  # Nemotron-NAS leaves out the attention of some layers
        attention = [block["attention"] for block in blocks]
        whole = [part for part in attention if not part.get("no_op")]
        group = {part.get("n_heads_in_group") for part in whole}
        if len(group) != 1 or any(
            part.get(key) for part in whole for key in ("window_length", "replace_with_linear")
        ):
            raise InputError(f"{fields.path}: block_configs: layers of different heads or kinds")
        return len(whole), sum(not block["ffn"].get("no_op") for block in blocks)
    if kinds is None:
        layers = fields.needed("num_hidden_layers")
        return layers, layers
    own = kinds.count(MLP) + kinds.count(EXPERTS)
    return kinds.count(FULL) + kinds.count(NEAR), own or len(kinds)


def _name(fields: Fields) -> str:
    name = fields.get("_name_or_path")
    if isinstance(name, str) and name:
        return name.rstrip("/").rsplit("/", 1)[-1]
    return fields.path.resolve().parent.name


def _head_dim(fields: Fields, heads: int, latent: Latent | None) -> int:
    head_dim = fields.whole("head_dim", "attention_head_dim")
    if head_dim:
        return head_dim
    hidden = fields.needed("hidden_size")
    if hidden % heads and not latent:
        raise InputError(
            f"{fields.path}: head_dim is missing and hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}"
        )
    return hidden // heads


def _kv_heads(fields: Fields, heads: int) -> int:
    # Falcon writes num_kv_heads also where all heads share one. Its new architecture uses it.
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1
    if blocks := fields.listed("block_configs"):
        groups = [block["attention"].get("n_heads_in_group") for block in blocks]
        return int(heads // next(filter(None, groups), heads))
    return fields.whole("num_key_value_heads", "num_kv_heads") or heads


def _width(fields: Fields, mlps: int) -> int:
    """Return the MLP width of one token in the widest layer."""
    mixture = read_mixture(fields, mlps)
    if mixture is None:
        return dense_width(fields)
    dense = dense_width(fields) if mixture.dense_layers else 0
    return max(mixture.active_width, dense)


_LENGTHS = ("max_position_embeddings", "max_sequence_length", "seq_length")
_SCALED = ("su", "longrope", "llama3", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of RoPE scaling that max_position_embeddings already includes."""


def _max_model_len(fields: Fields, stretches_yarn: bool) -> int:
    """Return the longest --max-model-len, as vLLM derives it (`_get_and_verify_max_len`).

    Linear and dynamic scaling multiply max_position_embeddings by their factor. With YaRN, vLLM up
    to 0.29 multiplied original_max_position_embeddings (`stretches_yarn`). vLLM 0.32 uses
    max_position_embeddings unchanged.
    """
    length = fields.needed(*_LENGTHS)
    rope = _rope(fields)
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if fields.model_type.startswith("gemma3") or kind is None or kind in _SCALED or factor is None:
        return length
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
        raise InputError(f"{fields.path}: rope_scaling: factor {factor!r} must be a number above 0")
    if kind != "yarn":
        return math.floor(length * factor)
    original = rope.get("original_max_position_embeddings")
    if not stretches_yarn or original is None:
        return length
    if not isinstance(original, int):
        raise InputError(
            f"{fields.path}: rope_scaling: original_max_position_embeddings {original!r} must be a "
            "whole number"
        )
    return math.floor(original * factor)


def _default_len(fields: Fields, longest: int) -> int:
    """Return the context without --max-model-len: with longrope, that before its scaling."""
    rope = _rope(fields)
    original = fields.whole("original_max_position_embeddings")
    if rope.get("rope_type", rope.get("type")) != "longrope" or not original:
        return longest
    return min(original, longest)


def _rope(fields: Fields) -> dict[str, Any]:
    """Return the RoPE scaling, or the first where layers of different kinds have their own."""
    rope = fields.section("rope_scaling") or fields.section("rope_parameters")
    nested = [section for section in rope.values() if isinstance(section, dict)]
    return nested[0] if nested and "rope_type" not in rope else rope


def _windows(fields: Fields, layers: int, longest: int, kinds: list[str] | None) -> dict[str, Any]:
    """Return the fields of `ModelShape` about layers that attend to a part of the context."""
    window = fields.whole("sliding_window") or 0
    number = _window_layers(fields, layers, kinds) if window else 0
    is_long = window >= longest and number == layers
    # MiMo's key of a chunk is unused.
    chunk = 0 if fields.get("swa_head_dim") else fields.whole("attention_chunk_size") or 0
    if chunk:
        window, number = chunk, _chunked(fields, layers, kinds)
    elif window >= longest or not number:
        window = number = 0
    elif fields.model_type in _ATTEND_ONE_MORE:
        window += 1
    # All but Qwen's models begin with a sliding layer.
    first = kinds[0] == NEAR if kinds else number > 0 and not fields.whole("max_window_layers")
    return {
        "sliding_layers": number,
        "sliding_window": window,
        "sliding_first": first,
        "long_window": is_long,
        "chunked": chunk > 0,
    }


def _window_layers(fields: Fields, layers: int, kinds: list[str] | None) -> int:
    """Return the number of layers that have the window in `sliding_window`."""
    if fields.get("use_sliding_window") is False:
        return 0
    if kinds is not None:
        return kinds.count(NEAR)
    if fields.get("use_sliding_window") and fields.get("max_window_layers") is not None:
        whole = min(layers, fields.whole("max_window_layers") or 0)
        if fields.model_type == "qwen2" and 0 < whole < layers:
            raise InputError(
                f"{fields.path}: max_window_layers is {whole} of {layers} layers with "
                "use_sliding_window: vLLM refuses to serve it; set use_sliding_window to false"
            )
        return layers - whole
    every = fields.whole("sliding_window_pattern", "_sliding_window_pattern")
    every = every or _PATTERNS.get(fields.model_type)
    return layers - layers // every if every else layers


def _chunked(fields: Fields, layers: int, kinds: list[str] | None) -> int:
    """Return the number of layers with RoPE, which attend inside their chunk (Llama 4)."""
    if kinds is not None:
        return kinds.count(NEAR)
    every = fields.whole("no_rope_layer_interval") or 4
    rotated = fields.listed("no_rope_layers") or [(n + 1) % every for n in range(layers)]
    return sum(map(bool, rotated))
