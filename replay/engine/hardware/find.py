"""Find a model or a GPU by its name, or in a JSON file.

Case, punctuation, the organisation and suffixes such as `-instruct` do not matter. An unknown name
is bad input, and the message lists the known ones. A name that ends in `.json` is read as a file.
"""

import re
from pathlib import Path

from forebay.replay.engine.hardware.gpu_sheet import read_gpu
from forebay.replay.engine.hardware.hf_model import is_config, read_model
from forebay.replay.engine.hardware.specs import (
    H100_SXM,
    H200_NVL,
    H200_SXM,
    L40S,
    LLAMA_3_8B,
    PHI_3_MINI,
    QWEN_2_5_14B,
    GpuSpec,
    ModelSpec,
)
from forebay.traces.errors import InputError

_MODELS = {
    "phi3mini": PHI_3_MINI,
    "phi3mini128k": PHI_3_MINI,
    "phi3": PHI_3_MINI,
    "llama38b": LLAMA_3_8B,
    "llama318b": LLAMA_3_8B,
    "llama3": LLAMA_3_8B,
    "metallama38b": LLAMA_3_8B,
    "metallama318b": LLAMA_3_8B,
    "qwen2514b": QWEN_2_5_14B,
    "qwen14b": QWEN_2_5_14B,
    "qwen25": QWEN_2_5_14B,
}
_GPUS = {
    "h200": H200_SXM,
    "h200sxm": H200_SXM,
    "h200sxm5": H200_SXM,
    "h200nvl": H200_NVL,
    "h100": H100_SXM,
    "h100sxm": H100_SXM,
    "h100sxm5": H100_SXM,
    "h10080gbhbm3": H100_SXM,
    "l40s": L40S,
}


def find_model(name: str) -> ModelSpec:
    """Find a model by name or config.json; raises InputError that lists the known ones."""
    spec = _MODELS.get(re.sub(r"(instruct|chat|hf)$", "", _plain(name.rsplit("/", 1)[-1])))
    if spec is not None:
        return spec
    if is_config(name):
        return read_model(name)
    known = ", ".join(sorted({model.name for model in _MODELS.values()}))
    raise InputError(
        f"--model {name}: no such model; the simulated ones are {known}; "
        "or give a config.json, or the folder of one"
    )


def find_gpu(name: str) -> GpuSpec:
    """Find a GPU by name or JSON data sheet; raises InputError that lists the known ones."""
    if name.endswith(".json"):
        return read_gpu(Path(name))
    spec = _GPUS.get(re.sub(r"^(nvidia|tesla)", "", _plain(name)))
    if spec is None:
        known = ", ".join(sorted({gpu.name for gpu in _GPUS.values()}))
        raise InputError(
            f"--gpu {name}: no such GPU; the simulated ones are {known} (h200 means "
            "h200-sxm); or give a file of name, peak_flops, bandwidth, memory_gib, "
            "multiprocessors: gpu.json"
        )
    return spec


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
