"""Sizes and data-sheet rates of the models and GPUs that the simulated engine knows.

`step_constants` has the shares of these rates that kernels reach.
"""

from dataclasses import KW_ONLY, dataclass

from forebay.replay.engine.hardware.kv_layout import (
    DecoderSizes,
    KvOptions,
    ModelShape,
    index_bytes,
    layer_bytes,
    near_bytes,
)
from forebay.replay.engine.hardware.layers import (
    PLAIN,
    Heads,
    Latent,
    LayerGroup,
    Mixers,
    Mixture,
    Product,
    WeightFormat,
)
from forebay.traces.ground.command_line.options import same_named

GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class ModelSpec(DecoderSizes):
    """A decoder, or the part of it that one GPU of several computes (`placement.rank_of`).

    Attributes:
        ffn: MLP width of a dense layer.
        chunked: step times use a window of the length of a chunk, which is true up to that length
            and too long beyond.
        parameters: as its safetensors count them.
        bytes_per_value: bytes of activations, embeddings, head, and of weights that are not
            quantised.
        gated: the MLP has a gate in addition to its up projection.
        mixture: experts of the layers that have them. None: all layers are dense.
        latent: sizes of multi-head latent attention (MLA). None: keys and values are cached.
        weights: format in which the matrices of the layers are stored and multiplied.
        served_bytes: bytes of all weights as served. 0: `parameters` times `bytes_per_value`.
        ranks: GPUs that share the model's layers by tensor parallelism.
    """

    parameters: int
    _: KW_ONLY
    bytes_per_value: int = 2
    gated: bool = True
    mixture: Mixture | None = None
    latent: Latent | None = None
    weights: WeightFormat = PLAIN
    served_bytes: int = 0
    ranks: int = 1

    @property
    def weight_bytes(self) -> int:
        return self.served_bytes or self.parameters * self.bytes_per_value

    @property
    def row_bytes(self) -> int:
        """Return the bytes of keys and values of one token in a layer with the whole context."""
        return layer_bytes(self.shape, KvOptions(value_bytes=self.kv_value_bytes))

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of keys and values of one token in all layers."""
        return self.layers * self.row_bytes

    @property
    def full_layers(self) -> int:
        """Return the number of layers that attend to the whole context."""
        return self.layers - self.near_layers

    @property
    def near_layers(self) -> int:
        """Return the number of layers that attend to a part of the context, never longer."""
        return self.index.sparse if self.index is not None else self.sliding_layers

    @property
    def attended_window(self) -> int:
        """Return the most tokens of the context that those layers attend to. 0: there are none."""
        return self.index.chosen if self.index is not None else self.sliding_window

    @property
    def depth(self) -> int:
        """Return the number of layers with attention or a recurrent state."""
        return self.layers + (self.state.layers if self.state is not None else 0)

    @property
    def mixers(self) -> Mixers:
        """Return attention and recurrent states of all layers."""
        value = self.value_dim or self.head_dim
        full = Heads(
            self.heads, self.kv_heads, self.head_dim, value, self.gated_attention, self.tied_values
        )
        return Mixers(
            self.layers, self.sliding_layers, full, self.near or full, self.latent, self.state,
            self.index,
        )  # fmt: skip

    @property
    def pair_flops(self) -> int:
        """Return the FLOPs of a pair of query and key of a prefill in a layer with all context."""
        if self.latent is not None:
            return 2 * self.heads * (self.latent.query_dim + self.latent.value)
        return 2 * self.heads * (self.head_dim + (self.value_dim or self.head_dim))

    @property
    def near_pair_flops(self) -> int:
        """Return the same of a layer with a part of the context. Sparse MLA unpacks no rows."""
        if self.latent is not None and self.index is not None:
            return self.latent.decode_flops(self.heads)
        return self.near.pair_flops if self.near is not None else self.pair_flops

    @property
    def near_row_bytes(self) -> int:
        """Return the bytes of keys and values of one token in a layer with part of the context."""
        return near_bytes(self.shape, KvOptions(value_bytes=self.kv_value_bytes))

    @property
    def index_pair_flops(self) -> int:
        """Return the FLOPs of one pair of index query and index key in all layers."""
        return self.index.layers * self.index.pair_flops if self.index is not None else 0

    @property
    def index_row_bytes(self) -> int:
        """Return the bytes of one token in the caches of all indexers."""
        return index_bytes(self.shape, KvOptions(value_bytes=self.kv_value_bytes))

    @property
    def state_bytes(self) -> int:
        """Return the bytes of one request's recurrent states in all layers."""
        return self.state.layers * self.state.bytes(1) if self.state is not None else 0

    @property
    def state_token_bytes(self) -> int:
        """Return the bytes that convolutions read and write for one token in all layers.

        They and the copies around them move each channel four times.
        """
        if self.state is None:
            return 0
        state = self.state
        channels = state.channels + state.groups * state.group_channels
        return 4 * self.bytes_per_value * state.layers * channels

    @property
    def shape(self) -> ModelShape:
        """Return the sizes that its memory depends on."""
        mixture, latent = self.mixture, self.latent
        active = mixture.active_width if mixture is not None else 0
        sizes = same_named(self, ModelShape) | {
            "ffn": max(self.ffn, active),
            "weight_bytes": self.weight_bytes,
            "latent": latent.rank + latent.rope if latent is not None else 0,
        }
        return ModelShape(**sizes)

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """Return (outputs, inputs) of a dense layer's products: qkv, o, gate_up, down."""
        qkv, out = self.mixers.full.products(self.hidden, 16)
        return (
            (qkv.outputs, qkv.inputs),
            (out.outputs, out.inputs),
            ((2 if self.gated else 1) * self.ffn, self.hidden),
            (self.hidden, self.ffn),
        )

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Return the matrix products of one layer of each kind, and how many layers there are."""
        mixture, weights, mixers = self.mixture, self.weights, self.mixers
        up, down = self.linear_shapes[2:]
        dense = tuple(Product(*shape, weights.linear_bits) for shape in (up, down))
        sparse = mixture.products(self.hidden, self.gated, weights) if mixture is not None else ()
        mlps = self.mlps or self.layers
        dense_layers = mixture.dense_layers if mixture is not None else mlps
        attention = mixers.groups(self.hidden, weights.attention_bits)
        parts = ((dense_layers, dense), (mlps - dense_layers, sparse))
        if len(attention) > 1 or self.mlps:
            groups = *attention, *(LayerGroup(*part) for part in parts)
        else:
            groups = tuple(LayerGroup(n, attention[0].products + mlp) for n, mlp in parts)
        return tuple(group for group in groups if group.layers)

    @property
    def elementwise_bytes(self) -> int:
        """Return the bytes that a layer's elementwise kernels read and write for one token.

        Two norms with their residuals read and write two hidden states each. RoPE reads and writes
        queries and keys. The activation reads gate and up, and writes their product. The cache
        write copies keys and values. Experts read and write each token once more.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        values = 8 * self.hidden + 2 * (queries + keys)
        if self.mixture is None:
            values += 3 * self.ffn
        else:
            values += 3 * self.mixture.active_width + 2 * self.mixture.chosen * self.hidden
        if self.latent is None:
            values += 4 * keys
        return self.bytes_per_value * values


@dataclass(frozen=True, slots=True)
class GpuFeatures:
    """Rates and links of a data sheet beyond `GpuSpec`. None: the sheet does not state it.

    Attributes:
        fp8_flops, fp4_flops: dense FLOP/s below 16 bits. 0: the GPU has no such units.
        link_bandwidth: bytes/s that one GPU sends to all others of its server.
        link_latency_s: seconds of an all-reduce of nothing.
        link_peers: links that lead to one other GPU each and share the bandwidth. 0: a switch, so
            that two GPUs use all of it.
        host_bandwidth: bytes/s from the host's memory.
    """

    fp8_flops: float | None = None
    fp4_flops: float | None = None
    link_bandwidth: float | None = None
    link_latency_s: float | None = None
    link_peers: int = 0
    host_bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU.

    Attributes:
        peak_flops: dense bf16 FLOP/s of the data sheet.
        bandwidth: bytes/s of the data sheet.
        memory_gib: total memory as the runtime reports it.
        multiprocessors: number of SMs, on which attention tiles run at the same time.
        features: rates and links in a JSON file. `gpu_sheet.features_of` has them for all GPUs.
    """

    name: str
    peak_flops: float
    bandwidth: float
    memory_gib: float
    multiprocessors: int
    features: GpuFeatures | None = None


# microsoft/Phi-3-mini-128k-instruct, meta-llama/Llama-3.1-8B-Instruct (the 128k sibling of
# Llama-3-8B, same shapes), Qwen/Qwen2.5-14B-Instruct (131,072 with its documented YaRN factor 4).
PHI_3_MINI = ModelSpec(
    "phi-3-mini-128k", 32, 3072, 32, 32, 96, 8192, 32_064, 131_072, 3_821_079_552, family="phi3"
)
LLAMA_3_8B = ModelSpec(
    "llama-3-8b", 32, 4096, 32, 8, 128, 14_336, 128_256, 131_072, 8_030_261_248, family="llama"
)
QWEN_2_5_14B = ModelSpec(
    "qwen2.5-14b", 48, 5120, 40, 8, 128, 13_824, 152_064, 131_072, 14_770_033_664, family="qwen2"
)
MODELS = PHI_3_MINI, LLAMA_3_8B, QWEN_2_5_14B

# NVIDIA data sheets give sparse rates: dense is half. SXM: 1,979/2 TFLOP/s; NVL: 1,671/2 TFLOP/s.
# Both carry 141 GB at 4.8 TB/s, of which the runtime reports 139.8 GiB, and 132 SMs.
H200_SXM = GpuSpec("h200-sxm", 989.5e12, 4.8e12, 139.8, 132)
H200_NVL = GpuSpec("h200-nvl", 835.5e12, 4.8e12, 139.8, 132)
# H100 SXM: the same rates, 3.35 TB/s, 79.18 GiB in start-up logs (llm-d-benchmark; others 79.10 to
# 79.33). L40S: 733/2 TFLOP/s, 864 GB/s, 142 SMs, 45,589 MiB by torch's device properties.
H100_SXM = GpuSpec("h100-sxm", 989.5e12, 3.35e12, 79.18, 132)
L40S = GpuSpec("l40s", 366.5e12, 0.864e12, 45_589 / 1024, 142)
# A100 SXM data sheet: 312 TFLOP/s dense, 2,039 and 1,555 GB/s, 108 SMs. Memory: torch's
# out-of-memory messages (79.14 to 79.35 GiB), start-up log in vllm-project/vllm#12330.
A100_80GB = GpuSpec("a100-80gb", 312e12, 2.039e12, 79.15, 108)
A100_40GB = GpuSpec("a100-40gb", 312e12, 1.555e12, 39.5, 108)
# DGX B200 data sheet, an eighth of eight GPUs: 36 PFLOP/s sparse, 64 TB/s. 148 SMs; torch's
# out-of-memory messages, 182,631 MiB in its properties.
B200 = GpuSpec("b200", 2250e12, 8.0e12, 178.35, 148)
# Ada white paper: 165.2 TFLOP/s with 32-bit sums, 1,008 GB/s, 128 SMs. Memory: LLMServingSim's
# meta.json of Llama-3.1-8B.
RTX_4090 = GpuSpec("rtx-4090", 165.2e12, 1.008e12, 25_250_627_584 / GIB, 128)
# AMD data sheet: 1,307.4 TFLOP/s dense, 5.3 TB/s, 304 compute units. Memory: torch's
# out-of-memory messages.
MI300X = GpuSpec("mi300x", 1307.4e12, 5.3e12, 191.98, 304)
GPUS = H200_SXM, H200_NVL, B200, MI300X, H100_SXM, A100_80GB, A100_40GB, L40S, RTX_4090
