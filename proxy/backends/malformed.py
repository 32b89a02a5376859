"""Log answers of backends that no sound server gives: one line for each kind in a minute."""

from collections.abc import Callable
from math import inf
from typing import Final

from forebay.proxy.relay.failures import MALFORMED
from forebay.proxy.telemetry.log_events import LogEvent, Say

SAID_S: Final = 60.0


class MalformedAnswers:
    """Logs the kind of a malformed answer, never its bytes.

    Args:
        clock: the time of the event loop.
    """

    def __init__(self, say: Say, clock: Callable[[], float]) -> None:
        self._say = say
        self._clock = clock
        self._said_at: dict[str, float] = {}  # by kind; bounded by `MALFORMED`
        self._more: dict[str, int] = {}

    def came(self, backend: str, kind: str) -> None:
        """A backend has failed a request; kinds that are not malformed answers are ignored."""
        if kind not in MALFORMED:
            return
        now = self._clock()
        if now - self._said_at.get(kind, -inf) < SAID_S:
            self._more[kind] = self._more.get(kind, 0) + 1
            return
        self._said_at[kind] = now
        more = self._more.pop(kind, 0)
        line = f"backend {backend} sent a malformed answer: {MALFORMED[kind]}"
        line += f" ({more} more since the last such line)" if more else ""
        self._say(LogEvent.BACKEND_MALFORMED, line, backend, kind)
