"""The books of one backend: what runs there, what waits for it, and how long that will take.

Books change when a decision is made, not when a socket opens. An engine prefills first come,
first served, so the requests sent and not yet answered form a line; its head has been computed
on since `_head_since`. A backlog is a prediction and shrinks as time passes, but never to
nothing while the head streams and has given no token: a late engine must look busy, not free,
and what seemed to be cached may not be.
"""

from collections.abc import Callable, Iterable
from math import exp, inf, log
from typing import Final

from forebay.proxy.core.chunks import LEARN_FROM, passing
from forebay.proxy.core.concurrency import Concurrency
from forebay.proxy.core.cost import CostModel, features
from forebay.proxy.core.fairness import Fairness
from forebay.proxy.core.held import HeldPrefixes
from forebay.proxy.core.kv import KvReserve
from forebay.proxy.core.lanes import Lanes
from forebay.proxy.core.model import STANDARD, BackendSpec, Bucket, Request
from forebay.proxy.core.others import NOTHING, BackendBooks, Elsewhere
from forebay.proxy.core.prefix import PrefixIndex, Touch
from forebay.proxy.core.prefix_error import PrefixError
from forebay.proxy.core.queueing import Waiting
from forebay.proxy.core.turns import Turns

OVERDUE_SHARE: Final = 0.1  # of a prefill with nothing cached: what it counts for until it answers
LATE: Final = 1.25  # a prefill this much over its prediction ...
LATE_S: Final = 0.1  # ... and this much more was not cached as believed
KV_FULL: Final = 0.95  # of the pool: beyond it the engine preempts or keeps requests waiting
DEFAULT_INDEX_BLOCKS = 1 << 16  # of a backend whose KV pool is unknown: 128 MiB of prompt text
KEPT_GAIN: Final = 0.5  # of `kept` towards what is left ...
KEPT_STEP: Final = 1.01  # ... and a step of it either way
KEPT_LEAST: Final = 0.25  # of the pool ...
KEPT_LEAST_UNKNOWN: Final = 1e-3  # ... and of an unknown one
KEPT_MOST: Final = 1.5
KEPT_FAR: Final = 0.7  # the index was so much too large
SURPLUS_BLOCKS: Final = 1.5  # of text; the end of a prompt is in no block and may be cached too
LOAD_HALF_LIFE_S: Final = 120.0
STEP_TOKENS: Final = 2_048
"""So many are computed in one engine step (the least max_num_batched_tokens of vLLM's defaults):
prefills that come to less cost one step together, however long a step is."""
AWAITED: Final = 2.0
"""A follower that would pass its leader in the engine waits for it if that takes at most so many
times what it saves: a shared instruction is cached as soon as it is computed, and saves little."""
LN_2: Final = 0.6931471805599453
IDLE_FIRST: Final = 1e12  # ranks every idle backend before every busy one
UNLIMITED: Final = 1 << 30
OBSERVE_AFTER_S: Final = 0.05  # prefills batched in one step answer together: measure them together
# While other proxies have prefills there too, whose end we hear of up to 0.1 s late.
OBSERVE_SHARED_S: Final = 0.5


class Flight:
    """A request that was sent and has not finished."""

    __slots__ = (
        "bucket",
        "cold_s",
        "counts",
        "ends_at",
        "evidence",
        "exact",
        "first_token_at",
        "outdated",
        "output_tokens",
        "prefill_s",
        "request",
        "reserved_tokens",
        "sent_at",
        "touch",
        "uncached_tokens",
    )

    def __init__(
        self,
        request: Request,
        bucket: str,
        sent_at: float,
        prefill_s: float,
        cold_s: float,
        uncached_tokens: int,
        reserved_tokens: int,
    ) -> None:
        self.request = request
        self.bucket = bucket
        self.sent_at = sent_at
        self.prefill_s = prefill_s
        self.cold_s = cold_s
        self.uncached_tokens = uncached_tokens
        self.reserved_tokens = reserved_tokens  # KV cache for its output
        self.output_tokens = 0  # as it turned out; 0 while not known
        self.first_token_at: float | None = None
        self.ends_at = inf  # predicted, of a prefill whose end cannot be seen
        self.exact = False  # the match was looked up in what the engine reports to hold
        self.evidence = 0  # the stamp that is proved too old if the match was wrong; 0: none
        # Counts towards the bucket's limit: an answer from the cache is in nobody's way.
        self.counts = uncached_tokens > STEP_TOKENS or uncached_tokens == request.prompt_tokens
        self.touch: Touch | None = None
        self.outdated = False  # the cache that it was sent to is gone


class Worked:
    """Prefill seconds of one bucket, and when they were last decayed."""

    __slots__ = ("at", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.at = 0.0


class Backend:
    def __init__(
        self,
        spec: BackendSpec,
        buckets: Iterable[Bucket],
        index: int = 0,
        *,
        fairness: Fairness | None = None,
        itl_slo_s: float = inf,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.index = index  # its place among the backends
        self.rank = 0.0  # `free_rank` as `Candidates` knows it
        self.room_at = -inf  # when the backlog will let more in, as `Candidates` knows it
        self.kv_tokens = spec.kv_tokens
        self.up = False
        self.draining = False  # it is to go: `up` stays false until it is gone
        self.most_prefills = UNLIMITED  # fewer while it is on trial or says that it is full
        self.cost = CostModel()
        self.prefixes = PrefixIndex(DEFAULT_INDEX_BLOCKS)
        self.kept = 1.0  # how much the engine keeps, as a share of what its pool should hold
        self.held: HeldPrefixes | None = None  # where the engine tells what it holds
        self.prefix_error = PrefixError()
        self.tells_cached = False  # its answers say how much of the prompt was cached
        fair = self._fairness = fairness or Fairness((), 1.0)
        self.queues = {bucket.name: Lanes(fair) for bucket in buckets}
        self.turns = Turns(self.queues)
        self.chunk_tokens = spec.chunk_tokens
        self.concurrency = Concurrency(spec.max_concurrency, itl_slo_s)
        self.limit = spec.max_concurrency  # requests that may run now
        self.queued = 0  # in all of them
        self.queued_s = 0.0  # their prefills
        self.flights: dict[str, Flight] = {}
        self.kv = KvReserve()
        self.sent_prompt_tokens = 0
        self.prefills: dict[str, Flight] = {}
        self._head: Flight | None = None  # the first of them
        self.prefills_of = dict.fromkeys(self.queues, 0)  # of them, those that count
        self.line_tokens = 0  # uncached, of `prefills`
        # Smoothed time from first token to finish, by bucket.
        self.decode_s = dict.fromkeys(self.queues, 1.0)
        self._line_s = 0.0  # sum of prefill_s over `prefills`
        self._head_since = 0.0
        self.silent = 0  # of `prefills`, those whose first token cannot be seen
        self._load = 0.0
        self._load_at = 0.0
        self._worked = {name: Worked() for name in self.queues}
        self._pending_terms = (0.0, 0.0, 0.0)
        self._pending_since = 0.0
        self.others: Elsewhere | None = None  # what other proxies have here, if there are any
        self._others_before = NOTHING  # their work done when the observation began
        self._work = NOTHING  # terms of all prefills done, while there were others
        self._fresh_tokens = 0.0  # the same of what was put into the cache
        self._block_tokens = 512.0

    def __repr__(self) -> str:
        state = "draining" if self.draining else "up" if self.up else "down"
        return (
            f"<Backend {self.name} {state} running={len(self.flights)}/{self.limit}"
            f" prefills={len(self.prefills)} queued={self.queued}>"
        )

    @property
    def empty(self) -> bool:
        """Nothing of ours runs or waits here, whatever others have."""
        return not self.flights and not self.queued

    @property
    def idle(self) -> bool:
        """Nobody has anything here, as far as we know."""
        others = self.others
        return not self.flights and not self.queued and (others is None or not others.running)

    @property
    def free_rank(self) -> float:
        """Ranks backends by when they will have prefilled what they have; idle ones by load.

        Time alone does not change the order.
        """
        if self.others is not None and (others_s := self.others.prefill_s(self.others.since)):
            own_s = self._line_s + self.queued_s
            return max(self._head_since, self.others.since) + own_s + others_s
        if self.prefills or self.queued:
            return self._head_since + self._line_s + self.queued_s
        load = log(self._load) / LN_2 + self._load_at / LOAD_HALF_LIFE_S if self._load else 0.0
        return load - IDLE_FIRST

    def matched_tokens(self, request: Request) -> int:
        """Prompt tokens this backend probably holds; the last token is always computed."""
        blocks = self.prefixes.match(request.blocks)
        if self.held is not None:
            exact = self._exact_tokens(request, blocks)
            if exact >= 0:
                return exact
        if not blocks:
            return 0
        return max(0, min(int(blocks * request.block_tokens), request.prompt_tokens - 1))

    def _exact_tokens(self, request: Request, believed_blocks: int) -> int:
        """What the engine tells it holds of the prompt; below 0 where that cannot be said."""
        assert self.held is not None
        return min(self.held.match(request.blocks, believed_blocks), request.prompt_tokens - 1)

    def awaits(self, request: Request) -> bool:
        """Whether what is matched of the request is still being computed for another.

        Sent now, it would compute once more what is missing: fifty users who open one document.
        """
        blocks = request.blocks
        matched = self.prefixes.match(blocks)
        if not matched:
            return False
        most_s = inf
        if self.chunk_tokens < inf:  # it need not wait, as it would pass them
            tokens = request.prompt_tokens
            saved_s = self.prefill_s(request, 0) - self.prefill_s(
                request, min(tokens - 1, int(matched * request.block_tokens))
            )
            most_s = AWAITED * saved_s
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

    def prefill_s(self, request: Request, matched_tokens: int) -> float:
        return self.cost.predict_s(request.prompt_tokens - matched_tokens, request.prompt_tokens)

    # What is ahead of a newcomer.

    def backlog_s(self, now: float) -> float:
        """Predicted seconds until the engine has given a first token to all it was sent."""
        others, head = self.others, self._head
        if head is None:
            return 0.0 if others is None else others.prefill_s(now)
        elapsed_s = now - self._head_since
        if others is not None and elapsed_s < 0.0:  # it begins after what they have sent
            elapsed_s = 0.0
        left, floor = head.prefill_s - elapsed_s, 0.0
        if head.request.streams:
            floor = OVERDUE_SHARE * head.cold_s
            if elapsed_s > LATE * head.prefill_s + LATE_S:
                # What seemed to be cached was not: the engine has evicted it.
                left = head.cold_s - elapsed_s
        own_s = self._line_s - head.prefill_s + max(left, floor)
        return own_s if others is None else own_s + others.prefill_s(now)

    def ahead_s(self, uncached_tokens: float, now: float) -> float:
        """Predicted seconds until the engine is through with what a prefill waits for here.

        All of the backlog where prefills are computed one after the other. Else those that are
        no longer than it, and of each longer one the chunk that shares each step with it.
        """
        if self.chunk_tokens == inf:
            return self.backlog_s(now)
        equals_s, chunks_s = passing(self.prefills.values(), uncached_tokens, self.chunk_tokens)
        return min(
            self.backlog_s(now), equals_s + chunks_s + self._elsewhere_s(uncached_tokens, now)
        )

    def due_s(self, uncached_tokens: float, now: float) -> float:
        """Of `ahead_s`, what keeps a prefill here: the chunks of longer ones never end sooner."""
        if self.chunk_tokens == inf:
            return self.backlog_s(now)
        equals_s, _ = passing(self.prefills.values(), uncached_tokens, self.chunk_tokens)
        return min(self.backlog_s(now), equals_s + self._elsewhere_s(uncached_tokens, now))

    def _elsewhere_s(self, uncached_tokens: float, now: float) -> float:
        """What a prefill of so many tokens waits for of what other proxies have sent."""
        if self.others is None:
            return 0.0
        theirs_s = self.others.prefill_s(now)
        if uncached_tokens > self.chunk_tokens:
            return theirs_s
        return min(theirs_s, self.others.short_s)

    def margin_s(self, wait_s: float, ahead_s: float) -> float:
        """How much longer a predicted wait may be, nine times in ten.

        Errors grow with all that is in the line, even what is nearly done. One and a half times
        the mean relative error: the 88th percentile of a normal one. With twice as much, more is
        refused that would have been in time than is served in time (`replay/sim/hindsight.py`).
        """
        line_s = wait_s if self.chunk_tokens < inf else self._line_s
        return 1.5 * self.cost.spread * max(wait_s, line_s + ahead_s)

    def backlog_below_at(self, limit_s: float) -> float:
        """When the backlog falls below `limit_s` by itself; inf if only an answer can do it."""
        others_at = -inf if self.others is None else self.others.below_at(limit_s)
        head = self._head
        if head is None:
            return others_at
        rest = self._line_s - head.prefill_s
        floor = OVERDUE_SHARE * head.cold_s if head.request.streams else 0.0
        if self.silent and rest >= limit_s:
            if self.chunk_tokens < inf:
                return min(flight.ends_at for flight in self.prefills.values())
            if not head.request.streams:
                return self._head_since + head.prefill_s  # the head leaves the line then
        if rest + floor >= limit_s:
            return inf
        return max(others_at, self._head_since + self._line_s - limit_s)

    def prefills_longer(self, than_s: float) -> bool:
        """Whether the engine has a prefill to do or under way that others await that long."""
        if self.chunk_tokens < inf:
            return False
        if self.others is not None and self.others.longest_s > than_s:
            return True
        return any(flight.prefill_s > than_s for flight in self.prefills.values())

    @property
    def running(self) -> int:
        """Requests there that have not finished, whoever sent them."""
        running = len(self.flights)
        return running if self.others is None else running + self.others.running

    def slots_wait_s(self, bucket: str, ahead: int) -> float:
        """Predicted wait for a free slot with `ahead` others waiting for one too."""
        missing = len(self.flights) + ahead + 1 - self.limit
        if self.others is not None:
            missing += self.others.running
        if missing <= 0:
            return 0.0
        return missing * self.decode_s[bucket] / self.limit

    def kv_fits(self, request: Request, output_tokens: int) -> bool:
        room = KV_FULL * self.kv_tokens - self.kv.held
        if self.others is not None and self.others.running:
            room -= self.others.kv_tokens
        elif not self.flights:
            return True
        if request.prompt_tokens + output_tokens <= room:
            return True
        return self.kv.need(request, output_tokens) <= room

    def kv_wait_s(self, request: Request, output_tokens: int, bucket: str, mates: int) -> float:
        """Predicted wait for KV cache: those who run give theirs back in turn.

        Each of `mates`, which are this one and those before it, is reckoned to need as much.
        """
        held = self.kv.held
        if not held:
            return 0.0
        room = KV_FULL * self.kv_tokens - held
        if (request.prompt_tokens + output_tokens) * mates <= room:
            return 0.0
        missing = self.kv.need(request, output_tokens) * mates - room
        if missing <= 0:
            return 0.0
        return missing / held * self.decode_s[bucket]

    def load(self, now: float) -> float:
        """Prompt tokens sent, halved every LOAD_HALF_LIFE_S: the long-run share."""
        if self.others is not None:
            return self.own_load(now) + self.others.load
        return self._load * decay(now - self._load_at)

    def own_load(self, now: float) -> float:
        """Of `load`, what we sent ourselves."""
        return self._load * decay(now - self._load_at)

    def worked_share(self, bucket: str, now: float) -> float:
        """Share of its time that the engine lately spent on prefills of one bucket."""
        worked = self._worked[bucket]
        share = worked.seconds * decay(now - worked.at) * LN_2 / LOAD_HALF_LIFE_S
        return share if self.others is None else share + self.others.worked.get(bucket, 0.0)

    def books(self, now: float) -> BackendBooks:
        """What we have here, for other proxies to know: without what they told us."""
        others, self.others = self.others, None
        books = BackendBooks(
            backlog_s=self.backlog_s(now),
            running=len(self.flights),
            kv_tokens=self.kv.held,
            longest_s=max((f.prefill_s for f in self.prefills.values()), default=0.0),
            load=self.own_load(now),
            fresh_tokens=self._fresh_tokens,
            work=self._work,
            prefills={bucket: count for bucket, count in self.prefills_of.items() if count},
            queued_s={bucket: q.work_s for bucket, q in self.queues.items() if len(q)},
            worked={b: share for b in self.queues if (share := self.worked_share(b, now)) > 1e-4},
            short_s=self.due_s(0.0, now),
        )
        self.others = others
        return books

    # What changes the books.

    def share_with(self, others: Elsewhere | None, now: float) -> None:
        """Other proxies use the backend too, and this is what they have here; None: no longer."""
        self.others = others
        self._begin_observation(now)  # what was measured so far may have been theirs

    def crowded(self, fresh_tokens: float) -> None:
        """Others have had the engine put so much into its cache, which pushes ours out."""
        self.prefixes.touch((), fresh_tokens / self._block_tokens)

    def enqueue(self, waiting: Waiting) -> None:
        """The request waits for this backend."""
        self.queues[waiting.bucket].push(waiting)
        self.turns.joined(waiting)
        self.queued += 1
        self.queued_s += waiting.work_s

    def dequeue(self, waiting: Waiting) -> None:
        """It waits no longer, or elsewhere."""
        self.queues[waiting.bucket].remove(waiting)
        self.queued -= 1
        self.queued_s -= waiting.work_s
        if not self.queued:
            self.queued_s = 0.0
            self.turns.nobody_waits()

    def sent(
        self,
        request: Request,
        bucket: str,
        matched_tokens: int,
        now: float,
        reserved_tokens: int | None = None,
        rank: int = STANDARD,
    ) -> Flight:
        """It was sent here: its prefill joins the line, its slot and KV cache are taken.

        `reserved_tokens` is what it is reckoned to generate; by default the most it may.
        """
        if reserved_tokens is None:
            reserved_tokens = request.output_tokens
        tokens = request.prompt_tokens
        prefill_s = cold_s = self.cost.predict_s(tokens, tokens)
        if matched_tokens:
            prefill_s = self.cost.predict_s(tokens - matched_tokens, tokens)
        flight = Flight(
            request, bucket, now, prefill_s, cold_s, tokens - matched_tokens, reserved_tokens
        )
        if self._head is None:
            self._head = flight
            self._head_since = now
            if self.others is not None:
                self._head_since += self.others.prefill_s(now)
            self._begin_observation(now)
        if not request.streams:
            flight.ends_at = now + self.ahead_s(flight.uncached_tokens, now) + prefill_s
        if self.held is not None:
            flight.exact = self._exact_tokens(request, self.prefixes.match(request.blocks)) >= 0
        if matched_tokens and not flight.exact:
            self._note_evidence(flight)
        self.flights[request.id] = self.prefills[request.id] = flight
        if self.queued:
            self.turns.sent(bucket, rank, prefill_s, self.queued)
        self.prefills_of[bucket] += flight.counts
        self.line_tokens += flight.uncached_tokens
        self.silent += not request.streams
        self._line_s += prefill_s
        self.kv.take(request, reserved_tokens)
        self.sent_prompt_tokens += tokens
        worked = self._worked[bucket]
        worked.seconds = worked.seconds * decay(now - worked.at) + prefill_s
        worked.at = now
        self._load = self._load * decay(now - self._load_at) + tokens
        self._load_at = now
        self._block_tokens = request.block_tokens
        if self.others is not None:
            self._fresh_tokens += tokens - matched_tokens + request.output_tokens
        pool_blocks = DEFAULT_INDEX_BLOCKS
        if self.kv_tokens < inf:
            pool_blocks = int(self.kv_tokens / request.block_tokens)
        self.prefixes.capacity_blocks = int(pool_blocks * self.kept)
        unindexed = tokens + request.output_tokens - int(len(request.blocks) * request.block_tokens)
        other_blocks = max(0, unindexed) / request.block_tokens
        flight.touch = self.prefixes.touch(request.blocks, other_blocks)
        return flight

    def first_token(self, request_id: str, now: float) -> Flight | None:
        """The engine answered: its prefill is over, and says how long prefills take.

        Returns it if it has left the line of prefills.
        """
        flight = self.flights.get(request_id)
        if flight is None or request_id not in self.prefills:
            return None
        flight.first_token_at = now
        fixed, linear, pairs = features(flight.uncached_tokens, flight.request.prompt_tokens)
        a, b, c = self._pending_terms
        self._pending_terms = a + fixed, b + linear, c + pairs
        if self.others is not None:
            a, b, c = self._work
            self._work = a + fixed, b + linear, c + pairs
        self._leave_line(flight, now)
        elapsed_s = now - self._pending_since
        if self.others is not None and self._others_worked(self.others):
            if not self.prefills or elapsed_s >= OBSERVE_SHARED_S:
                self._observe_shared(self.others, elapsed_s)
                self._begin_observation(now)
        elif not self.prefills or (elapsed_s >= OBSERVE_AFTER_S and self._mostly_ended()):
            if elapsed_s > 0:
                self.cost.observe(self._pending_terms, elapsed_s)
            self._begin_observation(now)
        return flight

    def finished(self, request_id: str, now: float) -> Flight | None:
        """It completed, failed or was cancelled: everything it held is given back.

        Returns it if it has left the line of prefills.
        """
        flight = self.flights.pop(request_id)
        left_line = None
        if request_id in self.prefills:
            left_line = flight
            if flight.request.streams:
                self._uncompute(flight, now)
            self._leave_line(flight, now)
            # It left without a first token: what was measured so far means nothing.
            self._begin_observation(now)
        elif flight.first_token_at is not None:
            seconds = now - flight.first_token_at
            self.decode_s[flight.bucket] += 0.1 * (seconds - self.decode_s[flight.bucket])
            if self.concurrency.on:
                running, tokens = self.running + 1, flight.output_tokens
                self.concurrency.finished(flight.first_token_at, tokens, running, now)
                self.limit = self.concurrency.limit
        self.kv.give_back(flight.request, flight.reserved_tokens)
        return left_line

    def prompt_cached(self, flight: Flight, cached_tokens: int | None, prompt_tokens: int) -> None:
        """The engine said how much of the prompt was cached (None: it did not say).

        The prompt is computed by now, so it is held either way: what a wrong guess tells is how
        much of all the rest the engine has dropped, or kept.
        """
        if flight.outdated:
            return
        if cached_tokens is None:
            # Some versions leave the count out when it is 0, all do when they are not to tell.
            if not self.tells_cached:
                return
            cached_tokens = 0
        self.tells_cached = True
        request = flight.request
        matched = float(request.prompt_tokens - flight.uncached_tokens)
        block_tokens = request.block_tokens
        if prompt_tokens and not flight.exact:  # in tokens as the engine counts them
            matched *= prompt_tokens / request.prompt_tokens
            block_tokens *= prompt_tokens / request.prompt_tokens
        self.prefix_error.add(matched, cached_tokens, block_tokens)
        if flight.exact:
            return
        if matched - cached_tokens > block_tokens + 1.0:
            if flight.evidence:
                self.prefixes.forget_until(flight.evidence)
                self._keeps_less(request.block_tokens)
        elif cached_tokens - matched > SURPLUS_BLOCKS * block_tokens and self.prefixes.evicted:
            self.kept = min(KEPT_MOST, self.kept * KEPT_STEP)

    def restarted(self) -> None:
        """It went away, or is another server now; when it comes back its cache is empty."""
        self.prefixes.clear()
        self.tells_cached = False
        for flight in self.flights.values():
            flight.outdated = True
        if self.held is not None:
            self.held.doubt()

    @property
    def prefix_mode(self) -> str:
        """How it is known what the backend holds: believed, corrected or exact."""
        if self.held is not None and self.held.complete:
            return "exact"
        return "corrected" if self.tells_cached else "believed"

    def _keeps_less(self, block_tokens: float) -> None:
        """What is left of the index is about what the engine keeps."""
        least, pool_blocks = KEPT_LEAST_UNKNOWN, float(DEFAULT_INDEX_BLOCKS)
        if self.kv_tokens < inf:
            least, pool_blocks = KEPT_LEAST, self.kv_tokens / block_tokens
        left = len(self.prefixes) / pool_blocks
        # What is a little too much is as often a little too little, which is a step up again.
        if left < KEPT_FAR * self.kept:
            self.kept += KEPT_GAIN * (left - self.kept)
        else:
            self.kept /= KEPT_STEP
        self.kept = max(least, self.kept)

    def _note_evidence(self, flight: Flight) -> None:
        """Remember how old the deepest block is that is believed to be held.

        Only if it was computed by a prefill that is over: blocks of one that is under way may be
        missing though nothing was dropped.
        """
        request = flight.request
        matched_tokens = request.prompt_tokens - flight.uncached_tokens
        deepest = round(matched_tokens / request.block_tokens)
        if 0 < deepest <= len(request.blocks):
            stamp = self.prefixes.stamp_of(request.blocks[deepest - 1])
            head = self._head
            if head is not None and head is not flight:
                touch = head.touch
                if touch is None or touch.stamp <= stamp:
                    stamp = 0
            flight.evidence = stamp

    def _uncompute(self, flight: Flight, now: float) -> None:
        """It left before its first token: the rest of its prompt is not computed."""
        if flight.touch is None or flight.exact:
            return
        done = 0.0
        if self._head is flight:
            done = min(1.0, (now - self._head_since) / max(1e-9, flight.prefill_s))
        matched_tokens = flight.request.prompt_tokens - flight.uncached_tokens
        tokens = matched_tokens + done * flight.uncached_tokens
        block_tokens = flight.request.block_tokens
        # Never less than was held before: others may hold more behind it.
        before = round(matched_tokens / block_tokens)
        self.prefixes.untouch(flight.touch, max(before, int(tokens / block_tokens)))

    def resize(self, spec: BackendSpec, itl_slo_s: float) -> None:
        """It has other limits; how many may run is found out anew."""
        self.spec = spec
        self.chunk_tokens = spec.chunk_tokens
        self.concurrency = Concurrency(spec.max_concurrency, itl_slo_s)
        self.limit = spec.max_concurrency

    def rebucket(self, buckets: Iterable[Bucket], home: Callable[[Request], str]) -> None:
        """There are other buckets now, and nobody waits; `home` names the bucket of a request."""
        assert not self.queued
        self.queues = {bucket.name: Lanes(self._fairness) for bucket in buckets}
        self.turns = Turns(self.queues)
        for flight in self.flights.values():
            flight.bucket = home(flight.request)
        self.prefills_of = dict.fromkeys(self.queues, 0)
        for flight in self.prefills.values():
            self.prefills_of[flight.bucket] += flight.counts
        self.decode_s = {name: self.decode_s.get(name, 1.0) for name in self.queues}
        self._worked = {name: self._worked.get(name) or Worked() for name in self.queues}

    def computed_s(self, request_id: str, now: float) -> float:
        """Of a request without a first token: seconds its prefill was computed, as predicted."""
        head = self._head
        if head is None or head.request.id != request_id:
            return 0.0
        # It may begin only after what others have sent.
        return max(0.0, min(head.prefill_s, now - self._head_since))

    def pass_time(self, now: float) -> bool:
        """Take those out of the line whose first token cannot be seen and is predicted past.

        Returns whether any was.
        """
        left = False
        while self.silent and (over := self._silently_over(now)):
            flight, ended_at = over
            self._leave_line(flight, ended_at)
            self._begin_observation(now)
            left = True
        return left

    def _silently_over(self, now: float) -> tuple[Flight, float] | None:
        """A prefill whose end cannot be seen and is predicted past, and when that was."""
        if self.chunk_tokens < inf:
            for flight in self.prefills.values():
                if flight.ends_at <= now:
                    return flight, flight.ends_at
            return None
        head = self._head
        if head is None or head.request.streams:
            return None
        ends_at = self._head_since + head.prefill_s
        return (head, ends_at) if ends_at <= now else None

    def _leave_line(self, flight: Flight, now: float) -> None:
        del self.prefills[flight.request.id]
        if flight is self._head:
            self._head_since = now
            self._head = _first(self.prefills)
        elif self.chunk_tokens < inf and self._head is not None:
            # It has passed the head: its part of the time since was no work on that.
            self._head_since = min(now, self._head_since + flight.prefill_s)
        self.prefills_of[flight.bucket] -= flight.counts
        self.line_tokens -= flight.uncached_tokens
        self.silent -= not flight.request.streams
        self._line_s = self._line_s - flight.prefill_s if self.prefills else 0.0

    def _begin_observation(self, now: float) -> None:
        self._pending_terms = (0.0, 0.0, 0.0)
        self._pending_since = now
        if self.others is not None:
            self._others_before = self.others.work

    def _mostly_ended(self) -> bool:
        """Whether the time since the observation began went to prefills that have ended."""
        return self.chunk_tokens == inf or (
            self.cost.total_s(self._pending_terms) >= LEARN_FROM * self._line_s
        )

    def _others_worked(self, others: Elsewhere) -> bool:
        """Whether the engine did others' prefills too since the observation began."""
        return others.work != self._others_before or others.busy_since(self._pending_since)

    def _observe_shared(self, others: Elsewhere, elapsed_s: float) -> None:
        """The engine did others' prefills as well as ours; too short a look tells nothing."""
        if elapsed_s < OBSERVE_SHARED_S:
            return
        (a, b, c), (d, e, f), (x, y, z) = self._pending_terms, others.work, self._others_before
        self.cost.observe((a + d - x, b + e - y, c + f - z), elapsed_s)


def _first(flights: dict[str, Flight]) -> Flight | None:
    for flight in flights.values():
        return flight
    return None


def decay(elapsed_s: float) -> float:
    """What is left of a load after `elapsed_s`."""
    return exp(-elapsed_s * (LN_2 / LOAD_HALF_LIFE_S))
