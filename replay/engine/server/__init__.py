"""The API server of the simulated engine, answer by answer as vLLM's.

In reading order: `cli` is the command `forebay engine`, `options` are the API server's options.
`server` starts everything. `protocol` reads requests, `generation` runs them, `answers`
and `streams` write the answers, `dialects` the answers of other APIs, `api_errors` the errors.
`pages` serves the other paths, `exposition` writes /metrics, `kv_publisher` sends KV events.
The room may import all of `forebay.replay.engine`.
"""
