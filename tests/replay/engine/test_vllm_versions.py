"""Rules and defaults by vLLM version."""

from dataclasses import replace

import pytest

from forebay.replay.engine.async_engine import AsyncScheduler
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.hardware.specs import H100_SXM
from forebay.replay.engine.kv_blocks.pool import BlockPool
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.scheduler import Scheduler
from forebay.replay.engine.vllm_versions import RELEASES, SINCE, find_release
from forebay.traces.ground.errors import InputError

BLOCK = 16


def limited(version: str, blocks: int, **options: object) -> EngineConfig:
    """Options of an engine with `blocks` blocks for requests, and a context that fills them."""
    return EngineConfig(
        vllm_version=version,
        max_model_len=blocks * BLOCK,
        num_gpu_blocks_override=blocks + 1,
        **options,  # type: ignore[arg-type]
    )


def scheduler(version: str, blocks: int, **options: object) -> Scheduler:
    return Scheduler(limited(version, blocks, **options).limits(), BlockPool(blocks + 1))


def step(engine: Scheduler) -> dict[str, int]:
    """Schedule, give every sampled request its token and return the scheduled tokens."""
    planned = engine.schedule()
    for one in planned.sampled:
        one.tokens += 1
    return {one.id: count for one, count in planned.tokens.items()}


def test_the_default_is_the_newest_and_the_rest_is_listed_on_a_wrong_name() -> None:
    assert EngineConfig().vllm_version == list(RELEASES)[-1]
    with pytest.raises(InputError, match=r"--vllm-version 0\.9: give 0\.11, .*, 0\.32"):
        EngineConfig(vllm_version="0.9")


@pytest.mark.parametrize(
    ("version", "options", "says"),
    [
        ("0.26", {"max_num_queued_reqs": 9}, "--max-num-queued-reqs: vLLM 0.26 has no such option"),
        ("0.26", {"max_num_queued_tokens": 9}, "leave it out or give --vllm-version 0.29"),
        ("0.20", {"watermark": 0.1}, "--watermark: vLLM 0.20"),
        ("0.20", {"prefill_schedule_interval": 2}, "--prefill-schedule-interval: vLLM 0.20"),
        ("0.11", {"scheduler_reserve_full_isl": False}, "--scheduler-reserve-full-isl: vLLM 0.11"),
        ("0.29", {"max_num_active_seqs": 9}, "--max-num-active-seqs: vLLM 0.29"),
        (
            "0.29",
            {"long_prefill_token_threshold_adaptive": True},
            "--long-prefill-token-threshold-adaptive: vLLM 0.29",
        ),
    ],
)
def test_an_option_that_the_version_lacks_is_bad_input(
    version: str, options: dict[str, object], says: str
) -> None:
    with pytest.raises(InputError, match=says) as caught:
        EngineConfig(vllm_version=version, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    EngineConfig(**options)  # type: ignore[arg-type]


def test_every_option_of_the_table_is_one_of_the_engine_and_in_the_newest() -> None:
    assert set(SINCE) <= set(EngineConfig.__dataclass_fields__)
    assert find_release("0.32").options == set(SINCE)


@pytest.mark.parametrize(("version", "overtakes"), [("0.11", True), ("0.13", False)])
def test_without_chunks_a_shorter_prompt_waits_its_turn_since_0_13(
    version: str, overtakes: bool
) -> None:
    config = EngineConfig(vllm_version=version, enable_chunked_prefill=False)
    assert config.limits().whole_prompts_overtake is overtakes


@pytest.mark.parametrize(("version", "reserves"), [("0.11", False), ("0.20", True), ("0.32", True)])
def test_the_whole_prompt_is_reserved_since_0_20(version: str, reserves: bool) -> None:
    assert EngineConfig(vllm_version=version).limits().scheduler_reserve_full_isl is reserves


@pytest.mark.parametrize(
    ("version", "memory_gib", "tokens", "seqs"),
    [
        ("0.32", 179.1, 16_384, 1_024),
        ("0.29", 179.1, 16_384, 1_024),
        ("0.26", 179.1, 8_192, 1_024),
        ("0.32", 139.8, 8_192, 1_024),
        ("0.11", 139.8, 8_192, 1_024),
        ("0.32", 79.1, 8_192, 1_024),
        ("0.32", 44.4, 2_048, 256),
        ("0.11", 23.6, 2_048, 256),
    ],
)
def test_batch_sizes_follow_the_gpus_memory(
    version: str, memory_gib: float, tokens: int, seqs: int
) -> None:
    assert find_release(version).batch_defaults(memory_gib) == (tokens, seqs)


@pytest.mark.parametrize(
    ("version", "gpu", "memory_gib", "tokens", "seqs"),
    [
        ("0.11", "NVIDIA A100-SXM4-80GB", 79.1, 2_048, 256),
        ("0.33", "a100-80gb", 79.1, 2_048, 256),
        ("0.33", "h100-80gb", 79.1, 8_192, 1_024),
        ("0.32", "NVIDIA GB10", 119.7, 8_192, 1_024),
        ("0.33", "NVIDIA GB10", 119.7, 2_048, 256),
    ],
)
def test_some_gpus_with_much_memory_have_small_batches(
    version: str, gpu: str, memory_gib: float, tokens: int, seqs: int
) -> None:
    assert find_release(version).batch_defaults(memory_gib, gpu) == (tokens, seqs)
    config = EngineConfig(
        vllm_version=version, gpu=replace(H100_SXM, name=gpu, memory_gib=memory_gib)
    )
    assert (config.batched_tokens, config.seqs) == (tokens, seqs)


def test_defaults_keep_within_each_other_as_vllms_do() -> None:
    assert EngineConfig(max_num_batched_tokens=100).seqs == 100
    assert EngineConfig(max_num_seqs=2, max_model_len=1_000).batched_tokens == 2_000


class TestPriority:
    @pytest.mark.parametrize(("version", "others"), [("0.32", {}), ("0.33", {"best": 1})])
    def test_a_request_that_preempts_itself_ended_the_pass_until_0_33(
        self, version: str, others: dict[str, int]
    ) -> None:
        engine = scheduler(version, 4, scheduling_policy="priority")
        worst = EngineRequest("worst", 31, 30, priority=9)
        engine.add(worst)
        assert step(engine) == {"worst": 31}
        engine.add(EngineRequest("best", 31, 30, priority=1))
        assert step(engine) == {"worst": 1, "best": 31}
        assert step(engine) == others  # `worst` needs a third block, and none is free
        assert list(engine.waiting) == [worst]

    @pytest.mark.parametrize(
        ("version", "planned"), [("0.26", {"b": 1}), ("0.29", {"b": 1, "c": 1})]
    )
    def test_preempting_a_skipped_request_hid_the_next_until_0_29(
        self, version: str, planned: dict[str, int]
    ) -> None:
        limits = limited(version, 5, scheduling_policy="priority").limits()
        engine = AsyncScheduler(limits, BlockPool(6))
        last = EngineRequest("a", 31, 2, priority=9)
        engine.add(last)
        engine.schedule()
        engine.add(EngineRequest("b", 32, 9))
        engine.add(EngineRequest("c", 15, 9))
        assert [one.id for one in engine.schedule().tokens] == ["a", "b", "c"]
        engine.arrived(last)
        found = engine.schedule()  # a's last token is being sampled; b needs a third block
        assert found.preempted == [last]
        assert {one.id: count for one, count in found.tokens.items()} == planned


class TestInterval:
    """A chat of 10 tokens decodes; documents come, which need 100 tokens, 39 a step beside it."""

    @staticmethod
    def played(version: str, documents: int, steps: int, **options: object) -> list[dict[str, int]]:
        engine = scheduler(version, 50, max_num_batched_tokens=40, **options)
        engine.add(EngineRequest("chat", 10, 99))
        plans = [step(engine)]
        for number in range(documents):
            engine.add(EngineRequest(f"doc{number}", 100, 9))
        return plans + [step(engine) for _ in range(steps - 1)]

    def test_it_counts_from_the_last_step_with_a_prefill(self) -> None:
        plans = self.played("0.33", 1, 11, max_num_seqs=8, prefill_schedule_interval=3)
        assert plans[0] == {"chat": 10}
        assert all(plan["chat"] == 1 for plan in plans[1:])
        documents = [plan.get("doc0", 0) for plan in plans]
        assert documents == [0, 0, 0, 39, 0, 0, 39, 0, 0, 22, 1]

    def test_it_pauses_while_requests_wait(self) -> None:
        plans = self.played("0.33", 2, 7, max_num_seqs=2, prefill_schedule_interval=3)
        # The fourth step may prefill, and leaves the second document without a seat.
        assert [plan.get("doc0", 0) for plan in plans] == [0, 0, 0, 39, 39, 22, 1]

    def test_before_0_33_one_engine_ignores_it(self) -> None:
        options = {"max_num_seqs": 8, "prefill_schedule_interval": 3}
        plans = self.played("0.32", 1, 5, **options)
        assert [plan.get("doc0", 0) for plan in plans] == [0, 39, 39, 22, 1]

    def test_nothing_is_held_while_nobody_decodes(self) -> None:
        engine = scheduler(
            "0.33", 50, max_num_batched_tokens=40, max_num_seqs=8, prefill_schedule_interval=3
        )
        engine.add(EngineRequest("doc", 100, 9))
        assert [step(engine) for _ in range(4)] == [{"doc": n} for n in (40, 40, 20, 1)]

    def test_a_prompt_that_is_cached_but_for_one_token_is_admitted(self) -> None:
        engine = scheduler("0.33", 50, prefill_schedule_interval=9)
        hashes = [1, 2]
        engine.add(EngineRequest("first", 33, 99, hashes))
        step(engine)
        engine.add(EngineRequest("same", 33, 9, list(hashes)))
        engine.add(EngineRequest("longer", 34, 9, list(hashes)))
        assert step(engine) == {"first": 1, "same": 1}


def with_a_head(version: str, blocks: int) -> EngineCore:
    head = '{"method": "eagle", "num_speculative_tokens": 2}'
    given = {"speculative_config": head, "acceptance": 1.0, "async_scheduling": False}
    return EngineCore(limited(version, blocks, **given))


@pytest.mark.parametrize(("version", "hit"), [("0.32", BLOCK), ("0.33", 2 * BLOCK)])
def test_a_head_lost_the_last_block_of_a_hit_until_0_33(version: str, hit: int) -> None:
    """From 0.33 on a block's hash covers the next token, so its states are those of the head."""
    engine = with_a_head(version, 20)
    for name in ("first", "same"):
        request = EngineRequest(name, 2 * BLOCK + 1, 1, [1, 2])
        engine.add(request)
        engine.step(0.0)
    assert request.cached_tokens == hit


@pytest.mark.parametrize(("version", "cached"), [("0.32", 0), ("0.33", 1)])
def test_a_block_that_accepted_tokens_fill_is_cached_when_they_arrive(
    version: str, cached: int
) -> None:
    engine = with_a_head(version, 20)
    engine.add(EngineRequest("a", BLOCK - 2, 30))
    engine.step(0.0)  # the prompt, and token 15
    engine.step(0.0)  # three further tokens: block 0 is full
    assert sum(engine.pool.hash_of(block) is not None for block in range(1, 21)) == cached


@pytest.mark.parametrize(("version", "cached"), [("0.32", 1), ("0.33", 0)])
def test_a_block_waits_for_the_token_that_its_hash_covers(version: str, cached: int) -> None:
    engine = with_a_head(version, 20)
    engine.add(EngineRequest("a", BLOCK, 30))
    engine.start_step(0.0)
    assert sum(engine.pool.hash_of(block) is not None for block in range(1, 21)) == cached
