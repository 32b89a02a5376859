"""How far predictions of prefill seconds are off, by how long the prefill takes.

The length of a step and what is decoded beside a prefill weigh less the longer it is: on simulated
H200s predictions under a quarter of a second are off by 30 % on average, of one second by 10 %, of
eight by 5 %. One figure for all, which chats decide as there are more of them, would refuse
requests behind a long prefill that is known well.
"""

from typing import Final

START: Final = 0.25  # relative (logarithmic) error, either way, before anything was seen
GAIN: Final = 0.05  # of an observation, once 20 were seen
EDGES_S: Final[tuple[float, ...]] = (0.25, 1.0, 4.0)  # between the classes
OF_ALL: Final = 0.75
"""Of the error of all: no wait is reckoned as less certain. Short prefills are off the most, but it
is many of them that somebody waits for."""


class Spread:
    """The smoothed relative error in each class of lengths."""

    __slots__ = ("_all", "_least", "_seen", "_shares")

    def __init__(self) -> None:
        classes = len(EDGES_S) + 1
        self._all = START
        self._shares = [START] * classes
        self._seen = [0] * classes
        self._least = [START * OF_ALL] * classes  # what `at` says in each

    def observe(self, predicted_s: float, error: float) -> None:
        """Work of `predicted_s` was off by `error`, the logarithm of taken over predicted."""
        self._all += GAIN * (abs(error) - self._all)
        class_ = _class(predicted_s)
        self._seen[class_] += 1
        share = self._shares[class_]
        share += max(GAIN, 1.0 / (1 + self._seen[class_])) * (abs(error) - share)
        self._shares[class_] = share
        for longer in range(class_ + 1, len(self._shares)):
            if self._seen[longer]:
                break
            self._shares[longer] = share  # the best guess until one is seen
        least = OF_ALL * self._all
        for place, share in enumerate(self._shares):
            self._least[place] = least = min(least, share)

    def at(self, seconds: float) -> float:
        """The relative error of a prediction of so many seconds, of one prefill or of many.

        Not above that of shorter ones: errors of independent parts cancel out, they do not grow.
        """
        return self._least[_class(seconds)]


def _class(seconds: float) -> int:
    class_ = 0
    while class_ < len(EDGES_S) and seconds >= EDGES_S[class_]:
        class_ += 1
    return class_
