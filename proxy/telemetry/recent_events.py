"""Keep the last events of the log for the live page."""

from collections import deque
from collections.abc import Callable
from logging import getLevelName
from typing import Any

from forebay.proxy.log_events import LogEvent, Say

MOST = 100
LONGEST = 300  # characters of a message
PASSED_OVER = frozenset({LogEvent.REJECTIONS_GO_ON, LogEvent.RELOAD_UNCHANGED, LogEvent.LISTENING})


class RecentEvents:
    """A `Say` that remembers the last events."""

    def __init__(self, say: Say, clock: Callable[[], float]) -> None:
        self._say = say
        self._clock = clock
        self._kept: deque[tuple[float, LogEvent, str, str]] = deque(maxlen=MOST)

    def __call__(
        self, event: LogEvent, message: str, backend: str = "", reason: str = "", /
    ) -> None:
        if event not in PASSED_OVER:
            self._kept.append((self._clock(), event, message[:LONGEST], backend))
        self._say(event, message, backend, reason)

    def within(self, seconds: float) -> list[dict[str, Any]]:
        """Return the events of the last `seconds`, the latest first."""
        now = self._clock()
        return [
            {
                "age_s": round(now - at, 1),
                "event": event.label,
                "level": getLevelName(event.level).lower(),
                "message": message,
                "backend": backend or None,
            }
            for at, event, message, backend in reversed(self._kept)
            if now - at <= seconds
        ]
