"""Decayed sums of recent tokens and seconds, and averages of recent values."""

from math import exp, log
from typing import Final

from forebay.proxy.core.model import ENOUGH

LOAD_TIME_S: Final = 173.0
"""Time constant of loads (half-life 120 s): long enough to even out a burst of documents. A tenant
that is idle for this long is forgotten, with its overuse. Doubled: the balance between
equal backends is restored more slowly."""
RECENT_S: Final = 10.0
"""Window and time constant of everything else that counts as recent: arrivals of a bucket or
tenant, use of buckets, tenants and classes, late first tokens. Doubled or halved, little changes.
With LOAD_TIME_S for the use of buckets, the forecast lags behind the load in overload."""


class Average:
    """The mean of a guess and the first ENOUGH values. Each later value counts 1 / ENOUGH."""

    __slots__ = ("seen", "value")

    def __init__(self, guess: float) -> None:
        self.value = guess
        self.seen = 0

    def add(self, value: float) -> None:
        self.seen += 1
        count = 1 + self.seen
        self.value += (value - self.value) / (count if count < ENOUGH else ENOUGH)


class DecayedSum:
    """A sum that decays with the time constant `time_s`. `amount` is its value at time `at`."""

    __slots__ = ("amount", "at", "time_s")

    def __init__(self, time_s: float = LOAD_TIME_S) -> None:
        self.time_s = time_s
        self.amount = 0.0
        self.at = 0.0

    def add(self, more: float, now: float) -> None:
        self.amount = self.amount * exp((self.at - now) / self.time_s) + more
        self.at = now

    def value(self, now: float) -> float:
        return self.amount * exp((self.at - now) / self.time_s)

    def rate(self, now: float) -> float:
        """Return the constant rate per second that would have led to this sum."""
        return self.value(now) / self.time_s

    @property
    def rank(self) -> float:
        """A number that orders sums with one time constant as their values do at any time.

        It needs an `amount` above 0.
        """
        return log(self.amount) + self.at / self.time_s
