"""What answers say about models whose step times are far from served runs, or unchecked."""

from pathlib import Path
from typing import Any

import pytest
from fakes.kv_models import CONFIGS, write_config

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.timing.served import FAR_RUNS, SERVED

FP8 = {"quant_method": "fp8"}
BLOCKS = FP8 | {"weight_block_size": [128, 128]}


def engine(folder: Path, model: str, gpu: str, gpus: int, stored: dict[str, Any]) -> EngineConfig:
    config = CONFIGS[model] | ({"quantization_config": stored} if stored else {})
    return EngineConfig(
        str(write_config(folder, config)), gpu, tensor_parallel_size=gpus, max_model_len=8_192
    )


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "stored", "words"),
    [
        ("Qwen/Qwen3-14B", "h200", 1, {}, ""),
        ("Qwen/Qwen3-14B", "h200", 1, FP8, ""),
        ("Qwen/Qwen3-14B", "h200", 1, BLOCKS, "unchecked: no served run of a dense model in fp8"),
        ("openai/gpt-oss-120b", "h200", 1, {}, ""),
        ("openai/gpt-oss-120b", "l40s", 4, {}, "unchecked: no served run of a mixture of experts"),
        ("Qwen/Qwen3-235B-A22B", "h200", 4, BLOCKS, "known error: "),
    ],
)
def test_an_answer_says_a_large_or_unknown_error(
    tmp_path: Path, model: str, gpu: str, gpus: int, stored: dict[str, Any], words: str
) -> None:
    config = engine(tmp_path, model, gpu, gpus, stored)
    assert (config.known_error() or "").startswith(words)
    assert bool(config.known_error()) == bool(words)
    # The check of the calibration is of another kind of model.
    plain = model == "Qwen/Qwen3-14B" and not stored
    assert ("within 5 %" in config.how_checked()) == plain
    assert words in (config.constants_remark() or "")


def test_kinds_with_many_runs_that_are_far_off() -> None:
    far = {runs.model for runs in SERVED if runs.far > FAR_RUNS * runs.runs}
    assert far == {"Qwen3-235B-A22B-FP8", "Kimi-K2.5", "Kimi-K2.5 and MiniMax-M2.5"}
