"""Estimate the seconds of an engine's step: its decoding requests, and the chunks of its prefills.

    step = base + token * (tokens + pairs / slope),    pairs = place + tokens / 2 for each token

So a token at place p of its prompt costs as much as 1 + p / slope tokens at its beginning. The base
is learned from steps that only decode. If base and token were fitted together, steps that all last
as long as they may would look as if tokens cost nothing.
"""

from collections.abc import Sequence
from math import inf, sqrt

from forebay.proxy.core.model import ENOUGH

Chunk = tuple[int, int]
"""Tokens of a prompt in one step, and the tokens before them."""


class StepCost:
    """The cost of a step of one engine, corrected by each step that ends.

    A step that differs much from its prediction counts as if it differed by a factor of two. Only
    when several in a row differ in the same direction does this factor grow, so a single step that
    takes 100 times as long changes nothing, and another GPU is learned in a dozen steps.

    Attributes:
        base_s: seconds of a step that only decodes.
        token_s: seconds of a prompt token at place 0.
        slope: the place at which a token costs twice as much, tokens. inf: all cost the same.
    """

    __slots__ = (
        "_base_reach", "_base_seen", "_pairs", "_pairs_s", "_reach", "_seen", "_start_slope",
        "_tokens", "_tokens_pairs", "_tokens_s", "base_s", "slope", "token_s",
    )  # fmt: skip

    def __init__(
        self, base_s: float = 0.01, token_s: float = 3e-5, slope: float = 30_000.0
    ) -> None:
        """Take guesses. The first steps that are observed replace the guessed times.

        Args:
            slope: FLOPs of a token's matrix products / FLOPs of its attention to one token before
                it, for a dense model. This guess fades only where prompts show another.
        """
        assert base_s > 0
        assert token_s > 0
        assert slope > 0
        self.base_s = base_s
        self.token_s = token_s
        self.slope = self._start_slope = slope
        self._base_seen = self._seen = 0
        self._base_reach = self._reach = 2.0
        # Decayed sums over steps: squares and products of tokens, pairs and seconds.
        self._tokens = self._pairs = self._tokens_pairs = self._tokens_s = self._pairs_s = 0.0

    def chunk_s(self, tokens: int, place: int) -> float:
        """Return the seconds that a chunk of `tokens` behind `place` tokens adds to a step."""
        return self.token_s * tokens * (1.0 + (place + 0.5 * tokens) / self.slope)

    def tokens_within(self, seconds: float, place: int) -> int:
        """Return the number of tokens behind `place` tokens that can be computed in `seconds`."""
        if seconds <= 0.0:
            return 0
        worth, first = seconds / self.token_s, 1.0 + place / self.slope
        # The root of worth = n * first + n * n / (2 * slope), without cancellation.
        return int(2.0 * worth / (first + sqrt(first * first + 2.0 * worth / self.slope)))

    def step_s(self, chunks: Sequence[Chunk]) -> float:
        """Return the predicted seconds of a step with these chunks."""
        seconds = self.base_s
        for tokens, place in chunks:
            seconds += self.chunk_s(tokens, place)
        return seconds

    def observe(self, seconds: float, chunks: Sequence[Chunk]) -> None:
        """Learn from a step that took `seconds`.

        Args:
            chunks: chunks of its prefills, empty for a step that only decoded.
        """
        if not 0.0 < seconds < inf:
            return
        if not chunks:
            # A step without prefill is the base itself.
            seen, self._base_reach = _within(seconds, self.base_s, self._base_reach)
            self._base_seen += 1
            self.base_s += (seen - self.base_s) / min(self._base_seen, ENOUGH)
            return
        # What the step took beyond its base belongs to the prompts.
        tokens = pairs = 0.0
        for count, place in chunks:
            tokens += count
            pairs += count * (place + 0.5 * count)
        expected = self.token_s * (tokens + pairs / self.slope)
        beyond = max(seconds - self.base_s, 0.1 * seconds)
        seen, self._reach = _within(beyond, expected, self._reach)
        self._seen += 1
        keep = 1.0 - 1.0 / min(self._seen, ENOUGH)
        self._tokens = self._tokens * keep + tokens * tokens
        self._pairs = self._pairs * keep + pairs * pairs
        self._tokens_pairs = self._tokens_pairs * keep + tokens * pairs
        self._tokens_s = self._tokens_s * keep + tokens * seen
        self._pairs_s = self._pairs_s * keep + pairs * seen
        self._fit()

    def _fit(self) -> None:
        """Fit seconds of a token and of a pair, by least squares through the origin.

        A tenth of the squares counts for the slope that was guessed.
        """
        guess = 1.0 / self._start_slope
        weight = 0.1 * self._pairs
        a = self._tokens + weight * guess * guess
        b = self._tokens_pairs - weight * guess
        c = self._pairs + weight
        determinant = a * c - b * b
        if determinant <= 1e-9 * a * c:
            return
        token_s = (c * self._tokens_s - b * self._pairs_s) / determinant
        pair_s = (a * self._pairs_s - b * self._tokens_s) / determinant
        # Noise may give one of them below 0. Then the other explains all, or nearly all.
        if pair_s <= 0.0:
            self.token_s, self.slope = self._tokens_s / self._tokens, inf
        elif token_s <= 0.0:
            self.token_s, self.slope = self._pairs_s / self._pairs, 1.0
        else:
            self.token_s, self.slope = token_s, token_s / pair_s


def _within(value: float, expected: float, reach: float) -> tuple[float, float]:
    """Return `value` within the factor `reach` of the expected one, and the next reach."""
    if value > expected * reach:
        return expected * reach, reach * 2.0
    if value < expected / reach:
        return expected / reach, reach * 2.0
    return value, max(2.0, reach / 2.0)
