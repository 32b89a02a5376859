"""The prefill queue of one engine: requests that were sent there and have no first token yet.

An engine computes prefills first come, first served; the head has been computed since `head_since`.
The backlog is a prediction that shrinks as time passes. It does not fall to nothing while the head
streams and has no first token: a late engine is busy, not free, and an expected cache hit may have
been a miss.

With `--long-prefill-token-threshold` (`chunk_tokens`) vLLM computes at most that many tokens of one
prompt per step while other requests wait. A prefill then shares each of its steps with one chunk of
every longer prefill: it waits for a few chunks instead of for whole long prefills.

`elsewhere` is what other proxies have in the same engine; None without other proxies.
"""

from collections.abc import Iterable, Sequence
from math import fsum, inf
from typing import Final

from forebay.proxy.core.learn.api_server import ServerModel, TimeInServer
from forebay.proxy.core.learn.cost import MOST_OFF, CostModel, Vector, features
from forebay.proxy.core.model import ENOUGH, INSTANT_S, SLACK
from forebay.proxy.core.state.elsewhere import SILENT_S, Elsewhere
from forebay.proxy.core.state.in_flight import InFlight, passing

LEARN_FROM: Final = 4.0
"""Elapsed time is attributed to prefills that have ended. The progress of unfinished ones is
unknown, so ended work must be this many times the unfinished work. Doubled: learns less
often in chunking engines."""


class PrefillQueue:
    """The prefills in one engine, in the order they were sent.

    Attributes:
        prefills: by request.
        prefills_of: by bucket, those that count towards `prefills_per_backend`.
        head: the first of them; None if the queue is empty.
        tokens: uncached tokens of all.
        total_s: sum of prefill_s of all.
        silent: how many have a first token that cannot be seen.
        chunk_tokens: see BackendSpec; set by `chunk`.
        chunked: the engine chunks long prefills, so shorter ones pass longer ones.
        ordered: the engine begins the waiting prefill with the lowest priority.
        elsewhere: what other proxies have in this engine.
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
            if elapsed_s > head.late_s:
                left = head.cold_s - elapsed_s  # the engine had evicted what seemed to be cached
        return self.total_s - head.prefill_s + max(left, floor)

    def ahead_s(self, uncached_tokens: float, now: float, priority: float | None = None) -> float:
        """Return the predicted seconds that a prefill sent now would wait in the engine.

        The whole backlog where prefills are computed one after the other. In a chunking engine:
        prefills that are no longer than it, and the chunks of longer ones beside it. In an engine
        that orders by priority: without the prefills that this `priority` passes.
        """
        if self.head is None and self.elsewhere is None:
            return 0.0
        before, backlog_s = self._before(priority, now)
        if not self.chunked:
            return backlog_s
        equals_s, chunks_s = passing(before, uncached_tokens, self.chunk_tokens)
        return min(backlog_s, equals_s + chunks_s + self._elsewhere_s(uncached_tokens, now))

    def drain_s(self, uncached_tokens: float, now: float, priority: float | None = None) -> float:
        """Return the part of `ahead_s` that must drain before dispatch.

        In a chunking engine: only prefills that are no longer than this one. The chunks of longer
        prefills will be beside it whenever it is sent.
        """
        if self.head is None and self.elsewhere is None:
            return 0.0
        before, backlog_s = self._before(priority, now)
        if not self.chunked:
            return backlog_s
        equals_s, _ = passing(before, uncached_tokens, self.chunk_tokens)
        return min(backlog_s, equals_s + self._elsewhere_s(uncached_tokens, now))

    def _before(self, priority: float | None, now: float) -> tuple[Iterable[InFlight], float]:
        """Return the prefills that one of this priority does not pass, and the backlog of them."""
        prefills, backlog_s = self.prefills.values(), self.backlog_s(now)
        if priority is None or not self.ordered:
            return prefills, backlog_s
        before = [p for p in prefills if p.priority <= priority or p is self.head]
        passed_s = self.total_s - fsum(prefill.prefill_s for prefill in before)
        return before, backlog_s - max(0.0, passed_s)

    def own_short_s(self, now: float) -> float:
        """Return what a short prefill waits for of what this proxy sent, for other proxies."""
        if not self.chunked:
            return self.own_backlog_s(now)
        equals_s, _ = passing(self.prefills.values(), 0.0, self.chunk_tokens)
        return min(self.own_backlog_s(now), equals_s)

    def _elsewhere_s(self, uncached_tokens: float, now: float) -> float:
        """Return what a prefill waits for of the work that other proxies sent."""
        if self.elsewhere is None:
            return 0.0
        theirs_s = self.elsewhere.prefill_s(now)
        if uncached_tokens > self.chunk_tokens:
            return theirs_s
        return min(theirs_s, self.elsewhere.short_s)

    def below_at(self, limit_s: float) -> float:
        """Return when the backlog falls below `limit_s` by itself; inf if only an answer can."""
        others_at = -inf if self.elsewhere is None else self.elsewhere.below_at(limit_s)
        head = self.head
        if head is None:
            return others_at
        rest = self.total_s - head.prefill_s
        floor = head.overdue_s if head.request.streams and head.counts else 0.0
        if rest + floor >= limit_s:
            return self.silent_ends_at()
        return max(others_at, self.head_since + self.total_s - limit_s)

    def done_in_at(self, limit_s: float, now: float) -> float:
        """Return when `limit_s` of its predicted work will be left; inf if it is already late."""
        own_at = -inf if self.head is None else self.head_since + self.total_s
        done_at = own_at if self.elsewhere is None else max(own_at, self.elsewhere.done_at())
        if done_at < now and self.backlog_s(now) > limit_s:
            return inf
        return max(now, done_at - limit_s)

    def blocks_for(self, than_s: float) -> bool:
        """Return whether a prefill in the engine makes others wait for longer than `than_s`."""
        if self.chunked:
            return False
        if self.elsewhere is not None and self.elsewhere.longest_s > than_s:
            return True
        return any(prefill.prefill_s > than_s for prefill in self.prefills.values())

    def longest_s(self) -> float:
        """Return the longest prefill in the queue; 0 if there is none."""
        return max((prefill.prefill_s for prefill in self.prefills.values()), default=0.0)

    def computes(self, blocks: Sequence[int], matched: int, most_s: float) -> bool:
        """Return whether a prefill of at most `most_s` computes the first `matched` blocks."""
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
        """Return how long this prefill has been computed; 0 behind the head."""
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
        """Count anew by bucket; each prefill has its new bucket already."""
        self.prefills_of = dict.fromkeys(buckets, 0)
        for prefill in self.prefills.values():
            self.prefills_of[prefill.bucket] += prefill.counts


class PrefillObserver:
    """Measures what prefills take on one engine and teaches the cost model.

    An observation begins when the engine begins to prefill and ends with its answer. Prefills of
    one step answer together and are measured together, with the work that other proxies had there:
    while others are in the engine, it waits for answers of the same step before it is learned from.
    The API server's time is no work of the engine: it is subtracted, or learned if it is most of
    the time, as with the hit of a long prompt.

    Attributes:
        work: cost terms of all prefills done while there were other proxies, for them to learn.
    """

    def __init__(self, cost: CostModel, server: ServerModel) -> None:
        self.work: Vector = (0.0, 0.0, 0.0)
        self._cost = cost
        self._server = server
        self._times = TimeInServer(server)
        self._terms: Vector = (0.0, 0.0, 0.0)
        self._since = 0.0
        self._others_before: Vector = (0.0, 0.0, 0.0)  # their work done when the observation began
        self._impure: list[tuple[float, Vector, float]] = []  # since one that was pure
        self._answered_at = inf  # the last answer of a step of which more answers may come

    def begin(self, now: float, elsewhere: Elsewhere | None) -> None:
        """Start an observation; one without an answer is dropped."""
        if self._answered_at < inf:
            self._end_step()
        self._terms = (0.0, 0.0, 0.0)
        self._times.begin()
        self._since = now
        if elsewhere is not None:
            self._others_before = elsewhere.work

    def lose_track(self) -> None:
        """Drop the observation until a first token is seen or the engine is empty.

        A prefill whose first token cannot be seen is over by its prediction only: nobody knows
        when the engine began the next one.
        """
        if self._answered_at < inf:
            self._end_step()
        self._since = inf

    def _end_step(self) -> None:
        """Learn from a step of which no more answers come; it has had one."""
        self._learn(self._terms, self._answered_at - self._since)
        self._answered_at = inf

    def _next_step(self, elsewhere: Elsewhere | None) -> None:
        """Learn from the last step and begin the next: the engine went on after the last one."""
        self.begin(self._answered_at - self._times.after_s, elsewhere)

    def answered(self, prefill: InFlight, queue: PrefillQueue, now: float) -> None:
        """Learn from a prefill that is over and has left the queue."""
        elsewhere = queue.elsewhere
        if now - self._answered_at > SLACK * INSTANT_S:  # of a later step
            self._next_step(elsewhere)
        prompt_tokens = prefill.request.prompt_tokens
        sent_at, reached_at, last = prefill.sent_at, prefill.reached_at, not queue.prefills
        self._times.answered(prompt_tokens, sent_at, reached_at, self._since, last=last)
        fixed, linear, pairs = features(prefill.uncached_tokens, prompt_tokens)
        a, b, c = self._terms
        self._terms = a + fixed, b + linear, c + pairs
        if elsewhere is not None:
            a, b, c = self.work
            self.work = a + fixed, b + linear, c + pairs
        if self._since == inf:
            if prefill.request.streams:
                self.begin(now, elsewhere)
            return
        elapsed_s = now - self._since
        if elsewhere is not None and self._others_worked(elsewhere):
            if not queue.prefills or elapsed_s >= SILENT_S:
                self._learn_shared(elsewhere, elapsed_s)
                self.begin(now, elsewhere)
        elif not queue.prefills or (elapsed_s >= INSTANT_S and self._mostly_ended(queue)):
            if elapsed_s > 0:
                self._answered_at = now
            if not queue.prefills or elsewhere is not None:  # their later work is not part of it
                self.begin(now, elsewhere)

    def answered_impurely(self, prefill: InFlight, now: float) -> None:
        """Note a first token before which more than its prefill may have happened.

        Only where no other requests are answered the engine's speed is learned from such: from the
        median of ENOUGH, the time to first token against its prediction.
        """
        self.lose_track()
        prompt_tokens = prefill.request.prompt_tokens
        begins_at = prefill.ends_at - prefill.prefill_s
        # The engine either waited for the text, or the text waited in the engine.
        waited = begins_at - prefill.reached_at < SLACK * INSTANT_S
        before_s = prefill.reached_at - prefill.sent_at if waited else 0.0
        server_s = before_s + self._server.after_s(prompt_tokens)
        predicted_s = prefill.ends_at - prefill.sent_at - before_s
        if not server_s <= predicted_s < inf or predicted_s == 0.0 or now <= prefill.sent_at:
            return
        elapsed_s = max(now - prefill.sent_at - server_s, predicted_s / MOST_OFF)
        fixed, linear, pairs = features(prefill.uncached_tokens, prompt_tokens)
        share = predicted_s / prefill.prefill_s  # what was ahead of it is work of the same kind
        terms = share * fixed, share * linear, share * pairs
        self._impure.append((elapsed_s / predicted_s, terms, elapsed_s))
        if len(self._impure) == ENOUGH:
            _, terms, elapsed_s = sorted(self._impure)[ENOUGH // 2]
            self._impure.clear()
            self._cost.observe(terms, elapsed_s)

    def _learn(self, terms: Vector, elapsed_s: float) -> None:
        self._impure.clear()
        engine_s = self._cost.total_s(terms)
        server_s = self._times.before_s + self._times.after_s
        if server_s > engine_s:
            self._times.learn(elapsed_s, engine_s, self._since)
        else:
            self._cost.observe(terms, max(elapsed_s - server_s, engine_s / MOST_OFF))

    def _mostly_ended(self, queue: PrefillQueue) -> bool:
        """Return whether most of the elapsed time went to prefills that have ended."""
        return not queue.chunked or self._cost.total_s(self._terms) >= LEARN_FROM * queue.total_s

    def _others_worked(self, elsewhere: Elsewhere) -> bool:
        """Return whether the engine also computed other proxies' prefills since the start."""
        return elsewhere.work != self._others_before or elsewhere.busy_since(self._since)

    def _learn_shared(self, elsewhere: Elsewhere, elapsed_s: float) -> None:
        """Learn from other proxies' prefills and ours together, unless the time is too short."""
        if elapsed_s < SILENT_S:
            return
        (a, b, c), (d, e, f), (x, y, z) = self._terms, elsewhere.work, self._others_before
        self._learn((a + d - x, b + e - y, c + f - z), elapsed_s)
