"""KV cache put aside for somebody who needs much of it.

Requests leave an engine one by one, and whoever needs little takes each piece of KV cache as it
comes free: a long prompt would wait until nobody else comes. So for one that has waited half of
what it can, more and more of what comes free is kept, and all that it needs after half of the time
that is left: the others become fewer for a while, they are not stopped.
"""

from typing import Final

from forebay.proxy.core.state.queue import Waiting

WHOLE_AFTER: Final = 0.5  # of the time left when it began


class Aside:
    """Of one backend; for one request at a time."""

    __slots__ = ("_since", "_tokens", "_whole_at", "waiting")

    def __init__(self) -> None:
        self.waiting: Waiting | None = None
        self._tokens = 0.0
        self._since = self._whole_at = 0.0

    def begin(self, waiting: Waiting, tokens: float, now: float) -> None:
        """From now on, room for so many tokens is put aside for it."""
        self.waiting, self._tokens, self._since = waiting, tokens, now
        self._whole_at = now + WHOLE_AFTER * (waiting.deadline - now)

    def left(self, waiting: Waiting) -> None:
        """It does not wait here any longer."""
        if self.waiting is waiting:
            self.waiting = None

    def kept_from(self, waiting: Waiting, now: float) -> float:
        """Tokens that this one must leave free."""
        if self.waiting is None or self.waiting is waiting:
            return 0.0
        if now >= self._whole_at:
            return self._tokens
        return self._tokens * (now - self._since) / (self._whole_at - self._since)
