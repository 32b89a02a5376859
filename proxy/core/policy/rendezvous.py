"""Where do several proxies send a cold prompt? All to the same backend, without communication.

Rendezvous hashing (highest random weight, Thaler and Ravishankar 1998): every proxy scores every
backend with a hash of the backend's name and a key of the prompt. The highest score wins. A backend
that comes or goes moves only the prompts that it wins or won.

The key is a block hash. Hashes are chained, so one block stands for all before it. Which block is
taken decides which prompts count as equal:
 - behind the common root: a block that most prompts share (a system prompt) would send everything
   to one backend;
 - inside the document: a block of the question would make each question a document of its own.
So the key is the block at the largest power of two within the first `min_match` of the prompt.
Questions of different lengths about one document then agree. If most recent prompts share that
block, it is the next power of two that they do not share. Counting starts when there are other
proxies. A restart only moves prompts whose beginning is common.
"""

from collections.abc import Sequence
from typing import Final

from forebay.proxy.core.model import ENOUGH, HISTORY, MAJORITY, Request
from forebay.proxy.core.policy.routing import Option
from forebay.proxy.core.state.backend import Backend

AGREED_SHARE: Final = 0.75
"""Part of a cold prefill: the worth of a backend to which every proxy would send the prompt. With
0.5, two proxies lost 6 % of one proxy's hits (documents of 40k tokens, 5 questions each). With 1
its prefill would count as nothing."""


class CommonRoot:
    """Counts the beginnings that recent prompts share, at block positions 1, 2, 4, 8 ..."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._seen = 0.0

    def count(self, blocks: tuple[int, ...]) -> None:
        """Count a prompt that has arrived."""
        if not blocks:
            return
        self._seen += 1.0
        counts, position = self._counts, 1
        while position <= len(blocks):
            block = blocks[position - 1]
            counts[block] = counts.get(block, 0.0) + 1.0
            position *= 2
        if self._seen >= HISTORY:
            self._seen /= 2.0
            self._counts = {block: n / 2.0 for block, n in counts.items() if n >= 2.0}

    def key(self, blocks: tuple[int, ...], min_match: float) -> int | None:
        """Return the block that stands for the prompt, or None if its whole beginning is common."""
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
        return seen >= ENOUGH and self._counts.get(block, 0.0) > MAJORITY * seen


def name_seed(name: str) -> int:
    """Return 32 bits of a backend's name, the same in every process (FNV-1a)."""
    seed = 0x811C9DC5
    for byte in name.encode():
        seed = ((seed ^ byte) * 0x01000193) & 0xFFFFFFFF
    return seed


def weight(key: int, seed: int) -> int:
    """Return a backend's score for a key: 32 mixed bits (MurmurHash3's finalizer, twice)."""
    return _mix(_mix(((key ^ (key >> 32)) & 0xFFFFFFFF) ^ seed) ^ (seed >> 7))


def highest(key: int, seeds: Sequence[int]) -> int:
    """Return the index of the seed with the highest score, the first of equals."""
    best, most = 0, -1
    for index, seed in enumerate(seeds):
        score = weight(key, seed)
        if score > most:
            best, most = index, score
    return best


def _mix(bits: int) -> int:
    bits ^= bits >> 16
    bits = (bits * 0x85EBCA6B) & 0xFFFFFFFF
    bits ^= bits >> 13
    bits = (bits * 0xC2B2AE35) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


class Rendezvous:
    """The backend on which all proxies agree for a prompt that is cold everywhere."""

    def __init__(self, root: CommonRoot | None = None) -> None:
        self.root = root or CommonRoot()
        self._seeds: dict[str, int] = {}

    def arrived(self, request: Request) -> None:
        """Count a prompt. Only needed while there are other proxies."""
        self.root.count(request.blocks)

    def agreed(
        self, request: Request, usable: Sequence[Backend], min_match: float
    ) -> Backend | None:
        """Return the backend where every proxy would send this prompt if it were cold."""
        key = self.root.key(request.blocks, min_match)
        if key is None or not usable:
            return None
        for backend in usable:
            if backend.name not in self._seeds:
                self._seeds[backend.name] = name_seed(backend.name)
        return usable[highest(key, [self._seeds[b.name] for b in usable])]


def prefer(options: Sequence[Option], agreed: Backend | None) -> None:
    """Make the cold prefill cheaper on the backend on which all proxies agree."""
    for option in options:
        if agreed is not None and option.backend == agreed.name:
            option.cold_prefill_s *= 1.0 - AGREED_SHARE
