"""Sizes and data-sheet rates of the models and GPUs that the simulated engine knows.

`step_constants` has the shares of these rates that kernels reach.
"""

from dataclasses import dataclass

from forebay.replay.engine.hardware.kv_layout import ModelShape, layer_bytes

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
        """Return the bytes of keys and values of one token in all layers."""
        return self.layers * layer_bytes(self.shape)

    @property
    def shape(self) -> ModelShape:
        """Return the sizes that its memory depends on."""
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
        """Return (outputs, inputs) of a layer's four matrix products: qkv, o, gate_up, down."""
        attention = self.heads * self.head_dim
        return (
            (attention + 2 * self.kv_heads * self.head_dim, self.hidden),
            (self.hidden, attention),
            (2 * self.ffn, self.hidden),
            (self.hidden, self.ffn),
        )

    @property
    def elementwise_bytes(self) -> int:
        """Return the bytes that a layer's elementwise kernels read and write for one token.

        Two norms with their residuals read and write two hidden states each. RoPE reads and writes
        queries and keys. The activation reads gate and up, and writes their product. The cache
        write copies keys and values.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        values = 8 * self.hidden + 2 * (queries + keys) + 3 * self.ffn + 4 * keys
        return self.bytes_per_value * values


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU.

    Attributes:
        peak_flops: dense bf16 FLOP/s of the data sheet.
        bandwidth: bytes/s of the data sheet.
        memory_gib: total memory as the runtime reports it.
        multiprocessors: number of SMs; attention tiles run on so many at once.
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
# H100 SXM: the same rates, 3.35 TB/s, 79.18 GiB in start-up logs (llm-d-benchmark; others 79.10 to
# 79.33). L40S: 733/2 TFLOP/s, 864 GB/s, 142 SMs, 45,589 MiB by torch's device properties.
H100_SXM = GpuSpec("h100-sxm", 989.5e12, 3.35e12, 79.18, 132)
L40S = GpuSpec("l40s", 366.5e12, 0.864e12, 45_589 / 1024, 142)
