"""Draw lengths in tokens from distributions, with a `Random` that is passed in."""

from bisect import bisect_right
from dataclasses import dataclass
from math import exp, log
from random import Random
from statistics import NormalDist
from typing import Any, Protocol

from forebay.traces.command_line.options import same_named
from forebay.traces.errors import InputError


class Length(Protocol):
    """A distribution of tokens, 1 or more, that makes exactly one draw from `dice`."""

    def draw(self, dice: Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    tokens: int

    def draw(self, dice: Random) -> int:
        dice.random()  # every kind makes one draw, so that a change of kind moves no later draw
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    least: int
    most: int

    def draw(self, dice: Random) -> int:
        return self.least + int(dice.random() * (self.most - self.least + 1))


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lognormal, truncated (not clipped) at its bounds. `sigma` is the logarithm's."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, dice: Random) -> int:
        normal = NormalDist(log(self.median), self.sigma)
        low, high = normal.cdf(log(self.least)), normal.cdf(log(self.most))
        # random() may be 0 and the bounds far out in a tail: keep the argument inside (0, 1).
        share = min(max(low + dice.random() * (high - low), 1e-15), 1 - 1e-15)
        return min(max(round(exp(normal.inv_cdf(share))), self.least), self.most)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Linear interpolation between (share, tokens) points, from share 0 to share 1."""

    points: tuple[tuple[float, int], ...]

    def draw(self, dice: Random) -> int:
        share = dice.random()
        right = bisect_right(self.points, share, key=lambda point: point[0])
        (low, least), (high, most) = self.points[right - 1], self.points[right]
        return least + round((share - low) / (high - low) * (most - least))


# Measured on the first half of Azure's 2023 conversation trace (9,683 requests; CC-BY-4.0, Patel et
# al., Splitwise, ISCA 2024). The input leaves out the 0.1 % of prompts beyond 5,000 tokens, which
# would count as documents.
AZURE_CONV_INPUT = Quantiles(
    (
        (0.0, 2),
        (0.01, 40),
        (0.05, 181),
        (0.1, 247),
        (0.2, 390),
        (0.3, 407),
        (0.4, 972),
        (0.5, 1035),
        (0.6, 1081),
        (0.7, 1140),
        (0.8, 1317),
        (0.9, 4075),
        (0.95, 4086),
        (0.99, 4122),
        (1.0, 5000),
    )
)
AZURE_CONV_OUTPUT = Quantiles(
    (
        (0.0, 7),
        (0.01, 16),
        (0.05, 38),
        (0.1, 50),
        (0.2, 71),
        (0.3, 88),
        (0.4, 102),
        (0.5, 141),
        (0.6, 213),
        (0.7, 393),
        (0.8, 405),
        (0.9, 428),
        (0.95, 463),
        (0.99, 613),
        (0.999, 939),
        (1.0, 1000),
    )
)
NAMED: dict[str, Length] = {
    "azure-conv-input": AZURE_CONV_INPUT,
    "azure-conv-output": AZURE_CONV_OUTPUT,
}
SYNTAX = (
    "TOKENS, uniform:MIN,MAX, lognormal:MEDIAN,SIGMA,MIN,MAX, azure-conv-input or azure-conv-output"
)


def parse_length(text: str, option: str) -> Length:
    """Read a distribution in the form of `SYNTAX` (InputError: names `option` and the fix)."""
    if text in NAMED:
        return NAMED[text]
    kind, colon, rest = text.partition(":")
    parts = (rest if colon else text).split(",")
    try:
        match kind if colon else "fixed", parts:
            case "fixed", [tokens]:
                return Fixed(_tokens(tokens))
            case "uniform", [least, most]:
                return _uniform(_tokens(least), _tokens(most))
            case "lognormal", [median, sigma, least, most]:
                return _lognormal(float(median), float(sigma), _tokens(least), _tokens(most))
    except ValueError:
        pass
    raise InputError(f"{option}: {text!r} is not a length; write {SYNTAX}")


def _tokens(text: str) -> int:
    """Read a whole number of tokens from 1 to 1e9 (ValueError: another number)."""
    number = float(text)
    if not (number.is_integer() and 1 <= number <= 1e9):
        raise ValueError(text)
    return int(number)


def _uniform(least: int, most: int) -> Uniform:
    if least > most:
        raise ValueError(least)
    return Uniform(least, most)


def _lognormal(median: float, sigma: float, least: int, most: int) -> Lognormal:
    if not (least <= median <= most and 0 < sigma <= 10):
        raise ValueError(median)
    return Lognormal(median, sigma, least, most)


def settings_of(options: Any, kind: type) -> dict[str, Any]:
    """Return the options that are settings of the dataclass `kind`, too.

    A length that was typed, an option `..._tokens` with a text, is parsed (InputError).
    """
    return {
        name: parse_length(value, f"--{name.replace('_', '-')}")
        if name.endswith("_tokens") and isinstance(value, str)
        else value
        for name, value in same_named(options, kind).items()
    }
