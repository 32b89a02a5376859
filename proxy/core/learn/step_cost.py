"""Estimate the seconds of an engine's step: its decoding requests, and the chunks of its prefills.

    step = base + token * (tokens + pairs / slope),    pairs = place + tokens / 2 for each token

So a token at place p of its prompt costs as much as 1 + p / slope tokens at its beginning. The base
is learned from steps that only decode. If base and token were fitted together, steps that all last
as long as they may would look as if tokens cost nothing.
"""

from collections.abc import Sequence
from math import inf, sqrt

from forebay.proxy.core.model import ENOUGH, HISTORY

Chunk = tuple[int, int]
"""Tokens of a prompt in one step, and the tokens before them."""


class _Sums:
    """Decayed squares and products of the tokens, pairs and seconds of steps."""

    __slots__ = ("count", "memory", "pairs", "pairs_s", "tokens", "tokens_pairs", "tokens_s")

    def __init__(self, memory: int) -> None:
        self.memory = memory  # steps
        self.count = 0
        self.tokens = self.pairs = self.tokens_pairs = self.tokens_s = self.pairs_s = 0.0

    def add(self, tokens: float, pairs: float, seconds: float) -> None:
        self.count += 1
        keep = 1.0 - 1.0 / min(self.count, self.memory)
        self.tokens = self.tokens * keep + tokens * tokens
        self.pairs = self.pairs * keep + pairs * pairs
        self.tokens_pairs = self.tokens_pairs * keep + tokens * pairs
        self.tokens_s = self.tokens_s * keep + tokens * seconds
        self.pairs_s = self.pairs_s * keep + pairs * seconds

    def token_s(self, pair: float) -> float:
        """Return the seconds of a token if a pair costs `pair` times as much."""
        squares = self.tokens + pair * (2.0 * self.tokens_pairs + pair * self.pairs)
        return (self.tokens_s + pair * self.pairs_s) / squares

    def pair(self, guess: float) -> float:
        """Return the cost of a pair in tokens, at most 1.

        Least squares through the origin, in which a hundredth of the squares speaks for `guess`.
        """
        weight = 0.01 * self.pairs
        a = self.tokens + weight * guess * guess
        b = self.tokens_pairs - weight * guess
        c = self.pairs + weight
        token, pair = c * self.tokens_s - b * self.pairs_s, a * self.pairs_s - b * self.tokens_s
        # Noise may give one of them below 0.
        if pair <= 0.0:
            return 0.0
        return min(pair / token, 1.0) if token > 0.0 else 1.0


class StepCost:
    """The cost of a step of one engine, corrected by each step that ends.

    A step that differs much from its prediction counts as if it differed by a factor of two. Only
    when several in a row differ in the same direction does this factor grow, so a single step that
    takes 100 times as long changes little, and another GPU is learned in a dozen steps.

    Attributes:
        base_s: seconds of a step that only decodes.
        token_s: seconds of a prompt token at place 0.
        slope: the place at which a token costs twice as much, tokens. inf: all cost the same.
    """

    __slots__ = (
        "_base_count", "_base_reach", "_guess", "_lasting", "_reach", "_recent", "base_s", "slope",
        "token_s",
    )  # fmt: skip

    def __init__(
        self, base_s: float = 0.01, token_s: float = 3e-5, slope: float = 30_000.0
    ) -> None:
        """Take guesses. The first steps that are observed replace the guessed times.

        Args:
            slope: FLOPs of a token's matrix products / FLOPs of its attention to one token before
                it, for a dense model. This guess fades where prompts show another.
        """
        assert base_s > 0
        assert token_s > 0
        assert slope > 0
        self.base_s = base_s
        self.token_s = token_s
        self.slope = slope
        self._guess = 1.0 / slope
        self._base_count = 0
        self._base_reach = self._reach = 2.0
        # An engine may become slower at any time. What a pair costs beside a token is the model's.
        self._recent, self._lasting = _Sums(ENOUGH), _Sums(HISTORY)

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
            self._base_count += 1
            self.base_s += (seen - self.base_s) / min(self._base_count, ENOUGH)
            return
        # The time beyond the base belongs to the prompts.
        tokens = pairs = 0.0
        for count, place in chunks:
            tokens += count
            pairs += count * (place + 0.5 * count)
        expected = self.token_s * (tokens + pairs / self.slope)
        beyond = max(seconds - self.base_s, 0.1 * seconds)
        seen, self._reach = _within(beyond, expected, self._reach)
        self._recent.add(tokens, pairs, seen)
        self._lasting.add(tokens, pairs, seen)
        pair = self._lasting.pair(self._guess)
        self.token_s = self._recent.token_s(pair)
        self.slope = 1.0 / pair if pair > 0.0 else inf


def _within(value: float, expected: float, reach: float) -> tuple[float, float]:
    """Return `value` within the factor `reach` of the expected one, and the next reach."""
    if value > expected * reach:
        return expected * reach, reach * 2.0
    if value < expected / reach:
        return expected / reach, reach * 2.0
    return value, max(2.0, reach / 2.0)
