"""How far the prefixes that a backend was believed to hold are from what it reports."""

BETWEEN = 1.0  # token: rounding


class PrefixError:
    """Sums over the answers that said how many prompt tokens were cached.

    Attributes:
        answers: how many did.
        predicted_tokens, reported_tokens: cached, by us before and by the engine after.
        absolute_tokens: sum of the differences, whatever their sign.
        within_block: answers in which they differ by no more than a block of prompt text.
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
        """One answer came."""
        error = abs(predicted_tokens - reported_tokens)
        self.answers += 1
        self.predicted_tokens += predicted_tokens
        self.reported_tokens += reported_tokens
        self.absolute_tokens += error
        self.within_block += error <= block_tokens + BETWEEN

    @property
    def bias_tokens(self) -> float:
        """Mean of predicted less reported: above 0, more was believed than was there."""
        return (self.predicted_tokens - self.reported_tokens) / max(1, self.answers)

    @property
    def mean_tokens(self) -> float:
        """Mean absolute difference."""
        return self.absolute_tokens / max(1, self.answers)

    @property
    def within_block_share(self) -> float:
        return self.within_block / max(1, self.answers)
