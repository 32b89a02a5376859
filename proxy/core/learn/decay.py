"""Sums that fade: what was sent or worked lately, halved every LOAD_HALF_LIFE_S."""

from math import exp, log
from typing import Final

LOAD_HALF_LIFE_S: Final = 120.0
LN_2: Final = 0.6931471805599453


class Recent:
    """`amount` is the sum as of `at`."""

    __slots__ = ("amount", "at")

    def __init__(self) -> None:
        self.amount = 0.0
        self.at = 0.0

    def add(self, more: float, now: float) -> None:
        self.amount = self.amount * decay(now - self.at) + more
        self.at = now

    def left(self, now: float) -> float:
        """What it has faded to."""
        return self.amount * decay(now - self.at)

    def rate(self, now: float) -> float:
        """The amount a second which, kept up, would have come to this sum."""
        return self.amount * decay(now - self.at) * LN_2 / LOAD_HALF_LIFE_S

    @property
    def rank(self) -> float:
        """Orders sums by what is left of them, whenever one looks; only of one above 0."""
        return log(self.amount) / LN_2 + self.at / LOAD_HALF_LIFE_S


def decay(elapsed_s: float) -> float:
    """What is left of a sum after `elapsed_s`."""
    return exp(-elapsed_s * (LN_2 / LOAD_HALF_LIFE_S))
