"""Read the data sheet of a GPU from a JSON file."""

import math
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

from forebay.replay.engine.hardware.hf_fields import read_object
from forebay.replay.engine.hardware.specs import GpuSpec
from forebay.traces.errors import InputError


@lru_cache(16)  # options are checked often
def read_gpu(path: Path) -> GpuSpec:
    """Read the fields of `GpuSpec` from a JSON object; raises InputError."""
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
