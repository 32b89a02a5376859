"""Decide whether a failed request proves anything against the backend at which it failed.

One client's requests may fail everywhere. So a failure counts once another backend has answered the
request. If no other backend was asked, it counts ASKED_AGAIN_S later, unless any request has failed
at two backends by then. It never counts while the other backends decline everything, too.
"""

ASKED_AGAIN_S = 0.5  # within it, mostly, another backend has answered a request that failed

Suspects = list[tuple[str, int]]
"""The backends at which one request failed, with the number of each failure."""


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
            self._open.clear()  # perhaps the others were like this one
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
