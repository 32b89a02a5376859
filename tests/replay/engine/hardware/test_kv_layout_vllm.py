"""The KV cache of public models against vLLM's own `get_kv_cache_configs`, equal to the block."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fakes.kv_families import COUNTED, REFUSED
from fakes.kv_models import CONFIGS, write_config
from paths import ROOT
from vllm_kv_cache import MEMORY
from vllm_server import needed_vllm_python

from forebay.replay.engine.hardware.hf_config import read_shape
from forebay.replay.engine.hardware.kv_layout import KV_VALUE_BYTES, KvOptions, kv_layout
from forebay.traces.ground.errors import InputError

ARCHITECTURES = {
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "exaone": "ExaoneForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon": "FalconForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhiMoEForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
FP8 = {"kv_cache_dtype": "fp8"}
TWO = {"tensor_parallel": 2}
UNCACHED = {"prefix_caching": False}
MLA_AND_STATES = {"moonshotai/Kimi-Linear-48B-A3B-Instruct"}
"""vLLM for the CPU has no prefix caching for them."""
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, UNCACHED if name in MLA_AND_STATES else {}) for name in (*CONFIGS, *COUNTED)),
    ("Qwen/Qwen3.5-35B-A3B", UNCACHED),
    ("nvidia/Nemotron-H-8B-Base-8K", UNCACHED),
    ("Qwen/Qwen3.5-35B-A3B", FP8),
    ("XiaomiMiMo/MiMo-V2-Flash", FP8),
    ("deepseek-ai/DeepSeek-V3.2", FP8),
    ("meta-llama/Llama-3.1-8B", FP8),
    ("google/gemma-3-27b-it", FP8),
    ("deepseek-ai/DeepSeek-R1", FP8),
    # Ranks change last, because vLLM starts its groups again for it.
    ("meta-llama/Llama-3.1-8B", TWO),
    ("google/gemma-2b", TWO),
    ("google/gemma-3-27b-it", TWO),
    ("openai/gpt-oss-20b", {**TWO, **FP8}),
    ("deepseek-ai/DeepSeek-R1", TWO),
    ("Qwen/Qwen3-235B-A22B", TWO),
    ("Qwen/Qwen3.5-35B-A3B", TWO),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", TWO),
    ("ibm-granite/granite-4.0-h-small", TWO),
    ("google/gemma-4-26B-A4B", TWO),
    ("zai-org/GLM-5.2", TWO),
]


def asked(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The case for vLLM: the text model alone, unquantised, because the CPU lacks kernels."""
    config = {**CONFIGS, **COUNTED}[name]
    config = {**config, **config.get("text_config", {})}
    config = {k: v for k, v in config.items() if k not in ("text_config", "quantization_config")}
    if (rope := config.get("rope_scaling")) and "short_factor" in rope:
        size = config["hidden_size"] // config["num_attention_heads"]
        factors = [1.0] * (size // 2)  # the file here has fewer than vLLM needs to build the model
        config["rope_scaling"] = {**rope, "short_factor": factors, "long_factor": factors}
    if pattern := config.get("hybrid_override_pattern"):  # experts without a gate need a GPU
        config["hybrid_override_pattern"] = pattern.replace("E", "-")
    architecture = ARCHITECTURES[config["model_type"]]
    return {"config": {**config, "architectures": [architecture]}, **options}


def ours(config: dict[str, Any], vllm: dict[str, Any], case: dict[str, Any], folder: Path) -> Any:
    """Our figures of a model, with the options that vLLM ended up with."""
    shape = read_shape(write_config(folder, config))
    layout = kv_layout(
        shape,
        KvOptions(
            block_size=vllm["block_size"],
            value_bytes=KV_VALUE_BYTES[case.get("kv_cache_dtype", "auto")],
            tensor_parallel=case.get("tensor_parallel", 1),
            max_num_batched_tokens=vllm["step_tokens"],
            caches_prefixes=case.get("prefix_caching", True),
        ),
    )
    return {
        "blocks": layout.blocks_in(MEMORY),
        "block_bytes": layout.block_bytes,
        "block_tokens": layout.block_size,
        "request_blocks": layout.request_blocks(vllm["max_model_len"]),
        "max_model_len": shape.default_len or shape.max_model_len,
    }


@pytest.mark.timeout(900)
def test_every_model_has_the_blocks_of_vllm(tmp_path: Path) -> None:
    cases = [asked(name, options) for name, options in CASES]
    run = subprocess.run(
        [needed_vllm_python(), str(ROOT / "tests" / "support" / "vllm_kv_cache.py")],
        input=json.dumps(cases), capture_output=True, text=True,
    )  # fmt: skip
    answers = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(cases), run.stderr[-2_000:]
    wrong = {}
    for (name, options), case, vllm in zip(CASES, cases, answers, strict=True):
        if "fault" in vllm:
            wrong[f"{name} {options}"] = vllm["fault"]
            continue
        mine = ours({**CONFIGS, **COUNTED}[name], vllm, case, tmp_path)
        theirs = {key: vllm[key] for key in mine}
        if mine != theirs:
            wrong[f"{name} {options}"] = f"vLLM {theirs} {vllm['groups']}, ours {mine}"
    assert not wrong, json.dumps(wrong, indent=1)


@pytest.mark.parametrize("name", REFUSED)
def test_other_kinds_of_attention_are_refused_by_the_key(name: str, tmp_path: Path) -> None:
    config, key = REFUSED[name]
    with pytest.raises(InputError, match=rf"config\.json: {key}"):
        read_shape(write_config(tmp_path, config))
