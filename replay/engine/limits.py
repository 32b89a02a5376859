"""The options and rules of the scheduler of one engine."""

import json
from dataclasses import dataclass

from forebay.proxy.vllm_scheduler import settings
from forebay.replay.engine.hardware.kv_layout import WHOLE, KvGroup
from forebay.traces.ground.errors import InputError

POLICIES = ("fcfs", "priority")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """vLLM's options of the same names, with the defaults of an H200-class API server."""

    max_model_len: int
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    block_size: int = 16
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    long_prefill_token_threshold_adaptive: bool = False
    max_num_active_seqs: int | None = None
    prefill_schedule_interval: int = 1
    minds_skipped_victims: bool = True  # not an option: the rule since vLLM 0.29
    passes_self_preempted: bool = True  # not an option: the rule since vLLM 0.33
    cap_spares_lone_request: bool = True  # not an option: the rule since vLLM 0.31
    counts_every_lookup: bool = False  # not an option: the rule up to vLLM 0.26
    whole_prompts_overtake: bool = False  # not an option: the rule of vLLM 0.11
    sliding_window: int = 0  # not an option: the model's, for the step-time model
    groups: tuple[KvGroup, ...] = (WHOLE,)  # not an option: the model's, in the order of vLLM
    tokens_in_flight: int = 0  # not an option: most tokens of steps that have not ended
    recaches_boundary: bool = False  # not an option: the rule up to vLLM 0.32, see `StateKind`
    proposed_tokens: int = 0  # num_speculative_tokens of --speculative-config
    lookahead_tokens: int = 0  # KV slots that the draft needs beyond the scheduled tokens
    draft_slots: int = 0  # places in the budget of a step that each request leaves to the draft
    drops_hit_block: bool = False  # a prefix hit loses its last block: draft heads need its states
    pause_s: float = 0.0  # longest pause by Forebay's scheduler; 0: vLLM's own scheduler
    hash_lookahead: int = 0  # tokens after a block that its hash covers too
    host_blocks: int = 0  # blocks that the host's memory holds (--kv-offloading-size)
    host_block_s: float = 0.0  # seconds to load one of them


FOREBAY_CLASS = "forebay"
"""Short name of Forebay's scheduler class in --scheduler-cls."""


def read_pause(scheduler_cls: str | None, additional_config: str | None) -> float:
    """Return the pause of Forebay's scheduler in seconds, 0.0 for vLLM's own scheduler.

    Raises:
        InputError: another class, or a pause that is no number of seconds.
    """
    try:
        options = json.loads(additional_config or "{}")
    except ValueError as error:
        raise InputError(f"--additional-config {additional_config}: {error}") from None
    if not isinstance(options, dict):
        raise InputError(f"--additional-config {additional_config}: give a JSON object")
    if scheduler_cls is None or scheduler_cls.partition(".")[0] == "vllm":
        return 0.0
    if scheduler_cls != FOREBAY_CLASS and not scheduler_cls.startswith("forebay."):
        raise InputError(
            f"--scheduler-cls {scheduler_cls}: of all classes only forebay can be simulated"
        )
    try:
        return settings.read_pause(options)
    except ValueError as error:
        raise InputError(str(error)) from None


def check_together(limits: SchedulerLimits) -> None:
    """Raise InputError for options that exclude each other."""
    if limits.pause_s and not (
        limits.enable_chunked_prefill and limits.prefill_schedule_interval == 1
    ):
        raise InputError(
            "--scheduler-cls forebay divides prompts among steps itself: leave out "
            "--no-enable-chunked-prefill and --prefill-schedule-interval"
        )
    beside_copies = {
        "--no-enable-prefix-caching": not limits.enable_prefix_caching,
        "--scheduler-cls forebay": limits.pause_s > 0,
        "--speculative-config": limits.proposed_tokens > 0,
    }
    for option, stated in beside_copies.items():
        if limits.host_blocks and stated:
            raise InputError(f"--kv-offloading-size: not simulated with {option}; leave one out")
