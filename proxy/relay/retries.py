"""Who may be asked for an answer a second time: the retry budget.

A retry is work that a fleet in trouble is given on top. It is worth it for one request, and ruin
for all of them: so a request is tried twice at most, and those that are being tried again are a
small share of all.
"""

from typing import Literal

Retry = Literal["never", "shared", "lost", "refused", "reserved"]
"""What a failure allows: `shared` counts towards the share. A `lost` connection does not, for the
backend works on the request no longer; nor does a `refused` one, for which it never began, and
which is not an attempt either. `reserved` was counted when it was decided."""

RETRIES = 1
LEAST, SHARE = 3, 0.1  # retries at once: of the requests at once


class RetryBudget:
    def __init__(self) -> None:
        self.active = 0
        self.retrying = 0

    @property
    def left(self) -> bool:
        return self.retrying < max(LEAST, SHARE * self.active)


class Tries:
    """The attempts of one request; use as a context while it is being served."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self._retried = 0
        self._counted = False

    def __enter__(self) -> "Tries":
        self._budget.active += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.active -= 1
        self._budget.retrying -= self._counted

    @property
    def spent(self) -> bool:
        """It has been tried again already."""
        return self._retried >= RETRIES

    def again(self, retry: Retry) -> bool:
        """Whether another backend may be asked; if so, it is counted."""
        if retry in ("refused", "reserved"):  # ends: a backend is asked once only
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
        """The same for a request that is about to be given up: many may be, at one instant."""
        return self.again("shared")
