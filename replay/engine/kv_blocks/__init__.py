"""The KV cache of one engine in blocks, as vLLM's.

`pool` has the blocks, `tables` which of them a request holds. `groups` is the same for models whose
layers need different parts of the context, and `kinds` says which parts. `chunk_ends` has the ends
of chunks that recurrent states need. `host_copies` has copies in the host's memory.
"""
