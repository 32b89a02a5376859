"""What is predicted: how long a request would wait on each backend, and whether it may start.

Reads the books, changes none of them; what it notes itself is how much was sent and, for
`partition.py`, who came and who was refused lately.
"""

from collections.abc import Iterable, Mapping
from math import fsum, inf
from typing import Final

from forebay.proxy.core.learn.decay import Recent
from forebay.proxy.core.model import Bucket, Request
from forebay.proxy.core.policy import meanwhile
from forebay.proxy.core.policy.long_prefills import Partition
from forebay.proxy.core.policy.precedence import MOST, Ahead
from forebay.proxy.core.policy.rendezvous import CommonRoot, highest, name_seed
from forebay.proxy.core.policy.routing import Option
from forebay.proxy.core.policy.split_prefill import beginning
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.candidates import Candidates
from forebay.proxy.core.state.elsewhere import Peers
from forebay.proxy.core.state.in_flight import STEP_TOKENS
from forebay.proxy.core.state.queue import Waiting, due_at

AGREED_SHARE: Final = 0.75
"""Of its prefill: what going where every proxy would send a cold prompt is worth. With half, two
proxies lost 6 % of the hits of one (documents of 40k tokens, 5 questions each); with all of it the
wait would count for nothing."""
PROVEN_SHARE: Final = (
    0.5  # of a prompt: an engine that has computed as much shows how long it takes
)
MATCH_SLACK_S: Final = (
    1e-9  # float rounding: a timer set for the moment a backlog ends must find it so
)


class Outlook:
    def __init__(
        self,
        backends: Mapping[str, Backend],
        buckets: Mapping[str, Bucket],
        dispatch_ahead_s: float,
        min_match: float,
        ahead: Ahead,
    ) -> None:
        self._ahead = ahead
        self._backends = backends
        self._all = list(backends.values())
        self._buckets = buckets
        self._dispatch_ahead_s = dispatch_ahead_s
        self._min_match = min_match
        self._usable = {
            bucket.name: [b for b in self._all if not bucket.backends or b.name in bucket.backends]
            for bucket in buckets.values()
        }
        self._candidates = Candidates(self._all, dispatch_ahead_s)
        self.limited = False  # some backend is on trial or in a pause
        self.partition = Partition(self._all, buckets)
        self._sent = Recent()  # prompt tokens, to all backends
        self._peers: Peers | None = None  # other proxies, while there are any
        self._root = CommonRoot()
        self._seeds: dict[str, int] = {}

    def rebuilt(
        self,
        backends: Mapping[str, Backend],
        buckets: Mapping[str, Bucket],
        dispatch_ahead_s: float,
        min_match: float,
    ) -> "Outlook":
        """One for other backends or buckets, which remembers what this one has seen of those."""
        new = Outlook(backends, buckets, dispatch_ahead_s, min_match, self._ahead)
        new.partition.remember(self.partition)
        new._sent = self._sent
        new.limited = self.limited
        new._peers, new._root = self._peers, self._root
        return new

    # What changes what it knows.

    def sent(self, tokens: int, now: float) -> None:
        """A prompt of so many tokens went to some backend."""
        self._sent.add(tokens, now)

    def moved(self, backend: Backend) -> None:
        """The books of the backend changed: its line, its queue, its load or whether it is up."""
        self._candidates.moved(backend)

    # Other proxies.

    def share_with(self, peers: Peers | None) -> None:
        """There are others, or there are none any longer."""
        self._peers = peers

    def came(self, request: Request) -> None:
        """One more prompt; only asked for while there are others."""
        self._root.saw(request.blocks)

    def _agreed(self, waiting: Waiting) -> Backend | None:
        """Where every proxy would send this prompt, were it cold everywhere."""
        key = self._root.key(waiting.request.blocks, self._min_match)
        if key is None:
            return None
        backends = [b for b in self._usable[waiting.bucket] if self.suits(b, waiting)]
        if not backends:
            return None
        for backend in backends:
            if backend.name not in self._seeds:
                self._seeds[backend.name] = name_seed(backend.name)
        return backends[highest(key, [self._seeds[b.name] for b in backends])]

    def _agree(self, options: list[Option], waiting: Waiting) -> None:
        """A prompt cold everywhere costs less where the others would send it too."""
        enough = self._min_match * waiting.request.prompt_tokens
        if not waiting.request.blocks or any(o.matched_tokens >= enough > 0 for o in options):
            return
        agreed = self._agreed(waiting)
        for option in options:
            if agreed is not None and option.backend == agreed.name:
                option.cold_prefill_s *= 1.0 - AGREED_SHARE

    # What a request would meet.

    def suits(self, backend: Backend, waiting: Waiting) -> bool:
        """Whether the backend may take the request: it is up, of its bucket, and not tried yet."""
        usable = self._usable[waiting.bucket]
        return (
            backend.up
            and (len(usable) == len(self._all) or backend in usable)
            and backend.name not in waiting.excluded
        )

    def options(self, waiting: Waiting, now: float) -> list[Option]:
        """One for each backend that is worth a look; empty when none may take the request."""
        if self._candidates.all:
            backends = [b for b in self._usable[waiting.bucket] if self.suits(b, waiting)]
        else:
            usable = self._usable[waiting.bucket]
            if waiting.excluded:
                usable = [b for b in usable if b.name not in waiting.excluded]
            if self.limited:  # those have next to nothing to do, and would be looked at first
                usable = [b for b in usable if b.up and b.tries_more] or usable
            some = usable if len(usable) < len(self._all) else None
            backends = self._candidates.of(waiting.request.blocks, self._min_match, some)
            if self._peers is not None:
                agreed = self._agreed(waiting)
                if agreed is not None and agreed not in backends:
                    backends.append(agreed)
        if self.limited:  # nobody should wait for a trial to end while another takes work
            backends = [b for b in backends if b.tries_more] or backends
        return self.options_among(backends, waiting, now)

    def idle_elsewhere(self, waiting: Waiting, now: float) -> list[Option]:
        """Of a large fleet an idle backend, though it was not worth a look; empty if none is.

        Looks at every backend: for those who would be refused.
        """
        if self._candidates.all:
            return []
        usable = self._usable[waiting.bucket]
        idle = next((b for b in usable if b.idle and b.tries_more and self.suits(b, waiting)), None)
        return [] if idle is None else self.options_among([idle], waiting, now)

    def options_among(self, backends: list[Backend], waiting: Waiting, now: float) -> list[Option]:
        """What sending the request to each of these would mean."""
        loads = [backend.load(now) for backend in backends]
        if self._candidates.all:
            mean_load = fsum(loads) / len(loads) if loads else 0.0
        else:
            mean_load = self._sent.left(now) / len(self._all)
            if self._peers is not None:
                mean_load += self._peers.load / len(self._all)
        long_s = self.partition.long_s(waiting.bucket, now)
        options = [
            self._option(backends[at], waiting, long_s, loads[at], mean_load, now)
            for at in range(len(backends))
        ]
        self._assume(options, backends)
        if self._peers is not None:
            self._agree(options, waiting)
        return options

    def _assume(self, options: list[Option], backends: list[Backend]) -> None:
        """Until an engine has shown how fast it is, it is taken to be as fast as the fastest.

        With the prior, which is slower than most, nothing would ever come to one that has computed
        nothing yet. What is known of chats alone may be far off for a document: it predicts, but
        does not decide where that goes; else all that comes to idle engines would go to the one
        that is thought faster, and nobody would learn better.
        """
        known = [b.cost.observations > 0 for b in backends]
        if any(known) and not all(known):
            least_s = min(o.cold_prefill_s for o, seen in zip(options, known, strict=True) if seen)
            for option, seen in zip(options, known, strict=True):
                if not seen:
                    option.prefill_s = min(option.prefill_s, least_s)
        if not all([o.proven for o in options]):
            least_s = min([o.cold_prefill_s for o in options])
            for option in options:
                if not option.proven:
                    option.cold_prefill_s = least_s

    def has_room(self, backend: Backend, now: float) -> bool:
        """Late binding: up, a slot free, and next to nothing left to prefill."""
        running = len(backend.flights) if backend.others is None else backend.running
        return (
            backend.up
            and running < backend.limit
            and backend.tries_more
            and (
                backend.due_s(0.0, now) < self._dispatch_ahead_s + MATCH_SLACK_S
                or (backend.others is None and backend.line.tokens < STEP_TOKENS)
            )
        )

    def behind(self, backend: Backend, uncached_tokens: float, now: float) -> bool:
        """Whether prefills pass each other there and too much is left of those it does not pass."""
        if not backend.line.chunked:
            return False
        return backend.due_s(uncached_tokens, now) >= self._dispatch_ahead_s + MATCH_SLACK_S

    def may_start(self, backend: Backend, waiting: Waiting, now: float) -> bool:
        """Whether the request, were it next, may be sent to this backend now."""
        if not self.has_room(backend, now):
            return False
        bucket = self._buckets[waiting.bucket]
        prefills = backend.line.prefills_of[bucket.name]
        if backend.others is not None:
            prefills += backend.others.prefills.get(bucket.name, 0)
        request = waiting.request
        passing = backend.line.chunked  # then has_room told of the shortest
        full = prefills >= bucket.prefills_per_backend
        if passing or full:
            uncached = request.prompt_tokens - backend.matched_tokens(request)
            if self.behind(backend, uncached, now):
                return False
            if full and (uncached > STEP_TOKENS or uncached == request.prompt_tokens):
                return False
        if backend.keeps(waiting):
            return False
        if not backend.kv_fits(waiting, now):
            return False
        long_s = self.partition.long_s(waiting.bucket, now)
        if long_s == inf:
            return True
        prefill_s = backend.prefill_s(request, backend.matched_tokens(request))
        next_s = backend.next_s(request, prefill_s)
        return self.partition.clear_at(backend, waiting, next_s, long_s, now) <= now

    def piece(
        self, backend: Backend, waiting: Waiting, matched_tokens: int, now: float
    ) -> Request | None:
        """What to send of a long prompt, while others come in that it would hold up."""
        if backend.piece_s == inf or self.partition.long_s(waiting.bucket, now) == inf:
            return None
        before = waiting.piece_blocks if waiting.piece_on == backend.name else 0
        return beginning(waiting.request, matched_tokens, before, backend.cost, backend.piece_s)

    def next_moment(self, heads: Iterable[Waiting], now: float) -> float:
        """When a head may be able to start without an event; what is past has had its effect."""
        return min(self._candidates.room_after(now), self.partition.next_moment(heads, now))

    def _option(
        self,
        backend: Backend,
        waiting: Waiting,
        long_s: float,
        load: float,
        mean_load: float,
        now: float,
    ) -> Option:
        request, bucket = waiting.request, waiting.bucket
        prompt_tokens = request.prompt_tokens
        matched, leader = backend.expected_tokens(waiting)
        cold_s = prefill_s = backend.cost.predict_s(prompt_tokens, prompt_tokens)
        if matched:
            prefill_s = backend.cost.predict_s(prompt_tokens - matched, prompt_tokens)
        wait_s = backend.ahead_s(prompt_tokens - matched, now)
        ahead_s, ahead, mates, in_order = 0.0, backend.queued, 1, False
        if ahead or backend.begun:
            deadline = min(waiting.deadline, now + self._buckets[bucket].max_wait_s)
            worth_s = cold_s if backend.awaits(request) else prefill_s
            due = due_at(waiting.arrived_at, deadline, worth_s)
            if leader is not None:  # it is a hit when that is computed, and not before
                due = max(due, leader.due)
            overtaken = meanwhile.overtaken(self._buckets, backend, bucket, now)
            if self._ahead.on:
                ahead_s, ahead = self._ahead.of(backend, waiting, deadline, due)
                overtaken = min(MOST, overtaken + self._ahead.overtaken(waiting, now))
                mates = 1 + ahead
            else:
                ahead = 0
                for name, queue in backend.queues.items():
                    if name == bucket:
                        ahead_s += queue.ahead_s(due)
                        ahead += queue.ahead(due)
                    elif queue.count and not meanwhile.passes(self._buckets, backend, bucket, name):
                        urgent_s, urgent = queue.urgent(deadline)
                        ahead_s += urgent_s
                        ahead += urgent
                owed_s = meanwhile.owed_s(self._buckets, backend, bucket, ahead_s, deadline, now)
                ahead_s += owed_s
                in_order = overtaken == owed_s == 0.0
                mates = 1 + backend.queues[bucket].count
            if backend.begun:
                rest_s, rests = backend.begun.ahead_of(waiting, deadline, due)
                ahead_s, ahead = ahead_s + rest_s, ahead + rests
            if waiting.backend == backend.name:
                ahead_s, ahead = max(0.0, ahead_s - waiting.work_s), ahead - 1
            if ahead > 0:
                wait_s += ahead_s / (1.0 - overtaken)
        if backend.others is not None and backend.others.queued_s:
            wait_s += self._elsewhere_s(backend, waiting, ahead_s, now)
        wait_s += backend.slots_wait_s(bucket, ahead)
        wait_s = max(wait_s, backend.kv_wait_s(waiting, mates, now))
        if backend.next_s(request, prefill_s) > long_s and not backend.line.chunked:
            wait_s = max(
                wait_s,
                self.partition.clear_at(backend, waiting, prefill_s, long_s, now) - now,
                self.partition.crowd_s(waiting, prefill_s, long_s, now),
            )
        margin_s = backend.margin_s(wait_s, ahead_s, ahead if in_order else 1)
        if ahead > 0 and backend.line.chunked:
            uncached = prompt_tokens - matched
            beside_s = meanwhile.beside_s(self._buckets, backend, bucket, uncached, ahead_s, now)
            margin_s = max(margin_s, beside_s)
        elif ahead > 0 and not self._ahead.on:
            margin_s += meanwhile.lump_s(self._buckets, backend, bucket, wait_s, now)
        proven = backend.cost.proven_tokens >= PROVEN_SHARE * prompt_tokens
        return Option(
            backend.name, wait_s, margin_s, prefill_s, cold_s, matched, load, mean_load, proven
        )

    def _elsewhere_s(self, backend: Backend, waiting: Waiting, ahead_s: float, now: float) -> float:
        """The wait for what is queued for the backend with other proxies and goes first.

        Args:
            ahead_s: of what we have queued there ourselves, what goes first.
        """
        assert backend.others is not None
        queued_s, bucket = backend.others.queued_s, waiting.bucket
        overtaken = meanwhile.overtaken(self._buckets, backend, bucket, now)
        if self._ahead.on:
            # Whose it is we are not told: connections are dealt out by chance, so that their
            # queues are made up as ours is.
            overtaken = min(MOST, overtaken + self._ahead.overtaken(waiting, now))
            share = min(1.0, ahead_s / backend.queued_s) if backend.queued_s > 0.0 else 1.0
            return share * fsum(queued_s.values()) / (1.0 - overtaken)
        patience_s = self._buckets[bucket].max_wait_s
        theirs_s = fsum(
            seconds
            for name, seconds in queued_s.items()
            if name not in self._buckets or self._buckets[name].max_wait_s <= patience_s
        )
        return theirs_s / (1.0 - overtaken)
