"""KV-cache arithmetic: the tokens that fit a GPU, checked against a real vLLM.

In reading order: `cli` is the command `forebay kv`, `plan` the options and the arithmetic, `table`
prints it. `verify` compares it with a vLLM's `start_log`. The room imports `statistics`.
"""
