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

from forebay.proxy.core.concurrency import Concurrency
from forebay.proxy.core.cost import CostModel, features
from forebay.proxy.core.fairness import Fairness
from forebay.proxy.core.kv import KvReserve
from forebay.proxy.core.lanes import Lanes
from forebay.proxy.core.model import STANDARD, BackendSpec, Bucket, Request
from forebay.proxy.core.prefix import PrefixIndex
from forebay.proxy.core.queueing import Waiting
from forebay.proxy.core.turns import Turns

OVERDUE_SHARE: Final = 0.1  # of a prefill with nothing cached: what it counts for until it answers
LATE: Final = 1.25  # a prefill this much over its prediction ...
LATE_S: Final = 0.1  # ... and this much more was not cached as believed
KV_FULL: Final = 0.95  # of the pool: beyond it the engine preempts or keeps requests waiting
DEFAULT_INDEX_BLOCKS = 1 << 16  # of a backend whose KV pool is unknown: 128 MiB of prompt text
LOAD_HALF_LIFE_S: Final = 120.0
LN_2: Final = 0.6931471805599453
IDLE_FIRST: Final = 1e12  # ranks every idle backend before every busy one
UNLIMITED: Final = 1 << 30
OBSERVE_AFTER_S: Final = 0.05  # prefills batched in one step answer together: measure them together


class Flight:
    """A request that was sent and has not finished."""

    __slots__ = (
        "bucket",
        "cold_s",
        "first_token_at",
        "output_tokens",
        "prefill_s",
        "request",
        "reserved_tokens",
        "sent_at",
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
        fair = self._fairness = fairness or Fairness((), 1.0)
        self.queues = {bucket.name: Lanes(fair) for bucket in buckets}
        self.turns = Turns(self.queues)
        self.concurrency = Concurrency(spec.max_concurrency, itl_slo_s)
        self.limit = spec.max_concurrency  # requests that may run now
        self.queued = 0  # in all of them
        self.queued_s = 0.0  # their prefills
        self.flights: dict[str, Flight] = {}
        self.kv = KvReserve()
        self.sent_prompt_tokens = 0
        self.prefills: dict[str, Flight] = {}
        self._head: Flight | None = None  # the first of them
        self.prefills_of = dict.fromkeys(self.queues, 0)
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

    def __repr__(self) -> str:
        state = "draining" if self.draining else "up" if self.up else "down"
        return (
            f"<Backend {self.name} {state} running={len(self.flights)}/{self.limit}"
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
        if not blocks:
            return 0
        return max(0, min(int(blocks * request.block_tokens), request.prompt_tokens - 1))

    def prefill_s(self, request: Request, matched_tokens: int) -> float:
        return self.cost.predict_s(request.prompt_tokens - matched_tokens, request.prompt_tokens)

    # What is ahead of a newcomer.

    def backlog_s(self, now: float) -> float:
        """Predicted seconds until the engine has given a first token to all it was sent."""
        head = self._head
        if head is None:
            return 0.0
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
        head = self._head
        if head is None:
            return -inf
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
        missing = len(self.flights) + ahead + 1 - self.limit
        if missing <= 0:
            return 0.0
        return missing * self.decode_s[bucket] / self.limit

    def kv_fits(self, request: Request, output_tokens: int) -> bool:
        room = KV_FULL * self.kv_tokens - self.kv.held
        if not self.flights or request.prompt_tokens + output_tokens <= room:
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
        return self._load * decay(now - self._load_at)

    def worked_share(self, bucket: str, now: float) -> float:
        """Share of its time that the engine lately spent on prefills of one bucket."""
        worked = self._worked[bucket]
        return worked.seconds * decay(now - worked.at) * LN_2 / LOAD_HALF_LIFE_S

    # What changes the books.

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
            self._begin_observation(now)
        self.flights[request.id] = self.prefills[request.id] = flight
        if self.queued:
            self.turns.sent(bucket, rank, prefill_s, self.queued)
        self.prefills_of[bucket] += 1
        self.silent += not request.streams
        self._line_s += prefill_s
        self.kv.take(request, reserved_tokens)
        self.sent_prompt_tokens += tokens
        worked = self._worked[bucket]
        worked.seconds = worked.seconds * decay(now - worked.at) + prefill_s
        worked.at = now
        self._load, self._load_at = self.load(now) + tokens, now
        if self.kv_tokens < inf:
            self.prefixes.capacity_blocks = int(self.kv_tokens / request.block_tokens)
        unindexed = tokens + request.output_tokens - int(len(request.blocks) * request.block_tokens)
        self.prefixes.touch(request.blocks, max(0, unindexed) / request.block_tokens)
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
            self._leave_line(flight, now)
            # It left without a first token: what was measured so far means nothing.
            self._begin_observation(now)
        elif flight.first_token_at is not None:
            seconds = now - flight.first_token_at
            self.decode_s[flight.bucket] += 0.1 * (seconds - self.decode_s[flight.bucket])
            if self.concurrency.on:
                running, tokens = len(self.flights) + 1, flight.output_tokens
                self.concurrency.finished(flight.first_token_at, tokens, running, now)
                self.limit = self.concurrency.limit
        self.kv.give_back(flight.request, flight.reserved_tokens)
        return left_line

    def resize(self, spec: BackendSpec, itl_slo_s: float) -> None:
        """It has other limits; how many may run is found out anew."""
        self.spec = spec
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
            self.prefills_of[flight.bucket] += 1
        self.decode_s = {name: self.decode_s.get(name, 1.0) for name in self.queues}
        self._worked = {name: self._worked.get(name) or Worked() for name in self.queues}

    def computed_s(self, request_id: str, now: float) -> float:
        """Of a request without a first token: seconds its prefill was computed, as predicted."""
        head = self._head
        if head is None or head.request.id != request_id:
            return 0.0
        return min(head.prefill_s, now - self._head_since)

    def pass_time(self, now: float) -> bool:
        """Take those out of the line whose first token cannot be seen and is predicted past.

        Returns whether any was.
        """
        left = False
        while self.silent and (head := self._head):
            ends_at = self._head_since + head.prefill_s
            if head.request.streams or ends_at > now:
                break
            self._leave_line(head, ends_at)
            self._begin_observation(now)
            left = True
        return left

    def _leave_line(self, flight: Flight, now: float) -> None:
        del self.prefills[flight.request.id]
        if flight is self._head:
            self._head_since = now
            self._head = _first(self.prefills)
        self.prefills_of[flight.bucket] -= 1
        self.silent -= not flight.request.streams
        self._line_s = self._line_s - flight.prefill_s if self.prefills else 0.0

    def _begin_observation(self, now: float) -> None:
        self._pending_terms = (0.0, 0.0, 0.0)
        self._pending_since = now


def _first(flights: dict[str, Flight]) -> Flight | None:
    for flight in flights.values():
        return flight
    return None


def decay(elapsed_s: float) -> float:
    """What is left of a load after `elapsed_s`."""
    return exp(-elapsed_s * (LN_2 / LOAD_HALF_LIFE_S))
