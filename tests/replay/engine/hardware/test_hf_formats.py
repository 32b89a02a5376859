"""The precision of a checkpoint, where its files state it, and the context length by version."""

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.kv_models import CONFIGS, write_config

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.find import find_model
from forebay.replay.engine.hardware.hf_config import read_shape
from forebay.replay.engine.hardware.specs import GIB
from forebay.traces.ground.errors import InputError

SEVENTY = {
    **{k: v for k, v in CONFIGS["RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic"].items()},
    "quantization_config": None,
}
PARAMETERS = 70_553_706_496
WIDE = 2 * 128_256 * 8192 + 80 * 2 * 8192 + 8192  # embedding, head, norms: always 16 bits


def write(folder: Path, config: dict[str, Any], beside: dict[str, Any] | None = None) -> Path:
    if beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    return write_config(folder, config)


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, **more}}


@pytest.mark.parametrize(
    ("quantization", "beside", "bits"),
    [
        (None, None, 16),
        ({"quant_method": "fp8"}, None, 8),
        (None, modelopt("FP8", kv_cache_quant_algo="FP8"), 8),
        (None, modelopt("NVFP4", group_size=16), 4.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None, 4.5),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, None, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, None, 4 + 20 / 64),
    ],
)
def test_weights_of_a_70b_by_hand(
    quantization: dict[str, Any] | None, beside: dict[str, Any] | None, bits: float, tmp_path: Path
) -> None:
    path = write(tmp_path, {**SEVENTY, "quantization_config": quantization}, beside)
    by_hand = ((PARAMETERS - WIDE) * bits + WIDE * 16) / 8
    assert read_shape(path).weight_bytes == pytest.approx(by_hand, rel=1e-9)


def test_the_file_of_nvidias_checkpoints_is_read(tmp_path: Path) -> None:
    """`kv` said 131 GiB for Llama-3.1-70B-FP8, which has 68."""
    path = write(tmp_path, SEVENTY, modelopt("FP8", kv_cache_quant_algo="FP8"))
    shape = read_shape(path)
    assert shape.weight_bytes / GIB == pytest.approx(67.7, abs=0.1)
    assert shape.kv_value_bytes == 1
    model = find_model(str(path))
    assert (model.weights.name, model.kv_value_bytes) == ("fp8", 1)


def test_attention_that_keeps_16_bits_is_counted_so(tmp_path: Path) -> None:
    whole = read_shape(write(tmp_path, SEVENTY, modelopt("NVFP4"))).weight_bytes
    part = modelopt("NVFP4", exclude_modules=["lm_head", "model.layers.*.self_attn*"])
    attention = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024)
    assert read_shape(write(tmp_path, SEVENTY, part)).weight_bytes - whole == attention * 11.5 / 8


def test_a_format_for_each_matrix(tmp_path: Path) -> None:
    """Qwen3.6 of NVIDIA has FP8 attention, and an MLP in NVFP4 with 16-bit activations."""
    layers = {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_NVFP4"},
    }
    path = write(tmp_path, SEVENTY, modelopt("MIXED_PRECISION", quantized_layers=layers))
    stored = find_model(str(path)).weights
    assert (stored.attention_bits, stored.linear_bits, stored.arithmetic) == (8, 4.5, "bf16")


def test_an_empty_method_beside_an_algorithm_is_nvidias(tmp_path: Path) -> None:
    quantization = {"quant_method": "", "quant_algo": "FP8", "kv_cache_scheme": "FP8"}
    path = write(tmp_path, {**SEVENTY, "quantization_config": quantization})
    model = find_model(str(path))
    assert (model.weights.name, model.kv_value_bytes) == ("fp8", 1)


@pytest.mark.parametrize(
    ("quantization", "beside", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None, "quant_method 'bitsandby"),
        (None, modelopt("MIXED_PRECISION"), "hf_quant_config.json: quant_algo 'MIXED_PRECISION'"),
        (None, {"producer": {}}, "hf_quant_config.json: quantization is not an object"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {
                "weights": {"num_bits": 8, "type": "int"},
                "input_activations": {"num_bits": 8, "type": "int"}}}},
            None, "quantization_config.config_groups: 8-bit int activations",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {
                "a": {"weights": {"num_bits": 8, "type": "float"}},
                "b": {"weights": {"num_bits": 4, "type": "int"}}}},
            None, "quantization_config.config_groups with different formats",
        ),
    ],
)  # fmt: skip
def test_an_unknown_precision_is_refused_by_its_key(
    quantization: dict[str, Any] | None, beside: dict[str, Any] | None, named: str, tmp_path: Path
) -> None:
    path = write(tmp_path, {**SEVENTY, "quantization_config": quantization}, beside)
    with pytest.raises(InputError, match=named.replace(".", r"\.")):
        find_model(str(path))


QWEN = {**CONFIGS["Qwen/Qwen2.5-14B-Instruct"]}
SCALING = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize(
    ("version", "changed", "longest", "default"),
    [
        # vLLM's own ModelConfig on such configurations
        ("0.20", {"rope_scaling": SCALING}, 131_072, 131_072),
        ("0.29", {"rope_scaling": SCALING}, 131_072, 131_072),
        ("0.32", {"rope_scaling": SCALING}, 32_768, 32_768),
        ("0.32", {"rope_scaling": SCALING, "max_position_embeddings": 131_072}, 131_072, 131_072),
        ("0.20", {"rope_scaling": {"type": "linear", "factor": 4.0}}, 131_072, 131_072),
        ("0.32", {"rope_scaling": {"type": "linear", "factor": 4.0}}, 131_072, 131_072),
        ("0.32", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 65_536, 65_536),
        ("0.32", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 32_768, 32_768),
        (
            "0.32",
            {
                "rope_scaling": {"type": "longrope", "long_factor": [1.0]},
                "max_position_embeddings": 131_072,
                "original_max_position_embeddings": 4_096,
            },
            131_072,
            4_096,
        ),
    ],
)
def test_context_lengths_are_those_of_the_version(
    version: str, changed: dict[str, Any], longest: int, default: int, tmp_path: Path
) -> None:
    path = str(write(tmp_path, {**QWEN, **changed}))
    assert EngineConfig(path, vllm_version=version).context == default
    assert EngineConfig(path, vllm_version=version, max_model_len=longest).context == longest
    with pytest.raises(InputError, match=f"has a context of {longest} tokens"):
        EngineConfig(path, vllm_version=version, max_model_len=longest + 1)
