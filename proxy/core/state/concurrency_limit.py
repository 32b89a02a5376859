"""How many requests may run at once so that tokens keep coming at the promised pace.

Additive increase, multiplicative decrease (Chiu and Jain 1989). The sample is a finished
request's mean gap between tokens: cheap, and what a batch that is too large raises for all.
A decrease is judged by requests that began after it, else one overload is answered many times.
"""

from math import ceil, inf

WINDOW_S = 1.0
ENOUGH = 10  # samples
QUANTILE = 0.95
DECREASE = 0.9
LEAST_TOKENS = 8  # of an answer: with fewer, the mean of the gaps says little


class Concurrency:
    """The limit of one backend, between 1 and `most`.

    Args:
        most: the configured limit, and where it starts.
        slo_s: the longest mean gap between tokens that 95 of 100 requests may see.
    """

    __slots__ = ("_changed_at", "_most", "_samples", "_since", "_slo_s", "_value", "limit", "on")

    def __init__(self, most: int, slo_s: float) -> None:
        self._most = most
        self._slo_s = slo_s
        self._value = float(most)
        self._samples: list[float] = []
        self._since = -inf
        self._changed_at = -inf
        self.limit = most
        self.on = slo_s < inf

    def finished(self, first_token_at: float, output_tokens: int, running: int, now: float) -> None:
        """A request of so many tokens ended; `running` counts it too."""
        if output_tokens < LEAST_TOKENS or first_token_at < self._changed_at:
            return
        if not self._samples:
            self._since = now
        self._samples.append((now - first_token_at) / (output_tokens - 1))
        if len(self._samples) < ENOUGH or now - self._since < WINDOW_S:
            return
        ordered = sorted(self._samples)
        slow = ordered[ceil(QUANTILE * len(ordered)) - 1] > self._slo_s
        if slow:
            # Not below what runs: a limit that nothing reaches is lowered for nothing.
            self._value = max(1.0, DECREASE * min(self._value, float(running)))
            self._changed_at = now
        elif running >= self.limit - 1:
            self._value = min(float(self._most), self._value + 1.0)
        self.limit = int(self._value)
        self._samples.clear()
