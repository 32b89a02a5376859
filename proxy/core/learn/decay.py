"""Decayed sums of what was sent or computed lately, and averages of recent values."""

from math import exp, log
from typing import Final

from forebay.proxy.core.model import ENOUGH

LOAD_TIME_S: Final = 173.0
"""Time constant of loads (half-life 120 s): long enough to even out a burst of documents. A tenant
that is idle for so long is forgotten, with what it used too much. Doubled: the balance between
equal backends is restored more slowly."""
RECENT_S: Final = 10.0
"""Window and time constant of everything else that counts as recent: arrivals of a bucket or
tenant, use of tenants and classes, late first tokens. Doubled or halved, nothing changed."""


class Average:
    """The mean of a guess and the first ENOUGH values; then each new value counts 1 / ENOUGH."""

    __slots__ = ("seen", "value")

    def __init__(self, guess: float) -> None:
        self.value = guess
        self.seen = 0

    def add(self, value: float) -> None:
        self.seen += 1
        self.value += (value - self.value) / min(ENOUGH, 1 + self.seen)


class DecayedSum:
    """A sum that decays with LOAD_TIME_S; `amount` is its value at time `at`."""

    __slots__ = ("amount", "at")

    def __init__(self) -> None:
        self.amount = 0.0
        self.at = 0.0

    def add(self, more: float, now: float) -> None:
        self.amount = self.amount * decay(now - self.at) + more
        self.at = now

    def value(self, now: float) -> float:
        return self.amount * decay(now - self.at)

    def rate(self, now: float) -> float:
        """Return the constant rate per second that would have led to this sum."""
        return self.amount * decay(now - self.at) / LOAD_TIME_S

    @property
    def rank(self) -> float:
        """A number that orders sums as their values do at any time; needs `amount` above 0."""
        return log(self.amount) + self.at / LOAD_TIME_S


def decay(elapsed_s: float) -> float:
    """Return the share of a sum that is left after `elapsed_s` seconds."""
    return exp(-elapsed_s / LOAD_TIME_S)
