"""Find the longest step since a given step or time, with one query for each request."""

from bisect import bisect_right


class LongestSince:
    """Steps that are longer than all later ones, oldest and longest first.

    Only these can be the longest since some step. A new step removes the shorter ones at the end
    of the list, so each step enters and leaves once, and a query is one bisection.
    """

    __slots__ = ("_seconds", "_steps")

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._seconds: list[float] = []

    def push(self, step: float, seconds: float) -> None:
        """Add `step`. `seconds` is the longest duration since the step pushed before."""
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

    def since(self, step: float) -> float:
        """Return the longest duration after `step`, which must have been pushed, else 0.0."""
        at = bisect_right(self._steps, step)
        return self._seconds[at] if at < len(self._seconds) else 0.0

    def clear(self) -> None:
        """Forget all steps, when no request is left that could ask."""
        self._steps.clear()
        self._seconds.clear()
