"""KV-cache arithmetic: what fits a GPU, and whether a real vLLM agrees."""
