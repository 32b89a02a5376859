"""Hold one request and its answer while it is under way, and end it when it makes no progress."""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.replay.clock import Clock
from forebay.replay.measure import OutputEvents


@dataclass(slots=True)
class ClientExchange:
    """One request and its answer so far; times in seconds of the run."""

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
    pieces: list[str] | None = None  # of the answer's text; None: it is not kept

    @property
    def answer(self) -> str | None:
        """The text of a complete answer, if it is kept."""
        return "".join(self.pieces) if self.pieces is not None and self.outcome == "ok" else None

    def ok(self) -> None:
        self.outcome, self.reason = "ok", None

    def fail(self, reason: str) -> None:
        self.outcome, self.reason = "failed", reason


class ProgressWatch:
    """Ends a request that makes no progress, or that the run cancels.

    A look checks whether there was progress, so no timer is set for each token. The first look is
    in `line`, which all requests share; most have ended by then.
    """

    def __init__(
        self,
        clock: Clock,
        first_token_s: float,
        stall_s: float,
        line: "WatchLine",
        leaves_s: float = math.inf,
    ) -> None:
        self.reason: str | None = None
        self._leaves_s = leaves_s
        self._clock = clock
        self._stall_s = stall_s
        self._due_s = clock.now() + first_token_s
        self._look_s = min(first_token_s, stall_s)
        self._events: OutputEvents | None = None
        self._stop: Callable[[], None] | None = None
        self._line = line
        self._timer: asyncio.TimerHandle | None = None

    def start(self, events: OutputEvents, stop: Callable[[], None]) -> None:
        """Watch the output `events` of a request; `stop` is called when it must end."""
        self._events, self._stop = events, stop
        if self.reason is not None:  # ended before it began
            stop()
        elif self._leaves_s < math.inf:
            self._arm(self._clock.now() + self._look_s)
        else:
            self._line.add(self, self._clock.now() + self._look_s)  # in time for either limit

    def finish(self) -> None:
        """Stop watching; the request has ended."""
        self._stop = None
        self._line.remove(self)
        if self._timer is not None:
            self._timer.cancel()

    def end(self, reason: str) -> None:
        """End the request now."""
        if self.reason is None:
            self.reason = reason
            if self._stop is not None:
                self._stop()

    def _limit_s(self) -> float:
        events = self._events
        if events is not None and events.at_s:
            return events.at_s[-1] + self._stall_s
        return self._due_s

    def _arm(self, at_s: float) -> None:
        left = self._clock.wall(min(at_s, self._leaves_s) - self._clock.now())
        self._timer = asyncio.get_running_loop().call_later(max(left, 0.001), self.look)

    def look(self) -> None:
        now_s, limit_s = self._clock.now(), self._limit_s()
        if now_s >= self._leaves_s:
            self.end("cancelled")
        elif now_s < limit_s:
            # Output may begin at any time, and be a stall that much later.
            self._arm(min(limit_s, now_s + self._look_s))
        else:
            self.end("stall" if self._events is not None and self._events.at_s else "timeout")


class WatchLine:
    """Watches in the order of their first looks, with one timer for all of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_s: OrderedDict[ProgressWatch, float] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, watch: ProgressWatch, at_s: float) -> None:
        """Let `watch` look at second `at_s`, which is never before that of an earlier one."""
        self._due_s[watch] = at_s
        if self._timer is None:
            self._arm(at_s)

    def remove(self, watch: ProgressWatch) -> None:
        self._due_s.pop(watch, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, at_s: float) -> None:
        left = self._clock.wall(at_s - self._clock.now())
        self._timer = asyncio.get_running_loop().call_later(max(left, 0.001), self._look)

    def _look(self) -> None:
        self._timer = None
        while self._due_s:
            watch, at_s = next(iter(self._due_s.items()))
            if at_s > self._clock.now():
                self._arm(at_s)
                return
            del self._due_s[watch]
            watch.look()
