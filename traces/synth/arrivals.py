"""Make arrival times from a seed: endless, in seconds from 0, ascending."""

from collections.abc import Iterator
from itertools import count, repeat
from math import isfinite
from random import Random

from forebay.traces.ground.errors import InputError

KINDS = ("burst", "constant", "poisson")


def arrival_times(kind: str, rate_per_s: float, seed: int) -> Iterator[float]:
    """Make endless arrival times, rounded to microseconds.

    `constant` has gaps of 1/rate. `poisson` has exponential gaps with that mean. `burst` has all
    arrivals at 0, at any rate.

    Raises:
        InputError: an unknown kind, or a rate that is not more than 0.
    """
    if kind not in KINDS:
        raise InputError(f"--arrivals {kind}: not known; one of: {', '.join(KINDS)}")
    if kind == "burst":
        return repeat(0.0)
    check_rate(rate_per_s, "--rate")
    if kind == "constant":
        return (round(index / rate_per_s, 6) for index in count())
    return poisson(rate_per_s, Random(f"{seed}:arrivals"))


def check_rate(rate_per_s: float, option: str) -> None:
    if not (isfinite(rate_per_s) and rate_per_s > 0):
        raise InputError(f"{option} {rate_per_s:g}: not a rate; give more than 0 requests a second")


def check_seconds(seconds: float, option: str) -> None:
    if not (isfinite(seconds) and seconds > 0):
        raise InputError(f"{option} {seconds:g}: give more than 0 seconds")


def check_share(share: float, option: str) -> None:
    if not 0 <= share <= 1:
        raise InputError(f"{option} {share:g}: not a share; give 0 to 1")


def poisson(rate_per_s: float, dice: Random) -> Iterator[float]:
    """Make endless times with exponential gaps, rounded to microseconds."""
    now_s = 0.0
    while True:
        now_s += dice.expovariate(rate_per_s)
        yield round(now_s, 6)
