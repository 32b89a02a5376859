"""The KV cache of one backend: what running requests hold, and what a new one would need.

A block that several running requests share counts once. A block that was cached but unused counts
as soon as a running request uses it, because it can no longer be evicted. Ends of prompts and
outputs are not shared. Hashes are chained, so the part that one prompt shares with the others is
its longest common beginning with any of them.

Clients ask for a `max_tokens` of thousands and use hundreds. So the output length is learned: the
90th percentile of recent answers of one tenant in one bucket, from a geometric histogram (four bins
per doubling) whose counts are halved from time to time.
"""

from typing import Final

from forebay.proxy.core.learn.prefix_index import common_run
from forebay.proxy.core.model import ENOUGH, HISTORY, Request

OUTPUT_QUANTILE: Final = 0.9  # of answers that fit what is reserved; it has no double
MOST_HISTOGRAMS: Final = 4_096
"""Tenants that no configuration lists come from clients. Doubled: about 4 MiB more."""


class _Root:
    """The running prompts that share their first block."""

    __slots__ = ("block_tokens", "prompts")

    def __init__(self, block_tokens: float) -> None:
        self.block_tokens = block_tokens  # estimated for the first of them
        self.prompts: dict[str, tuple[int, ...]] = {}

    def shared(self, blocks: tuple[int, ...]) -> int:
        """Return how many leading blocks of a prompt these prompts hold."""
        longest = 0
        for other in self.prompts.values():
            if longest == len(blocks):
                break
            # Skip prompts that differ at the first block beyond the longest run so far.
            if longest < len(other) and other[longest] == blocks[longest]:
                longest = common_run(blocks, other, longest + 1)
        return longest


class KvBudget:
    """KV cache held by the running requests of one backend.

    Attributes:
        held: tokens.
    """

    def __init__(self) -> None:
        self._roots: dict[int, _Root] = {}
        self.held = 0.0

    @property
    def tokens(self) -> int:
        """Tokens held, rounded."""
        return round(self.held)

    def need(self, request: Request, output_tokens: int) -> int:
        """Return the tokens that the request would add with an output of this length."""
        blocks = request.blocks
        root = self._roots.get(blocks[0]) if blocks else None
        shared = root.shared(blocks) if root is not None else 0
        return max(0, request.prompt_tokens + output_tokens - int(shared * request.block_tokens))

    def take(self, request: Request, output_tokens: int) -> None:
        """Reserve KV cache for a request that is sent, and for its expected output."""
        self.held += _unshared(request, output_tokens)
        blocks = request.blocks
        if not blocks:
            return
        root = self._roots.get(blocks[0])
        if root is None:
            root = self._roots[blocks[0]] = _Root(request.block_tokens)
        self.held += (len(blocks) - root.shared(blocks)) * root.block_tokens
        root.prompts[request.id] = blocks

    def give_back(self, request: Request, output_tokens: int) -> None:
        """Give back what `take` reserved with the same `output_tokens`."""
        self.held -= _unshared(request, output_tokens)
        blocks = request.blocks
        if blocks:
            root = self._roots[blocks[0]]
            del root.prompts[request.id]
            self.held -= (len(blocks) - root.shared(blocks)) * root.block_tokens
            if not root.prompts:
                del self._roots[blocks[0]]
        if self.held < 0.5:  # rounding errors
            self.held = 0.0


def _unshared(request: Request, output_tokens: int) -> float:
    whole = request.prompt_tokens + output_tokens
    return max(0.0, whole - len(request.blocks) * request.block_tokens)


class LengthHistogram:
    """Recent answer lengths; `quantile` is in tokens, 0 while too few were seen."""

    __slots__ = ("_counts", "_seen", "quantile")

    def __init__(self) -> None:
        self._counts: list[float] = []
        self._seen = 0
        self.quantile = 0

    def observe(self, tokens: int) -> None:
        """Count one answer."""
        # The bin is the position of the highest bit and the two bits behind it: no logarithm.
        high = tokens.bit_length()
        bin_ = min(HISTORY, 4 * high + ((tokens << 2 >> (high - 1)) & 3))
        while len(self._counts) <= bin_:
            self._counts.append(0.0)
        self._counts[bin_] += 1.0
        self._seen += 1
        if self._seen % HISTORY == 0:
            self._counts = [count / 2 for count in self._counts]
        if self._seen % ENOUGH == 0:
            self.quantile = self._upper_edge(OUTPUT_QUANTILE)

    def _upper_edge(self, quantile: float) -> int:
        """Return the largest token count of the bin that contains the quantile."""
        bin_, left = 0, quantile * sum(self._counts) - self._counts[0]
        while left > 0 and bin_ < len(self._counts) - 1:
            bin_ += 1
            left -= self._counts[bin_]
        # Below 4 tokens there are fewer than two bits behind the highest one.
        return ((5 + bin_ % 4) << bin_ // 4 >> 3) - (bin_ >= 12)


class OutputLengths:
    """Expected answer lengths by tenant and bucket; `any` once an answer was observed."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[str, str], LengthHistogram] = {}
        self.any = False

    def observe(self, tenant: str, bucket: str, tokens: int) -> None:
        """Learn the length of an answer, at least 1 token."""
        lengths = self._lengths.get((tenant, bucket))
        if lengths is None:
            if len(self._lengths) >= MOST_HISTOGRAMS:
                del self._lengths[next(iter(self._lengths))]
            lengths = self._lengths[tenant, bucket] = LengthHistogram()
            self.any = True
        lengths.observe(tokens)

    def expected(self, tenant: str, bucket: str, most: int) -> int:
        """Return the tokens to reserve for an answer of at most `most` tokens."""
        lengths = self._lengths.get((tenant, bucket))
        if lengths is None or not 0 < lengths.quantile < most:
            return most
        return lengths.quantile
