"""Learn about one engine from its responses.

In reading order: decay (values that fade), cost (seconds of a prefill), step_cost (seconds of an
engine's step), api_server (seconds before the engine), prefix_index (which prefixes are probably
cached), engine_blocks (which blocks are cached, from KV events), prefix_cache (both together).

May import model only.
"""
