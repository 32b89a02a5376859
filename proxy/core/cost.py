"""Learn what a prefill costs on one backend: seconds from tokens, corrected by what is observed.

    seconds = a + b*u + g*u*(n - u/2)

u: uncached tokens, n: prompt tokens. The last term is causal attention: each new token looks at
everything before it, so a chunk of u tokens that ends at n costs u*(n - u/2) token pairs
(physics of a transformer prefill; crossover of b and g at 37k-54k tokens for 4B-14B models).
The coefficients start at a prior for a 8B model on an H200 and follow recursive least squares
with forgetting (Ljung, System Identification, 11.2), on relative errors so that a chat weighs as
much as a 120k-token document. Coefficients never become negative.
"""

PRIOR_FIXED_S = 0.02
PRIOR_S_PER_TOKEN = 2.5e-5
PRIOR_S_PER_TOKEN_PAIR = 1.0e-9
FORGETTING = 0.99
NOISE = 0.04  # variance of one relative observation: batching, decode beside the prefill
LEAST_SHARE = 0.02  # of the prior: a coefficient may shrink this far, never to nothing
UNSURE = 12.0  # sum of the variances of the three scales at the start, and their ceiling
SPREAD_GAIN = 0.05
MOST_OFF = 5.0  # one observation counts as at most this many times the prediction

Vector = tuple[float, float, float]


def features(uncached_tokens: float, prompt_tokens: float) -> Vector:
    """The three terms of a prefill, each in seconds of the prior."""
    return (
        PRIOR_FIXED_S,
        PRIOR_S_PER_TOKEN * uncached_tokens,
        PRIOR_S_PER_TOKEN_PAIR * uncached_tokens * (prompt_tokens - uncached_tokens / 2),
    )


class CostModel:
    """Prefill seconds on one backend; `scale` multiplies each term of the prior."""

    __slots__ = ("_p", "observations", "scale", "spread")

    def __init__(self) -> None:
        self.scale: list[float] = [1.0, 1.0, 1.0]
        self.observations = 0
        self.spread = 0.25  # smoothed relative error of predictions, either way
        # Start unsure by a factor of a few, so that the first answers correct the prior fast.
        self._p = [[UNSURE / 3 if i == j else 0.0 for j in range(3)] for i in range(3)]

    def predict_s(self, uncached_tokens: float, prompt_tokens: float) -> float:
        fixed, linear, pairs = self.scale
        return (
            fixed * PRIOR_FIXED_S
            + linear * PRIOR_S_PER_TOKEN * uncached_tokens
            + pairs
            * PRIOR_S_PER_TOKEN_PAIR
            * uncached_tokens
            * (prompt_tokens - uncached_tokens / 2)
        )

    def observe(self, terms: Vector, elapsed_s: float) -> None:
        """Work of `terms` (the sum over one or more prefills) took `elapsed_s`."""
        predicted = sum(s * x for s, x in zip(self.scale, terms, strict=True))
        elapsed_s = min(elapsed_s, predicted * MOST_OFF)
        x = [term / predicted for term in terms]
        px = [sum(row[j] * x[j] for j in range(3)) for row in self._p]
        denominator = NOISE * FORGETTING + sum(xi * pxi for xi, pxi in zip(x, px, strict=True))
        error = elapsed_s / predicted - 1.0
        self.spread += SPREAD_GAIN * (abs(error) - self.spread)
        for i in range(3):
            self.scale[i] = max(LEAST_SHARE, self.scale[i] + px[i] / denominator * error)
        # Forget only while sure: directions never excited would otherwise grow without bound.
        forget = FORGETTING if sum(self._p[i][i] for i in range(3)) < UNSURE else 1.0
        self._p = [
            [(self._p[i][j] - px[i] * px[j] / denominator) / forget for j in range(3)]
            for i in range(3)
        ]
        self.observations += 1
