"""Estimate what one engine holds in its prefix cache.

The best available of three sources is used:
 - believed: an index of the prompts that the engine was sent;
 - corrected: the engine reports cached tokens in its answers, which shows how much it keeps;
 - exact: the engine publishes KV events (`engine_blocks.py`).
"""

from collections.abc import Sequence
from math import inf
from typing import Final

from forebay.proxy.core.learn.engine_blocks import EngineBlocks
from forebay.proxy.core.learn.prefix_index import PrefixIndex, Touch
from forebay.proxy.core.model import HISTORY, MAJORITY, Request

DEFAULT_INDEX_BLOCKS: Final = 1 << 16
"""If the KV pool is unknown: 128 MiB of prompt text. Doubled: more is believed to be cached until
answers tell, and memory doubles."""
KEPT_STEP: Final = 1.01  # factor of `kept` when more is cached; doubled: it swings more
KEPT_LEAST: Final = 0.25
"""Share of a known KV pool. Below that the reports must mean something else. Doubled: an engine
that other clients share is believed to hold half of its pool for us."""
KEPT_LEAST_UNKNOWN: Final = 1e-3
"""Share of DEFAULT_INDEX_BLOCKS. Doubled: pools below 65k tokens suffer."""
KEPT_MOST: Final = 1.5  # prompts may be shorter than estimated; doubled: slower back to 1
SURPLUS_BLOCKS: Final = 1.5
"""Text blocks cached beyond the prediction. Fewer may be the end of a prompt, which is in no block.
Doubled: an index that is too small is noticed later."""


def tokens_in(blocks: int, request: Request) -> int:
    """Return the prompt tokens that a hit of `blocks` leading blocks saves.

    The engine always computes the last prompt token.
    """
    return max(0, min(int(blocks * request.block_tokens), request.prompt_tokens - 1))


class Visit:
    """One request in one engine, as far as the prefix cache is concerned.

    Attributes:
        uncached_tokens: prompt tokens that were not cached when the request was sent.
        exact: the hit was looked up in the engine's published blocks.
        evidence: stamp of the deepest block believed to be held. If the engine reports fewer
            cached tokens, blocks as old as that are gone. 0: no such conclusion.
        outdated: the engine has restarted since.
    """

    __slots__ = ("evidence", "exact", "outdated", "request", "touch", "uncached_tokens")

    def __init__(self, request: Request, uncached_tokens: int) -> None:
        self.request = request
        self.uncached_tokens = uncached_tokens
        self.exact = False
        self.evidence = 0.0
        self.touch: Touch | None = None
        self.outdated = False

    @property
    def matched_tokens(self) -> int:
        """Prompt tokens that were believed to be cached when the request was sent."""
        return self.request.prompt_tokens - self.uncached_tokens


class PrefixError:
    """Sums over answers that reported their cached prompt tokens.

    Attributes:
        answers: number of such answers.
        predicted_tokens, reported_tokens: cached tokens, predicted by us and reported.
        absolute_tokens: sum of the absolute differences.
        within_block: answers whose difference is at most one block of prompt text.
    """

    __slots__ = (
        "absolute_tokens", "answers", "predicted_tokens", "reported_tokens", "within_block",
    )  # fmt: skip

    def __init__(self) -> None:
        self.answers = 0
        self.predicted_tokens = 0.0
        self.reported_tokens = 0.0
        self.absolute_tokens = 0.0
        self.within_block = 0

    def add(self, predicted_tokens: float, reported_tokens: float, block_tokens: float) -> None:
        """Count one answer."""
        error = abs(predicted_tokens - reported_tokens)
        self.answers += 1
        self.predicted_tokens += predicted_tokens
        self.reported_tokens += reported_tokens
        self.absolute_tokens += error
        self.within_block += int(error) <= block_tokens  # counts are rounded

    @property
    def bias_tokens(self) -> float:
        """Mean of predicted minus reported tokens. Above 0, predictions are too high."""
        return (self.predicted_tokens - self.reported_tokens) / max(1, self.answers)

    @property
    def mean_tokens(self) -> float:
        """Mean absolute difference."""
        return self.absolute_tokens / max(1, self.answers)

    @property
    def within_block_share(self) -> float:
        return self.within_block / max(1, self.answers)


class PrefixCache:
    """The prefix cache of one engine, as the proxy knows it.

    Attributes:
        prefixes: the prompts that the engine was sent and should still hold.
        kept: the share of its KV pool's size that the engine was seen to keep.
        engine_blocks: the blocks that the engine publishes; None if it does not.
        error: how far predictions were from reports.
        reports: its answers have reported cached tokens.
    """

    def __init__(self) -> None:
        self.prefixes = PrefixIndex(DEFAULT_INDEX_BLOCKS)
        self.kept = 1.0
        self.engine_blocks: EngineBlocks | None = None
        self.error = PrefixError()
        self.reports = False
        self._block_tokens = 512.0  # tokens in a block of the latest prompt
        self._computed: list[tuple[int, ...]] = []  # not reported yet to other proxies
        self._computed_blocks = 0

    @property
    def mode(self) -> str:
        """The source in use: believed, corrected or exact."""
        if self.engine_blocks is not None and self.engine_blocks.complete:
            return "exact"
        return self.estimate

    @property
    def estimate(self) -> str:
        """The source for prompts whose engine blocks are unknown: believed or corrected."""
        return "corrected" if self.reports else "believed"

    def matched_tokens(self, request: Request) -> int:
        """Return the prompt tokens that the engine probably holds, and takes from its cache."""
        if not request.reads_cache:
            return 0
        blocks = self.prefixes.match(request.blocks)
        if self.engine_blocks is not None:
            exact = self._exact_tokens(request, blocks)
            if exact is not None:
                return exact
        return tokens_in(blocks, request) if blocks else 0

    def may_match(self, request: Request) -> bool:
        """False only if `matched_tokens` is 0. A short look, for a look at many requests."""
        blocks = request.blocks
        if self.engine_blocks is not None:
            return request.reads_cache
        return request.reads_cache and len(blocks) > 0 and self.prefixes.stamp_of(blocks[0]) > 0.0

    def _exact_tokens(self, request: Request, believed_blocks: int) -> int | None:
        """Return the tokens held by published blocks, or None if these do not tell."""
        assert self.engine_blocks is not None
        matched = self.engine_blocks.match(request.blocks, believed_blocks)
        return None if matched is None else min(matched, request.prompt_tokens - 1)

    def sent(self, visit: Visit, head: Visit | None, kv_tokens: float, now: float = 0.0) -> None:
        """Enter a request that is sent to the engine.

        Args:
            head: the request whose prefill runs now; None if it is this request.
            kv_tokens: size of the engine's KV pool; infinite if unknown.
        """
        request = visit.request
        if self.engine_blocks is not None:
            exact = self._exact_tokens(request, self.prefixes.match(request.blocks))
            visit.exact = exact is not None
        if visit.matched_tokens and not visit.exact:
            self._note_evidence(visit, head)
        self._block_tokens = request.block_tokens
        pool_blocks = DEFAULT_INDEX_BLOCKS
        if kv_tokens < inf:
            pool_blocks = int(kv_tokens / request.block_tokens)
        self.prefixes.capacity_blocks = int(pool_blocks * self.kept)
        indexed = int(len(request.blocks) * request.block_tokens)
        unindexed = request.prompt_tokens + request.output_tokens - indexed
        other_blocks = max(0, unindexed) / request.block_tokens
        visit.touch = self.prefixes.touch(request.blocks, other_blocks, now)

    def _note_evidence(self, visit: Visit, head: Visit | None) -> None:
        """Remember the stamp of the deepest block that is believed to be held.

        Only if its prefill is over: blocks of a running prefill may be missing without eviction.
        """
        request = visit.request
        stamp = self.used_at(request, visit.matched_tokens)
        if head is not None and (head.touch is None or head.touch.stamp <= stamp):
            stamp = 0.0
        visit.evidence = stamp

    def used_at(self, request: Request, matched_tokens: int) -> float:
        """Return when the last of these cached tokens was used, or 0 if that is not known."""
        deepest = round(matched_tokens / request.block_tokens)
        if 0 < deepest <= len(request.blocks):
            return self.prefixes.stamp_of(request.blocks[deepest - 1])
        return 0.0

    def cut_short(self, visit: Visit, computed_share: float) -> None:
        """Forget the part of a prompt that was not computed, as its request ended too early."""
        if visit.touch is None or visit.exact:
            return
        matched_tokens, block_tokens = visit.matched_tokens, visit.request.block_tokens
        tokens = matched_tokens + computed_share * visit.uncached_tokens
        # Never less than was held before: others may hold more behind it.
        before = round(matched_tokens / block_tokens)
        self.prefixes.untouch(visit.touch, max(before, int(tokens / block_tokens)))

    def computed(self, visit: Visit) -> float:
        """Keep the blocks of a prompt whose prefill has ended for the next report, `news`.

        A report has at most HISTORY blocks of each backend, 128k tokens by default. Returns the
        tokens that the prompt put into the cache besides those blocks.
        """
        touch, request = visit.touch, visit.request
        room = HISTORY - self._computed_blocks
        blocks = () if touch is None else tuple(touch.blocks[: min(touch.left, room)])
        if not blocks:
            return visit.uncached_tokens
        self._computed.append(blocks)
        self._computed_blocks += len(blocks)
        rest = request.prompt_tokens - len(blocks) * request.block_tokens
        return max(0.0, min(rest, visit.uncached_tokens))

    def news(self, most_blocks: float = inf) -> list[tuple[int, ...]]:
        """Return and forget the first computed prompts, of at most `most_blocks` together."""
        count, blocks = 0, 0
        for prompt in self._computed:
            blocks += len(prompt)
            if blocks > most_blocks:
                break
            count += 1
        prompts, self._computed = self._computed[:count], self._computed[count:]
        self._computed_blocks = sum(map(len, self._computed))
        return prompts

    def heard(self, prompt: Sequence[int], now: float) -> None:
        """Enter a prompt that the engine has computed for another proxy."""
        self.prefixes.touch(prompt, now=now)

    def crowd(self, fresh_tokens: float) -> None:
        """Make room for tokens that other proxies had the engine compute."""
        self.prefixes.touch((), fresh_tokens / self._block_tokens)

    def reported(
        self, visit: Visit, cached_tokens: int | None, prompt_tokens: int, kv_tokens: float
    ) -> None:
        """Learn from an answer's report of cached prompt tokens.

        The prompt is computed by now and held either way. A wrong prediction shows how much of
        everything else the engine has evicted or kept.

        Args:
            cached_tokens: as the engine counts; None if the answer does not report them.
            prompt_tokens: as the engine counts; 0 if unknown.
            kv_tokens: size of the engine's KV pool; infinite if unknown.
        """
        if visit.outdated:
            return
        if cached_tokens is None:
            # Some vLLM versions leave the count out when it is 0; without the flag all do.
            if not self.reports:
                return
            cached_tokens = 0
        self.reports = True
        request = visit.request
        matched = float(visit.matched_tokens)
        block_tokens = request.block_tokens
        if prompt_tokens and not visit.exact:  # convert estimated tokens to the engine's tokens
            matched *= prompt_tokens / request.prompt_tokens
            block_tokens *= prompt_tokens / request.prompt_tokens
        self.error.add(matched, cached_tokens, block_tokens)
        if visit.exact:
            return
        if int(matched - cached_tokens) > block_tokens:
            if visit.evidence:
                self.prefixes.forget_until(visit.evidence)
                self._keeps_less(request.block_tokens, kv_tokens)
        elif cached_tokens - matched > SURPLUS_BLOCKS * block_tokens and self.prefixes.evicted:
            self.kept = min(KEPT_MOST, self.kept * KEPT_STEP)

    def _keeps_less(self, block_tokens: float, kv_tokens: float) -> None:
        """Lower `kept` towards the share of the pool that the index still has."""
        least, pool_blocks = KEPT_LEAST_UNKNOWN, float(DEFAULT_INDEX_BLOCKS)
        if kv_tokens < inf:
            least, pool_blocks = KEPT_LEAST, kv_tokens / block_tokens
        left = len(self.prefixes) / pool_blocks
        self.kept = max(least, self.kept + MAJORITY * (left - self.kept))

    def restarted(self) -> None:
        """Forget everything: the engine restarted or was replaced."""
        self.prefixes.clear()
        self.reports = False
        if self.engine_blocks is not None:
            self.engine_blocks.doubt()
