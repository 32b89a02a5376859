"""`config.json` of public models: only the fields that sizes depend on, as on the Hugging Face Hub.

Each name is the repository the numbers come from.
"""

import json
from pathlib import Path
from typing import Any

_QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 64,
    "torch_dtype": "bfloat16",
}
_LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
_FP8_DYNAMIC = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "float", "group_size": None},
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
        }
    },
}


def _sizes(layers: int, hidden: int, heads: int, ffn: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": {**_LLAMA, **_sizes(32, 4096, 32, 14_336)},
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": {
        **_LLAMA,
        **_sizes(80, 8192, 64, 28_672),
        "quantization_config": _FP8_DYNAMIC,
    },
    "microsoft/Phi-3-mini-128k-instruct": {
        **_sizes(32, 3072, 32, 8192),
        "model_type": "phi3",
        "num_key_value_heads": 32,
        "vocab_size": 32_064,
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        "sliding_window": 262_144,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    },
    "Qwen/Qwen2.5-14B-Instruct": {
        **_sizes(48, 5120, 40, 13_824),
        "model_type": "qwen2",
        "num_key_value_heads": 8,
        "vocab_size": 152_064,
        "max_position_embeddings": 32_768,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
        "max_window_layers": 70,
        "sliding_window": 131_072,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "Qwen/Qwen3-0.6B": {**_QWEN3, **_sizes(28, 1024, 16, 3072), "tie_word_embeddings": True},
    "Qwen/Qwen3-4B": {**_QWEN3, **_sizes(36, 2560, 32, 9728), "tie_word_embeddings": True},
    "Qwen/Qwen3-8B": {**_QWEN3, **_sizes(36, 4096, 32, 12_288), "tie_word_embeddings": False},
    "Qwen/Qwen3-14B": {**_QWEN3, **_sizes(40, 5120, 40, 17_408), "tie_word_embeddings": False},
    "Qwen/Qwen3-32B": {**_QWEN3, **_sizes(64, 5120, 64, 25_600), "tie_word_embeddings": False},
    "Qwen/Qwen3-235B-A22B": {
        **_QWEN3,
        **_sizes(94, 4096, 64, 12_288),
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-30B-A3B": {
        **_QWEN3,
        **_sizes(48, 2048, 32, 6144),
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "mistralai/Mixtral-8x7B-v0.1": {
        **_sizes(32, 4096, 32, 14_336),
        "model_type": "mixtral",
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32_000,
        "max_position_embeddings": 32_768,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "mistralai/Mistral-7B-v0.1": {
        **_sizes(32, 4096, 32, 14_336),
        "model_type": "mistral",
        "num_key_value_heads": 8,
        "vocab_size": 32_000,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": {
        "model_type": "mistral3",
        "torch_dtype": "bfloat16",
        "text_config": {
            **_sizes(40, 5120, 32, 32_768),
            "model_type": "mistral",
            "head_dim": 128,
            "num_key_value_heads": 8,
            "vocab_size": 131_072,
            "max_position_embeddings": 131_072,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
    },
    "google/gemma-2b": {
        **_sizes(18, 2048, 8, 16_384),
        "model_type": "gemma",
        "head_dim": 256,
        "num_key_value_heads": 1,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
    },
    "google/gemma-3-27b-it": {
        "model_type": "gemma3",
        "text_config": {
            **_sizes(62, 5376, 32, 21_504),
            "model_type": "gemma3_text",
            "head_dim": 128,
            "num_key_value_heads": 16,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
        },
    },
    "openai/gpt-oss-20b": {
        **_sizes(24, 2880, 64, 2880),
        "model_type": "gpt_oss",
        "head_dim": 64,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201_088,
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "openai/gpt-oss-120b": {
        **_sizes(36, 2880, 64, 2880),
        "model_type": "gpt_oss",
        "head_dim": 64,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "vocab_size": 201_088,
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "deepseek-ai/DeepSeek-R1": {
        **_sizes(61, 7168, 128, 18_432),
        "model_type": "deepseek_v3",
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "vocab_size": 129_280,
        "max_position_embeddings": 163_840,
        "tie_word_embeddings": False,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        "quantization_config": {"quant_method": "fp8"},
    },
}

_LLAMA_2 = {"model_type": "llama", "vocab_size": 32_000, "max_position_embeddings": 16_384,
            "tie_word_embeddings": False}  # fmt: skip
INFERENCE_SIM: dict[str, dict[str, Any]] = {
    "Llama-2-7B": {**_LLAMA_2, "num_hidden_layers": 32, "hidden_size": 4096,
                   "num_attention_heads": 32, "intermediate_size": 11_008},
    "CodeLlama-34B": {**_LLAMA_2, "num_hidden_layers": 48, "hidden_size": 8192,
                      "num_attention_heads": 64, "num_key_value_heads": 8,
                      "intermediate_size": 22_016},
    "Llama-2-70B": {**_LLAMA_2, "num_hidden_layers": 80, "hidden_size": 8192,
                    "num_attention_heads": 64, "num_key_value_heads": 8,
                    "intermediate_size": 28_672},
    "Mixtral-8x7B": CONFIGS["mistralai/Mixtral-8x7B-v0.1"],
}  # fmt: skip
"""The models whose runs inference-sim publishes."""

_FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
LOW_PRECISION: dict[str, dict[str, Any]] = {
    "gpt-oss-120b": CONFIGS["openai/gpt-oss-120b"],
    "Qwen3-235B-A22B-FP8": CONFIGS["Qwen/Qwen3-235B-A22B"] | _FP8,
    "MiniMax-M2.5": {
        "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536,
        "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
        "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8,
        "vocab_size": 200_064, "max_position_embeddings": 196_608, "tie_word_embeddings": False,
        **_FP8,
    },
    "Kimi-K2.5": {
        "model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18_432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 64,
        "num_key_value_heads": 64, "n_routed_experts": 384, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 163_840, "max_position_embeddings": 262_144, "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "compressed-tensors", "ignore": ["re:.*self_attn.*"],
            "config_groups": {"group_0": {"input_activations": None, "weights": {
                "type": "int", "num_bits": 4, "group_size": 32}}},
        },
    },
}  # fmt: skip
"""Mixtures of experts whose runs in low precision InferenceMAX and others publish."""


def write_config(folder: Path, config: dict[str, Any] | str, **changed: Any) -> Path:
    """Write a config.json (of CONFIGS: by its name), with fields changed or (None) left out."""
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    fields = {**(CONFIGS[config] if isinstance(config, str) else config), **changed}
    path.write_text(json.dumps({key: v for key, v in fields.items() if v is not None}))
    return path
