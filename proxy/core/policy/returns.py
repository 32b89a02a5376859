"""When those refused shall come back: one after the other, not all when the first would fit.

The wait of a single request says when there is room for one. Everybody refused meanwhile is told
the same, comes back at the same moment, and is refused again. So each is booked behind those
refused before it, as if newcomers left them no more than a bucket's guaranteed share.
"""

from collections.abc import Iterable
from math import inf

FOR_THEM = 0.2  # of the engines: newcomers take the rest
FURTHEST_S = 60.0


class Returns:
    def __init__(self, buckets: Iterable[str]) -> None:
        self._booked_until = dict.fromkeys(buckets, -inf)

    def book(self, bucket: str, wait_s: float, prefill_s: float, engines: int, now: float) -> float:
        """Seconds after which a refused request shall come back.

        Args:
            wait_s: until it would fit if nobody else came back.
            prefill_s: its work.
            engines: that share the work.
        """
        booked_until = max(now, self._booked_until[bucket])
        booked_until += prefill_s / (FOR_THEM * max(1, engines))
        self._booked_until[bucket] = min(now + FURTHEST_S, booked_until)
        return max(wait_s, booked_until - now)
