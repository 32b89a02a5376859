"""The line of prefills in one engine: what we sent there and has given no first token.

An engine prefills first come, first served; the head of the line has been computed on since
`head_since`. A backlog is a prediction and shrinks as time passes, but never to nothing while the
head streams and has given no token: a late engine must look busy, not free, and what seemed to be
cached may not be. Engines that let shorter prefills pass longer ones: `chunks.py`.

`others` is what other proxies have in the same engine, None where there are none.
"""

from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

from forebay.proxy.core.state.chunks import passing
from forebay.proxy.core.state.elsewhere import Elsewhere
from forebay.proxy.core.state.in_flight import Flight

LATE: Final = 1.25  # a prefill this much over its prediction ...
LATE_S: Final = 0.1  # ... and this much more was not cached as believed


class Line:
    """Who is in it, in order, and how long that will take.

    Attributes:
        prefills: by request.
        prefills_of: by bucket, those that count towards its limit.
        head: the first of them.
        tokens: uncached, of all.
        total_s: sum of prefill_s over all.
        silent: how many there are whose first token cannot be seen.
        chunk_tokens: see BackendSpec.
        pieces: long prompts come in pieces.
    """

    def __init__(self, buckets: Iterable[str], chunk_tokens: float, pieces: bool) -> None:
        self.chunk_tokens = chunk_tokens
        self.pieces = pieces
        self.prefills: dict[str, Flight] = {}
        self.prefills_of = dict.fromkeys(buckets, 0)
        self.head: Flight | None = None
        self.head_since = 0.0
        self.tokens = 0
        self.total_s = 0.0
        self.silent = 0

    @property
    def chunked(self) -> bool:
        """Whether shorter prefills pass longer ones here (`chunks.py`)."""
        return self.chunk_tokens < inf

    @property
    def mixed(self) -> bool:
        """Whether short prefills are computed beside longer ones, not only after them."""
        return self.pieces or self.chunk_tokens < inf

    # What is ahead of a newcomer.

    def backlog_s(self, now: float, others: Elsewhere | None) -> float:
        """Predicted seconds until the engine has given a first token to all it was sent."""
        head = self.head
        if head is None:
            return 0.0 if others is None else others.prefill_s(now)
        elapsed_s = now - self.head_since
        if others is not None and elapsed_s < 0.0:  # it begins after what they have sent
            elapsed_s = 0.0
        left, floor = head.prefill_s - elapsed_s, 0.0
        if head.request.streams:
            floor = head.overdue_s
            if elapsed_s > LATE * head.prefill_s + LATE_S:
                # What seemed to be cached was not: the engine has evicted it.
                left = head.cold_s - elapsed_s
        own_s = self.total_s - head.prefill_s + max(left, floor)
        return own_s if others is None else own_s + others.prefill_s(now)

    def ahead_s(self, uncached_tokens: float, now: float, others: Elsewhere | None) -> float:
        """Predicted seconds until the engine is through with what a prefill waits for here.

        All of the backlog where prefills are computed one after the other. Else those that are
        no longer than it, and of each longer one the chunk that shares each step with it.
        """
        if not self.chunked:
            return self.backlog_s(now, others)
        equals_s, chunks_s = passing(self.prefills.values(), uncached_tokens, self.chunk_tokens)
        return min(
            self.backlog_s(now, others),
            equals_s + chunks_s + self._elsewhere_s(uncached_tokens, now, others),
        )

    def due_s(self, uncached_tokens: float, now: float, others: Elsewhere | None) -> float:
        """Of `ahead_s`, what keeps a prefill here: the chunks of longer ones never end sooner."""
        if not self.chunked:
            return self.backlog_s(now, others)
        equals_s, _ = passing(self.prefills.values(), uncached_tokens, self.chunk_tokens)
        return min(
            self.backlog_s(now, others),
            equals_s + self._elsewhere_s(uncached_tokens, now, others),
        )

    def _elsewhere_s(self, uncached_tokens: float, now: float, others: Elsewhere | None) -> float:
        """What a prefill of so many tokens waits for of what other proxies have sent."""
        if others is None:
            return 0.0
        theirs_s = others.prefill_s(now)
        if uncached_tokens > self.chunk_tokens:
            return theirs_s
        return min(theirs_s, others.short_s)

    def below_at(self, limit_s: float, others: Elsewhere | None) -> float:
        """When the backlog falls below `limit_s` by itself; inf if only an answer can do it."""
        others_at = -inf if others is None else others.below_at(limit_s)
        head = self.head
        if head is None:
            return others_at
        rest = self.total_s - head.prefill_s
        floor = head.overdue_s if head.request.streams else 0.0
        if rest + floor >= limit_s:
            return self.silent_ends_at()
        return max(others_at, self.head_since + self.total_s - limit_s)

    def done_at(self, others: Elsewhere | None) -> float:
        """When the engine will have given a first token to all it was sent, as predicted."""
        own_at = -inf if self.head is None else self.head_since + self.total_s
        return own_at if others is None else max(own_at, others.done_at())

    def longer(self, than_s: float, others: Elsewhere | None) -> bool:
        """Whether the engine has a prefill to do or under way that others await that long."""
        if self.chunked:
            return False
        if others is not None and others.longest_s > than_s:
            return True
        return any(flight.prefill_s > than_s for flight in self.prefills.values())

    def longest_s(self) -> float:
        """Of the prefills, all of each; 0 when there are none."""
        return max((flight.prefill_s for flight in self.prefills.values()), default=0.0)

    def computes(self, blocks: Sequence[int], matched: int, most_s: float) -> bool:
        """Whether one of at most `most_s` in it begins with `matched` of these blocks."""
        last = blocks[matched - 1]
        for flight in self.prefills.values():
            theirs = flight.request.blocks
            if (
                flight.counts
                and flight.prefill_s <= most_s
                and len(theirs) >= matched
                and theirs[matched - 1] == last
            ):
                return True
        return False

    def computed_s(self, flight: Flight, now: float) -> float:
        """Seconds its prefill was computed, as predicted."""
        return min(flight.prefill_s, self.computed_for(flight, now))

    def computed_for(self, flight: Flight, now: float) -> float:
        """Seconds that the engine has been at it; 0 if others are before it."""
        if flight is not self.head:
            return 0.0
        return max(0.0, now - self.head_since)  # it may begin only after what others have sent

    def computed_share(self, flight: Flight, now: float) -> float:
        """Of a prefill in it, the share that is computed."""
        if flight is not self.head:
            return 0.0
        return min(1.0, (now - self.head_since) / max(1e-9, flight.prefill_s))

    # Who joins and who leaves.

    def join(self, flight: Flight, now: float, others: Elsewhere | None) -> None:
        """It was sent."""
        request = flight.request
        if self.head is None:
            self.head = flight
            self.head_since = now
            if others is not None:
                self.head_since += others.prefill_s(now)
        if not request.streams:
            ahead_s = self.ahead_s(flight.uncached_tokens, now, others)
            flight.ends_at = now + ahead_s + flight.prefill_s
            self.silent += 1
        self.prefills[request.id] = flight
        self.prefills_of[flight.bucket] += flight.counts
        self.tokens += flight.uncached_tokens
        self.total_s += flight.prefill_s

    def leave(self, flight: Flight, now: float) -> None:
        """It has given its first token, or is gone."""
        del self.prefills[flight.request.id]
        if flight is self.head:
            self.head_since = now
            self.head = _first(self.prefills)
        elif self.chunked and self.head is not None:
            # It has passed the head: its part of the time since was no work on that.
            self.head_since = min(now, self.head_since + flight.prefill_s)
        self.prefills_of[flight.bucket] -= flight.counts
        self.tokens -= flight.uncached_tokens
        self.silent -= not flight.request.streams
        self.total_s = self.total_s - flight.prefill_s if self.prefills else 0.0

    def silent_ends_at(self) -> float:
        """When the next prefill leaves whose end cannot be seen; inf where none does by itself."""
        if not self.silent:
            return inf
        if self.chunked:
            return min(flight.ends_at for flight in self.prefills.values())
        head = self.head
        if head is None or head.request.streams:
            return inf
        return self.head_since + head.prefill_s

    def silently_over(self, now: float) -> tuple[Flight, float] | None:
        """A prefill whose end cannot be seen and is predicted past, and when that was."""
        ends_at = self.silent_ends_at()
        if ends_at > now:
            return None
        if not self.chunked and self.head is not None:
            return self.head, ends_at
        return min(self.prefills.values(), key=lambda flight: flight.ends_at), ends_at

    def rebucket(self, buckets: Iterable[str]) -> None:
        """There are other buckets now, and each flight has been told its own."""
        self.prefills_of = dict.fromkeys(buckets, 0)
        for flight in self.prefills.values():
            self.prefills_of[flight.bucket] += flight.counts


def _first(flights: dict[str, Flight]) -> Flight | None:
    for flight in flights.values():
        return flight
    return None
