"""Guess which prompt prefixes one backend still holds in its KV cache.

The index has the chained hashes of the blocks that the backend was sent. Its size is bounded by the
KV pool. The least recently used block is evicted first. The engine frees the tail of a prompt
before its head, and so does the index. A request that uses a block uses all blocks before it.
So the part of a prompt that is held never has a gap, and a prompt whose last block was used again
was used again completely.

An engine that reports cached tokens corrects the guess. If a block is missing there, every block
that was used no later is missing too, because the engine frees blocks in the order of use.
"""

from collections import deque
from collections.abc import Sequence
from math import inf, nextafter
from typing import TypeVar

V = TypeVar("V")


def leading_run(held: dict[int, V], chain: Sequence[int]) -> int:
    """Return the number of leading hashes of `chain` that are keys of `held`.

    Binary search: hashes are chained, so all hashes before a held hash are held.
    """
    if not chain or chain[0] not in held:
        return 0
    first, beyond = 1, len(chain)
    while first < beyond:
        middle = (first + beyond) // 2
        if chain[middle] in held:
            first = middle + 1
        else:
            beyond = middle
    return first


def common_run(chain: Sequence[int], other: Sequence[int], at_least: int = 0) -> int:
    """Return the length of the common beginning of two chains, which has `at_least` blocks or more.

    Binary search: where two chained hashes are equal, all before them are.
    """
    first, beyond = at_least, min(len(chain), len(other))
    while first < beyond:
        middle = (first + beyond) // 2
        if chain[middle] == other[middle]:
            first = middle + 1
        else:
            beyond = middle
    return first


class Touch:
    """The blocks that one request left in the cache.

    `stamp` is the time of the request, a little later if that is needed to put touches in order.
    Successive requests that leave only anonymous blocks share one Touch, so that a million short
    requests need no more memory than one request.
    """

    __slots__ = ("anonymous", "blocks", "left", "stamp")

    def __init__(self, stamp: float, blocks: Sequence[int], anonymous: int) -> None:
        self.stamp = stamp
        self.blocks = blocks
        self.left = len(blocks)  # leading blocks that eviction has not looked at
        self.anonymous = anonymous  # blocks that no later request can hit


class PrefixIndex:
    """The blocks that one backend is believed to hold, least recently used first.

    Attributes:
        capacity_blocks: number of blocks that fit. The next `touch` evicts the excess.
        evicted: the index has been full once.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._held: dict[int, float] = {}  # block: stamp of its latest use
        self._touches: deque[Touch] = deque()  # oldest first
        self.evicted = False
        self._stamp = 0.0
        self._anonymous = 0
        self._other = 0.0
        self._tidy_at = 64
        self._holders: dict[int, int] | None = None
        self._bit = 0

    def __len__(self) -> int:
        return len(self._held) + self._anonymous

    def share(self, holders: dict[int, int] | None, bit: int) -> None:
        """Enter `bit` in `holders` for each held block at positions 1, 2, 4, 8 ... of a prompt.

        A large fleet then finds the backends that hold a prefix without asking each of them.

        Args:
            holders: a dict that all backends share; None: enter nothing from now on.
        """
        self._holders, self._bit = holders, bit
        if holders is not None:
            for touch in self._touches:
                self._enter(holders, touch.blocks[: touch.left])

    def match(self, blocks: Sequence[int]) -> int:
        """Return the number of leading blocks that are held."""
        return leading_run(self._held, blocks)

    def stamp_of(self, block: int) -> float:
        """Return the stamp of the block's last use, or 0 if it is not held."""
        return self._held.get(block, 0.0)

    def touch(self, blocks: Sequence[int], other_blocks: float = 0.0, now: float = 0.0) -> Touch:
        """Enter a request that the backend computes now.

        Args:
            blocks: the full blocks of its prompt.
            other_blocks: KV cache for the end of its prompt and for its output, in blocks. No
                later request can hit these, but they evict others.
        """
        self._other += other_blocks
        anonymous = int(self._other)
        self._other -= anonymous
        self._anonymous += anonymous
        self._stamp = max(now, nextafter(self._stamp, inf))
        held, stamp = self._held, self._stamp
        held.update(dict.fromkeys(blocks, stamp))
        touch = Touch(stamp, blocks, anonymous)
        if blocks or not self._joined(touch):
            self._touches.append(touch)
        if self._holders is not None:
            self._enter(self._holders, blocks)
        self._evict()
        if len(self._touches) > self._tidy_at:
            self._tidy()
        return touch

    def _joined(self, touch: Touch) -> bool:
        """Add anonymous blocks to the latest Touch, if that has only such blocks too.

        Returns True if `touch` needs no place of its own.
        """
        last = self._touches[-1] if self._touches else None
        if last is None or last.blocks:
            return not touch.anonymous
        last.anonymous += touch.anonymous
        last.stamp = touch.stamp
        touch.anonymous = 0
        return True

    def forget_until(self, stamp: float) -> None:
        """Drop all blocks last used at `stamp` or before: the engine has evicted such a block."""
        touches = self._touches
        while touches and touches[0].stamp <= stamp:
            self._drop(touches.popleft(), 0)

    def untouch(self, touch: Touch, computed: int) -> None:
        """Drop the blocks behind the first `computed`: the request ended before its prefill did.

        Blocks that other requests have used since stay.
        """
        if touch.left > computed:
            self._drop(touch, computed)

    def _drop(self, touch: Touch, keep: int) -> None:
        held = self._held
        self._anonymous -= touch.anonymous
        touch.anonymous = 0
        for block in touch.blocks[keep : touch.left]:
            if held.get(block) == touch.stamp:
                del held[block]
                self._leave(block)
        touch.left = keep

    def clear(self) -> None:
        """Forget all blocks: the backend restarted."""
        for block in self._held:
            self._leave(block)
        self._held.clear()
        for touch in self._touches:
            touch.left = touch.anonymous = 0  # a running request may still refer to it
        self._touches.clear()
        self._anonymous = 0
        self.evicted = False

    def _evict(self) -> None:
        """Drop the oldest blocks until the rest fits: anonymous blocks first, then the tail."""
        held, touches = self._held, self._touches
        excess = len(held) + self._anonymous - self.capacity_blocks
        while excess > 0:
            if not touches:  # hashes are not chained: start again rather than grow
                self.clear()
                return
            self.evicted = True
            oldest = touches[0]
            if oldest.anonymous:
                gone = min(excess, oldest.anonymous)
                oldest.anonymous -= gone
                self._anonymous -= gone
                excess -= gone
                continue
            blocks, left, stamp, get = oldest.blocks, oldest.left, oldest.stamp, held.get
            while excess > 0 and left and get(block := blocks[left - 1]) == stamp:
                del held[block]
                if self._holders is not None:
                    self._leave(block)
                left -= 1
                excess -= 1
            oldest.left = left
            if excess > 0:  # all others were used again since
                touches.popleft()

    def _outlived(self, touch: Touch) -> bool:
        """True if no block of the Touch is left: all were evicted or used again since."""
        return not touch.left or self._held.get(touch.blocks[touch.left - 1]) != touch.stamp

    def _tidy(self) -> None:
        """Forget touches without blocks, so that their number stays bounded."""
        touches = [t for t in self._touches if t.anonymous or not self._outlived(t)]
        self._touches = deque(touches)
        self._tidy_at = 2 * len(touches) + 64

    def _enter(self, holders: dict[int, int], blocks: Sequence[int]) -> None:
        position = 1
        while position <= len(blocks):
            block = blocks[position - 1]
            if block in self._held:
                holders[block] = holders.get(block, 0) | self._bit
            position *= 2

    def _leave(self, block: int) -> None:
        holders = self._holders
        if holders is None or block not in holders:
            return
        left = holders[block] & ~self._bit
        if left:
            holders[block] = left
        else:
            del holders[block]
