"""The longest step since a given one, asked once a request."""

from bisect import bisect_right


class LongestSince:
    """Steps that are longer than all that came after them, oldest and longest first.

    Only these can be the longest since some step. A new step removes the shorter ones at the end
    of the list, so each step enters and leaves once, and a query is one bisection.
    """

    __slots__ = ("_seconds", "_steps")

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._seconds: list[float] = []

    def push(self, step: int, seconds: float) -> None:
        """`seconds`: of `step`, or of the longest step after the one pushed before, up to it."""
        steps, durations = self._steps, self._seconds
        if not durations or durations[-1] > seconds:
            durations.append(seconds)
            steps.append(step)
            return
        while len(durations) > 1 and durations[-2] <= seconds:
            durations.pop()
            steps.pop()
        durations[-1] = seconds
        steps[-1] = step

    def since(self, step: int) -> float:
        """The longest of those after `step`, which must have been pushed; 0.0 without any."""
        at = bisect_right(self._steps, step)
        return self._seconds[at] if at < len(self._seconds) else 0.0

    def clear(self) -> None:
        """Forget all steps; for when nobody will ask about them."""
        self._steps.clear()
        self._seconds.clear()
