"""Guess which prompt prefixes a backend still holds in its KV cache.

One index per backend: the chained hashes of the blocks it was sent, bounded by what its KV pool
can hold, least recently used first out. The engine frees the tail of a prompt before its head, so
the head of a prompt outlives its tail here too; and since hashes are chained, whoever touches a
block touches all before it. So what is held of a prompt never has a gap, and a prompt whose last
block was touched again was touched again whole.

An engine that says how much of a prompt was cached corrects the guess. Where a block was gone, all
that was touched no later was gone before it: an engine frees in the order of use.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from forebay.proxy.core.learn.chains import leading_run

FEW: Final = 16  # blocks: beyond, a dict built and merged at C speed is faster than a loop


class Touch:
    """One request's use of the cache: what it left there, tail last to be entered.

    Uses in a row that left only anonymous blocks count together in the first of them, so that a
    million short requests take no more memory than one.
    """

    __slots__ = ("anonymous", "blocks", "left", "stamp")

    def __init__(self, stamp: int, blocks: Sequence[int], anonymous: int) -> None:
        self.stamp = stamp
        self.blocks = blocks
        self.left = len(blocks)  # of them, from the head, those not looked at for eviction
        self.anonymous = anonymous  # blocks nobody will ask for again


class PrefixIndex:
    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._held: dict[int, int] = {}  # block: stamp of its latest touch
        self._touches: deque[Touch] = deque()  # oldest first
        self.evicted = False  # it has been full once
        self._stamp = 0
        self._anonymous = 0
        self._other = 0.0
        self._tidy_at = 64
        self._holders: dict[int, int] | None = None
        self._bit = 0

    def __len__(self) -> int:
        return len(self._held) + self._anonymous

    def share(self, holders: dict[int, int] | None, bit: int) -> None:
        """Enter `bit` in `holders` under each block held at positions 1, 2, 4, 8 ... of a prompt.

        So that the holders of a prefix are found among many backends without asking each. None:
        enter nothing from now on.
        """
        self._holders, self._bit = holders, bit
        if holders is not None:
            for touch in self._touches:
                self._enter(holders, touch.blocks[: touch.left])

    def match(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are held."""
        return leading_run(self._held, blocks)

    def stamp_of(self, block: int) -> int:
        """When the block was last touched, as `touch` counts; 0 where it is not held."""
        return self._held.get(block, 0)

    def touch(self, blocks: Sequence[int], other_blocks: float = 0.0) -> Touch:
        """The backend now computes or reuses `blocks`.

        `other_blocks` is what the request holds besides, in blocks: the end of the prompt and
        the output. Nobody asks for it again, but it pushes others out all the same.
        """
        self._other += other_blocks
        anonymous = int(self._other)
        self._other -= anonymous
        self._anonymous += anonymous
        self._stamp += 1
        held, stamp = self._held, self._stamp
        if len(blocks) < FEW:
            for block in blocks:
                held[block] = stamp
        else:
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
        """Count what left only anonymous blocks with what came before, if that left no others."""
        last = self._touches[-1] if self._touches else None
        if last is None or last.blocks:
            return not touch.anonymous
        last.anonymous += touch.anonymous
        last.stamp = touch.stamp
        touch.anonymous = 0
        return True

    def forget_until(self, stamp: int) -> None:
        """The engine has dropped something touched at `stamp`, so all that is as old or older."""
        touches = self._touches
        while touches and touches[0].stamp <= stamp:
            self._drop(touches.popleft(), 0)

    def untouch(self, touch: Touch, computed: int) -> None:
        """Only the first `computed` blocks of it were computed after all.

        At least those that were held before it; what others have touched since stays.
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
        """The backend restarted: its cache is empty."""
        for block in self._held:
            self._leave(block)
        self._held.clear()
        for touch in self._touches:
            touch.left = touch.anonymous = 0  # a request that still runs may come back to it
        self._touches.clear()
        self._anonymous = 0
        self.evicted = False

    def _evict(self) -> None:
        """Drop the oldest until the rest fits; of each touch the anonymous, then from the tail."""
        held, touches = self._held, self._touches
        excess = len(held) + self._anonymous - self.capacity_blocks
        while excess > 0:
            if not touches:  # hashes that are not chained: start anew rather than grow
                self.clear()
                return
            self.evicted = True
            oldest = touches[0]
            if oldest.anonymous:
                gone = min(excess, oldest.anonymous)
                oldest.anonymous -= gone
                self._anonymous -= gone
                excess -= gone
            elif self._outlived(oldest):
                touches.popleft()
            else:
                oldest.left -= 1
                block = oldest.blocks[oldest.left]
                if held.get(block) == oldest.stamp:
                    del held[block]
                    self._leave(block)
                    excess -= 1

    def _outlived(self, touch: Touch) -> bool:
        """Whether nothing is left of it: looked through, or all touched again since."""
        return not touch.left or self._held.get(touch.blocks[touch.left - 1]) != touch.stamp

    def _tidy(self) -> None:
        """Forget touches of which nothing is left, so that their number stays bounded too."""
        kept = [t for t in self._touches if t.anonymous or not self._outlived(t)]
        self._touches = deque(kept)
        self._tidy_at = 2 * len(kept) + 64

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
