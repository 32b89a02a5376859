"""Limit retries, so that they cannot overload a fleet that already fails.

One retry rescues a request. A retry of every request doubles the load. So a request is tried twice
at most, and only a small share of all requests may be in retry at once.
"""

from typing import Literal

Retry = Literal["never", "shared", "lost", "refused", "reserved"]
"""Retries that a failure allows. `shared`: within the share. `lost` (connection lost): outside the
share, as the backend no longer works on the request. `refused` (no connection): outside the share,
and no attempt, as the backend never had the request. `reserved`: counted by `Tries.reserve`."""

RETRIES = 1
LEAST, SHARE = 3, 0.1  # requests in retry at once: this many, or this share of the active ones


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
        self.suspects: list[tuple[str, int]] = []

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
