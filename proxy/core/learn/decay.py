"""Exponentially decayed sums: how much was sent or computed lately."""

from math import exp, log
from typing import Final

LOAD_HALF_LIFE_S: Final = 120.0
LN_2: Final = log(2.0)


class DecayedSum:
    """A sum that halves every LOAD_HALF_LIFE_S; `amount` is its value at time `at`."""

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
        return self.amount * decay(now - self.at) * LN_2 / LOAD_HALF_LIFE_S

    @property
    def rank(self) -> float:
        """A number that orders sums as their values do at any time; needs `amount` above 0."""
        return log(self.amount) / LN_2 + self.at / LOAD_HALF_LIFE_S


def decay(elapsed_s: float) -> float:
    """Return the share of a sum that is left after `elapsed_s` seconds."""
    return exp(-elapsed_s * (LN_2 / LOAD_HALF_LIFE_S))
