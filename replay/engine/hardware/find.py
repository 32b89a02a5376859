"""Find a model or a GPU by its name, or in a JSON file.

Case, punctuation, the organisation and suffixes such as `-instruct` do not matter. An unknown name
is bad input, and the message lists the known ones. A name that ends in `.json` is read as a file.
"""

import re
from functools import lru_cache
from pathlib import Path

from forebay.replay.engine.hardware.gpu_sheet import read_gpu
from forebay.replay.engine.hardware.hf_config import read_fields, read_shape, shape_of
from forebay.replay.engine.hardware.hf_fields import Fields, read_object
from forebay.replay.engine.hardware.hf_formats import weight_format
from forebay.replay.engine.hardware.hf_weights import (
    UNGATED,
    dense_width,
    read_latent,
    read_mixture,
)
from forebay.replay.engine.hardware.kv_layout import ModelShape
from forebay.replay.engine.hardware.layers import PLAIN
from forebay.replay.engine.hardware.specs import GPUS, MODELS, GpuSpec, ModelSpec
from forebay.traces.ground.command_line.options import same_named
from forebay.traces.ground.errors import InputError

_OTHER_NAMES = {
    "phi-3-mini-128k": "phi3 phi3mini",
    "llama-3-8b": "llama3 llama318b metallama38b metallama318b",
    "qwen2.5-14b": "qwen25 qwen14b",
    "h200-sxm": "h200 h200sxm5",
    "h100-sxm": "h100 h100sxm5 h10080gbhbm3",
    "a100-80gb": "a100 a100sxm80gb a100sxm480gb",
    "a100-40gb": "a100sxm40gb a100sxm440gb",
    "b200": "b200sxm",
    "rtx-4090": "4090",
}
"""Further plain names of models and GPUs."""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _names(name: str) -> tuple[str, ...]:
    return _plain(name), *_OTHER_NAMES.get(name, "").split()


_MODELS = {name: model for model in MODELS for name in _names(model.name)}
_GPUS = {name: gpu for gpu in GPUS for name in _names(gpu.name)}


def find_model(name: str, *, stretches_yarn: bool = False) -> ModelSpec:
    """Find a model by name or config.json (InputError: an unknown model, with the known names).

    Args:
        stretches_yarn: read context lengths as vLLM up to 0.29.
    """
    key = _model_key(name)
    spec = _MODELS.get(key)
    if spec is not None:
        return spec
    if is_config(name):
        return _read_model(name, stretches_yarn)
    if key in _published():
        return _published_model(key, stretches_yarn)
    names = ", ".join(model_names())
    raise InputError(
        f"--model {name}: no such model; the simulated ones are {names}; "
        "or give a config.json, or the folder of one"
    )


_TABLE = Path(__file__).with_name("models.json")
"""Fields of published models' config.json that are read here, with their source."""


@lru_cache(1)
def _published() -> dict[str, Fields]:
    """Return the models of the table by their plain names, also without `-NVFP4` at the end."""
    models = {}
    for name, entry in read_object(_TABLE).items():
        fields = Fields(_TABLE / name, {**entry["config"], "_name_or_path": name})
        for key in (_plain(name), _plain(name).removesuffix("nvfp4")):
            models[key] = fields
    return models


@lru_cache(16)
def _published_model(key: str, stretches_yarn: bool) -> ModelSpec:
    fields = _published()[key]
    return _model_of(fields, shape_of(fields, stretches_yarn=stretches_yarn))


def model_names() -> list[str]:
    """Return the names of all models that are known without a config.json."""
    names = {model.name for model in MODELS}
    names |= {str(fields.get("_name_or_path")) for fields in _published().values()}
    return sorted(names, key=str.lower)


@lru_cache(maxsize=64)  # asked 33 times for each simulated engine
def _model_key(name: str) -> str:
    return re.sub(r"(instruct|chat|hf|it)$", "", _plain(name.rsplit("/", 1)[-1]))


@lru_cache(maxsize=64)
def _gpu_key(name: str) -> str:
    return re.sub(r"^(nvidia|tesla)", "", _plain(name))


def is_config(name: str) -> bool:
    """Return True if `name` is a config.json or its folder, and not a model's name."""
    path = Path(name)
    return path.suffix == ".json" or (path / "config.json").is_file()


@lru_cache(16)  # options are checked often
def _read_model(name: str, stretches_yarn: bool) -> ModelSpec:
    """Read a config.json (InputError: a model whose steps cannot be computed)."""
    path = Path(name)
    if not path.exists():
        raise InputError(f"--model {name}: no such file")
    return _model_of(read_fields(path), read_shape(path, stretches_yarn=stretches_yarn))


def _model_of(fields: Fields, shape: ModelShape) -> ModelSpec:
    # The format of the weights decides whether their bytes follow from the parameters.
    stored = weight_format(fields)
    mixture = read_mixture(fields, shape.mlps or shape.layers)
    plain = stored == PLAIN and mixture is None
    sizes = same_named(shape, ModelSpec) | {
        "ffn": dense_width(fields) if mixture is None or mixture.dense_layers else 0,
        "parameters": round(shape.weight_bytes / 2),
        "gated": fields.model_type not in UNGATED,
        "mixture": mixture,
        "latent": read_latent(fields),
        "weights": stored,
        "served_bytes": 0 if plain else shape.weight_bytes,
        "default_len": 0 if shape.default_len == shape.max_model_len else shape.default_len,
    }
    spec = ModelSpec(**sizes)
    _check_size(fields, spec, shape)
    return spec


_NEAR = 0.05
"""Allowed relative difference between all weights and the matrices: norms, biases and the like."""


def _check_size(fields: Fields, spec: ModelSpec, shape: ModelShape) -> None:
    """Raise InputError if the checkpoint is not as large as the layers that were read."""
    bits = sum(
        group.layers
        * sum(product.experts * product.weights * product.bits for product in group.products)
        for group in spec.layer_groups
    )
    embedding = shape.vocab * shape.hidden * 16
    if not any(
        abs(8 * shape.weight_bytes / (bits + times * embedding) - 1) < _NEAR for times in (1, 2)
    ):
        raise InputError(
            f"{fields.path}: {shape.weight_bytes / 1e9:.1f} GB of weights are not the "
            f"{(bits + 2 * embedding) / 8e9:.1f} GB of its layers: something in it is not counted "
            "here, or it is quantised and quantization_config does not say so"
        )


def find_gpu(name: str) -> GpuSpec:
    """Find a GPU by name or JSON data sheet (InputError: an unknown GPU, with the known names)."""
    if name.endswith(".json"):
        return read_gpu(Path(name))
    spec = _GPUS.get(_gpu_key(name))
    if spec is None:
        names = ", ".join(sorted(gpu.name for gpu in GPUS))
        raise InputError(
            f"--gpu {name}: no such GPU; the simulated ones are {names} (h200 means "
            "h200-sxm); or give a file of name, peak_flops, bandwidth, memory_gib, "
            "multiprocessors: gpu.json"
        )
    return spec
