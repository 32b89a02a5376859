"""Format numbers: one unit per row, the same number of decimals, a dash for None.

Every function takes base units (seconds, tokens, shares) and returns text. Only rounding is
computed here.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

from forebay.traces.ground.command_line.messages import printable as printable

NONE = "–"
NEVER = "never"


def durations(values_s: Sequence[float | None]) -> list[str]:
    """Format durations that are printed side by side with one unit and equal decimals.

    The decimals show three digits of the largest and two of the smallest, up to a limit.
    """
    numbers = [v for v in values_s if v is not None and math.isfinite(v)]
    largest = max(numbers, default=0.0)
    scale, unit, most = (1.0, "s", 3) if largest >= 1.0 else (1e3, "ms", 2)
    smallest = min((v * scale for v in numbers if v > 0), default=1.0)
    decimals = max(
        2 - math.floor(math.log10(largest * scale)) if largest > 0 else 0,
        1 - math.floor(math.log10(smallest)),
    )
    decimals = min(most, max(0, decimals))
    return [_one(v, scale, decimals, unit) for v in values_s]


def duration(value_s: float | None) -> str:
    return durations([value_s])[0]


def _one(value: float | None, scale: float, decimals: int, unit: str) -> str:
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return NEVER
    return f"{value * scale:,.{decimals}f} {unit}"


def numbered(count: int, noun: str) -> str:
    """Return a number with its noun: `1 server`, `2 servers`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def counts(values: Sequence[float | None], decimals: int = 0, unit: str = "") -> list[str]:
    return [NONE if v is None else f"{v:,.{decimals}f}{unit}" for v in values]


def rates(values: Sequence[float | None]) -> list[str]:
    """Format events per second."""
    return counts(values, _decimals(values, 1, 3), " /s")


def shares(values: Sequence[float | None]) -> list[str]:
    return [NONE if v is None else f"{v * 100:.1f} %" for v in values]


def money(values: Sequence[float | None]) -> list[str]:
    """Format amounts of one currency."""
    return counts(values, _decimals(values, 2, 6))


def _decimals(values: Sequence[float | None], least: int, most: int) -> int:
    """Return the decimals that show three digits of the smallest value other than 0."""
    smallest = min((v for v in values if v), default=1.0)
    return min(most, max(least, 2 - math.floor(math.log10(abs(smallest)))))


def ratio(value: float | None) -> str:
    """`4.5×`, `0.22×`, `120×`, `∞` for infinite and a dash for undefined ratios."""
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "∞"
    if value >= 100:
        return f"{value:,.0f}×"
    if 0 < value < 0.1:
        return f"{value:.3f}×" if value >= 0.0005 else "<0.001×"
    return f"{value:.1f}×" if value >= 10 else f"{value:.2f}×"


FORMATS: dict[str, Callable[[Sequence[float | None]], list[str]]] = {
    "s": durations,
    "per_s": rates,
    "share": shares,
    "ratio": lambda values: [ratio(v) for v in values],
    "count": counts,
    "money": money,
    "j": partial(counts, decimals=1, unit=" J"),
    "w": partial(counts, unit=" W"),
}


def listed(words: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def is_text(words: str) -> bool:
    """True if a command-line word was valid UTF-8. Otherwise no page or JSON can hold it."""
    return words.isascii() or not any("\ud800" <= c <= "\udfff" for c in words)
