"""The models of the course by size, as their config.json says."""

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}  # fmt: skip
LLAMA_2_13B = LLAMA_2_7B | {
    "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 40, "intermediate_size": 13824,
}  # fmt: skip
LLAMA_2_70B = LLAMA_2_7B | {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672,
}  # fmt: skip
QWEN_1_5B = LLAMA_2_7B | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1536,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    "intermediate_size": 8960, "vocab_size": 151936, "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16", "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {"7b": LLAMA_2_7B, "13b": LLAMA_2_13B, "70b": LLAMA_2_70B, "1.5b": QWEN_1_5B}
