"""Learn what a prefill costs on one backend: seconds from tokens, corrected by what is observed.

    seconds = a + b*u + g*u*(n - u/2)

u: uncached tokens, n: prompt tokens. The last term is causal attention: each new token looks at
everything before it, so a chunk of u tokens that ends at n costs u*(n - u/2) token pairs
(physics of a transformer prefill; crossover of b and g at 37k-54k tokens for 4B-14B models).
The coefficients start at a prior for a 8B model on an H200, each times a scale whose logarithm an
extended Kalman filter follows (a random walk; Ljung, System Identification, 11.4) from the
logarithm of taken over predicted seconds, so that a chat weighs as much as a 120k-token document
and no coefficient becomes negative or jumps. The scales are mostly one, the speed of the machine:
so a slow machine's chats say what its documents will take, and noise in chats, in which attention
is a hundredth of the work, does not decide about documents.
"""

from math import exp, log
from typing import Final

from forebay.proxy.core.learn.spread import Spread

PRIOR_FIXED_S: Final = 0.02
PRIOR_S_PER_TOKEN: Final = 2.5e-5
PRIOR_S_PER_TOKEN_PAIR: Final = 1.0e-9
NOISE: Final = 0.04  # variance of one observation's logarithm: batching, decode beside the prefill
UNSURE_SPEED: Final = (
    1.0  # variance, at the start and at most, of what the log scales have in common ...
)
UNSURE_SCALE: Final = 0.1  # ... and of what each has besides
DRIFT: Final = 0.001  # of these: how much less sure an observation later
GUESSES: Final = 2  # the first predictions rest on the prior: their errors are corrected at once
FURTHEST: Final = log(100.0)  # a coefficient stays within this factor of its prior, either way
LEAST_S: Final = 1e-6  # of an observation: clocks give zero
MOST_OFF: Final = log(5.0)  # one observation counts as at most this many times off, either way

Vector = tuple[float, float, float]


def features(uncached_tokens: float, prompt_tokens: float) -> Vector:
    """The three terms of a prefill, each in seconds of the prior."""
    return (
        PRIOR_FIXED_S,
        PRIOR_S_PER_TOKEN * uncached_tokens,
        PRIOR_S_PER_TOKEN_PAIR * uncached_tokens * (prompt_tokens - uncached_tokens / 2),
    )


class CostModel:
    """Prefill seconds on one backend.

    Attributes:
        scale: multiplies each term of the prior.
        observations: how many there were.
        proven_tokens: two of them were of at least so many uncached tokens.
        spread: how far off predictions are.
    """

    __slots__ = (
        "_fixed_s",
        "_most_tokens",
        "_p",
        "_pair_s",
        "_token_s",
        "observations",
        "proven_tokens",
        "scale",
        "spread",
    )

    def __init__(self) -> None:
        self.scale: Vector = (1.0, 1.0, 1.0)
        self.observations = 0
        self.proven_tokens = self._most_tokens = 0.0
        self.spread = Spread()
        # The covariance, which is symmetric: 00, 01, 02, 11, 12, 22. Start unsure by a factor of
        # a few, so that the first answers correct the prior fast.
        own, common = UNSURE_SPEED + UNSURE_SCALE, UNSURE_SPEED
        self._p = (own, common, common, own, common, own)
        self._settle()

    def predict_s(self, uncached_tokens: float, prompt_tokens: float) -> float:
        per_token_s = self._token_s + self._pair_s * (prompt_tokens - uncached_tokens / 2)
        return self._fixed_s + uncached_tokens * per_token_s

    def total_s(self, terms: Vector) -> float:
        """What work of `terms` takes."""
        return self.scale[0] * terms[0] + self.scale[1] * terms[1] + self.scale[2] * terms[2]

    def observe(self, terms: Vector, elapsed_s: float) -> None:
        """Work of `terms` (the sum over one or more prefills) took `elapsed_s`."""
        # Written out: it runs once an answer, and loops over three cost as much as a whole step.
        s0, s1, s2 = self.scale
        x0, x1, x2 = s0 * terms[0], s1 * terms[1], s2 * terms[2]
        predicted = x0 + x1 + x2
        x0, x1, x2 = x0 / predicted, x1 / predicted, x2 / predicted
        error = log(max(elapsed_s, LEAST_S) / predicted)
        error = max(-MOST_OFF, min(MOST_OFF, error))
        if self.observations >= GUESSES:
            self.spread.observe(predicted, error)
        p00, p01, p02, p11, p12, p22 = self._p
        y0 = p00 * x0 + p01 * x1 + p02 * x2
        y1 = p01 * x0 + p11 * x1 + p12 * x2
        y2 = p02 * x0 + p12 * x1 + p22 * x2
        gain = 1.0 / (NOISE + x0 * y0 + x1 * y1 + x2 * y2)
        step = gain * error
        self.scale = (
            exp(max(-FURTHEST, min(FURTHEST, log(s0) + y0 * step))),
            exp(max(-FURTHEST, min(FURTHEST, log(s1) + y1 * step))),
            exp(max(-FURTHEST, min(FURTHEST, log(s2) + y2 * step))),
        )
        # Less sure with time, but never less than at the start: what is not seen cannot run away.
        drift = DRIFT if p00 + p11 + p22 < 3 * (UNSURE_SPEED + UNSURE_SCALE) else 0.0
        own, common = drift * (UNSURE_SPEED + UNSURE_SCALE), drift * UNSURE_SPEED
        self._p = (
            p00 - y0 * y0 * gain + own,
            p01 - y0 * y1 * gain + common,
            p02 - y0 * y2 * gain + common,
            p11 - y1 * y1 * gain + own,
            p12 - y1 * y2 * gain + common,
            p22 - y2 * y2 * gain + own,
        )
        self.observations += 1
        tokens = terms[1] / PRIOR_S_PER_TOKEN
        if tokens > self.proven_tokens:
            self.proven_tokens = min(tokens, self._most_tokens)
            self._most_tokens = max(tokens, self._most_tokens)
        self._settle()

    def _settle(self) -> None:
        fixed, linear, pairs = self.scale
        self._fixed_s = fixed * PRIOR_FIXED_S
        self._token_s = linear * PRIOR_S_PER_TOKEN
        self._pair_s = pairs * PRIOR_S_PER_TOKEN_PAIR
