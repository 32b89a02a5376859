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

    def __len__(self) -> int:
        return len(self._held)

    def match(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are held."""
        held = self._held
        for position, block in enumerate(blocks):
            if block not in held:
                return position
        return len(blocks)

    def touch(self, blocks: Sequence[int]) -> None:
        """The backend now computes or reuses `blocks`."""
        held = self._held
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self.capacity_blocks:
            held.popitem(last=False)

    def clear(self) -> None:
        """The backend restarted: its cache is empty."""
        self._held.clear()
