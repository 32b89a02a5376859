"""Hold the share of those who were taken and are late anyway, whatever makes predictions wrong.

A margin says how far one prediction may be off; of those who come later and go first it knows
nothing. So the margins of a bucket are multiplied by a factor that rises when somebody who was
queued could not be sent in time, and falls as others are: adaptive conformal inference (Gibbs and
Candes 2021, arXiv:2106.00170), on the factor instead of the quantile. In the long run LATE of those
who were queued are late, as long as the factor is between its least, 1, and its most.
"""

from typing import Final

LATE: Final = 0.02
STEP: Final = 0.3  # the factor rises by nearly so much with each that is late
MOST: Final = 3.0


class Punctuality:
    """Of each bucket by its name."""

    __slots__ = ("_factor",)

    def __init__(self) -> None:
        self._factor: dict[str, float] = {}

    def factor(self, bucket: str) -> float:
        """What its margins are multiplied by."""
        return self._factor.get(bucket, 1.0)

    def in_time(self, bucket: str) -> None:
        """One that was queued was sent."""
        if bucket in self._factor:
            self._factor[bucket] = max(1.0, self._factor[bucket] - STEP * LATE)

    def late(self, bucket: str) -> None:
        """One that was queued was refused, as its time was over."""
        self._factor[bucket] = min(MOST, self.factor(bucket) + STEP * (1.0 - LATE))
