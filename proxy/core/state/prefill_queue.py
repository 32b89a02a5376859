"""The prefill queue of one engine: requests that were sent there and have no first token yet.

An engine computes prefills first come, first served. The head has been computed since `head_since`.
The backlog is a prediction that shrinks as time passes. It does not fall to nothing while the head
streams and has no first token: a late engine is busy, not free, and an expected cache hit may have
been a miss.

With `--long-prefill-token-threshold` (`chunk_tokens`) vLLM computes at most that many tokens of one
prompt per step while other requests wait. A prefill then shares each of its steps with one chunk of
every longer prefill: it waits for a few chunks instead of for whole long prefills.

`elsewhere` is the work of other proxies in the same engine, or None without other proxies.
"""

from collections.abc import Iterable, Sequence
from math import fsum, inf

from forebay.proxy.core.learn.cost import FULL_STEP_TOKENS
from forebay.proxy.core.state.elsewhere import Elsewhere
from forebay.proxy.core.state.in_flight import InFlight, passing


class PrefillQueue:
    """The prefills in one engine, in the order they were sent.

    Attributes:
        prefills: the prefill of each request.
        prefills_of: number of prefills that count towards `prefills_per_backend`, by bucket.
        head: the prefill that the engine computes; None if the queue is empty.
        tokens: uncached tokens of all prefills.
        total_s: prefill_s of all prefills.
        silent: number of prefills whose first token cannot be seen.
        chunk_tokens: see BackendSpec; set by `chunk`.
        chunked: the engine chunks long prefills, so short prefills pass them.
        ordered: the engine begins the waiting prefill with the lowest priority.
        elsewhere: the work of other proxies in this engine.
    """

    def __init__(
        self, buckets: Iterable[str], chunk_tokens: float, *, ordered: bool = False
    ) -> None:
        self.chunk(chunk_tokens)
        self.ordered = ordered
        self.prefills: dict[str, InFlight] = {}
        self.prefills_of = dict.fromkeys(buckets, 0)
        self.head: InFlight | None = None
        self.head_since = 0.0
        self.tokens = 0
        self.total_s = 0.0
        self.silent = 0
        self.elsewhere: Elsewhere | None = None

    def chunk(self, chunk_tokens: float) -> None:
        self.chunk_tokens = chunk_tokens
        self.chunked = chunk_tokens < inf

    # Predictions.

    def own_backlog_s(self, now: float) -> float:
        """Return the backlog that this proxy sent, for other proxies to add to theirs."""
        return self._own_s(now - self.head_since)

    def backlog_s(self, now: float) -> float:
        """Return the predicted seconds until the engine has prefilled everything sent to it."""
        elsewhere = self.elsewhere
        if elsewhere is None:
            return self._own_s(now - self.head_since)
        # The head begins after what other proxies have sent, so `head_since` may be ahead.
        return self._own_s(max(0.0, now - self.head_since)) + elsewhere.prefill_s(now)

    def _own_s(self, elapsed_s: float) -> float:
        head = self.head
        if head is None:
            return 0.0
        left, floor = head.prefill_s - elapsed_s, 0.0
        if head.request.streams:
            if head.counts or elapsed_s > head.late_s:
                floor = head.overdue_s
            if elapsed_s > head.late_s:  # the engine had evicted blocks that seemed to be cached
                left = head.cold_s - elapsed_s
        return self.total_s - head.prefill_s + max(left, floor)

    def ahead_s(self, uncached_tokens: float, now: float, priority: float | None = None) -> float:
        """Return the predicted seconds that a prefill sent now would wait in the engine.

        The whole backlog where prefills are computed one after the other. In a chunking engine:
        prefills that are no longer than it, and the chunks of longer prefills in its steps. In an
        engine that orders by priority: without the prefills that this `priority` passes.
        """
        if self.head is None and self.elsewhere is None:
            return 0.0
        before, backlog_s = self._before(priority, now)
        if not self.chunked:
            return backlog_s
        equals_s, chunks_s = passing(before, uncached_tokens, self.chunk_tokens)
        return min(backlog_s, equals_s + chunks_s + self._elsewhere_s(uncached_tokens, now))

    def lone_s(self, running: int, now: float) -> float:
        """Return the wait behind a long prompt that is alone in a chunking engine.

        From 0.31 on vLLM does not cap a lone prompt: it takes full steps. A request that comes then
        waits for the rest of the running step, half on average, and the step planned after it.

        Args:
            running: requests that the engine prefills or decodes.
        """
        if self.head is None or running > 1:
            return 0.0
        steps_s = 1.5 * FULL_STEP_TOKENS * self.total_s / max(1, self.tokens)
        return min(steps_s, self.backlog_s(now))

    def drain_s(self, uncached_tokens: float, now: float, priority: float | None = None) -> float:
        """Return the part of `ahead_s` that must drain before dispatch.

        In a chunking engine: only prefills that are no longer than this prefill. The chunks of
        longer prefills share its steps whenever it is sent.
        """
        if self.head is None and self.elsewhere is None:
            return 0.0
        before, backlog_s = self._before(priority, now)
        if not self.chunked:
            return backlog_s
        equals_s, _ = passing(before, uncached_tokens, self.chunk_tokens)
        return min(backlog_s, equals_s + self._elsewhere_s(uncached_tokens, now))

    def _before(self, priority: float | None, now: float) -> tuple[Iterable[InFlight], float]:
        """Return the prefills that a prefill of this priority does not pass, and their backlog."""
        prefills, backlog_s = self.prefills.values(), self.backlog_s(now)
        if priority is None or not self.ordered:
            return prefills, backlog_s
        before = [p for p in prefills if p.priority <= priority or p is self.head]
        passed_s = self.total_s - fsum(prefill.prefill_s for prefill in before)
        return before, backlog_s - max(0.0, passed_s)

    def own_short_s(self, now: float) -> float:
        """Return the part of `own_backlog_s` that a short prefill waits for."""
        if not self.chunked:
            return self.own_backlog_s(now)
        equals_s, _ = passing(self.prefills.values(), 0.0, self.chunk_tokens)
        return min(self.own_backlog_s(now), equals_s)

    def _elsewhere_s(self, uncached_tokens: float, now: float) -> float:
        """Return the part of the work of other proxies that a prefill waits for."""
        if self.elsewhere is None:
            return 0.0
        theirs_s = self.elsewhere.prefill_s(now)
        if uncached_tokens > self.chunk_tokens:
            return theirs_s
        return min(theirs_s, self.elsewhere.short_s)

    def below_at(self, limit_s: float) -> float:
        """Return when the backlog falls below `limit_s` without an answer, or inf."""
        others_at = -inf if self.elsewhere is None else self.elsewhere.below_at(limit_s)
        head = self.head
        if head is None:
            return others_at
        rest = self.total_s - head.prefill_s
        floor = head.overdue_s if head.request.streams and head.counts else 0.0
        if rest + floor >= limit_s:
            return self.silent_ends_at()
        return max(others_at, self.head_since + self.total_s - limit_s)

    def ends_at(self, now: float) -> float:
        """Return when its predicted work will end, or inf if that is overdue."""
        own_at = -inf if self.head is None else self.head_since + self.total_s
        done_at = own_at if self.elsewhere is None else max(own_at, self.elsewhere.done_at())
        return inf if done_at < now and self.backlog_s(now) > 0.0 else max(now, done_at)

    def has_longer(self, than_s: float) -> bool:
        """True if a prefill in the engine takes longer than `than_s`."""
        if self.elsewhere is not None and self.elsewhere.longest_s > than_s:
            return True
        return any(prefill.prefill_s > than_s for prefill in self.prefills.values())

    @property
    def chunks_document(self) -> bool:
        """True if the engine chunks long prefills, and a prefill here exceeds a full step."""
        if not self.chunked:
            return False
        return any(p.uncached_tokens > FULL_STEP_TOKENS for p in self.prefills.values())

    def longest_s(self) -> float:
        """Return the seconds of the longest prefill in the queue, or 0."""
        return max((prefill.prefill_s for prefill in self.prefills.values()), default=0.0)

    def computes(self, blocks: Sequence[int], matched: int, most_s: float) -> bool:
        """True if a prefill of at most `most_s` computes the first `matched` blocks."""
        last = blocks[matched - 1]
        for prefill in self.prefills.values():
            theirs = prefill.request.blocks
            if (
                prefill.counts
                and prefill.prefill_s <= most_s
                and len(theirs) >= matched
                and theirs[matched - 1] == last
            ):
                return True
        return False

    def computed_s(self, prefill: InFlight, now: float) -> float:
        """Return the seconds for which this prefill has been computed, 0 behind the head."""
        if prefill is not self.head:
            return 0.0
        return max(0.0, now - self.head_since)  # it may begin only after other proxies' work

    def computed_share(self, prefill: InFlight, now: float) -> float:
        """Return the share of this prefill that is computed, as predicted."""
        if prefill is not self.head:
            return 0.0
        return min(1.0, self.computed_s(prefill, now) / max(1e-9, prefill.prefill_s))

    # Changes.

    def join(self, prefill: InFlight, now: float) -> None:
        """Add a prefill that is sent now."""
        request = prefill.request
        if self.head is None:
            self.head = prefill
            self.head_since = max(now, prefill.reached_at)
            if self.elsewhere is not None:
                self.head_since += self.elsewhere.prefill_s(now)
        if not request.streams:
            ahead_s = self.ahead_s(prefill.uncached_tokens, now)
            prefill.ends_at = max(now + ahead_s, prefill.reached_at) + prefill.prefill_s
            self.silent += 1
        self.prefills[request.id] = prefill
        self.prefills_of[prefill.bucket] += prefill.counts
        self.tokens += prefill.uncached_tokens
        self.total_s += prefill.prefill_s

    def leave(self, prefill: InFlight, now: float) -> None:
        """Remove a prefill: its first token came, or its request ended."""
        del self.prefills[prefill.request.id]
        if prefill is self.head:
            self.head = self._next()
            self.head_since = now if self.head is None else max(now, self.head.reached_at)
        elif self.chunked and self.head is not None:
            # It passed the head, whose text may yet be tokenized: its time was no progress of it.
            begins_at = self.head_since + prefill.prefill_s
            self.head_since = max(self.head_since, min(now, begins_at))
        self.prefills_of[prefill.bucket] -= prefill.counts
        self.tokens -= prefill.uncached_tokens
        self.silent -= not prefill.request.streams
        self.total_s = self.total_s - prefill.prefill_s if self.prefills else 0.0

    def _next(self) -> InFlight | None:
        """Return the prefill that the engine begins next."""
        prefills = self.prefills.values()
        if self.ordered and prefills:
            return min(prefills, key=lambda prefill: prefill.priority)  # the first of equals
        return next(iter(prefills), None)

    def silent_ends_at(self) -> float:
        """Return the predicted end of the next prefill without a visible first token, or inf."""
        if not self.silent:
            return inf
        if self.chunked:
            return min(prefill.ends_at for prefill in self.prefills.values())
        head = self.head
        if head is None or head.request.streams:
            return inf
        return self.head_since + head.prefill_s

    def silently_over(self, now: float) -> tuple[InFlight, float] | None:
        """Return a prefill without a visible first token whose predicted end is past, and when."""
        ends_at = self.silent_ends_at()
        if ends_at > now:
            return None
        if not self.chunked and self.head is not None:
            return self.head, ends_at
        return min(self.prefills.values(), key=lambda prefill: prefill.ends_at), ends_at

    def rebucket(self, buckets: Iterable[str]) -> None:
        """Count by bucket again. Each prefill has its new bucket already."""
        self.prefills_of = dict.fromkeys(buckets, 0)
        for prefill in self.prefills.values():
            self.prefills_of[prefill.bucket] += prefill.counts
