"""GPUs, and what a vLLM on them is started with.

In reading order: `gpus` lists those of the machine, `profiles` knows good flags for models, `sizes`
computes what fits, `flags` writes the command line, `vllm_install` finds vLLM. The room imports
`forebay.replay.engine.hardware`.
"""
