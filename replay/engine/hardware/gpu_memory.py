"""Memory of GPUs as the CUDA runtime reports it, and vLLM's defaults that follow from it.

The KV-cache arithmetic needs nothing else of a GPU. `specs.py` has the GPUs with known speed.
"""

import re
from dataclasses import dataclass

from forebay.replay.engine.hardware.specs import GIB
from forebay.replay.engine.hardware.specs import GPUS as TIMED
from forebay.traces.ground.errors import InputError


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU in GiB: less than its name says, because the driver keeps some of it.

    The driver needs memory for ECC and page tables.
    """

    name: str
    gib: float

    @property
    def batched_tokens(self) -> int:
        """Return the API server's default of max_num_batched_tokens."""
        # vLLM 0.32, `EngineArgs.get_batch_defaults`, where the A100 is an exception (vllm#17885).
        if self.gib >= 160:
            return 16384
        return 8192 if self._large else 2048

    @property
    def sequences(self) -> int:
        """Return the API server's default of max_num_seqs."""
        return 1024 if self._large else 256

    @property
    def _large(self) -> bool:
        return self.gib >= 70 and "a100" not in self.name


_NAMED_BY_SIZE = {"h100-sxm": "h100-80gb"}
*_OTHERS, _RTX_4090 = (
    GpuMemory(_NAMED_BY_SIZE.get(gpu.name, gpu.name), gpu.memory_gib) for gpu in TIMED
)
GPUS = (
    *_OTHERS,
    GpuMemory("rtx-pro-6000", 101_976_440_832 / GIB),  # LLMServingSim, meta.json of Llama-3.1-8B
    _RTX_4090,
    GpuMemory("rtx-3090", 23.58),  # start-up logs in vllm-project/vllm#10517
)
_BY_NAME = {re.sub(r"[^a-z0-9]|rtx|gb", "", gpu.name): gpu for gpu in GPUS}
_OTHER_NAMES = {"h200": "h200sxm", "h100": "h10080", "a100": "a10080"}


def find_gpu_memory(name: str) -> GpuMemory:
    """Find the GPU called `name`, spelled loosely (InputError: unknown, with the known names)."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    plain = re.sub(r"nvidia|tesla|geforce|rtx|gb|hbm3e?|blackwell|serveredition", "", plain)
    plain = plain.replace("sxm4", "sxm").replace("sxm5", "sxm")
    shorter = plain.replace("sxm", "").replace("pcie", "")  # both forms have the same memory
    for spelling in (plain, shorter, _OTHER_NAMES.get(shorter, "")):
        if spelling in _BY_NAME:
            return _BY_NAME[spelling]
    names = ", ".join(gpu.name for gpu in GPUS)
    raise InputError(f"--gpu {name}: memory unknown; known are {names}; or give --gpu-memory-gib")
