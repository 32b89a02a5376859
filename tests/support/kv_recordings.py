"""Recordings of the KV events of hybrid models, made by a real vLLM (tests/data/kv_events).

Each model is tiny and has random weights: its groups of layers matter, not its answers. One
recording is a gzip file of msgpack: the model's architecture, vLLM's version, its lines of
/metrics, and the requests in order. Each has the token ids of its prompt, the cached tokens that
vLLM reported, and the batches of events that it published until the next request. This file has
the script that made them in commit 0210690d.
"""

import gzip

import msgspec
from paths import DATA

RECORDINGS = DATA / "kv_events"


class Asked(msgspec.Struct):
    """One request. Requests of one burst run together, and only the last has batches.

    Attributes:
        prompt: token ids.
        cached: tokens of the prompt that vLLM found in its prefix cache.
        burst: it ran beside others, so nobody can predict what it found.
        batches: msgpack of the KV events, as ZeroMQ delivered it.
    """

    prompt: list[int]
    cached: int
    burst: bool = False
    batches: list[bytes] = []


class Recording(msgspec.Struct):
    """All that one server published and reported."""

    architecture: str
    vllm: str
    metrics: list[str]
    asked: list[Asked]


def read_recording(architecture: str) -> Recording:
    data = gzip.decompress((RECORDINGS / f"{architecture}.msgpack.gz").read_bytes())
    return msgspec.msgpack.decode(data, type=Recording)
