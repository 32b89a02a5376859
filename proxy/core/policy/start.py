"""May a waiting request start now? `why_not` gives the reason that keeps it back.

Late binding: a backend is sent more only while its predicted backlog is short. The engine's own
queue stays almost empty, so order and cancellation stay with the proxy.
"""

from collections.abc import Mapping, Sequence
from math import fsum, inf, isclose
from typing import Final, Literal

from forebay.proxy.core.model import FULL, INSTANT_S, MAJORITY, Bucket
from forebay.proxy.core.policy.coalesce import keeps_back, must_follow
from forebay.proxy.core.policy.long_prefills import LongPrefills
from forebay.proxy.core.policy.order import engine_priority
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.fleet import heads_of
from forebay.proxy.core.state.in_flight import STEP_TOKENS, InFlight, counts
from forebay.proxy.core.state.kv_budget import reserved
from forebay.proxy.core.state.queue import QueuedRequest
from forebay.proxy.core.state.tenants import Fairness

DISPATCH_AHEAD_S: Final = 0.3
"""Backlog below which a backend is sent more, by default: the engine never waits for the proxy, and
its own queue is too short to matter. Doubled: what starts next is decided 0.3 s earlier."""
BESIDE_OTHERS: Final = 1 / 4
"""Share of that backlog while several tenants are active: what waits in the engine delays the next
prompt of a light tenant. Doubled: its p99 is 2.8 instead of 2.4 times that alone."""

Block = Literal[
    "",  # it may start
    "down",  # the backend takes no work
    "slots",  # too few of the backend's max_concurrency slots are free
    "trial",  # it is on trial or reported that it is full: few prefills at once
    "tokenizer",  # its API server tokenizes texts that were sent before
    "line",  # its backlog is longer than `dispatch_ahead`
    "kv",  # its KV cache would not hold the request
    "leader",  # its prefix is being computed there for another request
    "prefill_limit",  # `prefills_per_backend` requests of the bucket are in prefill there
    "partition",  # it is long, and this is the last backend clear of long prefills
]


class StartGate:
    """Decides which requests may start."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        buckets: Mapping[str, Bucket],
        long_prefills: LongPrefills,
        fairness: Fairness,
    ) -> None:
        self._backends = backends
        self._buckets = buckets
        self._long_prefills = long_prefills
        self._fairness = fairness
        self.dispatch_ahead_s = DISPATCH_AHEAD_S

    def has_room(self, backend: Backend, now: float) -> bool:
        """True if the backend may be sent any request at all."""
        ahead_s = self._ahead_s(now)
        no_room = self._no_room(backend, -inf, ahead_s, now)
        return not no_room or (no_room == "line" and takes_followers(backend, ahead_s))

    def beside_others(self, now: float) -> bool:
        """True if several tenants are active."""
        return self._fairness.on and self._fairness.shared(now)

    def engine_priority(self, backend: Backend, waiting: QueuedRequest) -> int | None:
        """Return the priority to send with the request, or None if the engine has no order."""
        if not backend.prefill_queue.ordered:
            return None
        fair = self._fairness
        behind_s = fair.behind_s(waiting.request.tenant) if fair.on else 0.0
        return engine_priority(backend, waiting, behind_s)

    def wait_s(self, backend: Backend, waiting: QueuedRequest, uncached: int, now: float) -> float:
        """Return the predicted wait of a request that is sent now, besides its prefill."""
        priority = self.engine_priority(backend, waiting)
        ahead_s = backend.prefill_queue.ahead_s(uncached, now, priority)
        return backend.wait_s(ahead_s, waiting.request.prompt_tokens, now)

    def may_start(self, backend: Backend, waiting: QueuedRequest, now: float) -> bool:
        """True if the request, if it were next, may be sent to this backend now."""
        return not self.why_not(backend, waiting, now)

    def why_not(self, backend: Backend, waiting: QueuedRequest, now: float) -> Block:
        """Return the reason why the request, if it were next, may not be sent here now."""
        priority = self.engine_priority(backend, waiting)
        ahead_s = self._ahead_s(now)
        no_room = self._no_room(backend, priority, ahead_s, now)
        if no_room and not (
            no_room == "line"
            and takes_followers(backend, ahead_s)
            and must_follow(backend, waiting.request)
        ):
            return no_room
        return self._why_not_this(backend, waiting, priority, ahead_s, now)

    def _why_not_this(
        self,
        backend: Backend,
        waiting: QueuedRequest,
        priority: int | None,
        ahead_s: float,
        now: float,
    ) -> Block:
        """Return the reason why this request may not be sent where others may."""
        request, chunked = waiting.request, backend.prefill_queue.chunked
        limited = self._limit_reached(backend, waiting.bucket)
        long_s = self._long_prefills.long_s(waiting.bucket, backend, now)
        matched = 0
        if chunked or limited or long_s < inf:
            matched = backend.matched_tokens(request)
        uncached = request.prompt_tokens - matched
        if chunked and not self._passes(backend, uncached, priority, ahead_s, now):
            return "line"
        short = lacks(backend, waiting)
        if short:
            return short
        if request.sequences > 1 and self._takes_last(backend, waiting, now):
            return "slots"
        if keeps_back(backend, waiting):
            return "leader"
        if limited and counts(request, uncached):
            return "prefill_limit"
        if long_s < inf:
            return self._partition(backend, waiting, matched, long_s, now)
        return ""

    def _partition(
        self, backend: Backend, waiting: QueuedRequest, matched: int, long_s: float, now: float
    ) -> Block:
        prefill_s = backend.prefill_s(waiting.request, matched)
        clear_at = self._long_prefills.clear_at(backend, waiting, prefill_s, long_s, now)
        return "partition" if clear_at > now else ""

    def divide(self, backend: Backend, now: float) -> None:
        """Order tenants by their holdings while one of the heads lacks slots or KV cache.

        Else they are ordered by their counters.
        """
        backend.turns.order_by_counters(backend.holdings)
        if self.beside_others(now):
            self._find_scarce(backend, heads_of([backend]), now)

    def look_again(self, backend: Backend, heads: Sequence[QueuedRequest], now: float) -> bool:
        """Note the shortage that keeps some of these heads from starting.

        Returns True if another tenant may be next because of that. Small requests take KV cache and
        slots as they come free, so a long prompt or a batch could wait until no other request
        comes. From half of its patience on, its needs are kept free for it. For a tenant that holds
        less than its share, they are kept free from the start.
        """
        if self.beside_others(now) and self._find_scarce(backend, heads, now):
            return True
        for head in heads:
            if backend.starving is not None:
                break
            half_s = MAJORITY * (head.late_at - head.arrived_at)
            late = now - head.arrived_at >= half_s or backend.holdings.below_share(
                head.request.tenant
            )
            if late and lacks(backend, head) and not self._takes_last(backend, head, now):
                backend.starving = head
        return False

    def _find_scarce(self, backend: Backend, heads: Sequence[QueuedRequest], now: float) -> bool:
        holdings = backend.holdings
        before = holdings.scarce, holdings.last
        last = [h.request.tenant for h in heads if self._takes_last(backend, h, now)]
        holdings.last |= frozenset(last)
        holdings.scarce = holdings.scarce or any(lacks(backend, head) for head in heads)
        return (holdings.scarce, holdings.last) != before

    def _takes_last(self, backend: Backend, waiting: QueuedRequest, now: float) -> bool:
        """True if a tenant would have more than half of every engine with this batch.

        In an engine that has more sequences than slots, all others wait until they have ended.
        """
        tenant = waiting.request.tenant
        if not fills(backend, waiting):
            return False
        others = [b for b in self._backends.values() if b.up and b is not backend]
        return (
            bool(others)
            and self.beside_others(now)
            and all(has_most(other, tenant) for other in others)
        )

    def _ahead_s(self, now: float) -> float:
        """Return the backlog below which a backend is sent more."""
        share = BESIDE_OTHERS if self.beside_others(now) else 1.0
        return share * self.dispatch_ahead_s

    def _no_room(
        self, backend: Backend, priority: float | None, ahead_s: float, now: float
    ) -> Block:
        """Return the reason why no request of this priority may be sent to this backend now."""
        if not backend.up:
            return "down"
        if backend.running >= backend.spec.max_concurrency:
            return "slots"
        if not backend.takes_another:
            return "trial"
        if not below(backend.api_server.wait_s(now), INSTANT_S):
            return "tokenizer"
        return "" if self._passes(backend, 0.0, priority, ahead_s, now) else "line"

    def _passes(
        self,
        backend: Backend,
        uncached_tokens: float,
        priority: float | None,
        ahead_s: float,
        now: float,
    ) -> bool:
        """True if the backlog that this prefill cannot pass is short, or fits into a step.

        A step has its fixed cost once, and it is high where the engine decodes many contexts.
        """
        queue = backend.prefill_queue
        if below(queue.drain_s(uncached_tokens, now, priority), ahead_s):
            return True
        if backend.elsewhere is not None:
            return False
        if queue.tokens < STEP_TOKENS:
            return True  # so is every part of them
        least = max(uncached_tokens, queue.chunk_tokens)  # it passes longer prefills
        before = [p for p in queue.prefills.values() if p.uncached_tokens <= least]
        if sum([prefill.uncached_tokens for prefill in before]) < STEP_TOKENS:
            return True
        # Prefills that cost next to nothing have more room than one step. So have all prefills
        # beside a document in a chunking engine: each step has a chunk of the document anyway.
        limit_s = ahead_s if queue.chunks_document else BESIDE_OTHERS * self.dispatch_ahead_s
        return _work_s(backend, before) < limit_s

    def _limit_reached(self, backend: Backend, bucket: str) -> bool:
        prefills = backend.prefill_queue.prefills_of[bucket]
        if backend.elsewhere is not None:
            prefills += backend.elsewhere.prefills.get(bucket, 0)
        return prefills >= self._buckets[bucket].prefills_per_backend


def takes_followers(backend: Backend, ahead_s: float) -> bool:
    """True if followers of the running prefill may be sent before it ends.

    An engine that computes prefills in order has the leader's blocks when it begins its followers.
    Meanwhile the API server tokenizes them, which takes longer than their hits.
    """
    queue = backend.prefill_queue
    if queue.chunked or queue.head is None or backend.elsewhere is not None:
        return False
    behind = [prefill for prefill in queue.prefills.values() if prefill is not queue.head]
    return _work_s(backend, behind) < ahead_s


def _work_s(backend: Backend, prefills: Sequence[InFlight]) -> float:
    """Return the predicted seconds of these prefills without their fixed costs."""
    fixed_s = backend.cost.predict_s(0, 0)
    return fsum([prefill.prefill_s - fixed_s for prefill in prefills])


def below(left_s: float, limit_s: float) -> bool:
    """True if `left_s` has fallen to the limit, as a timer for that moment must find it."""
    return left_s < limit_s or isclose(left_s, limit_s, rel_tol=1e-6)  # a clock of months is coarse


def kept_for(backend: Backend, waiting: QueuedRequest) -> QueuedRequest | None:
    """Return the other request for which room is kept that `waiting` must not use, or None.

    A tenant that holds less than the other's is not kept back.
    """
    other = backend.starving
    if other is None or other is waiting:
        return None
    tenant, theirs = waiting.request.tenant, other.request.tenant
    if tenant != theirs and backend.holdings.holds_less(tenant, theirs):
        return None
    return other


def fills(backend: Backend, waiting: QueuedRequest) -> bool:
    """True if a request alone takes more than half of the backend's slots."""
    return waiting.request.sequences > MAJORITY * backend.spec.max_concurrency


def has_most(backend: Backend, tenant: str) -> bool:
    """True if a tenant has more than half of the backend, or it is kept free for that."""
    other = backend.starving
    kept_free = other is not None and other.request.tenant == tenant and fills(backend, other)
    return kept_free or backend.holdings.part(tenant) > MAJORITY


def slots_fit(backend: Backend, waiting: QueuedRequest) -> bool:
    """True if slots are free for all sequences of the request, or all slots are free."""
    slots = backend.spec.max_concurrency
    room, other = slots - backend.running, kept_for(backend, waiting)
    if other is not None and other.request.sequences > 1:
        room -= min(slots, other.request.sequences)
    return min(slots, waiting.request.sequences) <= room


def kv_room(backend: Backend, waiting: QueuedRequest, enough: float = inf) -> float:
    """Return the tokens of KV cache that this request may use.

    Args:
        enough: tokens that are enough; a result above them need not be exact.
    """
    most = FULL * backend.kv_tokens
    room = most - backend.kv.held
    if backend.starving is not None and (other := kept_for(backend, waiting)) is not None:
        output_tokens = reserved(other.output_tokens, backend.kv_tokens)
        room -= min(most, backend.kv.need(other.request, output_tokens))
    if room < enough and waiting.request.tenant:
        owed = backend.holdings.lent(waiting.request.tenant)
        room += owed * most if owed else 0.0
    return room


def lacks(backend: Backend, waiting: QueuedRequest) -> Block:
    """Return the resource that the request lacks: slots, KV cache for it and its output, or ""."""
    request, output_tokens = waiting.request, waiting.output_tokens
    if (request.sequences > 1 or backend.starving is not None) and not slots_fit(backend, waiting):
        return "slots"
    elsewhere = backend.elsewhere
    if elsewhere is not None and not elsewhere.running:
        elsewhere = None
    if elsewhere is None and not backend.in_flight:
        return ""
    tokens = request.prompt_tokens + output_tokens
    room = kv_room(backend, waiting, tokens)
    if elsewhere is not None:
        room -= elsewhere.kv_tokens
    if tokens <= room:
        return ""
    need = backend.kv.need(request, reserved(output_tokens, backend.kv_tokens))
    return "" if need <= room else "kv"
