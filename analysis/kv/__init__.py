"""KV-cache arithmetic: the tokens that fit a GPU, checked against a real vLLM."""
