"""The books of one backend: what runs there, what waits for it, and how long that will take.

Books change when a decision is made, not when a socket opens. The parts: the line of prefills
(`line.py`), what the engine is believed to hold (`cache.py`), what its prefills cost (`cost.py`)
and how that is measured (`observation.py`).
"""

from collections.abc import Callable, Iterable
from itertools import chain
from math import inf, sqrt
from typing import Final

from forebay.proxy.core.learn.cost import CostModel
from forebay.proxy.core.learn.decay import Recent
from forebay.proxy.core.learn.engine_blocks import HeldPrefixes
from forebay.proxy.core.learn.prefix_cache import DEFAULT_INDEX_BLOCKS as DEFAULT_INDEX_BLOCKS
from forebay.proxy.core.learn.prefix_cache import PrefixCache, tokens_in
from forebay.proxy.core.model import STANDARD, BackendSpec, Bucket, Request
from forebay.proxy.core.policy.order import Turns
from forebay.proxy.core.policy.split_prefill import may_be_cut
from forebay.proxy.core.state.aside import Aside
from forebay.proxy.core.state.begun import Begun
from forebay.proxy.core.state.concurrency_limit import Concurrency
from forebay.proxy.core.state.elsewhere import BackendBooks, Elsewhere
from forebay.proxy.core.state.in_flight import Flight
from forebay.proxy.core.state.kv_budget import KvReserve
from forebay.proxy.core.state.lanes import Lanes
from forebay.proxy.core.state.leaders import Leaders, longest_run
from forebay.proxy.core.state.observation import Observation
from forebay.proxy.core.state.prefill_queue import Line
from forebay.proxy.core.state.queue import Waiting
from forebay.proxy.core.state.tenants import Fairness

KV_FULL: Final = 0.95  # of the pool: beyond it the engine preempts or keeps requests waiting
SURE: Final = 2.0  # times the mean error of predictions: nine in ten normal errors are smaller
AWAITED: Final = 2.0
"""A follower that would pass its leader in the engine waits for it if that takes at most so many
times what it saves: a shared instruction is cached as soon as it is computed, and saves little."""
IDLE_FIRST: Final = 1e12  # ranks every idle backend before every busy one
FULL_LAST: Final = 1e12  # and those without a free slot after all others
UNLIMITED: Final = 1 << 30


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
        # As `Candidates` knows: when the backlog will let more in, and a silent prefill leave.
        self.room_at = self.silent_at = -inf
        self.kv_tokens = spec.kv_tokens
        self.up = False
        self.draining = False  # it is to go: `up` stays false until it is gone
        self.most_prefills = UNLIMITED  # fewer while it is on trial or says that it is full
        self._tried: set[str] = set()  # sent during a trial, and not answered yet
        self.cost = CostModel()
        self.cache = PrefixCache()
        self.prefixes = self.cache.prefixes
        self.prefix_error = self.cache.error
        fair = self._fairness = fairness or Fairness((), 1.0)
        self.queues = {bucket.name: Lanes(fair) for bucket in buckets}
        self.turns = Turns(self.queues)
        self.concurrency = Concurrency(spec.max_concurrency, itl_slo_s)
        self.limit = spec.max_concurrency  # requests that may run now
        self.queued = 0  # in all of them
        self.queued_s = 0.0  # their prefills
        self.flights: dict[str, Flight] = {}
        self.begun = Begun()
        self.leaders = Leaders()
        self.followers: dict[str, Waiting] = {}  # who wait here for what it computes for another
        self.review = False  # some of them may no longer need to
        self.kv = KvReserve()
        self.aside = Aside()
        self.sent_prompt_tokens = 0
        self.line = Line(self.queues, spec.chunk_tokens, spec.piece_s < inf)
        self.prefills = self.line.prefills
        # Smoothed time from first token to finish, by bucket and of all.
        self.decode_s = dict.fromkeys(self.queues, 1.0)
        self._decode_all_s = 1.0
        self.others: Elsewhere | None = None  # what other proxies have here, if there are any
        self._observation = Observation(self.cost)
        self._sent = Recent()  # prompt tokens
        self._worked = {name: Recent() for name in self.queues}  # prefill seconds
        self._fresh_tokens = 0.0  # put into the cache, ever, while there were others

    def __repr__(self) -> str:
        state = "draining" if self.draining else "up" if self.up else "down"
        return (
            f"<Backend {self.name} {state} running={len(self.flights)}/{self.limit}"
            f" prefills={len(self.prefills)} queued={self.queued}>"
        )

    @property
    def tries_more(self) -> bool:
        """Whether a trial or a pause lets it have one more, be its first token seen or not."""
        most = self.most_prefills
        return most >= UNLIMITED or (len(self.prefills) < most and len(self._tried) < most)

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
        line = self.line
        full = self.running >= self.limit
        if self.others is not None and (others_s := self.others.prefill_s(self.others.since)):
            own_s = line.total_s + self.queued_s
            free_at = max(line.head_since, self.others.since) + own_s + others_s
        elif self.prefills or self.queued:
            free_at = line.head_since + line.total_s + self.queued_s
            if self.begun:
                free_at += self.begun.rest_s()
        else:
            free_at = self._sent.rank if self._sent.amount else 0.0
            if not full:
                return free_at - IDLE_FIRST
        return free_at + FULL_LAST if full else free_at

    # What the engine is believed to hold.

    @property
    def held(self) -> HeldPrefixes | None:
        """Where the engine tells what it holds; whoever listens to it sets this."""
        return self.cache.held

    @held.setter
    def held(self, held: HeldPrefixes | None) -> None:
        self.cache.held = held

    @property
    def kept(self) -> float:
        """How much the engine keeps, as a share of what its pool should hold."""
        return self.cache.kept

    @property
    def prefix_mode(self) -> str:
        """How it is known what the backend holds: believed, corrected or exact."""
        return self.cache.mode

    def matched_tokens(self, request: Request) -> int:
        """Prompt tokens this backend probably holds; the last token is always computed."""
        return self.cache.matched_tokens(request)

    def expected_tokens(self, waiting: Waiting) -> tuple[int, Waiting | None]:
        """Prompt tokens it will hold when the request has its turn, and for whom it computes them.

        For nobody who still waits: None. What was begun of a prompt is its own.
        """
        request = waiting.request
        matched = self.matched_tokens(request)
        if waiting.piece_on or not (self.leaders or self.begun):
            return matched, None
        known = int(matched / request.block_tokens)
        blocks, leader = longest_run(request, chain(self.leaders, self.begun), known)
        expected = tokens_in(blocks, request)
        return (expected, leader) if expected > matched else (matched, None)

    def leads(self, leader: Waiting | None) -> bool:
        """Whether it is to compute a prompt here that is still to be sent, or the rest of it."""
        return leader is not None and (leader in self.leaders or leader in self.begun)

    def awaits(self, request: Request, head: Waiting | None = None) -> bool:
        """Whether what is matched of the request is still being computed for another.

        Sent now, it would compute once more what is missing: fifty users who open one document.

        Args:
            head: as of `Begun.promised`.
        """
        if not self.prefills and not self.begun:
            return False
        blocks = request.blocks
        matched = self.prefixes.match(blocks)
        if self.begun and self.begun.promised(request, head) > matched:
            return True
        if not matched or not self.prefills:
            return False
        most_s = inf
        if self.line.chunked:  # it need not wait, as it would pass them
            tokens = request.prompt_tokens
            saved_s = self.prefill_s(request, 0) - self.prefill_s(
                request, min(tokens - 1, int(matched * request.block_tokens))
            )
            most_s = AWAITED * saved_s
        return self.line.computes(blocks, matched, most_s)

    def keeps(self, waiting: Waiting) -> bool:
        """Whether the next in a queue awaits another here; never one that waits behind it."""
        return self.awaits(waiting.request, waiting if waiting.backend == self.name else None)

    # What is ahead of a newcomer.

    def prefill_s(self, request: Request, matched_tokens: int) -> float:
        return self.cost.predict_s(request.prompt_tokens - matched_tokens, request.prompt_tokens)

    @property
    def piece_s(self) -> float:
        """As of BackendSpec; inf where the engine cuts prefills itself."""
        return inf if self.line.chunked else self.spec.piece_s

    def next_s(self, request: Request, prefill_s: float) -> float:
        """Of its prefill, what is computed without a break."""
        return min(prefill_s, self.piece_s) if may_be_cut(request) else prefill_s

    def backlog_s(self, now: float) -> float:
        """Predicted seconds until the engine has given a first token to all it was sent."""
        return self.line.backlog_s(now, self.others)

    def ahead_s(self, uncached_tokens: float, now: float) -> float:
        """Of it, what a prefill of so many tokens waits for."""
        return self.line.ahead_s(uncached_tokens, now, self.others)

    def due_s(self, uncached_tokens: float, now: float) -> float:
        """Of that, what keeps such a prefill here."""
        return self.line.due_s(uncached_tokens, now, self.others)

    def backlog_below_at(self, limit_s: float) -> float:
        """When the backlog falls below `limit_s` by itself; inf if only an answer can do it."""
        return self.line.below_at(limit_s, self.others)

    def prefills_longer(self, than_s: float) -> bool:
        """Whether the engine has a prefill to do or under way that others await that long."""
        return self.line.longer(than_s, self.others)

    def done_in_at(self, limit_s: float, now: float) -> float:
        """When it will be done in `limit_s` with what it was sent; inf if that has proved wrong."""
        done_at = self.line.done_at(self.others)
        if done_at < now and self.backlog_s(now) > limit_s:
            return inf
        return max(now, done_at - limit_s)

    def margin_s(self, wait_s: float, ahead_s: float, ahead: int = 1) -> float:
        """How much longer a predicted wait may be, nine times in ten.

        Errors grow with all that is in the line, even what is nearly done.

        Args:
            ahead: prefills that make up `ahead_s`, if nothing else can come between: their errors
                cancel out in part, to 1/sqrt(n) of the sum where n are alike. 1: nothing cancels.
        """
        line_s = wait_s if self.line.chunked else self.line.total_s
        cancelled_s = ahead_s * (1.0 - 1.0 / sqrt(ahead)) if ahead > 1 else 0.0
        reckoned_s = max(wait_s, line_s + ahead_s) - cancelled_s
        if reckoned_s <= 0.0:
            return 0.0
        return SURE * self.cost.spread.at(reckoned_s) * reckoned_s

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

    def kv_fits(self, waiting: Waiting, now: float) -> bool:
        """Whether its KV cache would hold the request and all that it is reckoned to generate."""
        request, output_tokens = waiting.request, waiting.output_tokens
        room = KV_FULL * self.kv_tokens - self.kv.held - self.aside.kept_from(waiting, now)
        if self.others is not None and self.others.running:
            room -= self.others.kv_tokens
        elif not self.flights:
            return True
        if request.prompt_tokens + output_tokens <= room:
            return True
        return self.kv.need(request, output_tokens) <= room

    def put_aside(self, waiting: Waiting, now: float) -> None:
        """Put room aside for it, whom the KV cache would not hold."""
        need = self.kv.need(waiting.request, waiting.output_tokens)
        self.aside.begin(waiting, min(float(need), KV_FULL * self.kv_tokens), now)

    def kv_wait_s(self, waiting: Waiting, mates: int, now: float) -> float:
        """Predicted wait for KV cache: those who run give theirs back in turn.

        Each of `mates`, which are this one and those before it, is reckoned to need as much.
        """
        held = self.kv.held
        if not held:
            return 0.0
        request, output_tokens = waiting.request, waiting.output_tokens
        room = KV_FULL * self.kv_tokens - held - self.aside.kept_from(waiting, now)
        if (request.prompt_tokens + output_tokens) * mates <= room:
            return 0.0
        missing = self.kv.need(request, output_tokens) * mates - room
        if missing <= 0:
            return 0.0
        return missing / held * self._decode_all_s

    def load(self, now: float) -> float:
        """Prompt tokens sent, halved every LOAD_HALF_LIFE_S: the long-run share."""
        own = self._sent.left(now)
        return own if self.others is None else own + self.others.load

    def worked_share(self, bucket: str, now: float) -> float:
        """Share of its time that the engine lately spent on prefills of one bucket."""
        share = self._worked[bucket].rate(now)
        return share if self.others is None else share + self.others.worked.get(bucket, 0.0)

    def books(self, now: float) -> BackendBooks:
        """What we have here, for other proxies to know: without what they told us."""
        line, worked = self.line, self._worked
        return BackendBooks(
            backlog_s=line.backlog_s(now, None),
            running=len(self.flights),
            kv_tokens=self.kv.held,
            longest_s=line.longest_s(),
            load=self._sent.left(now),
            fresh_tokens=self._fresh_tokens,
            work=self._observation.work,
            prefills={bucket: count for bucket, count in line.prefills_of.items() if count},
            queued_s={bucket: q.work_s for bucket, q in self.queues.items() if len(q)},
            worked={b: share for b in self.queues if (share := worked[b].rate(now)) > 1e-4},
            short_s=line.due_s(0.0, now, None),
        )

    # What changes the books.

    def allow(self, most_prefills: int) -> None:
        """So many prefills at once from now on: 1 for a trial, 0 for a pause."""
        self.most_prefills = most_prefills
        if most_prefills >= UNLIMITED:
            self._tried.clear()

    def share_with(self, others: Elsewhere | None, now: float) -> None:
        """Other proxies use the backend too, and this is what they have here; None: no longer."""
        self.others = others
        self._observation.begin(now, others)  # what was measured so far may have been theirs

    def crowded(self, fresh_tokens: float) -> None:
        """Others have had the engine put so much into its cache, which pushes ours out."""
        self.cache.crowded(fresh_tokens)

    def enqueue(self, waiting: Waiting) -> None:
        """The request waits for this backend."""
        if waiting.piece_on == self.name:
            self.begun.add(waiting)
        if waiting.follows:
            self.followers[waiting.request.id] = waiting
        elif waiting.piece_on != self.name:
            self.leaders.add(waiting)
        if waiting.leader is not None:
            waiting.leader.followed += 1
        self.queues[waiting.bucket].push(waiting)
        self.turns.joined(waiting)
        self.queued += 1
        self.queued_s += waiting.work_s

    def dequeue(self, waiting: Waiting) -> None:
        """It waits no longer, or elsewhere."""
        self.followers.pop(waiting.request.id, None)
        self.review |= self.leaders.drop(waiting.request.id)
        if waiting.leader is not None:
            waiting.leader.followed -= 1
            waiting.leader = None
        self._no_longer(waiting.request.id)
        self.queues[waiting.bucket].remove(waiting)
        self.aside.left(waiting)
        self.queued -= 1
        self.queued_s -= waiting.work_s
        if not self.queued:
            self.queued_s = 0.0
            self.turns.nobody_waits()

    def hasten(self, waiting: Waiting, due: float) -> None:
        """It waits here and is due sooner now."""
        queue = self.queues[waiting.bucket]
        queue.remove(waiting)
        waiting.due = due
        queue.push(waiting)

    def sent(
        self,
        request: Request,
        bucket: str,
        matched_tokens: int,
        now: float,
        reserved_tokens: int | None = None,
        rank: int = STANDARD,
        *,
        piece: bool = False,
        fresh: bool = False,
    ) -> Flight:
        """It was sent here: its prefill joins the line, its slot and KV cache are taken.

        `reserved_tokens` is what it is reckoned to generate; by default the most it may. A `piece`
        of a prompt does not count as a prompt that was sent. `fresh`: as of Flight.
        """
        if reserved_tokens is None:
            reserved_tokens = request.output_tokens
        tokens = request.prompt_tokens
        prefill_s = cold_s = self.cost.predict_s(tokens, tokens)
        if matched_tokens:
            prefill_s = self.cost.predict_s(tokens - matched_tokens, tokens)
        uncached_tokens = tokens - matched_tokens
        flight = Flight(
            request, bucket, prefill_s, cold_s, uncached_tokens, reserved_tokens, fresh=fresh
        )
        if self.line.head is None:
            self._observation.begin(now, self.others)
        self.line.join(flight, now, self.others)
        self.flights[request.id] = flight
        if self.most_prefills < UNLIMITED:
            self._tried.add(request.id)
        head = self.line.head
        self.cache.sent(flight, None if head is flight else head, self.kv_tokens)
        if self.queued:
            self.turns.sent(bucket, rank, prefill_s, self.queued)
        self.kv.take(request, reserved_tokens)
        if not piece:
            self.sent_prompt_tokens += tokens
            self._sent.add(tokens, now)
        self._worked[bucket].add(prefill_s, now)
        if self.others is not None:
            self._fresh_tokens += uncached_tokens + request.output_tokens
        return flight

    def begin(self, waiting: Waiting, flight: Flight) -> None:
        """What was sent of it is a piece: the rest will follow."""
        request, tokens = waiting.request, flight.request.prompt_tokens
        waiting.rest_s = self.cost.predict_s(request.prompt_tokens - tokens, request.prompt_tokens)
        self.begun.add(waiting)

    def _no_longer(self, request_id: str) -> None:
        """Nothing of its prompt is to come after what was sent."""
        if self.begun.drop(request_id):
            self.review = True

    def computed(self, request_id: str, now: float) -> None:
        """A piece of its prompt is in the engine's cache, and nothing of it runs any more."""
        self._no_longer(request_id)
        self.first_token(request_id, now)
        flight = self.flights.pop(request_id)
        self.kv.give_back(flight.request, flight.reserved_tokens)

    def first_token(self, request_id: str, now: float) -> Flight | None:
        """The engine answered: its prefill is over, and says how long prefills take.

        Returns it if it has left the line of prefills.
        """
        flight = self.flights.get(request_id)
        if flight is None or request_id not in self.prefills:
            return None
        flight.first_token_at = now
        self._tried.discard(request_id)
        self._leave_line(flight, now)
        self._observation.answered(flight, self.line, now, self.others)
        return flight

    def finished(self, request_id: str, now: float) -> Flight | None:
        """It completed, failed or was cancelled: everything it held is given back.

        Returns it if it has left the line of prefills.
        """
        flight = self.flights.pop(request_id)
        self._tried.discard(request_id)
        self._no_longer(request_id)
        left_line = None
        if request_id in self.prefills:
            left_line = flight
            if flight.request.streams:
                self.cache.cut_short(flight, self.line.computed_share(flight, now))
            self._leave_line(flight, now)
            if flight.output_tokens:
                # Answered whole before its first token was due: it took no longer than this.
                self._observation.answered(flight, self.line, now, self.others)
            else:
                # It left without a first token: what was measured so far means nothing.
                self._observation.begin(now, self.others)
        else:
            self._decoded(flight, now)
        self.kv.give_back(flight.request, flight.reserved_tokens)
        return left_line

    def _leave_line(self, flight: Flight, now: float) -> None:
        self.line.leave(flight, now)
        self.review |= flight.counts  # nobody else is followed (`Line.computes`)

    def _decoded(self, flight: Flight, now: float) -> None:
        """Learn how long a slot is held after the prefill, or after when that was due."""
        first_at = flight.first_token_at
        seconds = max(0.0, now - (flight.ends_at if first_at is None else first_at))
        self.decode_s[flight.bucket] += 0.1 * (seconds - self.decode_s[flight.bucket])
        self._decode_all_s += 0.1 * (seconds - self._decode_all_s)
        if self.concurrency.on and first_at is not None:
            running, tokens = self.running + 1, flight.output_tokens
            self.concurrency.finished(first_at, tokens, running, now)
            self.limit = self.concurrency.limit

    def prompt_cached(self, flight: Flight, cached_tokens: int | None, prompt_tokens: int) -> None:
        """The engine said how much of the prompt was cached (None: it did not say)."""
        self.cache.told(flight, cached_tokens, prompt_tokens, self.kv_tokens)

    def restarted(self) -> None:
        """It went away, or is another server now; when it comes back its cache is empty."""
        self.cache.restarted()
        for flight in self.flights.values():
            flight.outdated = True

    def resize(self, spec: BackendSpec, itl_slo_s: float) -> None:
        """It has other limits; how many may run is found out anew."""
        self.spec = spec
        self.line.chunk_tokens, self.line.pieces = spec.chunk_tokens, spec.piece_s < inf
        self.concurrency = Concurrency(spec.max_concurrency, itl_slo_s)
        self.limit = spec.max_concurrency

    def rebucket(self, buckets: Iterable[Bucket], home: Callable[[Request], str]) -> None:
        """There are other buckets now, and nobody waits; `home` names the bucket of a request."""
        assert not self.queued
        self.queues = {bucket.name: Lanes(self._fairness) for bucket in buckets}
        self.turns = Turns(self.queues)
        for flight in self.flights.values():
            flight.bucket = home(flight.request)
        self.line.rebucket(self.queues)
        self.decode_s = {name: self.decode_s.get(name, 1.0) for name in self.queues}
        self._worked = {name: self._worked.get(name) or Recent() for name in self.queues}

    def pass_time(self, now: float) -> bool:
        """Take those out of the line whose first token cannot be seen and is predicted past.

        Returns whether any was.
        """
        left = False
        while over := self.line.silently_over(now):
            flight, ended_at = over
            self._leave_line(flight, ended_at)
            self._observation.begin(now, self.others)
            left = True
        return left
