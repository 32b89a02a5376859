"""Know exactly which blocks an engine holds, from the KV events that it publishes.

The engine counts blocks of tokens, the proxy blocks of text. The proxy names an engine block by a
key: a chained hash of its tokens. So equal keys mean equal beginnings with any hash of the engine.
`BlockTranslations` learns from tokenized prompts which keys belong to which text blocks.
`EngineBlocks` counts which keys one engine holds.

A hybrid model has groups of layers that need only the end of a cached prefix: a sliding window, or
the state of a Mamba layer. `Tail` has the blocks of one such group.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from forebay.proxy.core.learn.prefix_index import common_run, leading_run
from forebay.proxy.core.model import SLACK

MOST_KEYS: Final = 1 << 21
"""Keys of all translations together, 8 bytes each in an array. Doubled: 16 MiB more."""


class BlockPlace:
    """The end of one text block in a prompt that was tokenized.

    Attributes:
        keys: keys of all engine blocks of that prompt.
        owner: the last text block learned with it. They are forgotten together.
        tokens: prompt tokens up to the end of the text block, in proportion to the text.
        shared: engine blocks shared by two prompts that differ right behind this text block;
            None until two such prompts were seen.
    """

    __slots__ = ("keys", "owner", "shared", "tokens")

    def __init__(self, keys: Sequence[int], owner: int, tokens: float) -> None:
        self.keys = keys
        self.owner = owner
        self.tokens = tokens
        self.shared: int | None = None


class BlockTranslations:
    """Text blocks to engine blocks of `block_size` tokens. The least recently used are dropped."""

    def __init__(self, block_size: int, most_keys: int = MOST_KEYS) -> None:
        self.block_size = block_size
        self._most_keys = most_keys
        self._places: dict[int, BlockPlace] = {}
        # By owner: the text blocks learned from one prompt, and how many keys these keep.
        self._added: OrderedDict[int, tuple[list[int], int]] = OrderedDict()
        self._keys = 0

    def __len__(self) -> int:
        return len(self._places)

    def known(self, blocks: Sequence[int]) -> int:
        """Return the number of leading text blocks that are translated."""
        return leading_run(self._places, blocks)

    def place(self, block: int) -> BlockPlace:
        """Return the place of a text block that is translated."""
        return self._places[block]

    def wanted(self, blocks: Sequence[int]) -> bool:
        """True if tokenizing this prompt would teach something new."""
        translated = self.known(blocks)
        if not translated:
            return bool(blocks)
        place = self._places[blocks[translated - 1]]
        self._added.move_to_end(place.owner)
        if len(blocks) - translated > SLACK * len(blocks):
            return True
        return place.shared is None

    def learn(self, blocks: Sequence[int], keys: Sequence[int], tokens_per_block: float) -> None:
        """Store the engine blocks that belong to a prompt's text blocks.

        Args:
            tokens_per_block: prompt tokens in a text block, on average.
        """
        if not blocks:
            return
        translated = self.known(blocks)
        if translated:
            place = self._places[blocks[translated - 1]]
            place.shared = common_run(place.keys, keys)
        # The beginning may have been dropped while its continuation was not.
        new = [block for block in blocks[translated:] if block not in self._places]
        if not new or len(keys) > self._most_keys:
            return
        for number, block in enumerate(blocks, 1):
            if number > translated and block not in self._places:
                self._places[block] = BlockPlace(keys, new[-1], number * tokens_per_block)
        self._added[new[-1]] = new, len(keys)
        self._keys += len(keys)
        while self._keys > self._most_keys:
            _, (old, count) = self._added.popitem(last=False)
            self._keys -= count
            for block in old:
                del self._places[block]

    def forget_size(self) -> None:
        """Forget everything. The next engine that is followed announces its own block size."""
        self.clear()
        self.block_size = 0

    def clear(self) -> None:
        self._places.clear()
        self._added.clear()
        self._keys = 0


class Tail:
    """The blocks of a group of layers that computes on from the end of a prefix alone.

    Attributes:
        needed: blocks that must be held at the end of a prefix: a sliding window's, or 1.
        stride: length of a block of this group, in blocks of the groups that keep whole prompts.
    """

    def __init__(self, needed: int, stride: int) -> None:
        self.needed = needed
        self.stride = stride
        self._copies: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of keys that are held."""
        return len(self._copies)

    def stored(self, key: int) -> None:
        """Enter the block that ends where the block `key` ends."""
        self._copies[key] = self._copies.get(key, 0) + 1

    def removed(self, key: int) -> bool:
        """Drop one copy of a block that is held. Returns True if it was the last copy."""
        self._copies[key] -= 1
        if self._copies[key]:
            return False
        del self._copies[key]
        return True

    def longest(self, keys: Sequence[int], most: int) -> int:
        """Return the longest prefix, of at most `most` blocks of `keys`, with its end held.

        As vLLM does, a beginning that is held wholly counts although it is shorter than the window.
        """
        run = 0
        for end in range(most - most % self.stride, 0, -self.stride):
            run = run + 1 if keys[end - 1] in self._copies else 0
            if run == self.needed:
                return end + (run - 1) * self.stride
        return run * self.stride


class EngineBlocks:
    """The blocks that one engine holds, from its KV events in order.

    Attributes:
        tails: groups of layers that need only the end of a prefix. Its length does not count them.
        complete: all blocks that the engine holds are known; while False `match` returns None.
        pool_blocks: engine blocks of its KV pool, 0 if unknown. Once this many blocks are known to
            be held, the engine can hold no unknown block.
    """

    def __init__(self, translations: BlockTranslations, pool_blocks: int = 0) -> None:
        self.translations = translations
        self.pool_blocks = pool_blocks
        self.complete = False
        self.tails: list[Tail] = []
        self._doubted = False
        # An engine may hold a block twice: equal prompts whose prefills ran at the same time.
        self._copies: dict[int, int] = {}
        self._held = 0

    def __len__(self) -> int:
        """Return the number of blocks known to be held, copies included."""
        return self._held

    def stored(self, keys: Sequence[int]) -> None:
        """Enter blocks that can be hit from now on."""
        copies = self._copies
        for key in keys:
            copies[key] = copies.get(key, 0) + 1
        self._held += len(keys)
        if not self.complete and 0 < self.pool_blocks <= self._held and not self._doubted:
            self.complete = True

    def removed(self, keys: Sequence[int]) -> None:
        """Drop one copy of each block. Unknown keys are ignored."""
        copies = self._copies
        for key in keys:
            count = copies.get(key, 0)
            if count > 1:
                copies[key] = count - 1
            elif count:
                del copies[key]
            self._held -= count > 0

    def cleared(self, *, complete: bool = True) -> None:
        """Drop all blocks. `complete` False: the engine may hold blocks that are unknown."""
        self._copies.clear()
        self.tails.clear()
        self._held = 0
        self._doubted = False
        self.complete = complete

    def lost(self) -> None:
        """Drop all blocks, because an event was missed that is not repeated."""
        self.cleared(complete=False)

    def doubt(self) -> None:
        """Stop answering: the engine may have restarted. `confirm` resumes."""
        self._doubted = self._doubted or self.complete
        self.complete = False

    def confirm(self) -> None:
        """Resume answering: the engine's events continue without a gap."""
        self.complete = self.complete or self._doubted
        self._doubted = False

    def match(self, blocks: Sequence[int], believed: int) -> int | None:
        """Return the number of leading prompt tokens that are held, or None if unknown.

        Args:
            blocks: the prompt's text blocks.
            believed: leading blocks that the prefix index holds. Blocks without a translation may
                be held as well.
        """
        if not self.complete or not blocks:
            return None
        translations = self.translations
        translated = translations.known(blocks)
        if not translated:
            return None
        place, size = translations.place(blocks[translated - 1]), translations.block_size
        run = leading_run(self._copies, place.keys)
        limit = place.shared if place.shared is not None else int(place.tokens) // size
        if run >= limit and believed > translated:
            return None
        return self._resumable(place.keys, min(run, limit)) * size

    def _resumable(self, keys: Sequence[int], most: int) -> int:
        """Return the longest prefix of at most `most` blocks whose end every tail holds."""
        before = -1
        while most != before:
            before = most
            for tail in self.tails:
                most = tail.longest(keys, most)
        return most
