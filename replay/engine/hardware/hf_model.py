"""Read a model to simulate from a Hugging Face `config.json`: a dense decoder in 16 bits."""

from functools import lru_cache
from pathlib import Path

from forebay.replay.engine.hardware.hf_config import read_shape
from forebay.replay.engine.hardware.specs import ModelSpec
from forebay.traces.errors import InputError

_NEAR = 0.05
"""Allowed relative difference between all weights and the matrices: norms, biases and the like."""


def is_config(name: str) -> bool:
    """Return True if `name` is a config.json or its folder, and not a model's name."""
    path = Path(name)
    return path.suffix == ".json" or (path / "config.json").is_file()


@lru_cache(16)
def read_model(name: str) -> ModelSpec:
    """Read a config.json; raises InputError for a model without known step times."""
    path = Path(name)
    if not path.exists():
        raise InputError(f"--model {name}: no such file")
    shape = read_shape(path)
    priced = "step times are known for dense decoders with whole attention in 16 bits only"
    if shape.latent or shape.sliding_layers:
        kind = "latent attention (MLA)" if shape.latent else "sliding-window layers"
        raise InputError(f"--model {name}: {shape.name} has {kind}; {priced}")
    spec = ModelSpec(
        name=shape.name,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.ffn,
        vocab=shape.vocab,
        max_model_len=shape.max_model_len,
        parameters=round(shape.weight_bytes / 2),
    )
    matrices = shape.layers * sum(outputs * inputs for outputs, inputs in spec.linear_shapes)
    embedding = shape.vocab * shape.hidden
    if not any(
        abs(spec.parameters / (matrices + times * embedding) - 1) < _NEAR for times in (1, 2)
    ):
        raise InputError(
            f"--model {name}: {spec.parameters / 1e9:.1f}e9 weights of 16 bits are not the "
            f"{(matrices + 2 * embedding) / 1e9:.1f}e9 of its layers (a mixture of experts, or "
            f"quantised); {priced}"
        )
    return spec
