"""The books of one backend: what runs there, what waits for it, and how long that will take.

Books change when a decision is made, not when a socket opens. An engine prefills first come,
first served, so the requests sent and not yet answered form a line; its head has been computed
on since `_head_since`. A backlog is a prediction and shrinks as time passes, but never to
nothing while the head streams and has given no token: a late engine must look busy, not free,
and what seemed to be cached may not be.
"""

from collections import OrderedDict
from collections.abc import Iterable
from math import exp, inf, log

from forebay.proxy.core.cost import CostModel, features
from forebay.proxy.core.held import HeldPrefixes
from forebay.proxy.core.kv import KvReserve
from forebay.proxy.core.model import BackendSpec, Bucket, Request
from forebay.proxy.core.prefix import PrefixIndex, Touch
from forebay.proxy.core.prefix_error import PrefixError
from forebay.proxy.core.queueing import DeadlineQueue, Waiting

OVERDUE_SHARE = 0.1  # of a prefill with nothing cached: what it counts for until it answers
LATE, LATE_S = 1.25, 0.1  # a prefill this much over its prediction was not cached as believed
KV_FULL = 0.95  # of the pool: beyond it the engine preempts or keeps requests waiting
DEFAULT_INDEX_BLOCKS = 1 << 16  # of a backend whose KV pool is unknown: 128 MiB of prompt text
KEPT_GAIN, KEPT_STEP = 0.5, 1.01  # of `kept`: towards what is left, and a step either way
KEPT_LEAST, KEPT_MOST = 0.25, 1.5  # of the pool; of an unknown one KEPT_LEAST_UNKNOWN
KEPT_LEAST_UNKNOWN = 1e-3
SURPLUS_BLOCKS = 1.5  # of text; the end of a prompt is in no block and may be cached too
KEPT_FAR = 0.7  # the index was so much too large
LOAD_HALF_LIFE_S = 120.0
LN_2 = log(2)
IDLE_FIRST = 1e12  # ranks every idle backend before every busy one
OBSERVE_AFTER_S = 0.05  # prefills batched in one step answer together: measure them together


class Flight:
    """A request that was sent and has not finished."""

    __slots__ = (
        "bucket",
        "cold_s",
        "evidence",
        "exact",
        "first_token_at",
        "matched_tokens",
        "prefill_s",
        "request",
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
        matched_tokens: int,
    ) -> None:
        self.request = request
        self.bucket = bucket
        self.sent_at = sent_at
        self.prefill_s = prefill_s
        self.cold_s = cold_s
        self.matched_tokens = matched_tokens
        self.uncached_tokens = request.prompt_tokens - matched_tokens
        self.first_token_at: float | None = None
        self.exact = False  # the match was looked up in what the engine reports to hold
        self.evidence = 0  # the stamp that is proved too old if the match was wrong; 0: none
        self.touch: Touch | None = None


class Backend:
    def __init__(self, spec: BackendSpec, buckets: Iterable[Bucket], index: int = 0) -> None:
        self.spec = spec
        self.name = spec.name
        self.index = index  # its place among the backends
        self.kv_tokens = spec.kv_tokens
        self.up = False
        self.cost = CostModel()
        self.prefixes = PrefixIndex(DEFAULT_INDEX_BLOCKS)
        self.kept = 1.0  # how much the engine keeps, as a share of what its pool should hold
        self.held: HeldPrefixes | None = None  # where the engine tells what it holds
        self.prefix_error = PrefixError()
        self.tells_cached = False  # its answers say how much of the prompt was cached
        self.queues = {bucket.name: DeadlineQueue() for bucket in buckets}
        self.queued = 0  # in all of them
        self.queued_s = 0.0  # their prefills
        self.flights: dict[str, Flight] = {}
        self.kv = KvReserve()
        self.sent_prompt_tokens = 0
        self.prefills: OrderedDict[str, Flight] = OrderedDict()
        self.prefills_of = dict.fromkeys(self.queues, 0)
        # Smoothed time from first token to finish, by bucket.
        self.decode_s = dict.fromkeys(self.queues, 1.0)
        self._line_s = 0.0  # sum of prefill_s over `prefills`
        self._head_since = 0.0
        self.silent = 0  # of `prefills`, those whose first token cannot be seen
        self._load = 0.0
        self._load_at = 0.0
        # Prefill seconds by bucket, and when they were last decayed.
        self._worked_s = dict.fromkeys(self.queues, (0.0, 0.0))
        self._pending_terms = (0.0, 0.0, 0.0)
        self._pending_since = 0.0

    def __repr__(self) -> str:
        state = "up" if self.up else "down"
        return (
            f"<Backend {self.name} {state} running={len(self.flights)}/{self.spec.max_concurrency}"
            f" prefills={len(self.prefills)} queued={self.queued}>"
        )

    @property
    def idle(self) -> bool:
        return not self.flights and not self.queued

    @property
    def free_rank(self) -> float:
        """Ranks backends by when they will have prefilled what they have; idle ones by load.

        Time alone does not change the order.
        """
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

    def prefill_s(self, request: Request, matched_tokens: int) -> float:
        return self.cost.predict_s(request.prompt_tokens - matched_tokens, request.prompt_tokens)

    # What is ahead of a newcomer.

    def backlog_s(self, now: float) -> float:
        """Predicted seconds until the engine has given a first token to all it was sent."""
        if not self.prefills:
            return 0.0
        head = next(iter(self.prefills.values()))
        elapsed_s = now - self._head_since
        left, floor = head.prefill_s - elapsed_s, 0.0
        if head.request.streams:
            floor = OVERDUE_SHARE * head.cold_s
            if elapsed_s > LATE * head.prefill_s + LATE_S:
                # What seemed to be cached was not: the engine has evicted it.
                left = head.cold_s - elapsed_s
        return self._line_s - head.prefill_s + max(left, floor)

    def margin_s(self, wait_s: float, ahead_s: float) -> float:
        """How much longer a predicted wait may be, nine times in ten.

        Errors grow with all that is in the line, even what is nearly done. Twice the mean
        relative error: about the 90th percentile of a normal one.
        """
        return 2.0 * self.cost.spread * max(wait_s, self._line_s + ahead_s)

    def backlog_below_at(self, limit_s: float) -> float:
        """When the backlog falls below `limit_s` by itself; inf if only an answer can do it."""
        if not self.prefills:
            return -inf
        head = next(iter(self.prefills.values()))
        rest = self._line_s - head.prefill_s
        floor = OVERDUE_SHARE * head.cold_s if head.request.streams else 0.0
        if not head.request.streams and rest >= limit_s:
            return self._head_since + head.prefill_s  # the head leaves the line then
        if rest + floor >= limit_s:
            return inf
        return self._head_since + self._line_s - limit_s

    def prefills_longer(self, than_s: float) -> bool:
        """Whether the engine has a prefill of more than `than_s` to do or under way."""
        return any(flight.prefill_s > than_s for flight in self.prefills.values())

    def slots_wait_s(self, bucket: str, ahead: int) -> float:
        """Predicted wait for a free slot with `ahead` others waiting for one too."""
        missing = len(self.flights) + ahead + 1 - self.spec.max_concurrency
        return max(0, missing) * self.decode_s[bucket] / self.spec.max_concurrency

    def kv_fits(self, request: Request) -> bool:
        room = KV_FULL * self.kv_tokens - self.kv.held
        if not self.flights or request.prompt_tokens + request.output_tokens <= room:
            return True
        return self.kv.need(request) <= room

    def kv_wait_s(self, request: Request, bucket: str) -> float:
        """Predicted wait for KV cache: those who run give theirs back in turn.

        Whoever waits in the same bucket is reckoned to need as much.
        """
        held, mates = self.kv.held, 1 + len(self.queues[bucket])
        room = KV_FULL * self.kv_tokens - held
        if not held or (request.prompt_tokens + request.output_tokens) * mates <= room:
            return 0.0
        missing = self.kv.need(request) * mates - room
        if missing <= 0:
            return 0.0
        return missing / held * self.decode_s[bucket]

    def load(self, now: float) -> float:
        """Prompt tokens sent, halved every LOAD_HALF_LIFE_S: the long-run share."""
        return self._load * decay(now - self._load_at)

    def worked_share(self, bucket: str, now: float) -> float:
        """Share of its time that the engine lately spent on prefills of one bucket."""
        seconds, at = self._worked_s[bucket]
        return seconds * decay(now - at) * LN_2 / LOAD_HALF_LIFE_S

    # What changes the books.

    def enqueue(self, waiting: Waiting) -> None:
        """The request waits for this backend."""
        self.queues[waiting.bucket].push(waiting)
        self.queued += 1
        self.queued_s += waiting.work_s

    def dequeue(self, waiting: Waiting) -> None:
        """It waits no longer, or elsewhere."""
        self.queues[waiting.bucket].remove(waiting.request.id)
        self.queued -= 1
        self.queued_s = self.queued_s - waiting.work_s if self.queued else 0.0

    def sent(self, request: Request, bucket: str, matched_tokens: int, now: float) -> Flight:
        """It was sent here: its prefill joins the line, its slot and KV cache are taken."""
        tokens = request.prompt_tokens
        prefill_s = cold_s = self.cost.predict_s(tokens, tokens)
        if matched_tokens:
            prefill_s = self.cost.predict_s(tokens - matched_tokens, tokens)
        flight = Flight(request, bucket, now, prefill_s, cold_s, matched_tokens)
        if not self.prefills:
            self._head_since = now
            self._begin_observation(now)
        if self.held is not None:
            flight.exact = self._exact_tokens(request, self.prefixes.match(request.blocks)) >= 0
        if matched_tokens and not flight.exact:
            self._note_evidence(flight)
        self.flights[request.id] = self.prefills[request.id] = flight
        self.prefills_of[bucket] += 1
        self.silent += not request.streams
        self._line_s += prefill_s
        self.kv.take(request)
        self.sent_prompt_tokens += tokens
        worked_s, at = self._worked_s[bucket]
        self._worked_s[bucket] = worked_s * decay(now - at) + prefill_s, now
        self._load, self._load_at = self.load(now) + tokens, now
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
        self._leave_line(flight, now)
        elapsed_s = now - self._pending_since
        if not self.prefills or elapsed_s >= OBSERVE_AFTER_S:
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
        self.kv.give_back(flight.request)
        return left_line

    def prompt_cached(self, request_id: str, cached_tokens: int | None, prompt_tokens: int) -> None:
        """The engine said how much of the prompt was cached (None: it did not say).

        The prompt is computed by now, so it is held either way: what a wrong guess tells is how
        much of all the rest the engine has dropped, or kept.
        """
        flight = self.flights.get(request_id)
        if flight is None:
            return
        if cached_tokens is None:
            # Some versions leave the count out when it is 0, all do when they are not to tell.
            if not self.tells_cached:
                return
            cached_tokens = 0
        self.tells_cached = True
        request, matched = flight.request, float(flight.matched_tokens)
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
        """It went away; when it comes back its cache is empty."""
        self.prefixes.clear()
        self.tells_cached = False
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
        deepest = round(flight.matched_tokens / request.block_tokens)
        if 0 < deepest <= len(request.blocks):
            stamp = self.prefixes.stamp_of(request.blocks[deepest - 1])
            if self.prefills:
                head = next(iter(self.prefills.values()))
                if head.touch is None or head.touch.stamp <= stamp:
                    return
            flight.evidence = stamp

    def _uncompute(self, flight: Flight, now: float) -> None:
        """It left before its first token: the rest of its prompt is not computed."""
        if flight.touch is None or flight.exact:
            return
        done = 0.0
        if next(iter(self.prefills)) == flight.request.id:
            done = min(1.0, (now - self._head_since) / max(1e-9, flight.prefill_s))
        tokens = flight.matched_tokens + done * flight.uncached_tokens
        block_tokens = flight.request.block_tokens
        # Never less than was held before: others may hold more behind it.
        before = round(flight.matched_tokens / block_tokens)
        self.prefixes.untouch(flight.touch, max(before, int(tokens / block_tokens)))

    def pass_time(self, now: float) -> bool:
        """Take those out of the line whose first token cannot be seen and is predicted past.

        Returns whether any was.
        """
        left = False
        while self.silent:
            head = next(iter(self.prefills.values()))
            ends_at = self._head_since + head.prefill_s
            if head.request.streams or ends_at > now:
                break
            self._leave_line(head, ends_at)
            self._begin_observation(now)
            left = True
        return left

    def _leave_line(self, flight: Flight, now: float) -> None:
        if next(iter(self.prefills)) == flight.request.id:
            self._head_since = now
        del self.prefills[flight.request.id]
        self.prefills_of[flight.bucket] -= 1
        self.silent -= not flight.request.streams
        self._line_s = self._line_s - flight.prefill_s if self.prefills else 0.0

    def _begin_observation(self, now: float) -> None:
        self._pending_terms = (0.0, 0.0, 0.0)
        self._pending_since = now


def decay(elapsed_s: float) -> float:
    """What is left of a load after `elapsed_s`."""
    return exp(-elapsed_s * (LN_2 / LOAD_HALF_LIFE_S))
