"""Send those who wait, when and where they may start; refuse those whose time is over.

Who comes in, and what is known of backends and other proxies, is told by the `Shaper`, which is a
dispatcher with doors. A subclass and not an owner: what keeps receipts (`explain.py`) looks in at
the same few verbs whether a request has just come or waited.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Final

from forebay.proxy.core.model import Action, Bucket, Reject, RejectReason, Send
from forebay.proxy.core.peers import Sharing
from forebay.proxy.core.policy.admission import retry_after_s
from forebay.proxy.core.policy.forecast import Outlook
from forebay.proxy.core.policy.precedence import Ahead
from forebay.proxy.core.policy.routing import Affinity, Option, Route
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.fleet import Queues, heads_of
from forebay.proxy.core.state.in_flight import STEP_TOKENS, Flight
from forebay.proxy.core.state.queue import Waiting, due_at, late_at
from forebay.proxy.core.state.quota import Quotas
from forebay.proxy.core.state.tenants import Fairness

LOOKS_ELSEWHERE: Final = 8  # heads of other queues that a backend with room looks at
LOST: Final = 0.5  # of its prefill: reckoned with less, it waited for what nobody computes now
LOOK_AGAIN_S: Final = 0.05  # a head that would rather stay is not asked again before


class Dispatcher:
    def __init__(
        self,
        backends: dict[str, Backend],
        buckets: dict[str, Bucket],
        *,
        route: Route,
        affinity: Affinity,
        dispatch_ahead_s: float,
        fairness: Fairness,
        quotas: Quotas,
    ) -> None:
        self.backends = backends
        self.buckets = buckets
        self.affinity = affinity
        self._route = route
        self._dispatch_ahead_s = dispatch_ahead_s
        self._fairness = fairness
        self._ahead = Ahead(backends, fairness)
        self._outlook = Outlook(
            backends, buckets, dispatch_ahead_s, affinity.min_match, self._ahead
        )
        self._queues = Queues(buckets)
        self._running: dict[str, tuple[Backend, Waiting]] = {}
        self._silent: dict[str, Backend] = {}  # those whose line time alone can shorten
        self._least_patience_s = least_patience_s(buckets)
        self._now = 0.0
        self._quotas = quotas
        self._sharing = Sharing(backends, fairness, quotas)

    def wake_at(self) -> float:
        """When `wake` has something to do; infinity if no timer is needed."""
        queues = self._queues
        if not queues.waiting:
            return inf
        return min(queues.first_deadline(), self._outlook.next_moment(queues.heads(), self._now))

    def wake(self, now: float) -> list[Action]:
        """Time has passed: send those whose turn it is, refuse those whose deadline is over."""
        self._pass_time(now)
        actions, left = self._dispatch_all(now), False
        for backend in list(self._queues.backends.values()):
            for queue in backend.queues.values():
                while (head := queue.earliest()) and head.deadline <= now:
                    self._dequeue(head.request.id)
                    wait_s = backend.backlog_s(now) + queue.work_s
                    actions.append(self._reject(head, "deadline_unattainable", now, wait_s))
                    left = True
        # Whoever has left may have kept those behind from starting.
        return actions + self._dispatch_all(now) if left else actions

    # How it acts.

    def _freed(self, backend: Backend, prefilled: Flight | None, now: float) -> list[Action]:
        """Something ended on `backend`; `prefilled` has left its line of prefills, if any has."""
        self._outlook.moved(backend)
        if not self._queues.waiting:
            return []
        came = prefilled is not None and prefilled.counts and self._gather(backend, now)
        if came or (prefilled and prefilled.prefill_s > self._least_patience_s):
            return self._dispatch_all(now)  # it may be clear of long prefills now
        return self._dispatch([backend], now)

    def _dispatch_all(self, now: float) -> list[Action]:
        return self._dispatch(self.backends.values(), now) if self._queues.waiting else []

    def _dispatch(self, backends: Collection[Backend], now: float) -> list[Action]:
        """Start what may start on these backends; those left with room look at other queues."""
        actions: list[Action] = []
        for backend in backends:
            actions += self._start_next(backend, now)
        for backend in backends if self._queues.waiting else ():
            while waiting := self._better_here(backend, now):
                home = self._dequeue(waiting.request.id)
                matched = backend.matched_tokens(waiting.request)
                actions.append(self._send(waiting, backend, matched, now))
                actions += self._start_next(home, now)  # it may have kept those behind it
        return actions

    def _start_next(self, backend: Backend, now: float) -> list[Action]:
        """Send those who wait for this backend while they may start, the most urgent first."""
        actions: list[Action] = self._review(backend, now) if backend.review else []
        while backend.queued and self._outlook.has_room(backend, now):
            heads = heads_of([backend])
            ready = [h for h in heads if self._outlook.may_start(backend, h, now)]
            if len(ready) < len(heads) and backend.aside.waiting is None:
                self._put_aside(backend, heads, now)
            if not ready:
                break
            waiting = backend.turns.first(ready, now)
            self._dequeue(waiting.request.id)
            matched = backend.matched_tokens(waiting.request)
            actions.append(self._send(waiting, backend, matched, now))
        return actions

    def _review(self, backend: Backend, now: float) -> list[Action]:
        """Who followed one that is computed, or gone, is as long now as what is missing of it."""
        backend.review = False
        actions: list[Action] = []
        for waiting in list(backend.followers.values()):
            request = waiting.request
            if waiting.backend != backend.name:  # gone with one of those before it
                continue
            if backend.leads(waiting.leader) or backend.awaits(request):
                continue
            matched, _ = backend.expected_tokens(waiting)
            prefill_s = backend.prefill_s(request, matched)
            if waiting.work_s < LOST * prefill_s:
                self._dequeue(request.id)
                actions += self._elsewhere(waiting, now)
                if waiting.backend not in ("", backend.name):
                    actions += self._start_next(self.backends[waiting.backend], now)
            else:
                self._queues.leave(waiting, backend)
                self._take_place(waiting, backend, prefill_s)
        return actions

    def _gather(self, backend: Backend, now: float) -> bool:
        """It has computed something long: who waits elsewhere to have that computed may come.

        Returns whether anybody did.
        """
        came = False
        for home in list(self._queues.backends.values()):
            if home is backend:
                continue
            for waiting in [*home.leaders, *home.begun, *home.followers.values()]:
                request = waiting.request
                if waiting.backend != home.name or not self._outlook.suits(backend, waiting):
                    continue
                if backend.matched_tokens(request) - home.matched_tokens(request) <= STEP_TOKENS:
                    continue
                options = self._outlook.options_among([home, backend], waiting, now)
                option = self._better(waiting, options)
                if option.backend == backend.name:
                    self._dequeue(request.id)
                    self._enqueue(waiting, option, now)
                    came = True
        return came

    def _put_aside(self, backend: Backend, heads: Iterable[Waiting], now: float) -> None:
        """KV cache for one that has waited long for it, while others take it as it comes free."""
        for head in heads:
            if now >= late_at(head) and not backend.kv_fits(head, now):
                backend.put_aside(head, now)
                return

    def _better_here(self, backend: Backend, now: float) -> Waiting | None:
        """The head of another backend's queue that would now rather come here."""
        if backend.queued or not self._outlook.has_room(backend, now):
            return None
        for head in self._queues.heads()[:LOOKS_ELSEWHERE]:
            if now < head.looks_again_at or not self._outlook.suits(backend, head):
                continue
            if self._outlook.may_start(backend, head, now):
                home = self.backends[head.backend]
                if not home.tries_more:  # nobody should wait for a pause while others have room
                    return head
                head.looks_again_at = now + LOOK_AGAIN_S
                both = [home, backend]
                options = self._outlook.options_among(both, head, now)
                if self._better(head, options).backend == backend.name:
                    return head
        return None

    def _send(self, waiting: Waiting, backend: Backend, matched_tokens: int, now: float) -> Send:
        request = waiting.request
        waiting.paid = False  # spent
        ahead_s = backend.ahead_s(request.prompt_tokens - matched_tokens, now)
        fresh = (
            waiting.piece_on == backend.name
            and not request.whole  # else it did not keep what it computed
            and round(matched_tokens / request.block_tokens) >= waiting.piece_blocks
        )
        piece = self._outlook.piece(backend, waiting, matched_tokens, now)
        if piece is not None:
            waiting.piece_blocks, waiting.piece_on = len(piece.blocks), backend.name
            waiting.began_at = min(now, waiting.began_at)
            flight = backend.sent(
                piece, waiting.bucket, matched_tokens, now, 1, waiting.rank,
                piece=True, fresh=fresh,
            )  # fmt: skip
            backend.begin(waiting, flight)
            # As it will have when the piece is computed, for those who want to know what waits.
            waiting.deadline = now + self.buckets[waiting.bucket].max_wait_s
            waiting.due = self._due(waiting, waiting.rest_s)
        else:
            flight = backend.sent(
                request, waiting.bucket, matched_tokens, now, waiting.output_tokens, waiting.rank,
                fresh=fresh,
            )  # fmt: skip
            self._outlook.sent(request.prompt_tokens, now)
        if self._ahead.on:
            self._ahead.sent(waiting, flight.prefill_s, now)
            self._queues.reorder()  # another tenant may be next
            self._sharing.gave(request.tenant, flight.prefill_s, now)
        self._outlook.moved(backend)
        self._running[request.id] = backend, waiting
        if not flight.request.streams:
            self._silent[backend.name] = backend
        queued_s = min(now, waiting.began_at) - waiting.arrived_at
        ttft_s = ahead_s + flight.prefill_s
        blocks = len(piece.blocks) if piece is not None else 0
        return Send(request, backend.name, waiting.bucket, queued_s, ttft_s, matched_tokens, blocks)

    def _enqueue(self, waiting: Waiting, option: Option, now: float) -> None:
        bucket = self.buckets[waiting.bucket]
        request = waiting.request
        if waiting.deadline == inf:
            left_s = request.timeout_s - (now - waiting.arrived_at)  # less than all for a retry
            bearable_s = min(bucket.max_wait_s, left_s - option.prefill_s)
            waiting.deadline = now + max(0.0, bearable_s)
        self._take_place(waiting, self.backends[option.backend], option.prefill_s)
        if self._fairness.on:
            self._fairness.queued(request.tenant)

    def _take_place(self, waiting: Waiting, backend: Backend, prefill_s: float) -> None:
        """In the queue of the backend, where its prefill is predicted to take so long."""
        request = waiting.request
        waiting.work_s = prefill_s
        waiting.next_s = backend.next_s(request, prefill_s)
        waiting.backend = backend.name
        _, leader = backend.expected_tokens(waiting)
        waiting.leader = leader
        waiting.follows = leader is not None or backend.awaits(request)
        # It keeps its place behind a leader as one that is as long: as a hit it would be in front.
        worth_s = backend.prefill_s(request, 0) if waiting.follows else prefill_s
        waiting.due = self._due(waiting, worth_s)
        self._queues.enter(waiting, backend)
        if leader is not None and leader.backend:
            backend.hasten(leader, self._due(leader, leader.work_s))
        self._outlook.moved(backend)

    def _due(self, waiting: Waiting, worth_s: float) -> float:
        deadline = waiting.deadline
        if waiting.began_at < inf:  # it does not fall behind for having one that is later now
            deadline = waiting.arrived_at + self.buckets[waiting.bucket].max_wait_s
        return due_at(waiting.arrived_at, deadline, worth_s / (1 + waiting.followed))

    def _dequeue(self, request_id: str) -> Backend:
        waiting = self._queues.waiting[request_id]
        backend = self.backends[waiting.backend]
        self._queues.leave(waiting, backend)
        self._outlook.moved(backend)
        waiting.backend = ""
        if self._fairness.on:
            self._fairness.left_queue(waiting.request.tenant)
        return backend

    def _take_out(self, backend: Backend, now: float) -> list[Action]:
        """It takes no work: those who wait for it go elsewhere or are refused."""
        backend.up = False
        self._outlook.moved(backend)
        actions: list[Action] = []
        for queue in backend.queues.values():
            for waiting in queue.everyone():
                self._dequeue(waiting.request.id)
                actions += self._elsewhere(waiting, now)
        return actions + self._dispatch_all(now)

    def _elsewhere(self, waiting: Waiting, now: float) -> list[Action]:
        """One who lost the place in a queue: to another, or refused when there is none."""
        options = self._outlook.options(waiting, now)
        if not options:
            return [self._reject(waiting, "no_backend_available", now)]
        self._enqueue(waiting, self._better(waiting, options), now)
        return []

    def _better(self, waiting: Waiting, options: list[Option]) -> Option:
        """For one who has waited: what is computed of its own prompt counts, however little."""
        affinity = replace(self.affinity, min_match=0.0) if waiting.piece_on else self.affinity
        return self._route(waiting.request, options, affinity)

    def _rebuild(self) -> None:
        """Other backends or buckets: what looks at all of them starts anew."""
        self._outlook = self._outlook.rebuilt(
            self.backends, self.buckets, self._dispatch_ahead_s, self.affinity.min_match
        )
        self._queues.reorder()

    def _tell_tenants_apart(self) -> None:
        """From the first request that names a tenant."""
        if self._fairness.on:
            return
        self._fairness.on = self._ahead.on = True
        for waiting in self._queues.waiting.values():
            self._fairness.queued(waiting.request.tenant)

    def _refund(self, backend: Backend, waiting: Waiting, now: float) -> None:
        """It leaves its backend: a prefill that was not computed is not paid for."""
        request = waiting.request
        flight = backend.prefills.get(request.id)
        if flight is not None and request.streams:
            computed_s = backend.line.computed_s(flight, now)
            self._correct(request.tenant, computed_s - flight.prefill_s, now)

    def _correct(self, tenant: str, more_s: float, now: float) -> None:
        self._fairness.correct(tenant, more_s)
        self._sharing.gave(tenant, more_s, now)

    def _pay_back(self, waiting: Waiting, now: float) -> None:
        """It leaves the queue and was never sent: its tenant has its tokens again, here.

        Other proxies go on counting them: in what they are told, sums only rise.
        """
        if waiting.paid:
            waiting.paid = False
            self._quotas.take(waiting.request.tenant, -waiting.request.prompt_tokens, now)

    def _reject(
        self, waiting: Waiting, reason: RejectReason, now: float, wait_s: float = 0.0
    ) -> Reject:
        self._pay_back(waiting, now)
        after_s = retry_after_s(waiting.request, self.buckets[waiting.bucket], wait_s)
        queued_s = now - waiting.arrived_at
        return Reject(waiting.request, reason, waiting.bucket, queued_s, after_s)

    def _pass_time(self, now: float) -> None:
        self._now = max(self._now, now)
        if not self._silent:
            return
        for backend in list(self._silent.values()):
            if backend.pass_time(now):
                self._outlook.moved(backend)
            if not backend.line.silent:
                del self._silent[backend.name]


def least_patience_s(buckets: Mapping[str, Bucket]) -> float:
    """Of the bucket that waits the least."""
    return min(bucket.max_wait_s for bucket in buckets.values())
