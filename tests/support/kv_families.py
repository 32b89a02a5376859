"""More `config.json` of public models, one or more of every kind of attention.

Sizes as on the Hugging Face Hub, the fields that sizes depend on. `kv_models` has the first.
"""

from typing import Any


def _sizes(
    kind: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, longest: int
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": longest,
    }


def _every(number: int, layers: int, other: str = "sliding_attention") -> list[str]:
    """The kinds of layers where every `number`-th has the whole context."""
    return ["full_attention" if (n + 1) % number == 0 else other for n in range(layers)]


_DEEPSEEK = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}

COUNTED: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": _sizes("llama", 32, 4096, 32, 32, 11_008, 32_000, 4096),
    "microsoft/phi-4": _sizes("phi3", 40, 5120, 40, 10, 17_920, 100_352, 16_384),
    "microsoft/phi-2": _sizes("phi", 32, 2560, 32, 32, 10_240, 51_200, 2048),
    "tiiuae/falcon-7b": {
        **_sizes("falcon", 32, 4544, 71, 71, 18_176, 65_024, 2048),
        "num_kv_heads": 71,
        "multi_query": True,
        "new_decoder_architecture": False,
    },
    "tiiuae/falcon-40b": {
        **_sizes("falcon", 60, 8192, 128, 8, 32_768, 65_024, 2048),
        "num_kv_heads": 8,
        "multi_query": True,
        "new_decoder_architecture": True,
    },
    "bigcode/starcoder2-7b": {
        **_sizes("starcoder2", 32, 4608, 36, 4, 18_432, 49_152, 16_384),
        "sliding_window": 4096,
    },
    "google/gemma-2-9b": {
        **_sizes("gemma2", 42, 3584, 16, 8, 14_336, 256_000, 8192),
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "google/gemma-3-1b-it": {
        **_sizes("gemma3_text", 26, 1152, 4, 1, 6912, 262_144, 32_768),
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "CohereLabs/c4ai-command-r7b-12-2024": {
        **_sizes("cohere2", 32, 4096, 32, 8, 14_336, 256_000, 8192),
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "LGAI-EXAONE/EXAONE-4.0-32B": {
        **_sizes("exaone4", 64, 5120, 40, 8, 27_392, 102_400, 131_072),
        "head_dim": 128,
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
        "layer_types": _every(4, 64),
    },
    "allenai/Olmo-3-7B-Instruct": {
        **_sizes("olmo3", 32, 4096, 32, 32, 11_008, 100_278, 65_536),
        "sliding_window": 4096,
        "layer_types": _every(4, 32),
    },
    "mistralai/Ministral-8B-Instruct-2410": {
        **_sizes("mistral", 36, 4096, 32, 8, 12_288, 131_072, 32_768),
        "head_dim": 128,
        "sliding_window": 32_768,
    },
    "meta-llama/Llama-4-Scout-17B-16E": {
        **_sizes("llama4_text", 48, 5120, 40, 8, 8192, 202_048, 131_072),
        "head_dim": 128,
        "intermediate_size_mlp": 16_384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8192,
        "layer_types": _every(4, 48, "chunked_attention"),
    },
    "deepseek-ai/DeepSeek-V2-Lite": {
        **_sizes("deepseek_v2", 27, 2048, 16, 16, 10_944, 102_400, 163_840),
        **_DEEPSEEK,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
    },
    "Qwen/Qwen3-30B-A3B": {
        **_sizes("qwen3_moe", 48, 2048, 32, 4, 6144, 151_936, 40_960),
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "zai-org/GLM-4.5-Air": {
        **_sizes("glm4_moe", 46, 4096, 96, 8, 10_944, 151_552, 131_072),
        "head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    },
    "allenai/OLMoE-1B-7B-0924": {
        **_sizes("olmoe", 16, 2048, 16, 16, 1024, 50_304, 4096),
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "microsoft/Phi-3.5-MoE-instruct": {
        **_sizes("phimoe", 32, 4096, 32, 8, 6400, 32_064, 131_072),
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "sliding_window": 131_072,
    },
    "ibm-granite/granite-3.3-8b-instruct": _sizes(
        "granite", 40, 4096, 32, 8, 12_800, 49_159, 131_072
    ),
    "zai-org/GLM-4-9B-0414": {
        **_sizes("glm4", 40, 4096, 32, 2, 13_696, 151_552, 32_768),
        "head_dim": 128,
    },
    "EleutherAI/pythia-6.9b": _sizes("gpt_neox", 32, 4096, 32, 32, 16_384, 50_432, 2048),
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ai21labs/Jamba-v0.1": (
        {
            **_sizes("jamba", 32, 4096, 32, 8, 14_336, 65_536, 262_144),
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
        },
        "attn_layer_period",
    ),
    "ibm-ai-platform/Bamba-9B": (
        {
            **_sizes("bamba", 32, 4096, 32, 8, 14_336, 128_256, 262_144),
            "attn_layer_indices": [9, 18, 27],
        },
        "attn_layer_indices",
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        {
            **_sizes("qwen3_next", 48, 2048, 16, 2, 5120, 151_936, 262_144),
            "full_attention_interval": 4,
        },
        "full_attention_interval",
    ),
    "nvidia/Nemotron-H-8B-Base-8K": (
        {
            **_sizes("nemotron_h", 52, 4096, 32, 8, 21_504, 131_072, 8192),
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        },
        "hybrid_override_pattern",
    ),
    "tiiuae/Falcon-H1-7B-Instruct": (
        {**_sizes("falcon_h1", 44, 3072, 12, 2, 12_288, 130_048, 262_144), "mamba_d_state": 256},
        "mamba_d_state",
    ),
    "Zyphra/Zamba2-7B": (
        {
            **_sizes("zamba2", 81, 3584, 32, 32, 14_336, 32_000, 4096),
            "layers_block_type": ["mamba", "hybrid"],
        },
        "layers_block_type",
    ),
    "MiniMaxAI/MiniMax-Text-01": (
        {
            **_sizes("minimax_text_01", 80, 6144, 64, 8, 9216, 200_064, 10_240_000),
            "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
        },
        "attn_type_list",
    ),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": (
        {
            **_sizes("kimi_linear", 27, 2304, 32, 32, 9216, 163_840, 1_048_576),
            "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]},
        },
        "linear_attn_config",
    ),
    "mistralai/Mamba-Codestral-7B-v0.1": (
        {"model_type": "mamba2", "num_hidden_layers": 64, "hidden_size": 4096, "state_size": 128},
        "model_type is 'mamba2'",
    ),
    "deepseek-ai/DeepSeek-V3.2": (
        {
            **_sizes("deepseek_v32", 61, 7168, 128, 128, 18_432, 129_280, 163_840),
            **_DEEPSEEK,
            "index_topk": 2048,
        },
        "index_topk",
    ),
    "google/gemma-3n-E4B-it": (
        {
            **_sizes("gemma3n_text", 35, 2048, 8, 2, 16_384, 262_400, 32_768),
            "num_kv_shared_layers": 15,
        },
        "num_kv_shared_layers",
    ),
    "meta-llama/Llama-3.2-11B-Vision": (
        {
            "model_type": "mllama",
            "text_config": {
                **_sizes("mllama_text_model", 40, 4096, 32, 8, 14_336, 128_256, 131_072),
                "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
            },
        },
        "cross_attention_layers",
    ),
    "openai/whisper-large-v3": (
        {"model_type": "whisper", "is_encoder_decoder": True, "d_model": 1280,
         "decoder_layers": 32, "encoder_layers": 32, "decoder_attention_heads": 20,
         "vocab_size": 51_866},
        "is_encoder_decoder",
    ),
    "facebook/bart-large-cnn": (
        {"model_type": "bart", "is_encoder_decoder": True, "d_model": 1024,
         "decoder_layers": 12, "encoder_layers": 12, "vocab_size": 50_264},
        "is_encoder_decoder",
    ),
    "BAAI/bge-m3": (
        {**_sizes("xlm-roberta", 24, 1024, 16, 16, 4096, 250_002, 8194)},
        "model_type is 'xlm-roberta'",
    ),
    "openai-community/gpt2": (
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024,
         "vocab_size": 50_257},
        "model_type is 'gpt2'",
    ),
    "bigcode/starcoder": (
        {"model_type": "gpt_bigcode", "n_layer": 40, "n_embd": 6144, "n_head": 48,
         "n_inner": 24_576, "n_positions": 8192, "multi_query": True, "vocab_size": 49_152},
        "num_attention_heads",
    ),
}  # fmt: skip
