"""Which blocks layers of one kind need: all of them, those in a window, or the last state.

Groups of one kind are looked up together: a block counts as cached if each of them has it.
"""

import math
from collections.abc import Sequence

from forebay.replay.engine.hardware.kv_layout import KvGroup
from forebay.replay.engine.kv_blocks.pool import BlockPool
from forebay.replay.engine.limits import SchedulerLimits


class WholeKind:
    """Groups whose layers attend to the whole context.

    Attributes:
        members: numbers of the groups.
        per_block: blocks of the scheduler in a block of these layers.
        block_size: tokens in a block of these layers.
    """

    def __init__(
        self, group: KvGroup, members: Sequence[int], limits: SchedulerLimits, pool: BlockPool
    ) -> None:
        self.members = members
        self._group = group
        self.per_block = group.blocks
        self.block_size = limits.block_size * group.blocks
        self._alignment = math.lcm(*(other.blocks for other in limits.groups))
        self._groups = len(limits.groups)
        self._pool = pool

    def key(self, block_hash: int, member: int) -> int:
        """Return the name in the pool of a block's content for the layers of a group."""
        return block_hash * self._groups + member

    def cached(self, hashes: Sequence[int], index: int) -> list[int] | None:
        """Return the cached block `index` of each of the groups, None if a group lacks it.

        A block is known by the hash of its last part, which covers all tokens before.
        """
        blocks = []
        block_hash = hashes[(index + 1) * self.per_block - 1]
        for member in self.members:
            block = self._pool.first(self.key(block_hash, member))
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def find(self, hashes: Sequence[int], most: int) -> list[list[int]]:
        """Return, for each group, the blocks of the longest prefix that is cached.

        Blocks that these layers do not need behind the prefix are null.

        Args:
            most: most tokens of the prefix.
        """
        rows: list[list[int]] = [[] for _ in self.members]
        for index in range(self._most_hit(hashes, most)):
            blocks = self.cached(hashes, index)
            if blocks is None:
                break
            for row, block in zip(rows, blocks, strict=True):
                row.append(block)
        return self._aligned(rows)

    def _most_hit(self, hashes: Sequence[int], most: int) -> int:
        """Return the blocks of `most` tokens whose content is known."""
        return min(most // self.block_size, len(hashes) // self.per_block)

    def _aligned(self, rows: list[list[int]]) -> list[list[int]]:
        """Shorten a hit to a place where blocks of all groups end."""
        while len(rows[0]) * self.per_block % self._alignment:
            for row in rows:
                row.pop()
        return rows

    def blocks(self, end: int) -> int:
        """Return the length of the table of a request of `end` tokens."""
        return -(-end // self.block_size)

    def most_blocks(self, end: int) -> int:
        """Return the most blocks that a request of `end` tokens holds at once."""
        return self.blocks(end)

    def skipped(self, tokens: int) -> int:
        """Return the leading blocks that nothing needs once `tokens` are computed."""
        return 0

    def room(self, end: int, skipped: int) -> int:
        """Return the tokens up to which a request can decode while its table stays as it is.

        Args:
            end: tokens of the request.
            skipped: leading null blocks of the table.
        """
        return -(-end // self.block_size) * self.block_size - 1

    def keeps(self, index: int, ends: Sequence[int]) -> bool:
        """Return True if the prefix cache keeps block `index`.

        Args:
            ends: tokens behind which later requests may continue.
        """
        return True


class WindowKind(WholeKind):
    """Groups whose layers attend to a window."""

    def __init__(
        self, group: KvGroup, members: Sequence[int], limits: SchedulerLimits, pool: BlockPool
    ) -> None:
        super().__init__(group, members, limits, pool)
        self._window = group.window
        self._needed = -(-(group.window - 1) // self.block_size)
        held = min(group.window - 1 + limits.tokens_in_flight, limits.max_model_len)
        self._most = -(-held // self.block_size) + 1  # a window may begin inside a block

    def find(self, hashes: Sequence[int], most: int) -> list[list[int]]:
        longest = self._most_hit(hashes, most)
        rows: list[list[int]] = [[0] * longest for _ in self.members]
        run = start = 0
        for index in range(longest - 1, -1, -1):
            blocks = self.cached(hashes, index)
            if blocks is None:
                run = 0
                continue
            if not run and (index + 1) * self.per_block % self._alignment:
                continue
            for row, block in zip(rows, blocks, strict=True):
                row[index] = block
            run += 1
            if run >= self._needed:
                start = index
                break
        for row in rows:
            del row[start + run :]
        return self._aligned(rows)

    def most_blocks(self, end: int) -> int:
        return min(self.blocks(end), self._most)

    def skipped(self, tokens: int) -> int:
        return max(0, tokens - self._window + 1) // self.block_size

    def room(self, end: int, skipped: int) -> int:
        leaves = (skipped + 1) * self.block_size + self._window - 1
        return min(super().room(end, skipped), leaves)

    def keeps(self, index: int, ends: Sequence[int]) -> bool:
        step = self._alignment * self.block_size // self.per_block
        last = [tokens // step * step // self.block_size for tokens in ends]
        return any(end - self._needed <= index < end for end in last)


class ChunkKind(WholeKind):
    """Groups whose layers attend to the chunk of the context that a token is in (Llama 4)."""

    def __init__(
        self, group: KvGroup, members: Sequence[int], limits: SchedulerLimits, pool: BlockPool
    ) -> None:
        super().__init__(group, members, limits, pool)
        self._window = group.window
        held = min(group.window + limits.tokens_in_flight, limits.max_model_len)
        self._most = -(-held // self.block_size)

    def find(self, hashes: Sequence[int], most: int) -> list[list[int]]:
        # vLLM takes all before the last token's chunk as a hit, also if nothing is cached.
        start = self.skipped(most)
        rows = [[0] * start for _ in self.members]
        for index in range(start, self._most_hit(hashes, most)):
            blocks = self.cached(hashes, index)
            if blocks is None:
                break
            for row, block in zip(rows, blocks, strict=True):
                row.append(block)
        return rows

    def most_blocks(self, end: int) -> int:
        return min(self.blocks(end), self._most)

    def skipped(self, tokens: int) -> int:
        return tokens // self._window * self._window // self.block_size

    def room(self, end: int, skipped: int) -> int:
        leaves = -(-(skipped + 1) * self.block_size // self._window) * self._window
        return min(super().room(end, skipped), leaves)


class StateKind(WholeKind):
    """Groups whose layers have a recurrent state, with prefix caching (mamba_cache_mode align).

    A block holds the state after its last token. A request holds the block that it writes, and
    until the next step the one before.
    """

    def find(self, hashes: Sequence[int], most: int) -> list[list[int]]:
        for index in range(self._most_hit(hashes, most) - 1, -1, -1):
            blocks = self.cached(hashes, index)
            if blocks is not None:
                return [[0] * index + [block] for block in blocks]
        return [[] for _ in self.members]

    def skipped(self, tokens: int) -> int:
        return max(0, tokens - 1) // self.block_size

    def keeps(self, index: int, ends: Sequence[int]) -> bool:
        return any(index == tokens // self.block_size - 1 for tokens in ends)


class HeldStateKind(WholeKind):
    """Groups whose layers have a recurrent state, without prefix caching: a block a request."""

    def blocks(self, end: int) -> int:
        return 1

    def room(self, end: int, skipped: int) -> int:
        return end + (1 << 40)  # it never changes


def kind_of(
    group: KvGroup, members: Sequence[int], limits: SchedulerLimits, pool: BlockPool
) -> WholeKind:
    """Return the kind of groups that are equal to `group`."""
    if group.state:
        kind = StateKind if limits.enable_prefix_caching else HeldStateKind
        return kind(group, members, limits, pool)
    windows = ChunkKind if group.chunked else WindowKind
    return (windows if group.window else WholeKind)(group, members, limits, pool)
