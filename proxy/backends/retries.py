"""Limit retries, so that they cannot overload a failing fleet, and learn from them.

One retry rescues a request. A retry of every request doubles the load. So a request is tried twice
at most, and only a small share of all requests may be in retry at once.

A failed request may be bad itself, and fail everywhere. So its failure proves something against a
backend only once another backend has answered it. If no other backend was asked, the failure counts
ASKED_AGAIN_S later, unless any request has failed at two backends by then. It never counts while
the other backends decline everything, too.
"""

from typing import Literal

Retry = Literal["never", "shared", "lost", "refused", "reserved"]
"""Retries that a failure allows. `shared`: within the share. `lost` (connection lost): outside the
share, as the backend no longer works on the request. `refused` (no connection): outside the share,
and no attempt, as the backend never had the request. `reserved`: counted by `Tries.reserve`."""

RETRIES = 1
ASKED_AGAIN_S = 0.5  # within it, mostly, another backend has answered a request that failed
LEAST, SHARE = 3, 0.1  # requests in retry at once: this many, or this share of the active ones

Suspects = list[tuple[str, int]]
"""The backends at which one request failed, with the number of each failure."""


class RetryBudget:
    """Counts active requests, and how many of them are in retry."""

    def __init__(self) -> None:
        self.active = 0
        self.retrying = 0

    @property
    def left(self) -> bool:
        return self.retrying < max(LEAST, SHARE * self.active)


class Tries:
    """The retries of one request. Use as a context while it is being served.

    Attributes:
        suspects: backends at which this request failed, perhaps by its own fault, and the number
            of each failure.
    """

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self._retried = 0
        self._counted = False
        self.suspects: Suspects = []

    def __enter__(self) -> "Tries":
        self._budget.active += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.active -= 1
        self._budget.retrying -= self._counted

    @property
    def spent(self) -> bool:
        """The request has used its retries."""
        return self._retried >= RETRIES

    def again(self, retry: Retry) -> bool:
        """True if another backend may be asked. Counts the retry."""
        if retry in ("refused", "reserved"):  # bounded by the number of backends
            return True
        if retry == "never" or self.spent:
            return False
        if retry == "shared":
            if not self._budget.left:
                return False
            self._budget.retrying += 1
            self._counted = True
        self._retried += 1
        return True

    def reserve(self) -> bool:
        """Count a retry before the attempt is ended: many attempts may end at one instant."""
        return self.again("shared")


class Suspicions:
    """The failures that are not proven yet, by backend and number."""

    def __init__(self) -> None:
        self._failures = 0
        self._open: dict[str, dict[int, tuple[float, float]]] = {}  # when sent, when failed

    def failed(
        self, name: str, sent_at: float, now: float, suspects: Suspects, *, everywhere: bool
    ) -> None:
        """A request has failed.

        Args:
            suspects: where it failed before.
            everywhere: no other backend is asked for it, since all of them decline requests, too.
        """
        if suspects or everywhere:
            self._open.clear()  # perhaps requests caused the other failures, too
        else:
            self._open.setdefault(name, {})[self._failures] = sent_at, now
        suspects.append((name, self._failures))
        self._failures += 1

    def answered(self, name: str, suspects: Suspects) -> list[tuple[str, float]]:
        """Return the backends that another's answer proves bad, and when each was asked."""
        self._open.pop(name, None)
        proven = []
        while suspects:
            suspect, number = suspects.pop()
            if times := self._open.get(suspect, {}).pop(number, None):
                proven.append((suspect, times[0]))
        return proven

    def due(self, name: str, now: float) -> list[float]:
        """Return when the requests were sent whose failures count now."""
        waiting = self._open.get(name, {})
        due = [n for n, (_, failed_at) in waiting.items() if failed_at < now - ASKED_AGAIN_S]
        return [waiting.pop(number)[0] for number in due]
