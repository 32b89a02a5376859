"""Data sheets of GPUs beyond `GpuSpec`: arithmetic below 16 bits, links between GPUs, JSON files.

Rates are dense and as the manufacturers state them. `specs` has what every GPU needs.
"""

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from forebay.replay.engine.hardware.hf_fields import read_object
from forebay.replay.engine.hardware.layers import WeightFormat
from forebay.replay.engine.hardware.specs import GpuFeatures, GpuSpec
from forebay.traces.ground.errors import InputError

NVLINK_LATENCY_S = 5e-6
"""Seconds of an all-reduce of nothing between GPUs on NVLink: fitted to published runs of
Llama-3.1-70B FP8 on H200, where vLLM's own all-reduce kernel runs."""
PCIE_LATENCY_S = 20e-6
"""The same over PCIe or between AMD GPUs: an assumption, never measured here."""

# Bytes/s that one GPU sends, and latency.
_NVLINK_4 = (450e9, NVLINK_LATENCY_S)  # data sheets: 900 GB/s both ways
_NVLINK_3 = (300e9, NVLINK_LATENCY_S)  # data sheet: 600 GB/s both ways
_PCIE_4_RATE, _PCIE_5_RATE = 31.5e9, 63e9  # 16 lanes of 16 and of 32 GT/s
_PCIE_4 = (_PCIE_4_RATE, PCIE_LATENCY_S)
FEATURES = {
    # H100 and H200 data sheets: 3,958/2 and 3,341/2 TFLOP/s FP8.
    "h200-sxm": GpuFeatures(1979e12, 0.0, *_NVLINK_4, host_bandwidth=_PCIE_5_RATE),
    "h200-nvl": GpuFeatures(1670.5e12, 0.0, *_NVLINK_4, host_bandwidth=_PCIE_5_RATE),
    "h100-sxm": GpuFeatures(1979e12, 0.0, *_NVLINK_4, host_bandwidth=_PCIE_5_RATE),
    # No FP8 units: FP8 weights are read as 8 bits and multiplied in 16 (vLLM's Marlin kernels).
    "a100-80gb": GpuFeatures(0.0, 0.0, *_NVLINK_3, host_bandwidth=_PCIE_4_RATE),
    "a100-40gb": GpuFeatures(0.0, 0.0, *_NVLINK_3, host_bandwidth=_PCIE_4_RATE),
    # DGX B200: 72/2 and 144/2 PFLOP/s of eight GPUs, NVLink 5 with 1.8 TB/s both ways.
    "b200": GpuFeatures(4500e12, 9000e12, 900e9, NVLINK_LATENCY_S, host_bandwidth=_PCIE_5_RATE),
    "l40s": GpuFeatures(733e12, 0.0, *_PCIE_4, host_bandwidth=_PCIE_4_RATE),
    "rtx-4090": GpuFeatures(
        330.3e12, 0.0, *_PCIE_4, host_bandwidth=_PCIE_4_RATE
    ),  # with 32-bit sums
    # Seven Infinity Fabric links of 64 GB/s each way, one to each other GPU.
    "mi300x": GpuFeatures(
        2614.9e12, 0.0, 448e9, PCIE_LATENCY_S, link_peers=7, host_bandwidth=_PCIE_5_RATE
    ),
}


_UNSTATED = GpuFeatures()


def features_of(gpu: GpuSpec) -> GpuFeatures:
    """Return the rates and links that the data sheet or the JSON file of `gpu` states."""
    return gpu.features or FEATURES.get(gpu.name, _UNSTATED)


def product_flops(gpu: GpuSpec, weights: WeightFormat, bits: float) -> float:
    """Return the FLOP/s at which weights of `bits` bits are multiplied.

    Without units for their arithmetic they are unpacked to 16 bits.
    """
    features = features_of(gpu)
    if bits < 16 and weights.arithmetic == "fp8":
        return features.fp8_flops or gpu.peak_flops
    if bits < 16 and weights.arithmetic == "fp4":
        return features.fp4_flops or gpu.peak_flops
    return gpu.peak_flops


@dataclass(frozen=True, slots=True)
class _Range:
    """Plausible values of one key of a data sheet, and how its unit is written."""

    low: float
    high: float
    unit: str


_RANGES = {
    "peak_flops": _Range(1e9, 1e17, "FLOP/s, such as 989.5e12 for 989.5 TFLOP/s"),
    "bandwidth": _Range(1e9, 1e14, "bytes/s, such as 4.8e12 for 4.8 TB/s"),
    "memory_gib": _Range(0.25, 4096, "GiB, such as 139.8"),
    "multiprocessors": _Range(1, 4096, "a number of SMs, such as 132"),
    "fp8_flops": _Range(1e9, 1e17, "FLOP/s, or 0 for none"),
    "fp4_flops": _Range(1e9, 1e17, "FLOP/s, or 0 for none"),
    "link_bandwidth": _Range(1e8, 1e13, "bytes/s in one direction, such as 450e9"),
    "link_latency_s": _Range(1e-7, 1e-2, "seconds, such as 5e-6"),
    "link_peers": _Range(1, 63, "links to single GPUs, or 0 for a switch"),
    "host_bandwidth": _Range(1e8, 1e13, "bytes/s from the host's memory, such as 63e9"),
}
_OPTIONAL = tuple(field.name for field in fields(GpuFeatures))
_NEEDED = tuple(field.name for field in fields(GpuSpec) if field.name not in ("name", "features"))
FLOPS_PER_BYTE = (0.5, 4000.0)
"""Plausible peak_flops over bandwidth: a core of a CPU has about 5, an L40S 424."""


@lru_cache(16)  # options are checked often
def read_gpu(path: Path) -> GpuSpec:
    """Read `GpuSpec` and `GpuFeatures` from a JSON object (InputError: a wrong key or value)."""
    body = read_object(path)
    keys = ("name", *_NEEDED, *_OPTIONAL)
    for key in body:
        if key not in keys:
            raise InputError(f"{path}: {key}: unknown key; known are {', '.join(keys)}")
    name = body.get("name")
    if not isinstance(name, str) or not name:
        raise InputError(f"{path}: name is {name!r}; give text")
    values = {key: _number(path, key, body.get(key)) for key in _NEEDED}
    low, high = FLOPS_PER_BYTE
    if not low <= values["peak_flops"] / values["bandwidth"] <= high:
        raise InputError(
            f"{path}: peak_flops {values['peak_flops']:g} for a bandwidth of "
            f"{values['bandwidth']:g}: one of them has another unit; give FLOP/s and bytes/s, "
            "such as 989.5e12 and 4.8e12"
        )
    return GpuSpec(
        name, values["peak_flops"], values["bandwidth"], values["memory_gib"],
        max(1, round(values["multiprocessors"])), _features(path, body),
    )  # fmt: skip


def _features(path: Path, body: dict[str, Any]) -> GpuFeatures | None:
    values = {
        key: 0.0 if body[key] == 0 else _number(path, key, body[key])
        for key in _OPTIONAL
        if key in body
    }
    if "link_peers" in values:
        values["link_peers"] = round(values["link_peers"])
    return GpuFeatures(**values) if values else None  # type: ignore[arg-type]


def _number(path: Path, key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InputError(f"{path}: {key} is {value!r}; give a number above 0")
    allowed = _RANGES[key]
    if not allowed.low <= value <= allowed.high:
        raise InputError(
            f"{path}: {key} is {value:g}; give {allowed.unit} ({allowed.low:g} to {allowed.high:g})"
        )
    return float(value)
