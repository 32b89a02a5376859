"""The models and GPUs the simulated engine knows: their sizes, nothing about their speed.

Names are looked up forgivingly (case, punctuation, organisation and suffixes such as `-instruct`
do not matter). An unknown name is bad input and the message lists the known ones. What ends in
`.json` is read from that file.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from forebay.replay.engine.hardware.kv_layout import ModelShape, layer_bytes
from forebay.traces.errors import InputError

GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A dense decoder served in 16-bit weights and a 16-bit KV cache on one GPU.

    Sizes are those of the model's published `config.json`; `parameters` counts its safetensors.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_model_len: int
    parameters: int
    bytes_per_value: int = 2

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return self.layers * layer_bytes(self.shape)

    @property
    def shape(self) -> ModelShape:
        """What its memory depends on."""
        return ModelShape(
            name=self.name,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            ffn=self.ffn,
            vocab=self.vocab,
            max_model_len=self.max_model_len,
            weight_bytes=self.weight_bytes,
        )

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of the four matrix products of a layer: qkv, o, gate_up, down."""
        attention = self.heads * self.head_dim
        return (
            (attention + 2 * self.kv_heads * self.head_dim, self.hidden),
            (self.hidden, attention),
            (2 * self.ffn, self.hidden),
            (self.hidden, self.ffn),
        )


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU.

    Attributes:
        peak_flops: dense bf16 FLOP/s of the data sheet.
        bandwidth: bytes/s of the data sheet.
        memory_gib: what the runtime reports as total memory.
        multiprocessors: SMs, for how many attention tiles run at once.
    """

    name: str
    peak_flops: float
    bandwidth: float
    memory_gib: float
    multiprocessors: int


# microsoft/Phi-3-mini-128k-instruct, meta-llama/Llama-3.1-8B-Instruct (the 128k sibling of
# Llama-3-8B, same shapes), Qwen/Qwen2.5-14B-Instruct (131,072 with its documented YaRN factor 4).
PHI_3_MINI = ModelSpec(
    "phi-3-mini-128k", 32, 3072, 32, 32, 96, 8192, 32_064, 131_072, 3_821_079_552
)
LLAMA_3_8B = ModelSpec("llama-3-8b", 32, 4096, 32, 8, 128, 14_336, 128_256, 131_072, 8_030_261_248)
QWEN_2_5_14B = ModelSpec(
    "qwen2.5-14b", 48, 5120, 40, 8, 128, 13_824, 152_064, 131_072, 14_770_033_664
)

# NVIDIA data sheets give sparse rates; dense is half. SXM: 1,979/2 TFLOP/s; NVL: 1,671/2 TFLOP/s.
# Both carry 141 GB at 4.8 TB/s, of which the runtime reports 139.8 GiB, and 132 SMs.
H200_SXM = GpuSpec("h200-sxm", 989.5e12, 4.8e12, 139.8, 132)
H200_NVL = GpuSpec("h200-nvl", 835.5e12, 4.8e12, 139.8, 132)

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
_GPUS = {"h200": H200_SXM, "h200sxm": H200_SXM, "h200sxm5": H200_SXM, "h200nvl": H200_NVL}


def find_model(name: str) -> ModelSpec:
    """The model called `name`, or in a config.json; raises InputError that lists the known ones."""
    spec = _MODELS.get(re.sub(r"(instruct|chat|hf)$", "", _plain(name.rsplit("/", 1)[-1])))
    if spec is not None:
        return spec
    from forebay.replay.engine.hardware.hf_model import (  # which needs ModelSpec
        is_config,
        read_model,
    )

    if is_config(name):
        return read_model(name)
    known = ", ".join(sorted({model.name for model in _MODELS.values()}))
    raise InputError(
        f"--model {name}: no such model; the simulated ones are {known}; "
        "or give a config.json, or the folder of one"
    )


def find_gpu(name: str) -> GpuSpec:
    """The GPU called `name`, or of that JSON file; raises InputError."""
    if name.endswith(".json"):
        from forebay.replay.engine.hardware.gpu_sheet import read_gpu

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
