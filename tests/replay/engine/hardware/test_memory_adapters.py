"""The memory of adapters against vLLM's own LoRA tensors, equal to the byte, and what it costs."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fakes.kv_models import CONFIGS, write_config
from paths import ROOT
from vllm_server import needed_vllm_python

from forebay.proxy.cli import main
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.architectures import ADAPTED
from forebay.replay.engine.hardware.find import find_model
from forebay.replay.engine.hardware.hf_config import read_shape
from forebay.replay.engine.hardware.memory import Adapters
from forebay.traces.ground.errors import InputError

SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 640,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
ARCHITECTURES = {
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Answers of vLLM 0.32 for 3 adapters of rank 8: on one GPU, and on each of four. A KV head is then
# on two of them.
BYTES = {
    "cohere": (760_704, 442_752),
    "cohere2": (760_704, 442_752),
    "ernie4_5": (820_992, 503_040),
    "exaone4": (820_992, 503_040),
    "gemma": (700_416, 382_464),
    "gemma2": (700_416, 382_464),
    "gemma3_text": (700_416, 382_464),
    "glm4": (700_416, 382_464),
    "granite": (820_992, 503_040),
    "llama": (820_992, 503_040),
    "ministral3": (700_416, 382_464),
    "mistral": (700_416, 382_464),
    "nemotron": (691_968, 443_136),
    "phi3": (655_104, 374_016),
    "qwen2": (645_120, 364_032),
    "qwen3": (820_992, 503_040),
}
LLAMA_3_8B_BYTES = 92_356_608  # one adapter of rank 16


def config_of(family: str, **changed: Any) -> dict[str, Any]:
    # All but two take heads of another width than hidden size by heads.
    size = {} if family in ("phi3", "qwen2") else {"head_dim": 96}
    named = {"model_type": family, "architectures": [ARCHITECTURES[family]]}
    return {**SMALL, **size, **named, **changed}


LLAMA_3_8B = {**CONFIGS["meta-llama/Llama-3.1-8B"], "architectures": ["LlamaForCausalLM"]}
CASES: list[tuple[dict[str, Any], int, Adapters]] = [
    *((config_of(family), 1, Adapters(3, 8)) for family in BYTES),
    (config_of("llama", tie_word_embeddings=True), 1, Adapters(3, 8)),
    (LLAMA_3_8B, 1, Adapters()),
    # Ranks change last, because vLLM starts its groups again for it.
    (LLAMA_3_8B, 2, Adapters(4, 64)),
    *((config_of(family), 4, Adapters(3, 8)) for family in BYTES),
]


def ours(config: dict[str, Any], ranks: int, room: Adapters, folder: Path) -> int:
    return room.bytes_of(read_shape(write_config(folder, config)), ranks)


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_take_the_bytes_that_vllm_said(family: str, tmp_path: Path) -> None:
    config, room = config_of(family), Adapters(3, 8)
    assert tuple(ours(config, ranks, room, tmp_path) for ranks in (1, 4)) == BYTES[family]


@pytest.mark.timeout(900)
def test_adapters_take_the_bytes_of_vllm(tmp_path: Path) -> None:
    cases = [
        {
            "config": config,
            "tensor_parallel": ranks,
            "max_loras": room.slots,
            "max_lora_rank": room.rank,
        }
        for config, ranks, room in CASES
    ]
    run = subprocess.run(
        [needed_vllm_python(), str(ROOT / "tests" / "support" / "vllm_lora.py")],
        input=json.dumps(cases), capture_output=True, text=True,
    )  # fmt: skip
    theirs = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert theirs == [{"bytes": ours(*case, tmp_path)} for case in CASES], run.stderr[-2_000:]


def test_the_cache_shrinks_by_the_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    """`forebay kv` and the engine say the same."""
    words = "kv --model llama-3-8b --gpu h200 --enable-lora --max-loras 8 --json"
    assert main(words.split()) == 0
    with_room = json.loads(capsys.readouterr().out)
    assert main([*words.split()[:5], "--json"]) == 0
    without = json.loads(capsys.readouterr().out)
    assert without["bytes"]["adapters"] == 0
    assert with_room["bytes"]["adapters"] == 8 * LLAMA_3_8B_BYTES
    less = without["bytes"]["pool"] - with_room["bytes"]["pool"]
    assert less == pytest.approx(8 * LLAMA_3_8B_BYTES, abs=1)
    block = find_model("llama-3-8b").kv_bytes_per_token * 16
    assert without["blocks"] - with_room["blocks"] == pytest.approx(less / block, abs=1)
    config = EngineConfig("llama-3-8b", "h200", enable_lora=True, max_loras=8)
    assert config.kv_budget.blocks == with_room["blocks"]


def test_the_table_has_a_line_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = "kv --model llama-3-8b --gpu h200 --enable-lora --max-loras 4 --max-lora-rank 64"
    assert main(words.split()) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "adapters" in line]
    gib = 4 * 4 * LLAMA_3_8B_BYTES / 2**30
    assert " ".join(line.split()) == f"- adapters {gib:.2f} LoRA: 4 of rank 64 at most"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--enable-lora --max-loras 0", "--max-loras 0: give a whole number of 1 or more"),
        ("--enable-lora --max-lora-rank 0", "--max-lora-rank 0: give one of 1, 8, 16, 32"),
        ("--enable-lora --max-lora-rank 12345", "--max-lora-rank 12345: give one of 1, 8"),
        ("--max-loras 4", "--max-loras: acts with --enable-lora only; add it or leave this out"),
    ],
)
def test_a_wrong_number_is_one_line(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("kv --gpu h200", "engine --port 0", "size --users 9 --document-tokens 9000"):
        assert main([*command.split(), "--model", "llama-3-8b", *words.split()]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert says in line


@pytest.mark.parametrize("name", ["mistralai/Mixtral-8x7B-v0.1", "deepseek-ai/DeepSeek-R1"])
def test_experts_are_refused_by_name(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    with pytest.raises(InputError, match=f"{config['model_type']} models with experts"):
        ours(config, 1, Adapters(), tmp_path)


def test_the_text_part_of_a_model_does_not_stand_for_it(tmp_path: Path) -> None:
    whole = {"model_type": "gemma3", "vision_config": {}, "text_config": config_of("gemma3_text")}
    with pytest.raises(InputError, match="adapters of gemma3 models are not counted here"):
        ours(whole, 1, Adapters(), tmp_path)


@pytest.mark.parametrize("adapters", [1_200, 3_000])
def test_adapters_that_leave_too_little_memory_are_named(adapters: int) -> None:
    with pytest.raises(InputError, match="--max-model-len 131072: the KV cache holds") as caught:
        EngineConfig("llama-3-8b", "h200", enable_lora=True, max_loras=adapters)
    assert "lower --max-loras or --max-lora-rank" in str(caught.value)
