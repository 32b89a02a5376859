"""May a waiting request start now? `why_not` gives the reason that keeps it back.

Late binding: a backend is sent more only while its predicted backlog is short. The engine's own
queue stays almost empty, so order and cancellation stay with the proxy.
"""

from collections.abc import Iterable, Mapping
from math import inf, isclose
from typing import Final, Literal

from forebay.proxy.core.model import FULL, Bucket
from forebay.proxy.core.policy.coalesce import keeps_back
from forebay.proxy.core.policy.long_prefills import LongPrefills
from forebay.proxy.core.policy.order import engine_priority
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.in_flight import STEP_TOKENS
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
    "slots",  # max_concurrency requests run there
    "trial",  # it is on trial or reported that it is full: few prefills at once
    "line",  # its backlog is longer than `dispatch_ahead`
    "kv",  # its KV cache would not hold the request
    "leader",  # its prefix is being computed there for another request
    "prefill_limit",  # `prefills_per_backend` requests of the bucket are in prefill there
    "partition",  # it is long, and this is the last backend clear of long prefills
]


class StartGate:
    """The rule that says which requests may start."""

    def __init__(
        self,
        buckets: Mapping[str, Bucket],
        long_prefills: LongPrefills,
        dispatch_ahead_s: float,
        fairness: Fairness,
    ) -> None:
        self._buckets = buckets
        self._long_prefills = long_prefills
        self._fairness = fairness
        self.dispatch_ahead_s = dispatch_ahead_s

    def has_room(self, backend: Backend, now: float) -> bool:
        """Return whether the backend may be sent any request at all."""
        return not self._no_room(backend, -inf, self._ahead_s(now), now)

    def beside_others(self, now: float) -> bool:
        """Return whether several tenants are active."""
        return self._fairness.on and self._fairness.shared(now)

    def engine_priority(self, backend: Backend, waiting: QueuedRequest) -> int | None:
        """Return the priority to send with the request; None where the engine has no order."""
        if not backend.prefill_queue.ordered:
            return None
        fair = self._fairness
        behind_s = fair.behind_s(waiting.request.tenant) if fair.on else 0.0
        return engine_priority(backend, waiting, behind_s)

    def may_start(self, backend: Backend, waiting: QueuedRequest, now: float) -> bool:
        """Return whether the request, if it were next, may be sent to this backend now."""
        return not self.why_not(backend, waiting, now)

    def why_not(self, backend: Backend, waiting: QueuedRequest, now: float) -> Block:
        """Return what keeps the request, if it were next, from being sent to this backend now."""
        priority = self.engine_priority(backend, waiting)
        ahead_s = self._ahead_s(now)
        no_room = self._no_room(backend, priority, ahead_s, now)
        if no_room:
            return no_room
        request, chunked = waiting.request, backend.prefill_queue.chunked
        limited = self._limit_reached(backend, waiting.bucket)
        long_s = self._long_prefills.long_s(waiting.bucket, now)
        matched = 0
        if chunked or limited or long_s < inf:
            matched = backend.matched_tokens(request)
        uncached = request.prompt_tokens - matched
        if chunked and not passes(backend, uncached, priority, ahead_s, now):
            return "line"
        if not kv_fits(backend, waiting):
            return "kv"
        if keeps_back(backend, waiting):
            return "leader"
        if limited and (uncached > STEP_TOKENS or uncached == request.prompt_tokens):
            return "prefill_limit"
        if long_s < inf and not chunked:  # a chunking engine lets chats pass
            next_s = backend.next_piece_s(request, backend.prefill_s(request, matched))
            if self._long_prefills.clear_at(backend, waiting, next_s, long_s, now) > now:
                return "partition"
        return ""

    def _ahead_s(self, now: float) -> float:
        """Return the backlog below which a backend is sent more."""
        share = BESIDE_OTHERS if self.beside_others(now) else 1.0
        return share * self.dispatch_ahead_s

    def _no_room(
        self, backend: Backend, priority: float | None, ahead_s: float, now: float
    ) -> Block:
        """Return what keeps any such request from being sent to this backend now."""
        if not backend.up:
            return "down"
        if backend.running >= backend.spec.max_concurrency:
            return "slots"
        if not backend.takes_another:
            return "trial"
        queue = backend.prefill_queue
        if below(queue.drain_s(0.0, now, priority), ahead_s):
            return ""
        # What fits into one engine step takes one step, however long that is.
        return "" if backend.elsewhere is None and queue.tokens < STEP_TOKENS else "line"

    def _limit_reached(self, backend: Backend, bucket: str) -> bool:
        prefills = backend.prefill_queue.prefills_of[bucket]
        if backend.elsewhere is not None:
            prefills += backend.elsewhere.prefills.get(bucket, 0)
        return prefills >= self._buckets[bucket].prefills_per_backend


def passes(
    backend: Backend, uncached_tokens: float, priority: float | None, ahead_s: float, now: float
) -> bool:
    """Return whether the backlog that this prefill cannot pass is below `ahead_s`."""
    return below(backend.prefill_queue.drain_s(uncached_tokens, now, priority), ahead_s)


def below(left_s: float, limit_s: float) -> bool:
    """Return whether `left_s` has fallen to the limit; a timer for that moment must find it so."""
    return left_s < limit_s or isclose(left_s, limit_s)


def starving(backend: Backend, heads: Iterable[QueuedRequest], now: float) -> QueuedRequest | None:
    """Return a head that has waited long for KV cache, if any.

    Small requests take KV cache as it comes free, so a long prompt could wait until no other
    request comes. From half of its patience on, what it needs is kept free for it.
    """
    late = (head for head in heads if now >= head.late_at and not kv_fits(backend, head))
    return next(late, None)


def kv_room(backend: Backend, waiting: QueuedRequest) -> float:
    """Return the tokens of KV cache that this request may use."""
    most = FULL * backend.kv_tokens
    room, other = most - backend.kv.held, backend.starving
    if other is not None and other is not waiting:
        room -= min(most, backend.kv.need(other.request, other.output_tokens))
    return room


def kv_fits(backend: Backend, waiting: QueuedRequest) -> bool:
    """Return whether the KV cache would hold the request and its expected output."""
    request, output_tokens = waiting.request, waiting.output_tokens
    room = kv_room(backend, waiting)
    if backend.elsewhere is not None and backend.elsewhere.running:
        room -= backend.elsewhere.kv_tokens
    elif not backend.in_flight:
        return True
    if request.prompt_tokens + output_tokens <= room:
        return True
    return backend.kv.need(request, output_tokens) <= room
