"""What one engine is believed to hold in its prefix cache.

An index of what it was sent says what it should hold; what its answers report as cached corrects
how much of that it keeps; and where it tells what it holds (`held.py`), that is exact.
"""

from math import inf
from typing import Final

from forebay.proxy.core.learn.engine_blocks import HeldPrefixes
from forebay.proxy.core.learn.prefix_error import PrefixError
from forebay.proxy.core.learn.prefix_index import PrefixIndex
from forebay.proxy.core.model import Request
from forebay.proxy.core.state.in_flight import Flight

DEFAULT_INDEX_BLOCKS = 1 << 16  # of a backend whose KV pool is unknown: 128 MiB of prompt text
KEPT_GAIN: Final = 0.5  # of `kept` towards what is left ...
KEPT_STEP: Final = 1.01  # ... and a step of it either way
KEPT_LEAST: Final = 0.25  # of the pool ...
KEPT_LEAST_UNKNOWN: Final = 1e-3  # ... and of an unknown one
KEPT_MOST: Final = 1.5
KEPT_FAR: Final = 0.7  # the index was so much too large
SURPLUS_BLOCKS: Final = 1.5  # of text; the end of a prompt is in no block and may be cached too


def tokens_in(blocks: int, request: Request) -> int:
    """What is saved where so many leading blocks of the prompt are held: never its last token."""
    return max(0, min(int(blocks * request.block_tokens), request.prompt_tokens - 1))


class PrefixCache:
    """What is sent goes in; what the engine tells corrects it.

    Attributes:
        prefixes: what it was sent, as far as its pool should hold that.
        kept: how much it keeps, as a share of what its pool should hold.
        held: where the engine tells what it holds.
        error: how far what was believed is from what it reported.
        tells_cached: its answers say how much of the prompt was cached.
    """

    def __init__(self) -> None:
        self.prefixes = PrefixIndex(DEFAULT_INDEX_BLOCKS)
        self.kept = 1.0
        self.held: HeldPrefixes | None = None
        self.error = PrefixError()
        self.tells_cached = False
        self._block_tokens = 512.0  # of the last prompt

    @property
    def mode(self) -> str:
        """How it is known what the backend holds: believed, corrected or exact."""
        if self.held is not None and self.held.complete:
            return "exact"
        return "corrected" if self.tells_cached else "believed"

    def matched_tokens(self, request: Request) -> int:
        """Prompt tokens it probably holds; the last token is always computed."""
        blocks = self.prefixes.match(request.blocks)
        if self.held is not None:
            exact = self._exact_tokens(request, blocks)
            if exact >= 0:
                return exact
        return tokens_in(blocks, request) if blocks else 0

    def _exact_tokens(self, request: Request, believed_blocks: int) -> int:
        """What the engine tells it holds of the prompt; below 0 where that cannot be said."""
        assert self.held is not None
        return min(self.held.match(request.blocks, believed_blocks), request.prompt_tokens - 1)

    # What changes it.

    def sent(self, flight: Flight, head: Flight | None, kv_tokens: float) -> None:
        """The engine will hold this prompt and what it generates for it.

        Args:
            head: what the engine computes now; None when that is this one.
            kv_tokens: the size of its pool; infinite when unknown.
        """
        request = flight.request
        if self.held is not None:
            flight.exact = self._exact_tokens(request, self.prefixes.match(request.blocks)) >= 0
        if flight.matched_tokens and not flight.exact:
            self._note_evidence(flight, head)
        self._block_tokens = request.block_tokens
        pool_blocks = DEFAULT_INDEX_BLOCKS
        if kv_tokens < inf:
            pool_blocks = int(kv_tokens / request.block_tokens)
        self.prefixes.capacity_blocks = int(pool_blocks * self.kept)
        indexed = int(len(request.blocks) * request.block_tokens)
        unindexed = request.prompt_tokens + request.output_tokens - indexed
        other_blocks = max(0, unindexed) / request.block_tokens
        flight.touch = self.prefixes.touch(request.blocks, other_blocks)

    def _note_evidence(self, flight: Flight, head: Flight | None) -> None:
        """Remember how old the deepest block is that is believed to be held.

        Only if it was computed by a prefill that is over: blocks of one that is under way may be
        missing though nothing was dropped.
        """
        request = flight.request
        deepest = round(flight.matched_tokens / request.block_tokens)
        if 0 < deepest <= len(request.blocks):
            stamp = self.prefixes.stamp_of(request.blocks[deepest - 1])
            if head is not None and (head.touch is None or head.touch.stamp <= stamp):
                stamp = 0
            flight.evidence = stamp

    def cut_short(self, flight: Flight, computed_share: float) -> None:
        """It left before its first token: the rest of its prompt is not computed."""
        if flight.touch is None or flight.exact:
            return
        matched_tokens, block_tokens = flight.matched_tokens, flight.request.block_tokens
        tokens = matched_tokens + computed_share * flight.uncached_tokens
        # Never less than was held before: others may hold more behind it.
        before = round(matched_tokens / block_tokens)
        self.prefixes.untouch(flight.touch, max(before, int(tokens / block_tokens)))

    def crowded(self, fresh_tokens: float) -> None:
        """Others have had the engine put so much into its cache, which pushes ours out."""
        self.prefixes.touch((), fresh_tokens / self._block_tokens)

    def told(
        self, flight: Flight, cached_tokens: int | None, prompt_tokens: int, kv_tokens: float
    ) -> None:
        """The engine said how much of the prompt was cached (None: it did not say).

        The prompt is computed by now, so it is held either way: what a wrong guess tells is how
        much of all the rest the engine has dropped, or kept.

        Args:
            prompt_tokens: as the engine counts; 0 when not known.
            kv_tokens: the size of its pool; infinite when unknown.
        """
        if flight.outdated:
            return
        if cached_tokens is None:
            # Some versions leave the count out when it is 0, all do when they are not to tell.
            if not self.tells_cached:
                return
            cached_tokens = 0
        self.tells_cached = True
        request = flight.request
        matched = float(flight.matched_tokens)
        block_tokens = request.block_tokens
        if prompt_tokens and not flight.exact:  # in tokens as the engine counts them
            matched *= prompt_tokens / request.prompt_tokens
            block_tokens *= prompt_tokens / request.prompt_tokens
        self.error.add(matched, cached_tokens, block_tokens)
        if flight.exact:
            return
        if matched - cached_tokens > block_tokens + 1.0:
            if flight.evidence:
                self.prefixes.forget_until(flight.evidence)
                self._keeps_less(request.block_tokens, kv_tokens)
        elif cached_tokens - matched > SURPLUS_BLOCKS * block_tokens and self.prefixes.evicted:
            self.kept = min(KEPT_MOST, self.kept * KEPT_STEP)

    def _keeps_less(self, block_tokens: float, kv_tokens: float) -> None:
        """What is left of the index is about what the engine keeps."""
        least, pool_blocks = KEPT_LEAST_UNKNOWN, float(DEFAULT_INDEX_BLOCKS)
        if kv_tokens < inf:
            least, pool_blocks = KEPT_LEAST, kv_tokens / block_tokens
        left = len(self.prefixes) / pool_blocks
        # What is a little too much is as often a little too little, which is a step up again.
        if left < KEPT_FAR * self.kept:
            self.kept += KEPT_GAIN * (left - self.kept)
        else:
            self.kept /= KEPT_STEP
        self.kept = max(least, self.kept)

    def restarted(self) -> None:
        """The engine went away, or is another now; when it comes back it holds nothing."""
        self.prefixes.clear()
        self.tells_cached = False
        if self.held is not None:
            self.held.doubt()
