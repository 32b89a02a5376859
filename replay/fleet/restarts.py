"""Decide when a server that died is restarted, and when it is given up."""

from dataclasses import dataclass

MOST_DOUBLINGS = 30  # beyond 1,023 a float overflows


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often and how fast a server that died is restarted.

    Waits double from `first_s` to `most_s`. A server is given up after `tries` in a row.

    Attributes:
        forgiven_after_s: a server that was up this long gets all its tries back.
        start_s: longest start, from the process to its first healthy answer.
        hung_s: a server whose /health fails this long is killed and counts as dead.
    """

    tries: int = 5
    first_s: float = 1.0
    most_s: float = 60.0
    forgiven_after_s: float = 300.0
    start_s: float = 900.0
    hung_s: float = 60.0


class Restarts:
    """Counts the restarts of one server."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.in_a_row = 0

    def died(self, up_s: float) -> float | None:
        """Return the seconds to wait before the restart. None: the server is given up.

        Args:
            up_s: seconds that the server had been healthy, 0 when it never was.
        """
        if up_s >= self._policy.forgiven_after_s:
            self.in_a_row = 0
        if self.in_a_row >= self._policy.tries:
            return None
        wait_s = min(
            self._policy.first_s * 2.0 ** min(self.in_a_row, MOST_DOUBLINGS), self._policy.most_s
        )
        self.in_a_row += 1
        return wait_s
