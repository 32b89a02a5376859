"""Keep one request and its answer so far, and end it when it makes no progress."""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.replay.clock.clock import Clock
from forebay.replay.send.http.measure import OutputEvents


@dataclass(slots=True)
class ClientExchange:
    """One request and its answer so far, with times in seconds of the run."""

    request_id: str
    intended_s: float
    cap_wait_s: float = 0.0
    sent_s: float = 0.0
    done_s: float | None = None
    events: OutputEvents = field(default_factory=OutputEvents)
    status: int | None = None
    outcome: str = "failed"
    reason: str | None = None
    backend: str | None = None
    queue_ms: float | None = None
    retry_after_s: float | None = None
    reject_latency_s: float | None = None
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    said: str | None = None  # first words of the server about a failure
    pieces: list[str] | None = None  # the answer's text, or None if it is not kept
    unread: Callable[[], None] | None = None  # reads the arrived bytes of the answer

    @property
    def answer(self) -> str | None:
        """The text of a complete answer, or None if it is incomplete or not kept."""
        return "".join(self.pieces) if self.pieces is not None and self.outcome == "ok" else None

    def settle(self) -> None:
        """Read the unread bytes of an answer that has ended."""
        unread, self.unread = self.unread, None
        if unread is not None:
            unread()

    def ok(self) -> None:
        self.outcome, self.reason = "ok", None

    def fail(self, reason: str, said: str | None = None) -> None:
        self.outcome, self.reason = "failed", reason
        self.said = said or self.said


class ProgressWatch:
    """Ends a request that makes no progress, or that the run cancels.

    A look checks if there was progress, so that no token sets a timer. The first look is in `line`,
    which all requests share. Most requests have ended by then.
    """

    __slots__ = ("_due_s", "_events", "_leaves_s", "_line", "_read", "_stop", "_timer", "reason")

    def __init__(self, line: "WatchLine", leaves_s: float) -> None:
        self.reason: str | None = None
        self._line = line
        self._leaves_s = leaves_s
        self._read: Callable[[], None] | None = None
        self._stop: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(
        self,
        now_s: float,
        events: OutputEvents,
        read: Callable[[], None],
        stop: Callable[[], None],
    ) -> None:
        """Watch the output `events` of a request. `stop` is called when it must end.

        `read` adds the events that have arrived.
        """
        self._events, self._read, self._stop = events, read, stop
        self._due_s = now_s + self._line.first_token_s
        if self.reason is not None:  # ended before it began
            stop()
        elif self._leaves_s < math.inf:
            self._arm(now_s + self._line.look_s)
        else:
            self._line.add(self, now_s + self._line.look_s)  # early enough for either limit

    def finish(self) -> None:
        """Stop watching a request that has ended."""
        self._read = self._stop = None  # leave no cycle to the garbage collector
        self._line.remove(self)
        if self._timer is not None:
            self._timer.cancel()

    def end(self, reason: str) -> None:
        """End the request now."""
        if self.reason is None:
            self.reason = reason
            if self._stop is not None:
                self._stop()

    def _arm(self, at_s: float) -> None:
        self._timer = self._line.call_at(min(at_s, self._leaves_s), self.look)

    def look(self) -> None:
        if self._read is not None:
            self._read()
        if self._stop is None:
            return
        at, now_s = self._events.at_s, self._line.clock.now()
        limit_s = at[-1] + self._line.stall_s if at else self._due_s
        if now_s >= self._leaves_s:
            self.end("cancelled")
        elif now_s < limit_s:
            # Output may begin at any time, and stall `stall_s` later.
            self._arm(min(limit_s, now_s + self._line.look_s))
        else:
            self.end("stall" if at else "timeout")


class WatchLine:
    """Watches in the order of their first looks, with one timer for all of them."""

    def __init__(self, clock: Clock, first_token_s: float, stall_s: float) -> None:
        self.clock = clock
        self.first_token_s, self.stall_s = first_token_s, stall_s
        self.look_s = min(first_token_s, stall_s)
        self._loop = asyncio.get_running_loop()
        self._due_s: OrderedDict[ProgressWatch, float] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def call_at(self, at_s: float, look: Callable[[], None]) -> asyncio.TimerHandle:
        left = self.clock.wall(at_s - self.clock.now())
        return self._loop.call_later(max(left, 0.001), look)

    def add(self, watch: ProgressWatch, at_s: float) -> None:
        """Let `watch` look at second `at_s`, never before an earlier watch."""
        self._due_s[watch] = at_s
        if self._timer is None:
            self._timer = self.call_at(at_s, self._look)

    def remove(self, watch: ProgressWatch) -> None:
        self._due_s.pop(watch, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        while self._due_s:
            watch, at_s = next(iter(self._due_s.items()))
            if at_s > self.clock.now():
                self._timer = self.call_at(at_s, self._look)
                return
            del self._due_s[watch]
            watch.look()
