"""Find the highest index that passes a test, when passing is monotone but not always certain. Pure.

A test may answer "unsure": the measurement is too small for a decision at that index. The search
then looks on both sides of the unsure range. So the result is three numbers: the highest index that
passed, the lowest that failed, and between them only indices that are unsure.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bracket:
    """The end of a search: `low` is the highest index that passed, `high` the lowest that failed.

    If no index passed, `low` is `least` - 1. If no index failed, `high` is `most` + 1. All indices
    between them were tried and are unsure.
    """

    low: int
    high: int


def bracket(
    passes: Callable[[int], bool | None], guess: int, least: int = 0, most: int = 1 << 30
) -> Bracket:
    """Search from `guess` with strides that double, then halve the distance.

    Args:
        passes: True, False, or None when it is unsure.
        least, most: the first and the last index that may be tried.
    """
    low, high = least - 1, most + 1
    unsure: set[int] = set()
    at, stride = min(max(guess, least), most), 2
    while True:
        verdict = passes(at)
        if verdict is None:
            unsure.add(at)
        elif verdict:
            low = max(low, at)
        else:
            high = min(high, at)
        unsure = {index for index in unsure if low < index < high}
        gap = _next(low, high, unsure)
        if gap is None:
            return Bracket(low, high)
        first, last = gap
        if low < least and first == low + 1:
            at = max(first, last - stride + 1)
        elif high > most and last == high - 1:
            at = min(last, first + stride - 1)
        else:
            at = (first + last) // 2
        stride *= 2


def _next(low: int, high: int, unsure: set[int]) -> tuple[int, int] | None:
    """Return the widest range of untried indices at either end of the unsure range."""
    if not unsure:
        return (low + 1, high - 1) if high - low > 1 else None
    below, above = (low + 1, min(unsure) - 1), (max(unsure) + 1, high - 1)
    widest = max(below, above, key=lambda span: span[1] - span[0])
    return widest if widest[0] <= widest[1] else None
