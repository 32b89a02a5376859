"""Draw documents by Zipf popularity."""

from itertools import accumulate
from random import Random


class Zipf:
    """Draws rank k of `count` (from 0) with probability proportional to 1 / (k + 1)^s.

    All ranks are equally likely with s = 0.
    """

    def __init__(self, count: int, s: float) -> None:
        self._sums = list(accumulate((rank + 1) ** -s for rank in range(count)))

    def draw(self, dice: Random) -> int:
        return dice.choices(range(len(self._sums)), cum_weights=self._sums)[0]
