"""Guaranteed shares: whoever goes last by the rules still gets a part while it waits.

A deficit counter each (as in deficit round robin): while somebody of a kind waits, every second
of prefill that goes out owes it its share. Once as much is owed as its next request takes, that
one is due and goes first. So the guarantee is a lower bound, the rules decide about the rest, and
nobody who just came has anything owed.
"""

from collections.abc import Container

MOST_OWED_S = 10.0  # it could not start for another reason; that is no right to a burst


class Shares:
    """What is owed to each kind on one backend.

    Args:
        share: of prefill seconds, for each kind.
    """

    def __init__(self, share: dict[str, float]) -> None:
        self.share = share
        self._owed = dict.fromkeys(share, 0.0)
        self.owing = False  # something to somebody

    def owed_s(self, kind: str) -> float:
        return self._owed[kind]

    def clear(self) -> None:
        """Nobody waits: nothing is owed."""
        self._owed = dict.fromkeys(self.share, 0.0)
        self.owing = False

    def went(self, kind: str, seconds: float, waiting: Container[str]) -> None:
        """A prefill of `kind` was sent while those of the kinds `waiting` wait."""
        self.owing = False
        for name, owed_s in self._owed.items():
            owed_s = owed_s + self.share[name] * seconds if name in waiting else 0.0
            if name == kind:
                owed_s = max(0.0, owed_s - seconds)
            self._owed[name] = min(MOST_OWED_S, owed_s)
            self.owing = self.owing or owed_s > 0.0

    def due(self, kind: str, seconds: float) -> bool:
        """Whether its next request, of so many seconds, goes first."""
        owed_s = self._owed[kind]
        return owed_s > 0.0 and owed_s >= min(seconds, MOST_OWED_S)
