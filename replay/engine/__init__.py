"""A simulated vLLM server: the engine on top, its surroundings in rooms.

- `engine` steps `scheduler` over `kv_blocks` and `waiting`, for each `request`. `config` has its
  settings, `limits` the settings of the scheduler, `flags` the options of commands, `placement`
  divides a model among GPUs. `async_engine` is the variant for async scheduling, `vllm_versions`
  the table of version differences, `tokenizer` makes the prompts and their block hashes,
  `kv_events` reports blocks.
- `hardware` has the sizes of models and GPUs, `timing` the durations of steps.
- `loop` runs an engine in real time, `calibration` fits the constants to measurements.
- `server` is the API server, and `forebay engine`, its command.

Modules on top import `timing` and `hardware`. These two rooms import no other room.
"""
