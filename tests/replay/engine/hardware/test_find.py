"""Published models: which are answered, and under which names."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.find import find_model, model_names
from forebay.replay.engine.hardware.hf_fields import Uncounted
from forebay.replay.engine.timing.step_time import StepWork
from forebay.traces.ground.errors import InputError

REFUSED = {
    name: "compress_ratios"
    for name in (
        "deepseek-ai--DeepSeek-V4-Flash",
        "deepseek-ai--DeepSeek-V4-Pro",
        "nvidia--DeepSeek-V4-Flash-NVFP4",
        "nvidia--DeepSeek-V4-Pro-NVFP4",
        "sgl-project--DeepSeek-V4-Flash-FP8",
        "sgl-project--DeepSeek-V4-Pro-FP8",
    )
}
"""Models of the package that are refused, by the key."""
WEIGHTS_GB = {
    "Qwen--Qwen3.5-35B-A3B": 69.3,
    "Qwen--Qwen3.5-397B-A17B": 792.7,
    "deepseek-ai--DeepSeek-V3.2": 673.8,
    "google--gemma-4-26B-A4B": 50.5,
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": 215.5,
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 63.2,
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": 121.8,
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1": 99.5,
    "XiaomiMiMo--MiMo-V2-Flash": 310.1,
}
"""Bytes of some models as counted, in GB: the parameters in their names, at their precision."""


def published() -> list[Path]:
    """The config.json files in NVIDIA's `aiconfigurator-core`, which is not needed otherwise."""
    package = find_spec("aiconfigurator_core")
    if package is None or package.submodule_search_locations is None:
        return []
    folder = Path(next(iter(package.submodule_search_locations))) / "model_configs"
    files = sorted(folder.glob("*_config.json"))
    return [file for file in files if not file.name.endswith("hf_quant_config.json")]


@pytest.mark.skipif(not published(), reason="pip install aiconfigurator-core has the files")
def test_a_published_model_is_answered_or_refused_by_its_key(tmp_path: Path) -> None:
    answered = {}
    for file in published():
        name = file.name.removesuffix("_config.json")
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(file, folder / "config.json")
        beside = file.with_name(f"{name}_hf_quant_config.json")
        if beside.exists():
            shutil.copy(beside, folder / "hf_quant_config.json")
        if name in REFUSED:
            with pytest.raises(Uncounted, match=REFUSED[name]):
                find_model(str(folder))
        else:
            answered[name] = find_model(str(folder)).weight_bytes / 1e9
    assert len(answered) >= 83
    for name, size in WEIGHTS_GB.items():
        assert answered[name] == pytest.approx(size, abs=0.1), name


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("Qwen/Qwen3-8B", 1),
        ("qwen3-30b-a3b", 1),
        ("gpt-oss-20b", 1),
        ("Llama-3.1-70B-Instruct", 4),
        ("Qwen3.6-35B-A3B", 1),
        ("Gemma-4 26B-A4B", 1),
        ("gemma-4-31B-it", 1),
        ("DeepSeek-V3.2", 8),
        ("Kimi-K2.7-Code", 8),
    ],
)
def test_a_name_is_enough(name: str, gpus: int) -> None:
    config = EngineConfig(model=name, gpu="h200", tensor_parallel_size=gpus, max_model_len=16_384)
    window = config.limits().sliding_window
    decode = StepWork(8, 8, 8, 8 * 8192, window_context=8 * min(window, 8192))
    prompt = StepWork(8192, 1, 1, chunks=[(8192, 0)])
    assert 0.001 < config.timing().step_s(decode) < 0.1
    assert 0.02 < config.timing().step_s(prompt) < 1
    assert config.kv_budget.pool_tokens(16_384) > 16_384


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError) as error:
        find_model("Qwen9-8B")
    assert all(name in str(error.value) for name in model_names())
    assert {"Qwen3-8B", "gpt-oss-120b", "Gemma-4-31B"} <= set(model_names())


def test_every_entry_of_the_table_has_its_source() -> None:
    table = Path(find_model.__code__.co_filename).with_name("models.json")
    for name, entry in json.loads(table.read_text()).items():
        assert entry["source"].startswith("https://huggingface.co/"), name


def test_a_hybrid_has_blocks_as_large_as_its_state() -> None:
    """As vLLM 0.32 on a GPU: attention blocks of 1,056 tokens have the bytes of a state."""
    config = EngineConfig(model="Qwen3.6-35B-A3B", gpu="h200")
    layout = config.kv_budget.layout
    assert (layout.block_size, config.limits().block_size) == (1056, 1056)
    assert layout.block_bytes == 10 * 1056 * 2048
    assert layout.state_bytes == 30 * (2 * 3 * 8192 + 4 * 32 * 128 * 128)
    assert layout.request_blocks(262_144) == 249 + 3 * 2
    with pytest.raises(InputError, match="a window or a state"):
        EngineConfig(model="Qwen3.6-35B-A3B", gpu="h200", vllm_version="0.26")
