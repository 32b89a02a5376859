"""GPUs, and the command line of a vLLM on them.

In reading order: `gpus` lists the machine's GPUs, `profiles` has good flags for models, `sizes`
computes what fits, `flags` writes the command line, `vllm_install` finds vLLM. The room imports
`forebay.replay.engine.hardware`.
"""
