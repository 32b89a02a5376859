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

    __slots__ = ("_fixed_s", "_p", "_pair_s", "_token_s", "observations", "scale", "spread")

    def __init__(self) -> None:
        self.scale: Vector = (1.0, 1.0, 1.0)
        self.observations = 0
        self.spread = 0.25  # smoothed relative error of predictions, either way
        # The covariance, which is symmetric: 00, 01, 02, 11, 12, 22. Start unsure by a factor of
        # a few, so that the first answers correct the prior fast.
        self._p = (UNSURE / 3, 0.0, 0.0, UNSURE / 3, 0.0, UNSURE / 3)
        self._settle()

    def predict_s(self, uncached_tokens: float, prompt_tokens: float) -> float:
        per_token_s = self._token_s + self._pair_s * (prompt_tokens - uncached_tokens / 2)
        return self._fixed_s + uncached_tokens * per_token_s

    def observe(self, terms: Vector, elapsed_s: float) -> None:
        """Work of `terms` (the sum over one or more prefills) took `elapsed_s`."""
        # Written out: it runs once an answer, and loops over three cost as much as a whole step.
        s0, s1, s2 = self.scale
        t0, t1, t2 = terms
        predicted = s0 * t0 + s1 * t1 + s2 * t2
        error = min(elapsed_s / predicted, MOST_OFF) - 1.0
        x0, x1, x2 = t0 / predicted, t1 / predicted, t2 / predicted
        p00, p01, p02, p11, p12, p22 = self._p
        y0 = p00 * x0 + p01 * x1 + p02 * x2
        y1 = p01 * x0 + p11 * x1 + p12 * x2
        y2 = p02 * x0 + p12 * x1 + p22 * x2
        gain = 1.0 / (NOISE * FORGETTING + x0 * y0 + x1 * y1 + x2 * y2)
        self.spread += SPREAD_GAIN * (abs(error) - self.spread)
        step = gain * error
        self.scale = (
            max(LEAST_SHARE, s0 + y0 * step),
            max(LEAST_SHARE, s1 + y1 * step),
            max(LEAST_SHARE, s2 + y2 * step),
        )
        # Forget only while sure: directions never excited would otherwise grow without bound.
        keep = 1.0 / FORGETTING if p00 + p11 + p22 < UNSURE else 1.0
        self._p = (
            (p00 - y0 * y0 * gain) * keep,
            (p01 - y0 * y1 * gain) * keep,
            (p02 - y0 * y2 * gain) * keep,
            (p11 - y1 * y1 * gain) * keep,
            (p12 - y1 * y2 * gain) * keep,
            (p22 - y2 * y2 * gain) * keep,
        )
        self.observations += 1
        self._settle()

    def _settle(self) -> None:
        fixed, linear, pairs = self.scale
        self._fixed_s = fixed * PRIOR_FIXED_S
        self._token_s = linear * PRIOR_S_PER_TOKEN
        self._pair_s = pairs * PRIOR_S_PER_TOKEN_PAIR
