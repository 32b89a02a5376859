"""How much of each prompt an infinite prefix cache would hold, were requests served at once.

The ideal a router can come near, never a prediction: a follower that arrives while its leader
still prefills counts as a hit, nothing is ever evicted, generated tokens are not cached and the
last token is not recomputed. Memory grows with the distinct blocks seen (about 100 bytes each: 512
tokens of a trace of block ids, 16 tokens of a trace of text) and with nothing else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from forebay.traces.schema import TraceRequest

TEXT_BLOCK_BYTES = 64
"""Text is compared in blocks of 64 bytes, 16 tokens at four bytes each; a partial last one never
counts, as an engine shares full blocks only."""


@dataclass(frozen=True, slots=True)
class IdealHit:
    """What one prompt found in the cache."""

    hit_tokens: float
    hit_blocks: int


class IdealCache:
    """An infinite prefix cache; `look_up` every request in order of arrival.

    Attributes:
        root_blocks: leading blocks that every request so far had in common.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._root: Sequence[int] | None = None
        self.root_blocks = 0

    def look_up(self, request: TraceRequest) -> IdealHit:
        """What `request` shares with those before it; then its blocks are cached too."""
        if request.text is not None:
            data = request.text.encode()
            keys = list(_text_keys(data))
            tokens_per_block = request.input_tokens * TEXT_BLOCK_BYTES / max(len(data), 1)
        else:
            keys = list(_id_keys(request.blocks or ()))
            tokens_per_block = float(request.block_tokens)
        hits = 0
        seen = self._seen
        for key in keys:  # chained: once one is missing, none after it can be there
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


def _id_keys(blocks: Sequence[int]) -> Iterator[int]:
    """A key for each leading run of ids, so that ids that are not prefix-chained count rightly."""
    key = 0
    for block in blocks:
        # The hash of a tuple of ints does not depend on the process, and is the fastest there is.
        key = hash((key, block))
        yield key


def _text_keys(data: bytes) -> Iterator[int]:
    key = 1  # not where the chain of ids starts
    for start in range(0, len(data) - TEXT_BLOCK_BYTES + 1, TEXT_BLOCK_BYTES):
        key = xxhash.xxh3_64_intdigest(data[start : start + TEXT_BLOCK_BYTES], seed=key)
        yield key
