"""Kernels of experts, of FP8 weights in blocks and of latent attention, by GPU generation.

Shares and fixed times of experts were fitted to NVIDIA's measured op tables (aiconfigurator-core
0.12.0, `moe`, vLLM 0.24, experts chosen as in `power_law_1.01`): half of the rows are within 12 %,
nine of ten within 40 %. Served runs judge the sums.
"""

from dataclasses import dataclass
from math import inf

from forebay.replay.engine.hardware.gpu_sheet import features_of
from forebay.replay.engine.hardware.layers import WeightFormat
from forebay.replay.engine.hardware.specs import GpuSpec


@dataclass(frozen=True, slots=True)
class Experts:
    """Grouped products of experts in one weight format.

    Attributes:
        compute: share of the 16-bit peak FLOP/s, in whichever arithmetic.
        fixed_s: seconds that routing, sorting and summing add to a product, beyond the kernels of a
            dense layer (8 us of the tables' time for each product).
        unpack: bytes/s of weights that one SM unpacks. inf: the bandwidth is the bound.
    """

    compute: float
    fixed_s: float
    unpack: float = inf


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels of one GPU generation.

    Attributes:
        experts: rates by format of the weights. Missing: the shares of dense products.
        block_s: seconds that quantising the activations adds to a product in block FP8. Inferred
            from served steps of MiniMax-M2.5, less the other ops of the tables. Their own 57 to 280
            us for such a product include launches that CUDA graphs hide.
        latent_s: seconds that the small kernels of latent attention add to a layer (`mla`: one
            decoding request takes 87 us on an H200 and 37 us on a B200).
    """

    experts: dict[str, Experts]
    block_s: float
    latent_s: float


HOPPER = Kernels(
    {
        "bf16": Experts(0.73, 6e-6),
        "fp8": Experts(0.70, 12e-6),
        "mxfp4": Experts(0.49, 12e-6, 19.2e9),
        "int4": Experts(0.24, 12e-6, 27.3e9),
        "nvfp4": Experts(0.22, 12e-6, 22.8e9),  # of MXFP4 with the same kernel, Marlin
    },
    block_s=45e-6,
    latent_s=50e-6,
)
BLACKWELL = Kernels(
    {
        "bf16": Experts(0.58, 0.0),
        "fp8": Experts(0.42, 5e-6),  # in blocks
        "mxfp4": Experts(0.92, 5e-6),  # activations in MXFP8
        "int4": Experts(0.10, 12e-6, 31e9),
        "nvfp4": Experts(1.85, 2e-6),
    },
    block_s=20e-6,
    latent_s=15e-6,
)
OTHERS = Kernels({}, block_s=HOPPER.block_s, latent_s=HOPPER.latent_s)
"""Ada and Ampere: experts are within a fifth of dense shares on an L40S. The times are assumed."""
EVEN_EXPERTS = 16
"""Largest number of experts whose weights and arithmetic overlap: Mixtral with 8 was served so."""
_HBM = 2.5e12
"""A bandwidth in bytes/s that Hopper exceeds, and Ada, Ampere and GPUs with GDDR do not."""


def kernels_of(gpu: GpuSpec) -> Kernels:
    """Return the kernels of a GPU's generation, which follows from its FP4 and FP8 units."""
    features = features_of(gpu)
    if features.fp4_flops:
        return BLACKWELL
    return HOPPER if features.fp8_flops and gpu.bandwidth > _HBM else OTHERS


def experts_of(gpu: GpuSpec, weights: WeightFormat, bits: float) -> Experts | None:
    """Return the rates of products of experts. None: as dense products."""
    return kernels_of(gpu).experts.get("bf16" if bits == 16 else weights.name)
