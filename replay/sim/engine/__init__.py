"""The engine of the simulator: the decisions of vLLM's, many steps at a time.

In reading order: `served` is an engine with its API server, `skipping` the engine that skips steps,
`planning` decides how far, from `cohort` (requests that decode together), `runs` and `block_runs`
(cached blocks) and `stalls`. `decided` lets Forebay's scheduler decide, `several_groups` watches
models whose layers have different blocks. `pools` separates prefill from decode. `request` is one
request, `stepping` computes every step instead. The room imports `forebay.replay.engine`.
"""
