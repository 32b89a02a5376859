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
        self._holders: dict[int, int] | None = None
        self._bit = 0

    def __len__(self) -> int:
        return len(self._held)

    def share(self, holders: dict[int, int], bit: int) -> None:
        """Enter `bit` in `holders` under each block held at positions 1, 2, 4, 8 ... of a prompt.

        So that the holders of a prefix are found among many backends without asking each.
        """
        self._holders, self._bit = holders, bit

    def match(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are held.

        Hashes are chained and heads outlive tails, so before a block that is held all are.
        """
        held = self._held
        if not blocks or blocks[0] not in held:
            return 0
        first, beyond = 1, len(blocks)
        while first < beyond:
            middle = (first + beyond) // 2
            if blocks[middle] in held:
                first = middle + 1
            else:
                beyond = middle
        return first

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
        if self._holders is not None:
            self._enter(self._holders, blocks)
        while len(held) > self.capacity_blocks:
            block, _none = held.popitem(last=False)
            if self._holders is not None and block in self._holders:
                self._leave(self._holders, block)

    def clear(self) -> None:
        """The backend restarted: its cache is empty."""
        if self._holders is not None:
            for block in self._held:
                if block in self._holders:
                    self._leave(self._holders, block)
        self._held.clear()

    def _enter(self, holders: dict[int, int], blocks: Sequence[int]) -> None:
        position = 1
        while position <= len(blocks):
            block = blocks[position - 1]
            holders[block] = holders.get(block, 0) | self._bit
            position *= 2

    def _leave(self, holders: dict[int, int], block: int) -> None:
        left = holders[block] & ~self._bit
        if left:
            holders[block] = left
        else:
            del holders[block]
