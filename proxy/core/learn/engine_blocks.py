"""What an engine really holds, as it tells; and which engine blocks a prompt's text becomes.

An engine speaks of blocks of tokens, the proxy of blocks of text. A key names one engine block and
all before it: the edge hashes it from the tokens, chained, so equal keys mean equal beginnings
whatever the engine's own hashes are. `Translations` learns from prompts that were tokenised which
keys a chain of text blocks has; `HeldPrefixes` counts which keys an engine holds.
"""

from collections import OrderedDict
from collections.abc import Sequence

from forebay.proxy.core.learn.chains import common_run, leading_run

UNKNOWN = -1
MOST_KEYS = 1 << 21  # of all translations; 8 bytes each where they are an array
RETOKENISE_SHARE = 0.1  # of a prompt's blocks: with fewer untranslated it is left at that


class Place:
    """Where a block of text ends in a prompt that was tokenised.

    Attributes:
        keys: of the whole prompt's engine blocks.
        owner: the last text block that came with it: what is kept or forgotten together.
        tokens: prompt tokens up to the end of the text block, about: in proportion to the text.
        shared: engine blocks in common of prompts that part behind this text block; UNKNOWN
            until two did.
    """

    __slots__ = ("keys", "owner", "shared", "tokens")

    def __init__(self, keys: Sequence[int], owner: int, tokens: float) -> None:
        self.keys = keys
        self.owner = owner
        self.tokens = tokens
        self.shared = UNKNOWN


class Translations:
    """Text blocks to engine blocks of `block_size` tokens; the longest unused go first."""

    def __init__(self, block_size: int, most_keys: int = MOST_KEYS) -> None:
        self.block_size = block_size
        self._most_keys = most_keys
        self._places: dict[int, Place] = {}
        # By owner: what a prompt added, and how many keys.
        self._added: OrderedDict[int, tuple[list[int], int]] = OrderedDict()
        self._keys = 0

    def __len__(self) -> int:
        return len(self._places)

    def known(self, blocks: Sequence[int]) -> int:
        """How many leading blocks of text are translated."""
        return leading_run(self._places, blocks)

    def place(self, block: int) -> Place:
        """Of a block that is translated."""
        return self._places[block]

    def wanted(self, blocks: Sequence[int]) -> bool:
        """Whether tokenising this prompt would tell something new."""
        known = self.known(blocks)
        if not known:
            return bool(blocks)
        place = self._places[blocks[known - 1]]
        self._added.move_to_end(place.owner)
        if len(blocks) - known > RETOKENISE_SHARE * len(blocks):
            return True
        return place.shared == UNKNOWN

    def learn(self, blocks: Sequence[int], keys: Sequence[int], tokens_per_block: float) -> None:
        """A prompt of these text blocks has these engine blocks.

        Args:
            tokens_per_block: prompt tokens in a block of text, on average.
        """
        if not blocks:
            return
        known = self.known(blocks)
        if known:
            place = self._places[blocks[known - 1]]
            place.shared = common_run(place.keys, keys)
        # Its beginning may have been forgotten, and what comes after not.
        new = [block for block in blocks[known:] if block not in self._places]
        if not new or len(keys) > self._most_keys:
            return
        for number, block in enumerate(blocks, 1):
            if number > known and block not in self._places:
                self._places[block] = Place(keys, new[-1], number * tokens_per_block)
        self._added[new[-1]] = new, len(keys)
        self._keys += len(keys)
        while self._keys > self._most_keys:
            _, (old, count) = self._added.popitem(last=False)
            self._keys -= count
            for block in old:
                del self._places[block]

    def forget_size(self) -> None:
        """No engine is followed any more: the next one says anew how large its blocks are."""
        self.clear()
        self.block_size = 0

    def clear(self) -> None:
        self._places.clear()
        self._added.clear()
        self._keys = 0


class HeldPrefixes:
    """The engine blocks that one engine holds, told in order by whoever listens to it.

    Attributes:
        complete: everything it holds is known; while False `match` knows nothing.
        pool_blocks: engine blocks of its KV pool, 0 when unknown: once so many are known to be
            held, nothing unknown can be.
    """

    def __init__(self, translations: Translations, pool_blocks: int = 0) -> None:
        self.translations = translations
        self.pool_blocks = pool_blocks
        self.complete = False
        self._doubted = False
        # An engine may hold a block twice: equal prompts prefilled at the same time.
        self._copies: dict[int, int] = {}
        self._held = 0

    def __len__(self) -> int:
        """Engine blocks known to be held, copies counted."""
        return self._held

    def stored(self, keys: Sequence[int]) -> None:
        """These can be hit from now on."""
        copies = self._copies
        for key in keys:
            copies[key] = copies.get(key, 0) + 1
        self._held += len(keys)
        if not self.complete and 0 < self.pool_blocks <= self._held and not self._doubted:
            self.complete = True

    def removed(self, keys: Sequence[int]) -> None:
        """One copy of each was evicted; a key that is not known is passed over."""
        copies = self._copies
        for key in keys:
            count = copies.get(key, 0)
            if count > 1:
                copies[key] = count - 1
            elif count:
                del copies[key]
            self._held -= count > 0

    def cleared(self, *, complete: bool = True) -> None:
        """Nothing is held, or nothing is known of what is (not `complete`)."""
        self._copies.clear()
        self._held = 0
        self._doubted = False
        self.complete = complete

    def lost(self) -> None:
        """Something was missed that nobody can tell again."""
        self.cleared(complete=False)

    def doubt(self) -> None:
        """The engine may have restarted: not to be relied on until it goes on as before."""
        self._doubted = self._doubted or self.complete
        self.complete = False

    def confirm(self) -> None:
        """It went on as before."""
        self.complete = self.complete or self._doubted
        self._doubted = False

    def match(self, blocks: Sequence[int], believed: int) -> int:
        """Leading prompt tokens held; UNKNOWN where that cannot be said.

        Args:
            blocks: the prompt's text blocks.
            believed: how many of them are believed to be held: those that are not translated
                yet may be.
        """
        if not self.complete or not blocks:
            return UNKNOWN
        translations = self.translations
        known = translations.known(blocks)
        if not known:
            return UNKNOWN
        place, size = translations.place(blocks[known - 1]), translations.block_size
        run = leading_run(self._copies, place.keys)
        limit = place.shared if place.shared >= 0 else int(place.tokens) // size
        if run < limit:
            return run * size
        if believed > known:
            return UNKNOWN
        return limit * size
