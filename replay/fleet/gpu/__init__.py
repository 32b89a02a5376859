"""GPUs and models of a fleet, and the vLLM that serves them.

In reading order: `gpus` lists the machine's GPUs, `profiles` has good values for models,
`vllm_install` finds vLLM. The room imports `forebay.replay.engine.hardware`.
"""
