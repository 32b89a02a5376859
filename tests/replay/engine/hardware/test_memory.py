"""KV-cache arithmetic: bytes a token, blocks, what fits; and reading a Hugging Face config.json."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.kv_models import write_config

from forebay.proxy.cli import main
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.gpu_memory import GPUS, find_gpu_memory
from forebay.replay.engine.hardware.hf_config import read_shape
from forebay.replay.engine.hardware.kv_layout import (
    WHOLE,
    KvOptions,
    ModelShape,
    kv_layout,
)
from forebay.replay.engine.hardware.memory import MemoryOptions, memory_budget
from forebay.replay.engine.hardware.specs import H200_NVL, LLAMA_3_8B, PHI_3_MINI, QWEN_2_5_14B
from forebay.traces.ground.errors import InputError

KIB = 1024
LLAMA = LLAMA_3_8B.shape


@pytest.mark.parametrize(
    ("shape", "kv_bytes", "tokens", "concurrency"),
    [
        # tokens of the pool; requests of 8k, 32k and 128k tokens at once
        (LLAMA, 2, 868_528, (106.02, 26.51, 6.63)),
        (LLAMA, 1, 1_737_072, (212.04, 53.01, 13.25)),
        # 31,605.9 blocks: a part of a block is none. Without the biases of q, k and v in the
        # parameter count it would be 31,606 blocks, 505,696 tokens.
        (QWEN_2_5_14B.shape, 2, 505_680, (61.73, 15.43, 3.86)),
        (QWEN_2_5_14B.shape, 1, 1_011_376, (123.46, 30.86, 7.72)),
        (PHI_3_MINI.shape, 2, 320_560, (39.13, 9.78, 2.45)),
        (PHI_3_MINI.shape, 1, 641_120, (78.26, 19.57, 4.89)),
    ],
)
def test_three_models_on_one_h200(
    shape: ModelShape, kv_bytes: int, tokens: int, concurrency: tuple[float, float, float]
) -> None:
    options = MemoryOptions(value_bytes=kv_bytes)
    budget = memory_budget(shape, H200_NVL.memory_gib, options)
    assert budget.pool_tokens(131_072) == budget.blocks * 16 == tokens
    lengths = (8192, 32_768, 131_072)
    assert tuple(round(budget.concurrency(n), 2) for n in lengths) == concurrency
    assert [budget.whole_requests(n) for n in lengths] == [int(c) for c in concurrency]


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen2.5-14b", "phi-3-mini"])
def test_the_simulated_engine_has_the_blocks_that_kv_says(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv", "--model", model, "--gpu", "h200", "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["blocks"] == EngineConfig(model=model).kv_budget.blocks
    )


@pytest.mark.parametrize(
    ("name", "tp", "kib"),
    [
        ("microsoft/Phi-3-mini-128k-instruct", 1, 384.0),  # MHA
        ("meta-llama/Llama-3.1-8B", 1, 128.0),  # GQA
        ("meta-llama/Llama-3.1-8B", 2, 64.0),
        ("google/gemma-2b", 1, 18.0),  # MQA
        ("google/gemma-2b", 8, 18.0),  # one head cannot be cut
        ("Qwen/Qwen3-235B-A22B", 8, 47.0),  # four heads on eight GPUs: one each
        ("deepseek-ai/DeepSeek-R1", 1, 68.625),  # MLA: 61 layers x 576 numbers
        ("deepseek-ai/DeepSeek-R1", 8, 68.625),  # on every GPU
    ],
)
def test_bytes_a_token(name: str, tp: int, kib: float, tmp_path: Path) -> None:
    layout = kv_layout(read_shape(write_config(tmp_path, name)), KvOptions(tensor_parallel=tp))
    assert layout.bytes_per_token / KIB == kib
    assert layout.block_bytes == layout.bytes_per_token * 16


def test_a_draft_head_is_one_more_layer() -> None:
    assert kv_layout(LLAMA, KvOptions(draft_layers=1)).bytes_per_token == 33 * 4096


def test_sliding_layers_hold_a_window_and_what_a_step_adds(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, "google/gemma-3-27b-it"))
    assert (shape.layers, shape.sliding_layers, shape.sliding_window) == (62, 52, 1024)
    layout = kv_layout(shape, KvOptions(max_num_batched_tokens=2048))
    # 10 full layers and 52 sliding: groups of ten, the sixth of the sliding ones padded
    assert (len(layout.groups), layout.groups.count(WHOLE)) == (7, 1)
    assert layout.window_tokens == 1023 + 2048
    assert layout.request_blocks(1024) == 64 + 6 * (64 + 1)
    assert layout.request_blocks(131_072) == 8192 + 6 * (192 + 1)
    whole = kv_layout(replace(shape, sliding_layers=0), KvOptions())
    part = layout.request_blocks(131_072) * layout.block_bytes
    assert part / (whole.request_blocks(131_072) * whole.block_bytes) == pytest.approx(0.184, 0.01)


def test_two_steps_in_flight_hold_more_beside_a_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM plans a step while one runs, and from 0.26 on sliding layers keep the tokens of both."""
    path = write_config(tmp_path, "google/gemma-3-27b-it")
    options = KvOptions(max_num_batched_tokens=2048, steps_in_flight=2)
    assert kv_layout(read_shape(path), options).window_tokens == 1023 + 2 * 2048
    tokens = {}
    for version in ("0.20", "0.26", "0.32"):
        words = ["kv", "--model", str(path), "--gpu", "h200", "--vllm-version", version, "--json"]
        assert main(words) == 0
        tokens[version] = json.loads(capsys.readouterr().out)["pool_tokens"]
    assert tokens["0.20"] > tokens["0.26"] == tokens["0.32"]


def test_all_layers_sliding_fit_any_length(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, "mistralai/Mistral-7B-v0.1"))
    layout = kv_layout(shape, KvOptions(max_num_batched_tokens=2048))
    assert layout.request_blocks(32_768) == layout.request_blocks(8192) == 384 + 1
    assert layout.longest(385, 32_768) == 32_768
    assert layout.longest(101, 32_768) == 1600


@pytest.mark.parametrize(
    ("changed", "sliding"),
    [
        ({}, 0),
        ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}, 48),
        ({"use_sliding_window": True, "sliding_window": 4096}, 0),  # from layer 70 of 48 on
        ({"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}, 0),
        ({"use_sliding_window": True, "max_window_layers": 0}, 0),  # window as long as the context
        (
            {
                "use_sliding_window": True,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
                "max_window_layers": None,
            },
            36,
        ),
    ],
)
def test_which_layers_slide(changed: dict[str, Any], sliding: int, tmp_path: Path) -> None:
    path = write_config(tmp_path, "Qwen/Qwen2.5-14B-Instruct", **changed)
    assert read_shape(path).sliding_layers == sliding


def test_a_qwen_with_windows_in_a_part_of_its_layers_is_refused_as_by_vllm(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}
    path = write_config(tmp_path, "Qwen/Qwen2.5-14B-Instruct", **window)
    with pytest.raises(InputError, match="max_window_layers is 28 of 48 layers"):
        read_shape(path)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", 70_553_706_496),
        ("microsoft/Phi-3-mini-128k-instruct", 3_821_079_552),
        ("Qwen/Qwen2.5-14B-Instruct", 14_770_033_664),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-32B", 32_762_123_264),
        ("Qwen/Qwen3-235B-A22B", 235_093_634_560),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
        ("google/gemma-2b", 2_506_172_416),
        ("google/gemma-3-27b-it", 27_009_346_304),  # the language model without the vision tower
        ("deepseek-ai/DeepSeek-R1", 671_026_404_352),  # published: 15 thousand more, router biases
    ],
)
def test_parameters_counted_from_the_configuration(
    name: str, parameters: int, tmp_path: Path
) -> None:
    assert read_shape(write_config(tmp_path, name)).weights_source.startswith(f"{parameters:,} ")


def test_built_in_models_are_their_configurations(tmp_path: Path) -> None:
    for built_in, name in (
        (LLAMA_3_8B, "meta-llama/Llama-3.1-8B"),
        (PHI_3_MINI, "microsoft/Phi-3-mini-128k-instruct"),
        (QWEN_2_5_14B, "Qwen/Qwen2.5-14B-Instruct"),
    ):
        # Qwen's context with YaRN is the one of vLLM up to 0.29; see test_configs.py for 0.32.
        read = read_shape(write_config(tmp_path, name), stretches_yarn=True)
        same = replace(read, name=built_in.name, weights_source=built_in.shape.weights_source)
        assert same == built_in.shape


def test_the_index_beside_it_is_believed(tmp_path: Path) -> None:
    write_config(tmp_path, "meta-llama/Llama-3.1-8B")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 16060522496}, "weight_map": {}}')
    shape = read_shape(tmp_path)
    assert (shape.weight_bytes, "index.json" in shape.weights_source) == (16_060_522_496, True)
    write_config(tmp_path, "meta-llama/Llama-3.1-8B", torch_dtype="float32")
    assert read_shape(tmp_path).weight_bytes == 8_030_261_248
    index.write_text('{"weight_map": {}}')
    with pytest.raises(InputError, match=r"index\.json: no metadata\.total_size"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("meta-llama/Llama-3.1-8B", {"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ("meta-llama/Llama-3.1-8B", {"hidden_size": None}, "hidden_size is missing"),
        ("meta-llama/Llama-3.1-8B", {"vocab_size": "many"}, "vocab_size is 'many'"),
        ("meta-llama/Llama-3.1-8B", {"intermediate_size": None}, "intermediate_size or"),
        ("meta-llama/Llama-3.1-8B", {"max_position_embeddings": 0}, "max_position_embeddings or"),
        ("meta-llama/Llama-3.1-8B", {"hidden_size": 4100}, "head_dim is missing"),
        ("deepseek-ai/DeepSeek-R1", {"qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
        ("openai/gpt-oss-20b", {"layer_types": ["linear_attention"] * 24}, "linear_attention"),
        ("openai/gpt-oss-20b", {"layer_types": ["full_attention"]}, "1 entries"),
        ("Qwen/Qwen3-8B", {"quantization_config": {"quant_method": "quip"}}, "quip.*weights-gib"),
        ("Qwen/Qwen3-8B", {"text_config": 5}, "text_config is not an object"),
    ],
)
def test_a_field_that_is_missing_or_wrong_is_named(
    name: str, changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=rf"config\.json: .*{words}"):
        read_shape(write_config(tmp_path, name, **changed))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("h200", "h200-sxm"), ("H200-NVL", "h200-nvl"), ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("A100", "a100-80gb"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("A100-80GB", "a100-80gb"),
        ("4090", "rtx-4090"), ("NVIDIA GeForce RTX 3090", "rtx-3090"), ("L40S", "l40s"),
        ("B200", "b200"), ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        *((gpu.name, gpu.name) for gpu in GPUS),
    ],
)  # fmt: skip
def test_gpus_by_name(name: str, known: str) -> None:
    assert find_gpu_memory(name).name == known


@pytest.mark.parametrize("name", ["h100-nvl", "l4", "a100-20gb"])
def test_a_gpu_of_another_size_is_not_taken_for_one_we_know(name: str) -> None:
    with pytest.raises(InputError, match="memory unknown"):
        find_gpu_memory(name)


@pytest.mark.parametrize("block_size", [16, 8192, 32_768])
def test_least_utilisation_is_least(block_size: int) -> None:
    options = MemoryOptions(block_size=block_size)
    share = memory_budget(LLAMA, 139.8, options).least_utilization(131_072)
    for asked, fits in ((share, 1), (share - 0.01, 0)):
        budget = memory_budget(LLAMA, 139.8, replace(options, gpu_memory_utilization=asked))
        assert budget.whole_requests(131_072) == fits


@pytest.mark.parametrize(
    ("tp", "tokens", "activation"),
    [
        (1, 8192, 38.5 * 1024 * 128_256),  # logits of 1,024 sequences
        (1, 131_072, 131_072 * (3 * 14_336 + 3 * 4096) * 2),  # the MLP of a large step
        (4, 131_072, 131_072 * (3 * 3584 + 3 * 4096) * 2),  # split, the hidden state is not
    ],
)
def test_activation_peak(tp: int, tokens: int, activation: float) -> None:
    options = MemoryOptions(tensor_parallel=tp, max_num_batched_tokens=tokens)
    budget = memory_budget(LLAMA, 139.8, options)
    assert budget.activation == activation
    assert budget.weights == LLAMA.weight_bytes / tp


def test_one_request_fits_from_the_stated_utilisation_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["kv", "--model", "qwen2.5-14b", "--gpu", "h200", "--json", "--max-model-len", "131072"]
    assert main(words) == 0
    share = json.loads(capsys.readouterr().out)["least_gpu_memory_utilization"]
    assert main([*words, "--gpu-memory-utilization", f"{share}"]) == 0
    assert main([*words, "--gpu-memory-utilization", f"{share - 0.01:.2f}"]) == 2
    assert f"try --gpu-memory-utilization {share} or --max-model-len" in capsys.readouterr().err


def test_the_stated_longest_context_is_the_longest(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["kv", "--model", "llama-3-8b", "--gpu", "rtx-4090", "--json"]
    assert main(words) == 0
    longest = json.loads(capsys.readouterr().out)["longest_request_tokens"]
    assert main([*words, "--max-model-len", f"{longest}"]) == 0
    assert main([*words, "--max-model-len", f"{longest + 1}"]) == 2
    error = capsys.readouterr().err
    assert f"--max-model-len {longest}" in error
    assert "--kv-cache-dtype fp8" in error


def test_a_model_that_does_not_fit_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # llm-d-benchmark's log of this pair says -1.44 GiB, and that it fits two H100
    path = write_config(tmp_path, "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic")
    assert main(["kv", "--model", str(path), "--gpu", "h100"]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert len(said.err.splitlines()) == 1
    assert "does not fit by 1.3 GiB" in said.err
    assert "--tp 2" in said.err
    assert main(["kv", "--model", str(path), "--gpu", "h100", "--tp", "2"]) == 0


def test_the_table_says_the_budget_and_the_concurrency(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "--model", "llama-3-8b", "--gpu", "h200", "--length", "131072"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in ("weights 14.96", "54,283 blocks of 16: 868,528 tokens", "6.63x 6", "128 KiB"):
        assert words in said
