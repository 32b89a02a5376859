"""Track the holdings of running requests on one backend: KV cache, and the part of each tenant.

A block that several running requests share counts once. A block that was cached but unused counts
as soon as a running request uses it, because it can no longer be evicted. Ends of prompts and
outputs are not shared. Hashes are chained, so the part that one prompt shares with the others is
its longest common beginning with any of them.

Clients ask for a `max_tokens` of thousands and use hundreds. So the output length is learned: the
90th percentile of recent answers of one tenant in one bucket, from a geometric histogram (four bins
per doubling) whose counts are halved from time to time. Until then one request reserves at most
half of the pool for its output.

Slots and KV cache are divided as prefill seconds are: while a request waits for either, the
tenant that holds least of them, over its weight, is next. KV cache that others reserved for outputs
beyond their fair shares, and have not used, keeps no tenant from its own share.
"""

from math import fsum, inf, sqrt
from typing import Final

from forebay.proxy.core.learn.decay import Average
from forebay.proxy.core.learn.prefix_index import common_run
from forebay.proxy.core.model import ENOUGH, HISTORY, MAJORITY, REMEMBERED_MOST, Request
from forebay.proxy.core.state.tenants import Fairness

OUTPUT_QUANTILE: Final = 0.9  # share of answers that fit into their reservation; it has no double


class _Root:
    """The running prompts that share their first block."""

    __slots__ = ("block_tokens", "prompts")

    def __init__(self, block_tokens: float) -> None:
        self.block_tokens = block_tokens  # estimated for the first of them
        self.prompts: dict[str, tuple[int, ...]] = {}

    def shared(self, blocks: tuple[int, ...]) -> int:
        """Return the number of leading blocks of a prompt that these prompts hold."""
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

    An answer fills its KV cache as it grows, and gives it back at its end. At a random moment it
    holds half of that on average, evenly distributed from none to all. Many answers together
    hardly ever hold more than the sum of the means and two standard deviations, which is what
    counts here. So one answer alone counts in full, and a hundred count a little over half.

    Attributes:
        held: tokens.
        freed: average tokens that came free when a request ended.
    """

    def __init__(self) -> None:
        self._roots: dict[int, _Root] = {}
        self._prompts = self._answers = self._squares = 0.0
        self.held = 0.0
        self.freed = Average(0.0)

    @property
    def tokens(self) -> int:
        """Tokens held, rounded."""
        return round(self.held)

    @property
    def answer_share(self) -> float:
        """The part of the reservations for answers that counts as held."""
        return (self.held - self._prompts) / self._answers if self._answers > 0.0 else 1.0

    def need(self, request: Request, output_tokens: int) -> int:
        """Return the tokens that the request would add with an output of this length."""
        blocks = request.blocks
        root = self._roots.get(blocks[0]) if blocks else None
        shared = root.shared(blocks) if root is not None else 0
        return max(0, request.prompt_tokens + output_tokens - int(shared * request.block_tokens))

    def take(self, request: Request, output_tokens: int) -> None:
        """Reserve KV cache for a request that is sent, and for its expected output."""
        self._prompts += _unshared(request)
        blocks = request.blocks
        if blocks:
            root = self._roots.get(blocks[0])
            if root is None:
                root = self._roots[blocks[0]] = _Root(request.block_tokens)
            self._prompts += (len(blocks) - root.shared(blocks)) * root.block_tokens
            root.prompts[request.id] = blocks
        self._count(output_tokens, 1)

    def give_back(self, request: Request, output_tokens: int) -> None:
        """Give back the KV cache that `take` reserved with the same `output_tokens`."""
        before = self.held
        self._prompts -= _unshared(request)
        blocks = request.blocks
        if blocks:
            root = self._roots[blocks[0]]
            del root.prompts[request.id]
            self._prompts -= (len(blocks) - root.shared(blocks)) * root.block_tokens
            if not root.prompts:
                del self._roots[blocks[0]]
        self._count(output_tokens, -1)
        self.freed.add(before - self.held)

    def _count(self, output_tokens: int, number: int) -> None:
        """Count an answer that begins, or that ends if `number` is -1."""
        answers = self._answers = self._answers + number * output_tokens
        squares = self._squares = self._squares + number * output_tokens * output_tokens
        # An even distribution from 0 to n has the variance n^2 / 12.
        likely = answers / 2 + 2 * sqrt(squares / 12) if squares > 0.0 else answers / 2
        self.held = self._prompts + (answers if answers < likely else likely)
        if self.held < 0.5:  # rounding errors
            self.held = self._prompts = 0.0


def _unshared(request: Request) -> float:
    tokens = request.prompt_tokens - len(request.blocks) * request.block_tokens
    return tokens if tokens > 0.0 else 0.0


def reserved(output_tokens: int, pool_tokens: float) -> int:
    """Return the KV cache that one request reserves for its output: at most half of the pool."""
    most = MAJORITY * pool_tokens
    return output_tokens if output_tokens <= most else int(most)


class Holding:
    """Shares of the slots, the KV cache, and the KV cache for outputs that a tenant holds."""

    __slots__ = ("kv", "outputs", "requests", "slots")

    def __init__(self, slots: float = 0.0, kv: float = 0.0, outputs: float = 0.0) -> None:
        self.requests = 1
        self.slots = slots
        self.kv = kv
        self.outputs = outputs


class Holdings:
    """Adds up the holdings of each tenant's running requests on one backend, and orders tenants.

    Attributes:
        fairness: the counters and weights of tenants.
        scarce: a waiting request lacks slots or KV cache.
        last: tenants that would take the last engine with a batch: their turn is after all others'.
    """

    def __init__(self, fairness: Fairness) -> None:
        self.fairness = fairness
        self._of: dict[str, Holding] = {}
        self.scarce = False
        self.last: frozenset[str] = frozenset()

    def take(self, tenant: str, more: Holding) -> None:
        """Add the holding of a request of the tenant."""
        held = self._of.get(tenant)
        if held is None:
            self._of[tenant] = Holding(more.slots, more.kv, more.outputs)
            return
        held.requests += 1
        held.slots += more.slots
        held.kv += more.kv
        held.outputs += more.outputs

    def give_back(self, tenant: str, less: Holding) -> None:
        """Subtract the holding of a request of the tenant."""
        held = self._of[tenant]
        held.requests -= 1
        if not held.requests:
            del self._of[tenant]
        held.slots -= less.slots
        held.kv -= less.kv
        held.outputs -= less.outputs

    def part(self, tenant: str) -> float:
        """Return the larger of a tenant's shares of the slots and of the KV cache."""
        held = self._of.get(tenant)
        return 0.0 if held is None else max(held.slots, held.kv)

    def turn_by_counter(self, tenant: str) -> float:
        """Return the number that orders tenants while nothing is scarce, the smallest first."""
        return inf if tenant in self.last else self.fairness.counter(tenant)

    def turn_by_holding(self, tenant: str) -> float:
        """Return the number that orders tenants while something is scarce, the smallest first."""
        return inf if tenant in self.last else self.part(tenant) / self.fairness.weight(tenant)

    def holds_less(self, tenant: str, other: str) -> bool:
        """True if a tenant holds less than another tenant, over their weights."""
        weight = self.fairness.weight
        return self.part(tenant) / weight(tenant) < self.part(other) / weight(other)

    def below_share(self, tenant: str) -> bool:
        """True if a tenant holds less than its fair share while others hold something."""
        return self.part(tenant) < self.fairness.weight(tenant) * self._share(tenant) < 1.0

    def lent(self, tenant: str) -> float:
        """Return the share of the KV cache that is still owed to a tenant out of others' outputs.

        It is reserved by others for outputs beyond their fair shares. It is at most the part that
        the tenant lacks of its own share.
        """
        weight, share = self.fairness.weight, self._share(tenant)
        held = self._of.get(tenant)
        lacks = weight(tenant) * share - (held.kv if held is not None else 0.0)
        if lacks <= 0.0:
            return 0.0
        beyond = (
            min(other.outputs, max(0.0, other.kv - weight(name) * share))
            for name, other in self._of.items()
            if name != tenant
        )
        return min(lacks, fsum(beyond))

    def _share(self, tenant: str) -> float:
        """Return the fair share for each unit of weight among the tenant and all that hold any."""
        weight = self.fairness.weight
        return 1.0 / fsum(weight(name) for name in {tenant, *self._of})


class LengthHistogram:
    """Recent answer lengths. `quantile` is in tokens, 0 while too few were seen."""

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
    """Expected answer lengths by tenant and bucket."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[str, str], LengthHistogram] = {}

    def observe(self, tenant: str, bucket: str, tokens: int) -> None:
        """Learn the length of an answer, at least 1 token."""
        lengths = self._lengths.get((tenant, bucket))
        if lengths is None:
            if len(self._lengths) >= REMEMBERED_MOST:
                del self._lengths[next(iter(self._lengths))]
            lengths = self._lengths[tenant, bucket] = LengthHistogram()
        lengths.observe(tokens)

    def expected(self, tenant: str, bucket: str, most: int, sequences: int = 1) -> int:
        """Return the tokens to reserve for `sequences` answers of `most` tokens at most in all."""
        lengths = self._lengths.get((tenant, bucket)) if self._lengths else None
        if lengths is None or not 0 < sequences * lengths.quantile < most:
            return most
        return sequences * lengths.quantile
