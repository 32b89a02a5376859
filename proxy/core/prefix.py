"""Guess which prompt prefixes a backend still holds in its KV cache.

One index per backend: the chained hashes of the blocks it was sent, least recently used first,
bounded by what its KV pool can hold. The engine frees the tail of a prompt before its head, so
blocks are touched tail first: the head of a prompt outlives its tail here too.
"""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._held: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._anonymous = 0
        self._other = 0.0

    def __len__(self) -> int:
        return len(self._held)

    def match(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are held."""
        held = self._held
        for position, block in enumerate(blocks):
            if block not in held:
                return position
        return len(blocks)

    def touch(self, blocks: Sequence[int], other_blocks: float = 0.0) -> None:
        """The backend now computes or reuses `blocks`.

        `other_blocks` is what the request holds besides, in blocks: the end of the prompt and
        the output. Nobody asks for it again, but it pushes others out all the same.
        """
        held = self._held
        self._other += other_blocks
        while self._other >= 1.0:
            self._other -= 1.0
            self._anonymous -= 1  # no hash is negative
            held[self._anonymous] = None
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self.capacity_blocks:
            held.popitem(last=False)

    def clear(self) -> None:
        """The backend restarted: its cache is empty."""
        self._held.clear()
