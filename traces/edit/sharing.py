"""Compute how much of each prompt an infinite prefix cache would hit, if requests took no time.

This is an upper bound for routers, not a prediction: a follower that arrives during its leader's
prefill counts as a hit, nothing is ever evicted, generated tokens are not cached, and the last
token is not recomputed. Memory grows only with the distinct blocks: about 100 bytes for each, which
is 512 tokens in a trace of block ids and 16 tokens in a trace of text.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from forebay.traces.ground.schema import TraceRequest
from forebay.traces.text import shared_text

TEXT_BLOCK_BYTES = 64
"""Text is compared in blocks of 64 bytes, 16 tokens of four bytes each. A partial last block never
counts, because engines share full blocks only."""


@dataclass(frozen=True, slots=True)
class IdealHit:
    """The hit of one prompt in the ideal cache."""

    hit_tokens: float
    hit_blocks: int


class IdealCache:
    """An infinite prefix cache, for which `look_up` is called in order of arrival.

    Attributes:
        root_blocks: leading blocks that all requests so far share.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._root: Sequence[int] | None = None
        self.root_blocks = 0

    def look_up(self, request: TraceRequest) -> IdealHit:
        """Return the hit of `request` on earlier requests, and cache its blocks."""
        text = shared_text(request)
        if text is not None:
            data = text.encode()
            keys = list(_text_keys(data))
            tokens_per_block = request.input_tokens * TEXT_BLOCK_BYTES / max(len(data), 1)
        else:
            keys = list(_id_keys(request.blocks or ()))
            tokens_per_block = float(request.block_tokens)
        hits = 0
        seen = self._seen
        for key in keys:  # chained: after the first missing key, all are missing
            if key not in seen:
                break
            hits += 1
        seen.update(keys[hits:])
        self._shrink_root(keys)
        return IdealHit(min(hits * tokens_per_block, float(request.input_tokens)), hits)

    def _shrink_root(self, keys: Sequence[int]) -> None:
        if self._root is None:
            self._root = keys
            self.root_blocks = len(keys)
        root = min(self.root_blocks, len(keys))
        while root and keys[root - 1] != self._root[root - 1]:
            root -= 1
        self.root_blocks = root


def share_prompts(requests: Iterable[TraceRequest]) -> bool:
    """Return True if more than one session in 20 begins as an earlier one, but not as all do."""
    cache = IdealCache()
    sessions: set[str] = set()
    hits = []
    for request in requests:
        if request.session not in sessions:
            hits.append(cache.look_up(request).hit_blocks)
        if request.session is not None:
            sessions.add(request.session)
    return sum(blocks > cache.root_blocks for blocks in hits) > len(hits) / 20


def _id_keys(blocks: Sequence[int]) -> Iterator[int]:
    """Make a key for each leading run of ids, so that ids that are not chained count correctly."""
    key = 0
    for block in blocks:
        # The hash of a tuple of ints is the same in all processes, and the fastest way.
        key = hash((key, block))
        yield key


def _text_keys(data: bytes) -> Iterator[int]:
    key = 1  # differs from the start of the chain of ids
    for start in range(0, len(data) - TEXT_BLOCK_BYTES + 1, TEXT_BLOCK_BYTES):
        key = xxhash.xxh3_64_intdigest(data[start : start + TEXT_BLOCK_BYTES], seed=key)
        yield key
