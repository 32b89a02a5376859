"""Draw lengths in tokens from distributions, with a `Random` that is passed in."""

from bisect import bisect_right
from dataclasses import dataclass
from math import exp, log
from random import Random
from statistics import NormalDist
from typing import Annotated, Any, Protocol, cast

import typer

from forebay.traces.ground.errors import InputError


class Length(Protocol):
    """A distribution of tokens, 1 or more, that makes exactly one draw from `dice`.

    Its text is the option that makes it.
    """

    def draw(self, dice: Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    tokens: int

    def __str__(self) -> str:
        return str(self.tokens)

    def draw(self, dice: Random) -> int:
        dice.random()  # every kind makes one draw, so that a change of kind moves no later draw
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    least: int
    most: int

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(self.least)

    def __str__(self) -> str:
        return f"uniform:{self.least},{self.most}"

    def draw(self, dice: Random) -> int:
        return self.least + int(dice.random() * (self.most - self.least + 1))


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lognormal, truncated (not clipped) at its bounds. `sigma` is the logarithm's."""

    median: float
    sigma: float
    least: int
    most: int

    def __post_init__(self) -> None:
        if not (self.least <= self.median <= self.most and 0 < self.sigma <= 10):
            raise ValueError(self.median)

    def __str__(self) -> str:
        return f"lognormal:{self.median:g},{self.sigma:g},{self.least},{self.most}"

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

    def __str__(self) -> str:
        return next((name for name, length in NAMED.items() if length is self), repr(self.points))

    def draw(self, dice: Random) -> int:
        share = dice.random()
        right = bisect_right(self.points, share, key=lambda point: point[0])
        (low, least), (high, most) = self.points[right - 1], self.points[right]
        return least + round((share - low) / (high - low) * (most - least))


def _quantiles(shares: tuple[float, ...], tokens: tuple[int, ...]) -> Quantiles:
    return Quantiles(tuple(zip(shares, tokens, strict=True)))


# Measured on the first half of Azure's 2023 conversation trace (9,683 requests; CC-BY-4.0, Patel et
# al., Splitwise, ISCA 2024). The input leaves out the 0.1 % of prompts beyond 5,000 tokens, which
# would count as documents.
AZURE_CONV_INPUT = _quantiles(
    (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0),
    (2, 40, 181, 247, 390, 407, 972, 1035, 1081, 1140, 1317, 4075, 4086, 4122, 5000),
)
AZURE_CONV_OUTPUT = _quantiles(
    (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0),
    (7, 16, 38, 50, 71, 88, 102, 141, 213, 393, 405, 428, 463, 613, 939, 1000),
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
                return Uniform(_tokens(least), _tokens(most))
            case "lognormal", [median, sigma, least, most]:
                return Lognormal(float(median), float(sigma), _tokens(least), _tokens(most))
    except ValueError:
        pass
    raise InputError(f"{option}: {text!r} is not a length; write {SYNTAX}")


def a_length(option: str, what: str = "") -> Any:
    """Make the option for a length, with its forms in the help."""
    return length_option(
        option, f"{what}tokens, as N, uniform:MIN,MAX or lognormal:MEDIAN,SIGMA,MIN,MAX"
    )


def length_option(option: str, help_text: str) -> Any:
    """Make the option for a length."""

    def parse(text: Any) -> Length:
        """Read a typed length. The default is one already."""
        return parse_length(text, option) if isinstance(text, str) else cast(Length, text)

    return typer.Option(option, parser=parse, metavar="<str>", help=help_text)


DocumentTokens = Annotated[Length, a_length("--document-tokens")]
QuestionTokens = Annotated[Length, a_length("--question-tokens")]
OutputTokens = Annotated[Length, a_length("--output-tokens")]
ChatTokens = Annotated[Length, a_length("--chat-tokens")]
ChatOutputTokens = Annotated[Length, a_length("--chat-output-tokens")]


def _tokens(text: str) -> int:
    """Read a whole number of tokens from 1 to 1e9 (ValueError: another number)."""
    number = float(text)
    if not (number.is_integer() and 1 <= number <= 1e9):
        raise ValueError(text)
    return int(number)
