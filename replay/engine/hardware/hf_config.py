"""Read a model's sizes from its Hugging Face `config.json`."""

import math
from pathlib import Path
from typing import Any

from forebay.replay.engine.hardware.architectures import check_architecture
from forebay.replay.engine.hardware.hf_fields import Fields, read_object
from forebay.replay.engine.hardware.hf_formats import kv_value_bytes
from forebay.replay.engine.hardware.hf_weights import (
    dense_width,
    read_latent,
    read_mixture,
    weight_bytes,
)
from forebay.replay.engine.hardware.kv_layout import ModelShape
from forebay.replay.engine.hardware.layers import Latent
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
    fields = read_fields(path)
    check_architecture(fields)
    return _shape(fields, path, weights_gib, stretches_yarn)


def read_fields(path: Path) -> Fields:
    """Read a config.json, also from its folder. An InputError names the file."""
    file = path / "config.json" if path.is_dir() else path
    return Fields(file, read_object(file))


def _shape(
    fields: Fields, path: Path, weights_gib: float | None, stretches_yarn: bool
) -> ModelShape:
    # Fields whose value depends on others come first.
    heads = fields.needed("num_attention_heads")
    latent = read_latent(fields)
    head_dim, kv_heads = _head_dim(fields, heads, latent), _kv_heads(fields, heads)
    layers = fields.needed("num_hidden_layers")
    longest = _max_model_len(fields, stretches_yarn)
    chunk = fields.whole("attention_chunk_size") or 0
    window, sliding = (
        (chunk, _chunked(fields, layers)) if chunk else _sliding(fields, layers, longest)
    )
    # The size of the weights, as given or by counting parameters.
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
        sliding_first=_slides_first(fields, sliding),
        long_window=_has_long_window(fields, layers, longest),
        chunked=chunk > 0,
        latent=latent.rank + latent.rope if latent else 0,
        weights_source=source,
        kv_value_bytes=kv_value_bytes(fields),
        default_len=_default_len(fields, longest),
        family=fields.family,
    )


def _name(fields: Fields, path: Path) -> str:
    name = fields.get("_name_or_path")
    if isinstance(name, str) and name:
        return name.rstrip("/").rsplit("/", 1)[-1]
    folder = path if path.is_dir() else path.parent
    return folder.resolve().name


def _head_dim(fields: Fields, heads: int, latent: Latent | None) -> int:
    head_dim = fields.whole("head_dim")
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
    return fields.whole("num_key_value_heads", "num_kv_heads") or heads


def _width(fields: Fields, layers: int) -> int:
    """Return the MLP width of one token in the widest layer."""
    mixture = read_mixture(fields, layers)
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


def _sliding(fields: Fields, layers: int, longest: int) -> tuple[int, int]:
    """Return the window in tokens and the number of sliding layers, (0, 0) without any."""
    types = fields.listed("layer_types")
    if types is not None:
        _check_types(fields, types, layers)
    window = fields.whole("sliding_window")
    if not window or window >= longest:
        return 0, 0
    number = _window_layers(fields, layers)
    if fields.model_type in _ATTEND_ONE_MORE:
        window += 1
    return (window, number) if number else (0, 0)


def _window_layers(fields: Fields, layers: int) -> int:
    """Return the number of layers that have the window in `sliding_window`."""
    if fields.get("use_sliding_window") is False:
        return 0
    types = fields.listed("layer_types")
    if types is not None:
        return types.count("sliding_attention")
    if fields.get("use_sliding_window") and fields.get("max_window_layers") is not None:
        return layers - min(layers, fields.whole("max_window_layers") or 0)
    every = fields.whole("sliding_window_pattern", "_sliding_window_pattern")
    every = every or _PATTERNS.get(fields.model_type)
    return layers - layers // every if every else layers


def _slides_first(fields: Fields, sliding: int) -> bool:
    """Return True if the first layer is a sliding one: all but Qwen's begin with them."""
    types = fields.listed("layer_types")
    if types:
        return bool(types[0] != "full_attention")
    return sliding > 0 and not fields.whole("max_window_layers")


def _has_long_window(fields: Fields, layers: int, longest: int) -> bool:
    """Return True if all layers have a window that is not shorter than the context."""
    window = fields.whole("sliding_window") or 0
    return window >= longest and _window_layers(fields, layers) == layers


def _chunked(fields: Fields, layers: int) -> int:
    """Return the number of layers with RoPE, which attend inside their chunk (Llama 4)."""
    types = fields.listed("layer_types")
    if types is not None:
        _check_types(fields, types, layers)
        return types.count("chunked_attention")
    every = fields.whole("no_rope_layer_interval") or 4
    rotated = fields.listed("no_rope_layers") or [(n + 1) % every for n in range(layers)]
    return sum(map(bool, rotated))


def _check_types(fields: Fields, types: list[object], layers: int) -> None:
    kinds = ("full_attention", "sliding_attention", "chunked_attention")
    strange = next((kind for kind in types if kind not in kinds), None)
    if strange is not None:
        raise InputError(
            f"{fields.path}: layer_types holds {strange!r}, whose state is not counted here; "
            f"known are {', '.join(kinds)}"
        )
    if len(types) != layers:
        raise InputError(
            f"{fields.path}: layer_types has {len(types)} entries, num_hidden_layers is {layers}"
        )
