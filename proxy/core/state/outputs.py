"""How long answers turn out to be, so that KV cache is reserved for what comes, not what may come.

Clients ask for a `max_tokens` of thousands and take hundreds. What is learned is the 90th
percentile of the lengths seen lately from one tenant in one bucket, on a geometric histogram
(four bins to a doubling) whose counts are halved now and then.
"""

QUANTILE = 0.9
ENOUGH = 20  # answers before the quantile is believed
BINS = 4 * 22  # up to two million tokens
HALVED_EVERY = 256  # answers
LOOK_EVERY = 16  # answers between two looks at the histogram
MOST_KEYS = 4_096  # of tenants and buckets; tenants nobody has listed come from clients


class Lengths:
    __slots__ = ("_counts", "_seen", "quantile")

    def __init__(self) -> None:
        self._counts = [0.0] * BINS
        self._seen = 0
        self.quantile = 0  # tokens; 0 while too few were seen

    def observe(self, tokens: int) -> None:
        """An answer had so many tokens."""
        # The position of the highest bit and the two bits after it: cheaper than a logarithm.
        high = tokens.bit_length()
        bin_ = 4 * high + ((tokens << 2 >> (high - 1)) & 3)
        self._counts[bin_ if bin_ < BINS else BINS - 1] += 1.0
        self._seen += 1
        if self._seen % HALVED_EVERY == 0:
            self._counts = [count / 2 for count in self._counts]
        if self._seen == ENOUGH or (self._seen > ENOUGH and self._seen % LOOK_EVERY == 0):
            self.quantile = self._upper_edge(QUANTILE)

    def _upper_edge(self, quantile: float) -> int:
        """The largest number of tokens in the bin that holds the quantile."""
        bin_, left = 0, quantile * sum(self._counts) - self._counts[0]
        while left > 0 and bin_ < BINS - 1:
            bin_ += 1
            left -= self._counts[bin_]
        # Below 4 tokens the bits after the highest stand beyond the point: no next bin to stop at.
        return ((5 + bin_ % 4) << bin_ // 4 >> 3) - (bin_ >= 12)


class Outputs:
    """What to reserve for an answer."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[str, str], Lengths] = {}
        self.any = False  # was observed

    def observe(self, tenant: str, bucket: str, tokens: int) -> None:
        """An answer had so many tokens, at least one."""
        lengths = self._lengths.get((tenant, bucket))
        if lengths is None:
            if len(self._lengths) >= MOST_KEYS:
                del self._lengths[next(iter(self._lengths))]
            lengths = self._lengths[tenant, bucket] = Lengths()
            self.any = True
        lengths.observe(tokens)

    def expected(self, tenant: str, bucket: str, most: int) -> int:
        """Tokens to reserve for an answer of at most `most`."""
        lengths = self._lengths.get((tenant, bucket))
        if lengths is None or not 0 < lengths.quantile < most:
            return most
        return lengths.quantile
