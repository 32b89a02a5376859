"""Models and GPUs that are not built in, from files: a `config.json`, and a data sheet as JSON.

Read once a process: options are checked often.
"""

import math
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

from forebay.replay.engine.hf_config import read_shape
from forebay.replay.engine.hf_fields import read_object
from forebay.replay.engine.models import GpuSpec, ModelSpec
from forebay.traces.errors import InputError

_VALUE_BYTES = 2  # weights and KV cache are served in 16 bits


@lru_cache(16)
def read_model(path: Path) -> ModelSpec:
    """The dense model of a Hugging Face `config.json`, called after its folder.

    Raises InputError for what the step-time model cannot price: experts, sliding windows, latent
    attention, quantised weights.
    """
    shape = read_shape(path)
    parts = read_object(path)
    text = parts.get("text_config") or {}
    strange = {
        "layers with a sliding window": shape.sliding_layers,
        "latent attention": shape.latent,
        "experts": any("expert" in key and part[key] for part in (parts, text) for key in part),
        "quantised weights": parts.get("quantization_config"),
    }
    for what, found in strange.items():
        if found:
            raise InputError(f"{path}: {what}: steps of such a model cannot be priced")
    return ModelSpec(
        name=shape.name,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.ffn,
        vocab=shape.vocab,
        max_model_len=shape.max_model_len,
        parameters=shape.weight_bytes // _VALUE_BYTES,
    )


@lru_cache(16)
def read_gpu(path: Path) -> GpuSpec:
    """A data sheet: the fields of `GpuSpec` as a JSON object; raises InputError."""
    body = read_object(path)
    wanted = [field.name for field in fields(GpuSpec)]
    for key in body:
        if key not in wanted:
            raise InputError(f"{path}: {key}: unknown key; known are {', '.join(wanted)}")
    name, values = body.get("name"), dict[str, float]()
    if not isinstance(name, str) or not name:
        raise InputError(f"{path}: name is {name!r}; give text")
    for key in wanted[1:]:
        value = body.get(key)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value < math.inf
        ):
            raise InputError(f"{path}: {key} is {value!r}; give a number above 0")
        values[key] = float(value)
    return GpuSpec(
        name, values["peak_flops"], values["bandwidth"], values["memory_gib"],
        max(1, round(values["multiprocessors"])),
    )  # fmt: skip
