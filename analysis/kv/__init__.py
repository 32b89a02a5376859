"""KV-cache arithmetic: the tokens that fit a GPU, checked against a real vLLM.

In reading order: `cli` is the command `forebay kv`, `plan` the options and the arithmetic, `table`
prints it. `verify` starts a vLLM and reads its `start_log`, `verify_table` prints the
difference. The room imports `statistics`.
"""
