"""The state of one backend: running and waiting requests, and the known content of its engine.

State changes when a decision is made, not when a socket opens. Its parts have modules of their own:
prefill queue, waiting requests, KV budget, prefix cache, cost model. Decisions are made in
`policy/`.
"""

from collections.abc import Callable, Iterable
from math import exp, inf

from forebay.proxy.core.learn.api_server import ApiServerQueue
from forebay.proxy.core.learn.cost import CostModel
from forebay.proxy.core.learn.decay import LOAD_TIME_S, RECENT_S, Average, DecayedSum
from forebay.proxy.core.learn.prefix_cache import PrefixCache
from forebay.proxy.core.model import MAJORITY, STANDARD, BackendSpec, Bucket, Request, serves
from forebay.proxy.core.state.bucket_queue import BucketQueue, Turns
from forebay.proxy.core.state.elsewhere import Elsewhere
from forebay.proxy.core.state.in_flight import InFlight
from forebay.proxy.core.state.kv_budget import Holding, Holdings, KvBudget, reserved
from forebay.proxy.core.state.prefill_observer import PrefillObserver
from forebay.proxy.core.state.prefill_queue import PrefillQueue
from forebay.proxy.core.state.queue import ByPrefix, Leaders, QueuedRequest
from forebay.proxy.core.state.tenants import Fairness


class Backend:
    """One backend.

    Attributes:
        api_server: the texts that its API server has yet to tokenize.
        index: its place among the backends.
        kv_tokens: size of its KV pool; infinite while unknown.
        models: the models that it serves; None while unknown.
        family: its main model, which backends are scaled by; "" while unknown.
        strict: it takes only requests that name one of its models.
        draining: it will be removed; `up` stays False until then.
        most_prefills: below infinity during a trial or while it reports that it is full.
        queues: waiting requests by bucket.
        queued, queued_s: number and prefill seconds of all waiting requests.
        passing: requests that have passed all queues (`proxy/backends/passing.py`).
        in_flight: running requests by id.
        sequences: outputs that the running requests generate together.
        context_tokens: tokens that a decode step reads for the running requests.
        holdings: the slots and KV cache that each tenant holds.
        leaders: waiting requests that others may follow.
        followers: waiting requests that wait for a prefill of another request here.
        review: a prefill has ended that followers may have waited for.
        decode_s: average seconds from first token to finish, by bucket.
        decode_all_s: average seconds from first token to finish, of all buckets.
        long_prefill_s, long_ended_at: the last prefill that was longer than the patience of the
            most urgent bucket, and its end.
        starving: a waiting request for which KV cache is kept free.
        elsewhere: the work of other proxies here; None without other proxies.
        load: prompt tokens of recent requests, a decayed sum; a cached token counts once.
        worked: recent prefill seconds, by bucket.
        fresh_tokens: tokens put into the prefix cache while there were other proxies, without the
            blocks that these are told of.
        ranks, room_at, room_beside_at, silent_at: as the `Shortlist` found them last.
    """

    def __init__(
        self,
        spec: BackendSpec,
        buckets: Iterable[Bucket],
        index: int = 0,
        *,
        fairness: Fairness | None = None,
    ) -> None:
        # Its specification, and how far it may be used now.
        self.spec = spec
        self.name = spec.name
        self.index = index
        self.ranks: dict[str, float] = {}  # by bucket
        self.room_at = self.room_beside_at = self.silent_at = -inf
        self.kv_tokens = spec.kv_tokens
        self.models: frozenset[str] | None = None
        self.family = ""
        self.strict = False
        self.up = False
        self.draining = False
        self.most_prefills = inf
        self._tried: set[str] = set()  # sent during a trial, and without an answer yet
        # Its prefix cache and its waiting requests. Tenants take turns by their holdings.
        self.cost = CostModel()
        self.cache = PrefixCache()
        fair = fairness or Fairness((), 1.0)
        self.holdings = Holdings(fair)
        self.queues = {bucket.name: BucketQueue(self.holdings) for bucket in buckets}
        self.turns = Turns(self.queues)
        self.queued = 0
        self.queued_s = 0.0
        # Its running requests, and the waiting requests that depend on their prefills.
        self.in_flight: dict[str, InFlight] = {}
        self.sequences = self.context_tokens = self.passing = 0
        self.leaders = Leaders()
        self.followers = ByPrefix()
        self.review = False
        self.kv = KvBudget()
        self.starving: QueuedRequest | None = None
        self.sent_prompt_tokens = 0
        self.long_prefill_s, self.long_ended_at = 0.0, -inf
        # Prefills in the engine, and measured times that predict the next ones.
        self.prefill_queue = PrefillQueue(self.queues, spec.chunk_tokens, ordered=spec.priority)
        self.prefills = self.prefill_queue.prefills
        self.decode_s = {name: Average(1.0) for name in self.queues}
        self.decode_all_s = Average(1.0)
        self.elsewhere: Elsewhere | None = None
        self.api_server = ApiServerQueue()
        self.observer = PrefillObserver(self.cost, self.api_server.model)
        self.load = DecayedSum()
        self.worked = {name: DecayedSum(RECENT_S) for name in self.queues}
        self.fresh_tokens = 0.0

    def __repr__(self) -> str:
        state = "draining" if self.draining else "up" if self.up else "down"
        return (
            f"<Backend {self.name} {state}"
            f" running={self.sequences}/{self.spec.max_concurrency}"
            f" prefills={len(self.prefills)} queued={self.queued}>"
        )

    # Facts.

    @property
    def takes_another(self) -> bool:
        """False while the backend's trial or pause limit is used up."""
        most = self.most_prefills
        return most == inf or (len(self.prefills) < most and len(self._tried) < most)

    @property
    def empty(self) -> bool:
        """No request of this proxy runs or waits here."""
        return not self.in_flight and not self.queued and not self.passing

    @property
    def idle(self) -> bool:
        """No request of any proxy is known to run or wait here."""
        others = self.elsewhere
        return not self.in_flight and not self.queued and (others is None or not others.running)

    @property
    def running(self) -> int:
        """Slots in use: the sequences of the running requests of all proxies."""
        running = self.sequences + self.passing
        return running if self.elsewhere is None else running + self.elsewhere.running

    def matched_tokens(self, request: Request) -> int:
        """Return the prompt tokens that the engine probably holds, never the last token."""
        return self.cache.matched_tokens(request)

    def prefill_s(self, request: Request, matched_tokens: int) -> float:
        """Return the predicted seconds of a prefill with `matched_tokens` cached tokens."""
        return self.cost.predict_s(request.prompt_tokens - matched_tokens, request.prompt_tokens)

    def wait_s(self, ahead_s: float, prompt_tokens: int, now: float) -> float:
        """Return the wait besides the prefill, for a request sent now.

        In the engine it is `ahead_s`. Meanwhile the API server tokenizes the prompt.
        """
        if self.prefill_queue.chunked:
            ahead_s = max(ahead_s, self.prefill_queue.lone_s(len(self.in_flight), now))
        server = self.api_server
        reaches_s = server.wait_s(now) + server.model.before_s(prompt_tokens)
        waits_s = ahead_s if ahead_s > reaches_s else reaches_s
        return waits_s + server.model.after_s(prompt_tokens)

    def work_left_s(self, now: float) -> float:
        """Return the predicted seconds of all prefills that were sent there or wait for it."""
        return self.prefill_queue.backlog_s(now) + self.queued_s

    # Waiting requests.

    def enqueue(self, waiting: QueuedRequest) -> None:
        """Let a request wait for this backend."""
        if waiting.follows:
            self.followers.add(waiting)
        else:
            self.leaders.add(waiting)
        self.queues[waiting.bucket].push(waiting)
        self.turns.joined(waiting)
        self.queued += 1
        self.queued_s += waiting.work_s

    def dequeue(self, waiting: QueuedRequest) -> None:
        """Take a request out of its queue here."""
        self.followers.drop(waiting.request.id)
        self.review |= self.leaders.drop(waiting.request.id)
        waiting.leader = None
        self.queues[waiting.bucket].remove(waiting)
        if self.starving is waiting:
            self.starving = None
        self.queued -= 1
        self.queued_s -= waiting.work_s
        if not self.queued:
            self.queued_s = 0.0
            self.turns.clear()
            self.turns.order_by_counters(self.holdings)

    # Running requests.

    def send(
        self,
        request: Request,
        bucket: str,
        matched_tokens: int,
        now: float,
        reserved_tokens: int | None = None,
        rank: int = STANDARD,
        *,
        priority: int = 0,
    ) -> InFlight:
        """Enter a request that is sent here: it takes a slot, KV cache and a place in the queue.

        Args:
            reserved_tokens: expected output; by default the most it may generate. At most half of
                the KV pool is reserved.
            rank: rank of its class among its tenant's requests.
            priority: see InFlight.
        """
        if reserved_tokens is None:
            reserved_tokens = request.output_tokens
        if reserved_tokens > MAJORITY * self.kv_tokens:
            reserved_tokens = reserved(reserved_tokens, self.kv_tokens)
        # Predict the prefill.
        tokens = request.prompt_tokens
        prefill_s = cold_s = self.cost.predict_s(tokens, tokens)
        if matched_tokens:
            prefill_s = self.cost.predict_s(tokens - matched_tokens, tokens)
        uncached_tokens = tokens - matched_tokens
        sent = InFlight(
            request, bucket, prefill_s, cold_s, uncached_tokens, reserved_tokens,
            priority=priority,
        )  # fmt: skip
        # It passes the API server, then joins the engine's queue.
        sent.sent_at = now
        sent.reached_at = self.api_server.join(tokens, now)
        sent.late_s += self.api_server.model.after_s(tokens)
        if self.prefill_queue.head is None:
            self.observer.begin(now, self.elsewhere)
        self.prefill_queue.join(sent, now)
        self.in_flight[request.id] = sent
        self.sequences += request.sequences
        self.context_tokens += sent.context_tokens
        if self.most_prefills < inf:
            self._tried.add(request.id)
        # Its tokens count as load and enter the prefix cache.
        head, load = self.prefill_queue.head, float(uncached_tokens)
        if matched_tokens:  # add the part that faded since these tokens were counted
            used_at = self.cache.used_at(request, matched_tokens)
            load += matched_tokens * (1.0 - exp(min(0.0, used_at - now) / LOAD_TIME_S))
        self.load.add(load, now)
        self.cache.sent(
            sent.visit, None if head is sent or head is None else head.visit, self.kv_tokens, now
        )
        # Charge bucket, class and tenant, and reserve its KV cache.
        if self.queued:
            self.turns.sent(bucket, rank, prefill_s, self.queued)
        before = self.kv.held
        self.kv.take(request, reserved_tokens)
        if request.tenant:
            pool = self.kv_tokens
            sent.holding = Holding(
                min(1.0, request.sequences / self.spec.max_concurrency),
                (self.kv.held - before) / pool,
                reserved_tokens / pool,
            )
            self.holdings.take(request.tenant, sent.holding)
        self.sent_prompt_tokens += tokens
        self.worked[bucket].add(prefill_s, now)
        return sent

    def first_token(self, request_id: str, now: float) -> InFlight | None:
        """End the prefill of a request. Returns it if it was in the prefill queue."""
        sent = self.in_flight.get(request_id)
        if sent is None:
            return None
        if sent.first_token_at is None:
            self.api_server.answered(sent.reached_at, now)
        prefilling = request_id in self.prefills
        if prefilling or not sent.request.pure:
            sent.first_token_at = now
            self._tried.discard(request_id)
        if prefilling:
            self._end_prefill(sent, now)
            if sent.request.pure:
                self.observer.answered(sent, self.prefill_queue, now)
        if not sent.request.pure:
            self.observer.answered_impurely(sent, now)
        return sent if prefilling else None

    def finished(self, request_id: str, now: float) -> InFlight | None:
        """Give back everything that a completed, failed or cancelled request held.

        Returns the request if it was still in the prefill queue.
        """
        sent = self.in_flight.pop(request_id)
        self._tried.discard(request_id)
        if sent.output_tokens and sent.first_token_at is None:
            self.api_server.answered(sent.reached_at, now)
        prefilling = None
        if request_id in self.prefills:
            prefilling = sent
            if sent.request.streams:
                self.cache.cut_short(sent.visit, self.prefill_queue.computed_share(sent, now))
            self._end_prefill(sent, now)
            if sent.output_tokens and sent.request.pure:
                # It was answered completely before its first token was due.
                self.observer.answered(sent, self.prefill_queue, now)
            else:
                # It ended without a first token: the time measured so far means nothing.
                self.observer.begin(now, self.elsewhere)
        else:  # learn how long a slot is held after the prefill, or after its predicted end
            first_at = sent.first_token_at
            decode_s = max(0.0, now - (sent.ends_at if first_at is None else first_at))
            if sent.request.sequences <= self.spec.max_concurrency:  # else it waited for itself
                self.decode_s[sent.bucket].add(decode_s)
                self.decode_all_s.add(decode_s)
        give_back(self, sent)
        return prefilling

    def learn_cached(self, sent: InFlight, cached_tokens: int | None, prompt_tokens: int) -> None:
        """Learn the cached tokens that an answer reports. None, or 0 of a prompt: unknown."""
        self.cache.reported(sent.visit, cached_tokens, prompt_tokens, self.kv_tokens)

    def _end_prefill(self, sent: InFlight, now: float) -> None:
        self.prefill_queue.leave(sent, now)
        if self.elsewhere is not None:
            self.fresh_tokens += self.cache.computed(sent.visit) + sent.request.output_tokens
        self.review |= sent.counts  # only such prefills are followed (`PrefillQueue.computes`)

    def end_silent_prefills(self, now: float) -> bool:
        """End prefills without a visible first token whose predicted end is past.

        Returns True if there was any.
        """
        ended = False
        while over := self.prefill_queue.silently_over(now):
            sent, ended_at = over
            self._end_prefill(sent, ended_at)
            self.observer.lose_track()
            ended = True
        return ended

    # Changes of the backend itself.

    def allow(self, most_prefills: float) -> None:
        """Allow `most_prefills` at once: 1 during a trial, 0 during a pause."""
        self.most_prefills = most_prefills
        if most_prefills == inf:
            self._tried.clear()

    def share_with(self, elsewhere: Elsewhere | None, now: float) -> None:
        """Use the work that other proxies report here, or None without other proxies."""
        self.cache.news()  # too old for a proxy that joins later
        self.elsewhere = self.prefill_queue.elsewhere = elsewhere
        self.observer.begin(now, elsewhere)  # the time measured so far may include their work

    def restarted(self) -> None:
        """Forget the prefix cache and the texts: the engine went away or was replaced."""
        self.cache.restarted()
        self.api_server.restarted()
        for sent in self.in_flight.values():
            sent.visit.outdated = True
            sent.reached_at = sent.sent_at

    def resize(self, spec: BackendSpec) -> None:
        """Change the limits."""
        self.spec = spec
        self.prefill_queue.chunk(spec.chunk_tokens)
        self.prefill_queue.ordered = spec.priority

    def rebucket(self, buckets: Iterable[Bucket], home: Callable[[Request], Bucket]) -> None:
        """Change the buckets while no request waits. `home` returns a request's new bucket."""
        assert not self.queued
        self.queues = {bucket.name: BucketQueue(self.holdings) for bucket in buckets}
        self.turns = Turns(self.queues)
        for sent in self.in_flight.values():
            sent.bucket = home(sent.request).name
        self.prefill_queue.rebucket(self.queues)
        self.decode_s = {name: self.decode_s.get(name) or Average(1.0) for name in self.queues}
        self.worked = {name: self.worked.get(name) or DecayedSum(RECENT_S) for name in self.queues}


def takes_model(backend: Backend, model: str) -> bool:
    """True if it takes requests for a model. "" is unknown, or a model that all serve."""
    return serves(backend.models, model) and not (backend.strict and not model)


def give_back(backend: Backend, sent: InFlight) -> None:
    """Give back the slots and the KV cache of a request that has ended."""
    backend.sequences -= sent.request.sequences
    backend.context_tokens -= sent.context_tokens
    backend.kv.give_back(sent.request, sent.reserved_tokens)
    if sent.holding is not None:
        backend.holdings.give_back(sent.request.tenant, sent.holding)
        backend.turns.fell(sent.request.tenant)
