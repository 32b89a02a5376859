"""What `size` counts with, by hand: seconds of one prompt alone, and tokens of the KV cache.

The formulas are those of any textbook. Products take 2 FLOPs a weight and token, attention 4 x
layers x heads x width a pair of tokens, half of them under the causal mask. A KV token takes
2 x layers x KV heads x width values.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes.kv_models import write_config

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.engine.request import SimRequest
from forebay.replay.sim.engine.served import run_alone, served_engine

H200_BYTES, H200_FLOPS, H200_FP8_FLOPS = 139.8 * 2**30, 989.5e12, 1979e12
PRODUCTS, FP8_PRODUCTS, ATTENTION = 0.735, 0.735 * 0.82, 0.627
"""Shares of the peak that `forebay engine --list-calibrations --json` states for an H200."""


@dataclass(frozen=True, slots=True)
class Model:
    """Layers, heads, KV heads, head width, hidden size, vocabulary, and weights of a layer's FFN.

    `used` are the FFN weights that one token passes: those of its experts only.
    """

    layers: int
    heads: int
    kv_heads: int
    width: int
    hidden: int
    vocabulary: int
    ffn: int
    used: int

    def weights(self, ffn: int) -> int:
        attention = self.hidden * self.width * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + ffn)

    def prefill_s(self, tokens: int, peak: float, share: float) -> float:
        products = 2 * self.weights(self.used) * tokens / (peak * share)
        pairs = tokens * tokens / 2
        attention = 4 * self.layers * self.heads * self.width * pairs / (H200_FLOPS * ATTENTION)
        return products + attention

    def kv_tokens(self, weight_bytes: int) -> float:
        """Tokens beside the weights, without room for activations: at most so many."""
        stored = (self.weights(self.ffn) + self.vocabulary * self.hidden) * weight_bytes
        head = self.vocabulary * self.hidden * 2
        a_token = 2 * self.layers * self.kv_heads * self.width * 2
        return (0.9 * H200_BYTES - stored - head) / a_token


QWEN = Model(48, 40, 8, 128, 5120, 152_064, 3 * 5120 * 13_824, 3 * 5120 * 13_824)
LLAMA_70B = Model(80, 64, 8, 128, 8192, 128_256, 3 * 8192 * 28_672, 3 * 8192 * 28_672)
QWEN_MOE = Model(48, 32, 4, 128, 2048, 151_936, 128 * 3 * 2048 * 768, 8 * 3 * 2048 * 768)


def config_json(model: Model, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden, "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads,
        "head_dim": model.width, "vocab_size": model.vocabulary,
        "max_position_embeddings": 131_072, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


FILES = {
    "llama-70b": config_json(
        LLAMA_70B, architectures=["LlamaForCausalLM"], model_type="llama", intermediate_size=28_672
    ),
    "qwen3-moe": config_json(
        QWEN_MOE, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe",
        intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        decoder_sparse_step=1, mlp_only_layers=[],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "model", "tokens", "quantization"),
    [
        ("qwen2.5-14b", QWEN, 100_000, None),
        ("llama-70b", LLAMA_70B, 100_000, "fp8"),
        ("qwen3-moe", QWEN_MOE, 100_000, None),
    ],
)
def test_the_time_and_the_room_of_a_long_prompt(
    name: str, model: Model, tokens: int, quantization: str | None, tmp_path: Path
) -> None:
    path = name
    if name in FILES:
        path = str(write_config(tmp_path, FILES[name]))
    config = EngineConfig(path, "h200", quantization=quantization)
    request = SimRequest("document", tokens, 1)
    run_alone(served_engine(config), request, 0.0)
    peak, share = (H200_FP8_FLOPS, FP8_PRODUCTS) if quantization else (H200_FLOPS, PRODUCTS)
    assert request.first_token_s == pytest.approx(model.prefill_s(tokens, peak, share), rel=0.2)
    room = (config.kv_budget.blocks - 1) * 16
    most = model.kv_tokens(1 if quantization else 2)
    assert 0.85 * most < room < most


def test_the_time_and_the_room_of_a_model_with_windows(tmp_path: Path) -> None:
    """gpt-oss-20b: every second of 24 layers attends to 128 tokens, experts have 4.25 bits."""
    path = write_config(tmp_path, "openai/gpt-oss-20b")
    config, tokens = EngineConfig(str(path), "h200"), 100_000
    request = SimRequest("document", tokens, 1)
    run_alone(served_engine(config), request, 0.0)
    layers, hidden, heads, kv_heads, width, vocabulary = 24, 2880, 64, 8, 64, 201_088
    attention = layers * hidden * width * (2 * heads + 2 * kv_heads)
    expert = layers * 3 * hidden * hidden
    products = 2 * attention * tokens / (H200_FLOPS * PRODUCTS)
    # NVIDIA's op tables: products of MXFP4 experts reach .49 of the peak, and 132 SMs unpack
    # 19.2 GB/s each. The 13 steps read all experts.
    products += 2 * 4 * expert * tokens / (H200_FLOPS * 0.49)
    products += 13 * 32 * expert * 4.25 / 8 / (132 * 19.2e9)
    pairs = 12 * tokens * tokens / 2 + 12 * tokens * 128
    by_hand = products + 4 * heads * width * pairs / (H200_FLOPS * ATTENTION)
    server = 0.46 * tokens / 120_000  # docs/explanation/simulator.md has it for 120,000
    assert request.first_token_s == pytest.approx(by_hand + server, rel=0.1)
    # A block has 16 tokens of 12 layers. A request of 131,072 tokens has 8,192 blocks for the
    # layers that keep them, and 1,033 for those that keep 127 and two steps of 8,192.
    stored = 32 * expert * 4.25 / 8 + 2 * attention + 2 * 2 * vocabulary * hidden
    blocks = (0.9 * H200_BYTES - stored) / (12 * 2 * kv_heads * width * 2 * 16)
    most = blocks / (8_192 + 1_033) * 131_072
    assert 0.85 * most < config.kv_budget.pool_tokens(131_072) < most
