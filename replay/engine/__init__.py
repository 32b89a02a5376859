"""A simulated vLLM server: the engine on top, what surrounds it in rooms.

- `engine` steps `scheduler` over `kv_cache` and `waiting`; `step_time` gives a step's duration,
  from `step_constants`. `async_engine` is the variant for async scheduling, `vllm_versions` the
  table of version differences, `tokenizer` the prompts and their block hashes.
- `loop` runs an engine in real time; `metrics`, `kv_events` and `faults` observe or break it.
- `server/` is the API server, `hardware/` has the sizes of models and GPUs, `calibration/` fits
  the constants to measurements. `cli` is the command.

Modules on top import no room but `hardware/`; only `cli` and its `options` import the others.
"""
