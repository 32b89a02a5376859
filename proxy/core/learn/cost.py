"""Learn the cost of a prefill on one backend: seconds from tokens, corrected by observation.

    seconds = a + b*u + g*u*(n - u/2)

u: uncached tokens, n: prompt tokens. The last term is causal attention: each new token attends to
everything before it, so a chunk of u tokens that ends at n costs u*(n - u/2) token pairs. The b and
g terms are equal at 37k to 54k tokens for models of 4B to 14B parameters.

The coefficients start at a prior for an 8B model on an H200. Each has a scale. An extended Kalman
filter follows the logarithms of the scales as a random walk (Ljung, System Identification, 11.4).
It observes the logarithm of measured over predicted seconds: a chat counts as much as a 120k-token
document, and no coefficient becomes negative or jumps. The scales mostly move together, as the
speed of the machine: chats on a slow machine predict its documents, while noise in chats, where
attention is 1 % of the work, hardly changes predictions for documents.
"""

from math import exp, log
from typing import Final

from forebay.proxy.core.learn.decay import Average
from forebay.proxy.core.model import ENOUGH

# An 8B model on an H200. Doubled: the first predictions are twice as long; a few answers mend it.
PRIOR_FIXED_S: Final = 0.02
PRIOR_S_PER_TOKEN: Final = 2.5e-5
PRIOR_S_PER_TOKEN_PAIR: Final = 1.0e-9
PRIOR_READ_S_PER_TOKEN: Final = 3.4e-8
"""Seconds by which each token of context in the batch makes a decode step longer: 131 KB of KV
cache at 80 % of an H200's bandwidth. Doubled: 93.0 instead of 94.8 % of multi-turn chats are in
time at 1.5 times capacity."""
NOISE: Final = 0.04
"""Variance of an observation's logarithm: batching, decode in the steps of a prefill. At 0.0625 two
documents no longer correct the lessons of a chat about an engine."""
UNSURE_SPEED: Final = 1.0
"""Largest variance of the part that the log scales have in common. Doubled: the first answer counts
for 98 instead of 96 %."""
UNSURE_SCALE: Final = 0.1
"""Largest variance of each log scale besides. Doubled: chats tell less about documents."""
DRIFT: Final = 0.001  # share of these variances added per observation; doubled: forgets faster
FURTHEST: Final = log(100.0)  # bound of a log scale; doubled: an engine may be 10,000 times as slow
MOST_OFF: Final = 5.0
"""An observation counts as at most this many times off. At 3, two documents no longer correct the
lessons of a chat about an engine. Doubled: one hiccup spoils predictions."""
FAR_OFF: Final = 3.0
"""A prefill hardly ever differs from its prediction by more than this factor. If it does,
something is wrong with the backend. A backend whose first tokens are later than its peers' by more
takes no work, and a request is hopeless if its prefill takes this many times its client's limit.
Doubled: a failing backend is used for longer."""
UNPROVEN: Final = 0.25
"""Relative error of a prediction that nothing has confirmed. A prefill that takes longer by more
was not cached as believed, and backends whose prefills differ by less are equally fast. Doubled:
new backends are avoided for longer, and a missed cache hit is noticed later."""
EDGES_S: Final[tuple[float, ...]] = (0.25, 1.0, 4.0)
"""Between the classes of `PredictionError`. Doubled: waits up to 0.5 s share the error of chats."""
OF_ALL: Final = 0.75
"""A wait is at least as uncertain as this share of the error of all prefills: short prefills are
off the most, but most waits consist of many of them. Doubled, it hardly applies. Without it,
1.7 to 3.1 instead of at most 1.9 % of Azure code's requests are rejected falsely."""

FULL_STEP_TOKENS: Final = 8_192
"""Tokens in one engine step under load: vLLM's default `max_num_batched_tokens` for servers.
Doubled: fewer steps are expected, so less of the longer prefills in the steps of a request."""

Vector = tuple[float, float, float]


def features(uncached_tokens: float, prompt_tokens: float) -> Vector:
    """Return the three terms of a prefill, each in seconds of the prior."""
    return (
        PRIOR_FIXED_S,
        PRIOR_S_PER_TOKEN * uncached_tokens,
        PRIOR_S_PER_TOKEN_PAIR * uncached_tokens * (prompt_tokens - uncached_tokens / 2),
    )


class PredictionError:
    """The smoothed relative error of predictions, by length of the prefill.

    Engine steps, and decoding in the steps of a prefill, matter less the longer it is. On simulated
    H200s predictions are off by 30 % on average below 0.25 s, by 10 % at 1 s and by 5 % at 8 s.
    One figure for all, dominated by chats, would reject requests behind a long prefill whose
    duration is well known.
    """

    __slots__ = ("_all", "_least", "_shares")

    def __init__(self) -> None:
        classes = len(EDGES_S) + 1
        self._all = UNPROVEN
        self._shares = [Average(UNPROVEN) for _ in range(classes)]
        self._least = [UNPROVEN * OF_ALL] * classes  # what `at` returns for each

    def observe(self, predicted_s: float, error: float) -> None:
        """Learn from one prefill. `error` is the logarithm of measured over predicted seconds."""
        self._all += (abs(error) - self._all) / ENOUGH
        class_ = _class_of(predicted_s)
        self._shares[class_].add(abs(error))
        for longer in range(class_ + 1, len(self._shares)):
            if self._shares[longer].seen:
                break
            self._shares[longer].value = self._shares[class_].value  # the best guess until then
        least = OF_ALL * self._all
        for place, share in enumerate(self._shares):
            self._least[place] = least = min(least, share.value)

    def at(self, seconds: float) -> float:
        """Return the relative error of a prediction of `seconds`, for one or many prefills.

        Never above the error of shorter predictions, as errors of independent parts cancel out.
        """
        return self._least[_class_of(seconds)]


class CostModel:
    """Predicts prefill seconds on one backend.

    Attributes:
        scale: factor of each term of the prior.
        observations: how many prefills were observed.
        proven_tokens: two observed prefills had at least this many uncached tokens.
        error: how far predictions are off.
    """

    __slots__ = (
        "_fixed_s",
        "_most_tokens",
        "_p",
        "_pair_s",
        "_token_s",
        "error",
        "observations",
        "proven_tokens",
        "scale",
    )

    def __init__(self) -> None:
        self.scale: Vector = (1.0, 1.0, 1.0)
        self.observations = 0
        self.proven_tokens = self._most_tokens = 0.0
        self.error = PredictionError()
        # The symmetric covariance: 00, 01, 02, 11, 12, 22. The large start lets the first
        # observations correct the prior quickly.
        own, common = UNSURE_SPEED + UNSURE_SCALE, UNSURE_SPEED
        self._p = (own, common, common, own, common, own)
        self._settle()

    def predict_s(self, uncached_tokens: float, prompt_tokens: float) -> float:
        per_token_s = self._token_s + self._pair_s * (prompt_tokens - uncached_tokens / 2)
        return self._fixed_s + uncached_tokens * per_token_s

    def read_s(self, context_tokens: float) -> float:
        """Return the seconds in which a decode step reads this much KV cache.

        A machine is taken to be as fast in reading as in prefills.
        """
        return PRIOR_READ_S_PER_TOKEN * self.scale[1] * context_tokens

    def total_s(self, terms: Vector) -> float:
        """Return the predicted seconds of work with these terms."""
        return self.scale[0] * terms[0] + self.scale[1] * terms[1] + self.scale[2] * terms[2]

    def observe(self, terms: Vector, elapsed_s: float) -> None:
        """Learn that prefills whose terms sum up to `terms` took `elapsed_s`."""
        # Written out: it runs once per answer, and loops over three cost as much as the rest.
        s0, s1, s2 = self.scale
        x0, x1, x2 = s0 * terms[0], s1 * terms[1], s2 * terms[2]
        predicted = x0 + x1 + x2
        x0, x1, x2 = x0 / predicted, x1 / predicted, x2 / predicted
        error = log(max(1.0 / MOST_OFF, min(MOST_OFF, elapsed_s / predicted)))
        if self.proven_tokens:  # the first two predictions rest on the prior
            self.error.observe(predicted, error)
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
        # Certainty falls with time, but not below that at the start.
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


def _class_of(seconds: float) -> int:
    class_ = 0
    while class_ < len(EDGES_S) and seconds >= EDGES_S[class_]:
        class_ += 1
    return class_
