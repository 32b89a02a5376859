"""Rules and defaults by vLLM version."""

import pytest

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.vllm_versions import RELEASES, SINCE, find_release
from forebay.traces.errors import InputError


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


def test_defaults_keep_within_each_other_as_vllms_do() -> None:
    assert EngineConfig(max_num_batched_tokens=100).seqs == 100
    assert EngineConfig(max_num_seqs=2, max_model_len=1_000).batched_tokens == 2_000


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"watermark": 1.0}, "--watermark 1.0: give a share"),
        ({"watermark": float("nan")}, "--watermark nan"),
        ({"max_num_active_seqs": 0}, "--max-num-active-seqs 0"),
        ({"max_num_active_seqs": 2_000}, "2000 is more than --max-num-seqs 1024"),
    ],
)
def test_a_value_that_cannot_work_is_bad_input(options: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        EngineConfig(**options)  # type: ignore[arg-type]
