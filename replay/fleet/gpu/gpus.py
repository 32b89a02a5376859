"""Find this machine's NVIDIA GPUs with nvidia-smi."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forebay.replay.engine.hardware.gpu_memory import GpuMemory
from forebay.traces.ground.errors import InputError

QUERY = ("nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits")
ASK_S = 30.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU by nvidia-smi's number. Memory is in GiB."""

    index: int
    name: str
    total_gib: float

    @property
    def memory(self) -> GpuMemory:
        return GpuMemory(self.name.lower(), self.total_gib)


def found_gpus() -> list[Gpu]:
    """Return all GPUs of this machine, an empty list without a driver."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def parse_gpus(text: str) -> list[Gpu]:
    """Read the answer to QUERY, without lines with a field that the driver does not report."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[0].isdigit() and fields[2].isdigit():
            gpus.append(Gpu(int(fields[0]), fields[1], int(fields[2]) / 1024))
    return gpus


def parse_indexes(text: str | None, environ: Mapping[str, str]) -> list[int] | None:
    """Read `0,1` of --gpus, else of CUDA_VISIBLE_DEVICES. None: all GPUs. Raises InputError."""
    where = "--gpus"
    if text is None:
        where, text = "CUDA_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES") or None
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() for word in words) or len(set(words)) < len(words):
        raise InputError(f"{where} {text}: give GPU numbers as nvidia-smi -L lists them, e.g. 0,1")
    return [int(word) for word in words]


def choose_gpus(indexes: Sequence[int] | None, present: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs to serve on (InputError: a GPU that does not exist)."""
    if not present:
        raise InputError(
            "no GPU here (nvidia-smi lists none): give --cpu, or --dry-run to only see the plan"
        )
    by_index = {gpu.index: gpu for gpu in present}
    for index in indexes or ():
        if index not in by_index:
            there = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in present)
            raise InputError(f"--gpus: there is no GPU {index}; there are {there}")
    return [by_index[index] for index in indexes] if indexes is not None else list(present)
