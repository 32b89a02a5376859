"""Where several proxies would send a cold prompt, agreed upon without a word.

Rendezvous hashing (highest random weight, Thaler and Ravishankar 1998): every proxy scores every
backend with a hash of the backend's name and a key of the prompt, and the highest score wins. A
backend that comes or goes moves only the prompts it wins or won.

The key is a block hash. Hashes are chained, so one block stands for all before it; which one
decides what counts as equal. Behind the common root: a block that most prompts share (a system
prompt) would send everything to one backend. Inside the document: a block of the question would
make every question a document of its own. So the key is the block at the largest power of two
within the first `min_match` of the prompt (that is the share below which a match is no reason to
prefer a backend, `routing.Affinity`; powers of two, so that questions of different lengths about
one document agree), or the next power of two beyond what most recent prompts share. Nothing is
agreed beforehand and a restart forgets nothing that matters: counting starts when there are
others, and only moves keys of prompts whose beginning is common.
"""

from collections.abc import Sequence

COMMON_SHARE = 0.5  # of recent prompts: a block in more of them is part of the root
ENOUGH = 32  # prompts seen before any block is called common
RECENT = 512.0  # prompts, after which all counts are halved

MASK = 0xFFFFFFFF


class CommonRoot:
    """Counts which beginnings recent prompts share, at block positions 1, 2, 4, 8 ..."""

    def __init__(self) -> None:
        self._count: dict[int, float] = {}
        self._seen = 0.0

    def saw(self, blocks: tuple[int, ...]) -> None:
        """A prompt has come."""
        if not blocks:
            return
        self._seen += 1.0
        count, position = self._count, 1
        while position <= len(blocks):
            block = blocks[position - 1]
            count[block] = count.get(block, 0.0) + 1.0
            position *= 2
        if self._seen >= RECENT:
            self._seen /= 2.0
            self._count = {block: n / 2.0 for block, n in count.items() if n >= 2.0}

    def key(self, blocks: tuple[int, ...], min_match: float) -> int | None:
        """The block that stands for the prompt; None where all its beginning is common."""
        within, position = max(1.0, min_match * len(blocks)), 1
        while position * 2 <= within:
            position *= 2
        while position <= len(blocks):
            block = blocks[position - 1]
            if not self._common(block):
                return block
            position *= 2
        return None

    def _common(self, block: int) -> bool:
        seen = self._seen
        return seen >= ENOUGH and self._count.get(block, 0.0) > COMMON_SHARE * seen


def name_seed(name: str) -> int:
    """32 bits of a backend's name, the same in every process (FNV-1a)."""
    seed = 0x811C9DC5
    for byte in name.encode():
        seed = ((seed ^ byte) * 0x01000193) & MASK
    return seed


def weight(key: int, seed: int) -> int:
    """The score of a backend for a key: 32 well-mixed bits (MurmurHash3's finaliser, twice)."""
    return _mix(_mix(((key ^ (key >> 32)) & MASK) ^ seed) ^ (seed >> 7))


def highest(key: int, seeds: Sequence[int]) -> int:
    """The index of the seed with the highest score; the first of equals."""
    best, most = 0, -1
    for index, seed in enumerate(seeds):
        score = weight(key, seed)
        if score > most:
            best, most = index, score
    return best


def _mix(bits: int) -> int:
    bits ^= bits >> 16
    bits = (bits * 0x85EBCA6B) & MASK
    bits ^= bits >> 13
    bits = (bits * 0xC2B2AE35) & MASK
    return bits ^ (bits >> 16)
