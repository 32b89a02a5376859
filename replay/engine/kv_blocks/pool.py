"""The pool of KV-cache blocks: allocation, reference counts, prefix cache and eviction.

The pool follows vLLM 0.32 (v1, full attention). Block 0 is the null block. A block without a
reference lies in the free list, cached or not, and is evicted only when it is allocated again.
The scheduler decides which requests get blocks.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from forebay.replay.engine.request import EngineRequest


class CacheObserver(Protocol):
    """Receives the changes of the prefix cache in their order."""

    def stored(self, request: EngineRequest, first: int, stop: int) -> None:
        """Record that blocks `first`..`stop` of `request` are cached from now on."""

    def removed(self, block_hash: int) -> None:
        """Record that one block of this content was evicted."""

    def cleared(self) -> None:
        """Record that the whole cache was dropped."""


class BlockPool:
    """The blocks of one engine and the index of their contents.

    Hashes are chained (each covers all blocks before it), so equal hashes mean equal prefixes.

    Attributes:
        observer: learns evictions from the pool and stored blocks from the scheduler.
        changes: registrations and evictions so far. While it is equal, the same lookup has the
            same hits.

    Args:
        uncached_first: reuse freed blocks that can never hit first, as since vLLM 0.26.
    """

    def __init__(self, num_blocks: int, *, uncached_first: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"{num_blocks} blocks: at least 2 are needed (one is the null block)")
        self.num_blocks = num_blocks
        self._uncached_first = uncached_first
        # An ordered dict is a deque with removal from the middle. The left end is allocated first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._references = [0] * num_blocks
        self._hash_of: list[int | None] = [None] * num_blocks
        # A hash nearly always has one block. Equal prompts prefilled together register several.
        self._cached: dict[int, int | dict[int, None]] = {}
        self.observer: CacheObserver | None = None
        self.changes = 0

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Return the share of usable blocks that requests hold, without cached free blocks."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

    @property
    def cached_blocks(self) -> int:
        """Return the number of distinct block contents that a new prompt could hit."""
        return len(self._cached)

    def leading_run(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Return the blocks of the first of `hashes` without a gap, at most `limit`."""
        cached, blocks = self._cached, []
        for index in range(min(limit, len(hashes))):
            entry = cached.get(hashes[index])
            if entry is None:
                break
            blocks.append(entry if isinstance(entry, int) else next(iter(entry)))
        return blocks

    def first(self, block_hash: int) -> int | None:
        """Return the block of this content that was registered first, None without one."""
        entry = self._cached.get(block_hash)
        return entry if entry is None or isinstance(entry, int) else next(iter(entry))

    def count_free(self, blocks: Iterable[int]) -> int:
        """Count the blocks in the free list: taking them uses up free blocks."""
        references = self._references
        return sum(1 for block in blocks if not references[block])

    def take(self, blocks: Iterable[int]) -> None:
        """Add a reference to cached blocks."""
        references, free = self._references, self._free
        for block in blocks:
            if not references[block]:
                del free[block]
            references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Allocate the `count` least valuable free blocks and evict their cached contents."""
        free, references, hash_of = self._free, self._references, self._hash_of
        blocks = []
        for _ in range(count):
            block, _none = free.popitem(last=False)
            references[block] = 1
            if hash_of[block] is not None:
                self._evict(block)
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each of a request's blocks, which are given head first.

        The tail is freed first, so that the end of a prompt is evicted before its beginning.
        Uncached blocks can never hit and go to the front (up to vLLM 0.23: to the back as well).
        """
        free, references, hash_of = self._free, self._references, self._hash_of
        worthless = []
        for block in reversed(blocks):
            references[block] -= 1
            if not references[block]:
                if hash_of[block] is None and self._uncached_first:
                    worthless.append(block)
                else:
                    free[block] = None
        for block in reversed(worthless):  # their own order is kept at the front
            free[block] = None
            free.move_to_end(block, last=False)

    def register(self, block: int, block_hash: int) -> None:
        """Let later prompts hit `block`, as vLLM does when the content of a block is scheduled."""
        if self._hash_of[block] is not None:
            return
        self._hash_of[block] = block_hash
        self.changes += 1
        entry = self._cached.get(block_hash)
        if entry is None:
            self._cached[block_hash] = block
        elif isinstance(entry, int):
            self._cached[block_hash] = {entry: None, block: None}
        else:
            entry[block] = None

    def forget_all(self) -> bool:
        """Drop the whole prefix cache. False if it stays because a block is in use."""
        if len(self._free) != self.num_blocks - 1:
            return False
        self._cached.clear()
        self._hash_of = [None] * self.num_blocks
        self.changes += 1
        if self.observer is not None:
            self.observer.cleared()
        return True

    def hash_of(self, block: int) -> int | None:
        """Return the hash under which `block` is registered (for tests)."""
        return self._hash_of[block]

    def free_order(self) -> list[int]:
        """Return the free list in the order of allocation (for tests)."""
        return list(self._free)

    def check(self) -> None:
        """Raise AssertionError if references, free list and index disagree (for tests)."""
        for block in range(1, self.num_blocks):
            assert (self._references[block] == 0) == (block in self._free), block
            block_hash = self._hash_of[block]
            if block_hash is not None:
                entry = self._cached[block_hash]
                assert entry == block or (isinstance(entry, dict) and block in entry), block
        indexed = sum(1 if isinstance(e, int) else len(e) for e in self._cached.values())
        assert indexed == sum(h is not None for h in self._hash_of)
        assert 0 not in self._free

    def _evict(self, block: int) -> None:
        block_hash = self._hash_of[block]
        assert block_hash is not None
        self._hash_of[block] = None
        self.changes += 1
        if self.observer is not None:
            self.observer.removed(block_hash)
        entry = self._cached[block_hash]
        if isinstance(entry, int):
            del self._cached[block_hash]
        else:
            del entry[block]
            if len(entry) == 1:
                self._cached[block_hash] = next(iter(entry))
