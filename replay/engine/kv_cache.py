"""KV-cache blocks: how many there are, who holds them, which can be reused, which goes next.

Follows vLLM 0.32 (v1, full attention): block 0 is the null block; a block nobody holds lies in
the free list whether or not it is cached, and is evicted only when it is handed out again.
Nothing here knows requests' lengths or decides who gets blocks.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from forebay.replay.engine.request import EngineRequest


class CacheObserver(Protocol):
    """Told what the prefix cache holds, in the order in which it changes."""

    def stored(self, request: EngineRequest, first: int, stop: int) -> None:
        """Blocks `first`..`stop` of `request` can be hit from now on."""

    def removed(self, block_hash: int) -> None:
        """One block of this content was evicted."""

    def cleared(self) -> None:
        """The whole cache was dropped."""


class BlockPool:
    """The blocks of one engine and the index of what they hold.

    Hashes are chained (each covers everything before it), so equal hashes mean equal prefixes.
    `observer` hears of evictions from here and of stored blocks from the scheduler.
    `uncached_first`: freed blocks that can never hit are reused first, as since vLLM 0.26.
    """

    def __init__(self, num_blocks: int, *, uncached_first: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"{num_blocks} blocks: at least 2 are needed (one is the null block)")
        self.num_blocks = num_blocks
        self._uncached_first = uncached_first
        # An ordered dict is a deque with removal from the middle: left end is handed out first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._holders = [0] * num_blocks
        self._hash_of: list[int | None] = [None] * num_blocks
        # One block a hash nearly always; equal prompts prefilled together register several.
        self._cached: dict[int, int | dict[int, None]] = {}
        self.observer: CacheObserver | None = None
        self.changes = 0  # registrations and evictions so far: an unchanged count, unchanged hits

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of usable blocks held by live requests (cached but free ones do not count)."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

    @property
    def cached_blocks(self) -> int:
        """Distinct block contents a new prompt could hit."""
        return len(self._cached)

    def leading_run(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Blocks holding the first of `hashes` without a gap, at most `limit`."""
        cached, found = self._cached, []
        for index in range(min(limit, len(hashes))):
            entry = cached.get(hashes[index])
            if entry is None:
                break
            found.append(entry if isinstance(entry, int) else next(iter(entry)))
        return found

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody holds: taking them uses up free blocks too."""
        holders = self._holders
        return sum(1 for block in blocks if not holders[block])

    def take(self, blocks: Iterable[int]) -> None:
        """Hold cached blocks once more."""
        holders, free = self._holders, self._free
        for block in blocks:
            if not holders[block]:
                del free[block]
            holders[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out the `count` least valuable free blocks, evicting what they cached."""
        free, holders, hash_of = self._free, self._holders, self._hash_of
        blocks = []
        for _ in range(count):
            block, _none = free.popitem(last=False)
            holders[block] = 1
            if hash_of[block] is not None:
                self._evict(block)
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a request's blocks, given head first.

        The tail is put back first, so that of one prompt the end is evicted before the beginning;
        uncached blocks can never hit and go to the front (up to vLLM 0.23: to the back as well).
        """
        free, holders, hash_of = self._free, self._holders, self._hash_of
        worthless = []
        for block in reversed(blocks):
            holders[block] -= 1
            if not holders[block]:
                if hash_of[block] is None and self._uncached_first:
                    worthless.append(block)
                else:
                    free[block] = None
        for block in reversed(worthless):  # keeps their own order at the front
            free[block] = None
            free.move_to_end(block, last=False)

    def register(self, block: int, block_hash: int) -> None:
        """Let later prompts hit `block`; called when its content is scheduled, as vLLM does."""
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
        """Drop the whole prefix cache; refused (False) while any block is held."""
        if len(self._free) != self.num_blocks - 1:
            return False
        self._cached.clear()
        self._hash_of = [None] * self.num_blocks
        self.changes += 1
        if self.observer is not None:
            self.observer.cleared()
        return True

    def hash_of(self, block: int) -> int | None:
        """What `block` is registered as; for tests."""
        return self._hash_of[block]

    def free_order(self) -> list[int]:
        """The free list from the next one handed out to the last; for tests."""
        return list(self._free)

    def check(self) -> None:
        """Raise AssertionError where the books disagree; for tests."""
        for block in range(1, self.num_blocks):
            assert (self._holders[block] == 0) == (block in self._free), block
            block_hash = self._hash_of[block]
            if block_hash is not None:
                entry = self._cached[block_hash]
                assert entry == block or (isinstance(entry, dict) and block in entry), block
        held = sum(1 if isinstance(e, int) else len(e) for e in self._cached.values())
        assert held == sum(h is not None for h in self._hash_of)
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
