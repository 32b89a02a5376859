"""How long would a request wait on each backend? One `Option` for each backend worth a look.

A forecast reads state and changes none. It notes arrivals, for `long_prefills.py` and
`rendezvous.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Final

from forebay.proxy.core.model import MAJORITY, Bucket, Request
from forebay.proxy.core.policy.admission import SURE, attainable
from forebay.proxy.core.policy.coalesce import (
    awaited_tokens,
    expected_tokens,
    must_follow,
    others_want,
)
from forebay.proxy.core.policy.kv_wait import kv_use, kv_wait_s, without_copies
from forebay.proxy.core.policy.long_prefills import LongPrefills
from forebay.proxy.core.policy.order import due_at
from forebay.proxy.core.policy.precedence import Before, Precedence
from forebay.proxy.core.policy.rendezvous import Rendezvous, prefer
from forebay.proxy.core.policy.routing import Option, try_rarely_used
from forebay.proxy.core.policy.start import BESIDE_OTHERS, StartGate, fills, kept_for
from forebay.proxy.core.state.backend import Backend, takes_model
from forebay.proxy.core.state.elsewhere import Peers
from forebay.proxy.core.state.fleet import Shortlist
from forebay.proxy.core.state.in_flight import STEP_TOKENS
from forebay.proxy.core.state.queue import QueuedRequest

NOTHING_BEFORE: Final = Before()


class Forecast:
    """Prices a request on each backend.

    Attributes:
        gate: which requests may start.
        long_prefills: keeps one backend clear of long prefills.
        limited: a backend is on trial or in a pause.
    """

    def __init__(
        self, backends: Mapping[str, Backend], buckets: Mapping[str, Bucket], precedence: Precedence
    ) -> None:
        self._backends = backends
        self._buckets = buckets
        self._precedence = precedence
        self.limited = False
        self.long_prefills = LongPrefills(backends, buckets)
        self.gate = StartGate(backends, buckets, self.long_prefills, precedence.fairness)
        self._peers: Peers | None = None  # while there are other proxies
        self._rendezvous = Rendezvous()

    def rebuild(self, dispatch_ahead_s: float, min_match: float) -> None:
        """Look at the backends and buckets as they are now. Notes of arrivals stay."""
        self._all, buckets = list(self._backends.values()), self._buckets
        self._min_match = min_match
        self._usable = {
            bucket.name: [b for b in self._all if not bucket.backends or b.name in bucket.backends]
            for bucket in buckets.values()
        }
        beside_others_s = BESIDE_OTHERS * dispatch_ahead_s
        self._shortlist = Shortlist(
            self._all, list(buckets.values()), dispatch_ahead_s, beside_others_s
        )
        self.long_prefills.rebuild()
        self.gate.dispatch_ahead_s = dispatch_ahead_s
        self._rendezvous = Rendezvous(self._rendezvous.root)

    # Events.

    def arrived(self, request: Request, bucket: str, now: float) -> None:
        """Note an arrival."""
        self.long_prefills.arrived(bucket, request.model, now)
        if self._peers is not None:
            self._rendezvous.arrived(request)

    def decided(self, bucket: str, model: str, *, rejected: bool) -> None:
        """Note the decision about a new request."""
        self.long_prefills.decided(bucket, model, rejected=rejected)

    def moved(self, backend: Backend) -> None:
        """Note a change of a backend: its prefill queue, waiting requests, load or health."""
        self._shortlist.moved(backend)

    def share_with(self, peers: Peers | None) -> None:
        """Use the reports of other proxies, or None without other proxies."""
        self._peers = peers

    # Questions.

    def suits(self, backend: Backend, waiting: QueuedRequest) -> bool:
        """True if it is up, serves bucket and model, and has not failed the request."""
        usable = self._usable[waiting.bucket]
        return (
            backend.up
            and takes_model(backend, waiting.request.model)
            and (len(usable) == len(self._all) or backend in usable)
            and backend.name not in waiting.excluded
        )

    def options(
        self, waiting: QueuedRequest, now: float, *, everywhere: bool = False
    ) -> list[Option]:
        """Price every backend that is worth a look. Empty if no backend may take the request.

        Args:
            everywhere: every backend that may take it is worth a look, in a large fleet too.
        """
        every = everywhere or self._shortlist.all
        backends = self._all_suitable(waiting) if every else self._listed(waiting)
        if self.limited:  # no request should wait for a trial while another backend has room
            backends = [b for b in backends if b.takes_another] or backends
        return self.options_among(backends, waiting, now)

    def _all_suitable(self, waiting: QueuedRequest) -> list[Backend]:
        return [b for b in self._usable[waiting.bucket] if self.suits(b, waiting)]

    def _listed(self, waiting: QueuedRequest) -> list[Backend]:
        """Return the backends of a large fleet that are worth a look."""
        usable = self._usable[waiting.bucket]
        if waiting.excluded or waiting.request.model:
            usable = [b for b in usable if self.suits(b, waiting)]
        if self.limited:  # backends on trial have little to do and would be listed first
            usable = [b for b in usable if b.up and b.takes_another] or usable
        some = usable if len(usable) < len(self._all) else None
        backends = self._shortlist.of(waiting.request.blocks, waiting.bucket, self._min_match, some)
        if self._peers is not None:
            agreed = self._agreed(waiting)
            if agreed is not None and agreed not in backends:
                backends.append(agreed)
        return backends

    def hopeful(
        self, waiting: QueuedRequest, limits: Bucket, options: list[Option], now: float
    ) -> list[Option]:
        """Return the options among which the route picks for a new request.

        Backends that can meet the limits, then an idle backend that was not priced: it joins
        `options`. Without any of these, all options but needless copies.
        """
        allowed = without_copies(options)
        hopeful = [
            o
            for o in allowed
            if self._backends[o.backend].idle or attainable(waiting.request, limits, o)
        ]
        if not hopeful:
            hopeful = self._idle_elsewhere(waiting, now)
            options += hopeful
        return self.without_late_copies(hopeful or allowed, waiting, now)

    def _idle_elsewhere(self, waiting: QueuedRequest, now: float) -> list[Option]:
        """Price an idle backend of a large fleet that was not listed, if there is any.

        Looks at every backend, for a request that would be rejected otherwise.
        """
        if self._shortlist.all:
            return []
        usable = self._usable[waiting.bucket]
        suitable = (b for b in usable if b.idle and b.takes_another and self.suits(b, waiting))
        idle = next(suitable, None)
        return [] if idle is None else self.options_among([idle], waiting, now)

    def options_among(
        self, backends: Sequence[Backend], waiting: QueuedRequest, now: float
    ) -> list[Option]:
        """Price these backends."""
        options = [self._option(backend, waiting, now) for backend in backends]
        _assume(options, backends)
        try_rarely_used(options)
        if self._peers is not None:
            self._agree(options, waiting)
        return options

    def without_late_copies(
        self, options: list[Option], waiting: QueuedRequest, now: float
    ) -> list[Option]:
        """Leave out backends where a new request would wait to have its prefix computed once more.

        While one of these backends computes the prefix, or will, another begins a copy at once or
        not at all.
        """
        if len(options) == 1 or waiting.request.prompt_tokens <= STEP_TOKENS:
            return options
        backends = self._backends
        awaited = max(awaited_tokens(backends[o.backend], waiting) for o in options)
        return [
            o
            for o in options
            if awaited - o.matched_tokens <= STEP_TOKENS
            or self.gate.may_start(backends[o.backend], waiting, now)
        ]

    def next_moment(self, heads: Iterable[QueuedRequest], now: float) -> float:
        """Return the next time, later than `now`, at which a head may start without an event."""
        room_at = self._shortlist.room_after(now, beside_others=self.gate.beside_others(now))
        return min(room_at, self.long_prefills.next_moment(heads, now))

    def _agreed(self, waiting: QueuedRequest) -> Backend | None:
        usable = self._all_suitable(waiting)
        return self._rendezvous.agreed(waiting.request, usable, self._min_match)

    def _agree(self, options: list[Option], waiting: QueuedRequest) -> None:
        """Prefer the agreed backend for a prompt that is cold everywhere."""
        enough = self._min_match * waiting.request.prompt_tokens
        if not waiting.request.blocks or any(o.matched_tokens >= enough > 0 for o in options):
            return
        prefer(options, self._agreed(waiting))

    def _option(self, backend: Backend, waiting: QueuedRequest, now: float) -> Option:
        request = waiting.request
        prompt_tokens = request.prompt_tokens
        # The prefill, with the hit that is expected once the request is sent.
        matched, _ = expected_tokens(backend, waiting)
        cold_s = prefill_s = backend.cost.predict_s(prompt_tokens, prompt_tokens)
        if matched:
            prefill_s = backend.cost.predict_s(prompt_tokens - matched, prompt_tokens)
        uncached = prompt_tokens - matched
        # The wait, and its margin, behind the requests that go first.
        before = NOTHING_BEFORE
        if backend.queued:
            deadline = min(waiting.deadline, now + self._buckets[waiting.bucket].deadline_s)
            worth_s = cold_s if must_follow(backend, request) else prefill_s
            due = due_at(waiting.arrived_at, deadline, worth_s)
            before = self._precedence.before(backend, waiting, deadline, due, now)
        kv_s, kv_spread_s = kv_wait_s(backend, waiting, before.kv_tokens, now)
        wait_s = self._wait_s(backend, waiting, uncached, before, kv_s, now)
        long_s = self.long_prefills.long_s(waiting.bucket, backend, now)
        # A long prefill also waits until enough other backends are clear.
        if prefill_s > long_s:
            wait_s = max(
                wait_s,
                self.long_prefills.clear_at(backend, waiting, prefill_s, long_s, now) - now,
                self.long_prefills.crowd_s(backend, waiting, prefill_s, long_s, now),
            )
        margin_s = self._margin_s(backend, waiting, uncached, before, wait_s, now)
        margin_s = max(margin_s, kv_spread_s)
        # Further facts by which routes tell backends apart.
        proven = backend.cost.proven_tokens >= MAJORITY * prompt_tokens
        load, requests = load_of(backend, now), backend.running
        if not backend.prefill_queue.ordered:  # an engine with an order passes what waits
            requests += backend.queued
        in_demand = matched > 0 and others_want(backend, request, matched)
        sent_s = 0.0 if backend.prefill_queue.chunked else backend.prefill_queue.backlog_s(now)
        if sent_s > 0.0:
            sent_s += error_margin_s(backend, sent_s, 0.0)
        used, kv_tokens = kv_use(backend, request)
        answer_tokens = waiting.output_tokens / request.sequences
        decode_s = answer_tokens * backend.cost.read_s(backend.context_tokens)
        return Option(
            backend.name, wait_s, margin_s, prefill_s, cold_s, matched, load, proven, requests,
            wanted=in_demand, decode_s=decode_s, step_s=backend.cost.predict_s(0, 0),
            sent_s=sent_s, kv_tokens=kv_tokens, kv_used=used,
        )  # fmt: skip

    def _wait_s(
        self,
        backend: Backend,
        waiting: QueuedRequest,
        uncached: int,
        before: Before,
        kv_s: float,
        now: float,
    ) -> float:
        """Return the predicted wait: in the API server and the engine, in the queues, for a slot,
        for KV cache."""
        queue = backend.prefill_queue
        priority = self.gate.engine_priority(backend, waiting) if queue.ordered else None
        wait_s = queue.ahead_s(uncached, now, priority)
        if before.count > 0:
            wait_s += before.seconds / (1.0 - before.overtaken)
        if backend.elsewhere is not None and backend.elsewhere.queued_s:
            wait_s += self._precedence.elsewhere_s(backend, waiting, before.seconds, now)
        wait_s += slots_wait_s(backend, waiting, before.count)
        if kv_s > wait_s:
            wait_s = kv_s
        return backend.wait_s(wait_s, waiting.request.prompt_tokens, now)

    def _margin_s(
        self,
        backend: Backend,
        waiting: QueuedRequest,
        uncached: int,
        before: Before,
        wait_s: float,
        now: float,
    ) -> float:
        """Return the seconds by which the wait may exceed its prediction."""
        alike = before.count if before.in_order else 1
        margin_s = error_margin_s(backend, wait_s, before.seconds, alike)
        if before.count <= 0:
            return margin_s
        margin_s += before.shorter_s / (1.0 - before.overtaken)
        if not backend.prefill_queue.chunked:
            return margin_s
        bucket = waiting.bucket
        beside_s = self._precedence.beside_s(backend, bucket, uncached, before.seconds, now)
        return max(margin_s, beside_s)


def _assume(options: list[Option], backends: Sequence[Backend]) -> None:
    """Take a backend to be as fast as the fastest until it has shown its speed.

    The prior is slower than most GPUs: with it, a backend that has computed nothing would never be
    chosen. Chats alone may give a speed for documents that is somewhat off: it is used to predict
    but not to choose, or all documents that meet idle backends would go to the seemingly fastest.
    A backend of another, slower kind is known from its first chats.
    """
    if not all([o.proven for o in options]):
        least_s = min([o.cold_prefill_s for o in options])
        for option, backend in zip(options, backends, strict=True):
            if option.proven:
                continue
            seen = backend.cost.observations
            if seen > 1 and MAJORITY * option.cold_prefill_s > least_s:
                continue  # an L40S takes 2.7 times as long as an H200, a wrong guess at most 1.9
            if seen:  # the prediction of a hit stays
                option.cold_prefill_s = least_s
            else:
                option.assume_fast(least_s)


def load_of(backend: Backend, now: float) -> float:
    """Return the recent prompt tokens of a backend, from all proxies (a decayed sum)."""
    own = backend.load.value(now)
    return own if backend.elsewhere is None else own + backend.elsewhere.load


def error_margin_s(backend: Backend, wait_s: float, before_s: float, alike: float = 1) -> float:
    """Return the seconds by which a wait may exceed its prediction, nine times in ten.

    Errors grow with everything in the prefill queue, even with prefills that are nearly done. 0
    until the first answer: a guess must not reject a request that the engine could serve.

    Args:
        before_s: the part of the wait that is still in the proxy's queues.
        alike: prefills in `before_s` if nothing else can get in between: their errors cancel out
            in part, to 1/sqrt(n) of the sum for n alike. 1: nothing cancels out.
    """
    if not backend.cost.observations:
        return 0.0
    queue = backend.prefill_queue
    engine_s = wait_s if queue.chunked else queue.total_s
    cancelled_s = before_s * (1.0 - 1.0 / sqrt(alike)) if alike > 1 else 0.0
    uncertain_s = max(wait_s, engine_s + before_s) - cancelled_s
    if uncertain_s <= 0.0:
        return 0.0
    return SURE * backend.cost.error.at(uncertain_s) * uncertain_s


def slots_wait_s(backend: Backend, waiting: QueuedRequest, before: float) -> float:
    """Return the predicted wait for slots behind `before` other requests."""
    slots, sequences = backend.spec.max_concurrency, waiting.request.sequences
    missing = backend.sequences + backend.passing + before + sequences - slots
    if backend.elsewhere is not None:
        missing += backend.elsewhere.running
    if backend.starving is not None and (other := kept_for(backend, waiting)) is not None:
        missing += other.request.sequences if fills(backend, other) else 0
    if missing <= 0:
        return 0.0
    missing -= max(0, sequences - slots)  # a larger batch begins once all slots are free
    return missing * backend.decode_s[waiting.bucket].value / slots
