"""Read how a checkpoint stores its weights, from `quantization_config` or `hf_quant_config.json`.

NVIDIA's tools write the second file next to config.json. An unknown format is bad input, because
its size and its speed would be guesses.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from forebay.replay.engine.hardware.hf_fields import Fields, Uncounted, read_object
from forebay.replay.engine.hardware.layers import PLAIN, WeightFormat
from forebay.traces.ground.errors import InputError

BESIDE = "hf_quant_config.json"
MXFP4_BITS = 4 + 8 / 32
"""One 8-bit scale for 32 weights."""
NVFP4_BITS = 4 + 8 / 16
"""One 8-bit scale for 16 weights."""
_FP8_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
_LEFT_OUT = ("exclude_modules", "modules_to_not_convert", "ignore", "ignored_layers")


def weight_format(fields: Fields) -> WeightFormat:
    """Return the format of the checkpoint's weights (InputError: an unknown format)."""
    key, config = _configuration(fields)
    if not config:
        return PLAIN
    method = str(config.get("quant_method") or ("modelopt" if config.get("quant_algo") else ""))
    read = _READERS.get(method)
    if read is None:
        raise _unknown(fields, f"{key}.quant_method {method!r}")
    stored = read(fields, key, config)
    return replace(stored, attention_bits=16) if _leaves_attention(fields, config) else stored


def kv_value_bytes(fields: Fields) -> int:
    """Return the bytes of a cached number with --kv-cache-dtype auto: 1 if the checkpoint asks."""
    _, config = _configuration(fields)
    scheme = config.get("kv_cache_scheme")
    bits = scheme.get("num_bits") if isinstance(scheme, dict) else None
    narrow = scheme == "FP8" or str(config.get("kv_cache_quant_algo", "")).upper() == "FP8"
    return 1 if bits == 8 or narrow else 2


def _configuration(fields: Fields) -> tuple[str, dict[str, Any]]:
    """Return the configuration and the name of its key or file, both empty without any."""
    for key in ("quantization_config", "compression_config"):
        config = fields.section(key)
        if config:
            inner = config.get("quantization")
            return key, {**config, **inner} if isinstance(inner, dict) else config
    path = fields.path.parent / BESIDE
    if not path.exists():
        return "", {}
    inner = read_object(path).get("quantization")
    if not isinstance(inner, dict):
        raise InputError(f"{path}: quantization is not an object")
    return BESIDE, {"quant_method": "modelopt", **inner}


def _unknown(fields: Fields, what: str) -> Uncounted:
    return Uncounted(
        f"{fields.path}: {what}: size and speed of the weights unknown; for `forebay kv`, put "
        "model.safetensors.index.json beside it or give --weights-gib"
    )


def _fp8(fields: Fields, key: str, config: dict[str, Any]) -> WeightFormat:
    block = config.get("weight_block_size")
    size = block[0] if isinstance(block, list) and block and isinstance(block[0], int) else 0
    return WeightFormat("fp8", 8, 8, 8, "fp8", size)


def _mxfp4(fields: Fields, key: str, config: dict[str, Any]) -> WeightFormat:
    return WeightFormat("mxfp4", 16, 16, MXFP4_BITS)  # gpt-oss: experts only


def _grouped(fields: Fields, key: str, config: dict[str, Any]) -> WeightFormat:
    """Read AWQ and GPTQ: whole numbers with one 16-bit scale and offset for a group of weights."""
    bits = _stored_bits(fields, key, config, config)
    return WeightFormat(f"int{int(bits)}", bits, bits, bits)


def _stored_bits(
    fields: Fields, key: str, config: dict[str, Any], section: dict[str, Any]
) -> float:
    bits = section.get("bits", section.get("num_bits"))
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 < bits <= 16:
        raise _unknown(fields, f"{key}.quant_method {config.get('quant_method')!r}")
    size = section.get("group_size")
    scales = (16 + bits) / size if isinstance(size, int) and size > 0 else 0
    return bits + scales


def _compressed(fields: Fields, key: str, config: dict[str, Any]) -> WeightFormat:
    """Read compressed-tensors: groups with a format of weights, and one of activations."""
    first, inputs = _only_group(fields, key, config)
    number, width = first.get("type"), first.get("num_bits")
    if number == "float" and width == 8:
        return WeightFormat("fp8", 8, 8, 8, "fp8" if inputs else "bf16")
    if number == "float" and width == 4 and first.get("group_size") == 32:
        return WeightFormat("mxfp4", *(MXFP4_BITS,) * 3)
    if number == "float" and width == 4:
        return WeightFormat("nvfp4", *(NVFP4_BITS,) * 3, "fp4" if inputs else "bf16")
    if inputs:
        raise _unknown(fields, f"{key}.config_groups: {width}-bit {number} activations")
    bits = _stored_bits(fields, key, config, first)
    return WeightFormat(f"int{width}", bits, bits, bits)


def _only_group(fields: Fields, key: str, config: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return weights and activations of the groups, which all have the same weights."""
    groups = (config.get("config_groups") or {}).values()
    entries = [section for section in groups if isinstance(section, dict)]
    sections = [section.get("weights") for section in entries]
    first = next(iter(sections), None)
    if not isinstance(first, dict):
        raise _unknown(fields, f"{key}.config_groups")
    if any(_kind(section) != _kind(first) for section in sections):
        raise _unknown(fields, f"{key}.config_groups with different formats")
    return first, entries[0].get("input_activations")


def _kind(section: Any) -> tuple[Any, ...]:
    values = section if isinstance(section, dict) else {}
    return values.get("type"), values.get("num_bits"), values.get("group_size")


def _modelopt(fields: Fields, key: str, config: dict[str, Any]) -> WeightFormat:
    """Read the format of NVIDIA's Model Optimizer."""
    algorithm = str(config.get("quant_algo", "")).upper()
    if algorithm in _FP8_ALGORITHMS:
        return WeightFormat("fp8", 8, 8, 8, "fp8", 128 if algorithm == "FP8_PB_WO" else 0)
    if algorithm in ("NVFP4", "NVFP4_AWQ"):
        return WeightFormat("nvfp4", *(NVFP4_BITS,) * 3, "fp4")
    if algorithm == "MIXED_PRECISION" and config.get("quantized_layers"):
        return _mixed(fields, key, config)
    if algorithm == "W4A16_AWQ":
        bits = 4 + 16 / int(config.get("group_size") or 128)
        return WeightFormat("int4", bits, bits, bits)
    raise _unknown(fields, f"{key}: quant_algo {algorithm or 'missing'!r}")


_MIXED = {
    "FP8": ("fp8", 8, "fp8"),
    "FP8_PB_WO": ("fp8", 8, "fp8"),
    "MXFP8": ("mxfp8", 8 + 8 / 32, "fp8"),
    "NVFP4": ("nvfp4", NVFP4_BITS, "fp4"),
    "W4A16_NVFP4": ("nvfp4", NVFP4_BITS, "bf16"),
}
"""Name, bits of a weight and arithmetic of a layer's `quant_algo`."""


def _mixed(fields: Fields, key: str, config: dict[str, Any]) -> WeightFormat:
    """Read the most frequent format of experts, of attention, and of the other matrices.

    A model has one arithmetic in `step_time`: the arithmetic of the narrowest weights.
    """
    algorithms: dict[str, list[str]] = {"experts": [], "attention": [], "linear": []}
    for name, layer in config["quantized_layers"].items():
        algorithm = str(layer.get("quant_algo", "")).upper()
        if algorithm not in _MIXED:
            raise _unknown(fields, f"{key}: quant_algo {algorithm or 'missing'!r} of {name}")
        shared = "shared_expert" in name
        kind = "experts" if ".experts" in name and not shared else "linear"
        if any(word in name for word in ("attn", "in_proj", "out_proj", "q_proj", "o_proj")):
            kind = "attention"
        algorithms[kind].append(algorithm)
    formats = [
        _MIXED[max(set(names), key=names.count)] if names else ("bf16", 16, "bf16")
        for names in (algorithms["attention"], algorithms["linear"], algorithms["experts"])
    ]
    if not algorithms["experts"]:
        formats[2] = formats[1]  # no experts, or none that has a format of its own
    name, _, arithmetic = min(formats, key=lambda stored: stored[1])
    attention, linear, experts = (bits for _, bits, _ in formats)
    return WeightFormat(name, attention, linear, experts, arithmetic)


def _quark(fields: Fields, key: str, config: dict[str, Any]) -> WeightFormat:
    """Read the format of AMD's Quark: FP8 in all layers."""
    section = config.get("global_quant_config")
    weight = section.get("weight") if isinstance(section, dict) else None
    if isinstance(weight, dict) and weight.get("dtype") == "fp8_e4m3":
        return WeightFormat("fp8", 8, 8, 8, "fp8")
    raise _unknown(fields, f"{key}.global_quant_config")


_READERS: dict[str, Callable[[Fields, str, dict[str, Any]], WeightFormat]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "awq": _grouped,
    "gptq": _grouped,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "quark": _quark,
}


def _leaves_attention(fields: Fields, config: dict[str, Any]) -> bool:
    """Return True if the attention of most layers keeps 16 bits."""
    names = [
        str(name)
        for key in _LEFT_OUT
        if isinstance(config.get(key), list)
        for name in config[key]
        if "self_attn" in str(name)
    ]
    layers = {name.split("layers.", 1)[-1].split(".", 1)[0] for name in names}
    wide = any("*" in name.split("self_attn", 1)[0] for name in names)
    return wide or len(layers) > (fields.whole("num_hidden_layers") or 0) / 2
