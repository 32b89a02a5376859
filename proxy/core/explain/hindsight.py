"""Judge rejections afterwards: would the request have met its target, had it been admitted?

This is an estimate from the later work of the backends. A request that was rejected for lack of
time or room is followed as if it alone waited in the queue where it would have waited (a ghost):

- It would have been sent at the first moment at which a backend that was priced for it would have
  let it start with no request before it there, or in place of the first request behind it that was
  sent. So the time that the queue before it took is observed, not predicted.
- It then meets its target if the wait so far, the rest of that backend's prefills and its own
  predicted prefill are within the bucket's target and the client's limit. If not, the rejection was
  `right`.
- Its prefill delays the requests behind it until its backend has been without work for as long. If
  that would have caused a rejection or made a request late that was in time, the ghost would only
  have taken that request's place: `costs_another`. Requests of more urgent buckets that go before
  the ghost while it waits do not count.
- If it harmed no request, the rejection was `false`.

In a long overload, when the engines work without a break, a rejection is `costs_another`, not
`false`: there was no room for one more. A ghost that has harmed no request within RETRY_MOST_S has
harmed none: by then its client would be back. Not modelled: the KV cache that the ghost would have
taken, and where the requests behind it would have gone instead. LOOK_AT_MOST ghosts of each bucket
are followed at a time, which bounds the cost. The others are `unjudged`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from forebay.proxy.core.explain.receipt import Receipt, Receipts
from forebay.proxy.core.model import LOOK_AT_MOST, Bucket, Request
from forebay.proxy.core.policy.admission import RETRY_MOST_S, in_time_wait_s, longest_wait_s
from forebay.proxy.core.policy.order import due_at
from forebay.proxy.core.policy.routing import Option
from forebay.proxy.core.policy.start import StartGate
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.queue import QueuedRequest


@dataclass(slots=True, eq=False)
class Ghost:
    """A rejected request, followed as if it had been admitted.

    Attributes:
        backend: where it would wait or would have been sent.
        sent: it would have been sent, at `sent_at`.
        left_s: prefill seconds not yet made up for by idle time of the backend.
        displaces: it would have taken another request's place.
    """

    waiting: QueuedRequest
    receipt: Receipt
    bucket: Bucket
    backend: str
    left_s: float
    sent: bool = False
    sent_at: float = 0.0
    displaces: bool = False


class Hindsight:
    """Follows rejected requests. `watches` is True while there are any."""

    def __init__(
        self,
        receipts: Receipts,
        gate: StartGate,
        backends: Mapping[str, Backend],
        buckets: Mapping[str, Bucket],
    ) -> None:
        self._receipts = receipts
        self._gate, self._backends, self._buckets = gate, backends, buckets
        self._ghosts: list[Ghost] = []
        self._until = 0.0  # the time of the last look
        self.watches = False

    def rejected(
        self,
        waiting: QueuedRequest,
        receipt: Receipt,
        bucket: Bucket,
        option: Option,
        now: float,
    ) -> None:
        """Follow a new request that was rejected for lack of time or room, priced as `option`."""
        ghost = Ghost(waiting, receipt, bucket, option.backend, option.prefill_s)
        if sum(g.receipt.bucket == receipt.bucket for g in self._ghosts) >= LOOK_AT_MOST:
            self._judge(ghost, "unjudged")
            return
        receipt.hindsight = "pending"
        bearable_s = in_time_wait_s(waiting.request, bucket, option.prefill_s)
        waiting.deadline = now + max(0.0, bearable_s)
        waiting.due = due_at(waiting.arrived_at, waiting.deadline, option.prefill_s)
        self._ghosts.append(ghost)
        self._until = now
        self.watches = True

    def admitted(
        self, request: Request, bucket: Bucket, options: Sequence[Option], queued: int
    ) -> None:
        """Note another admission at these prices, with `queued` requests of its bucket waiting."""
        for ghost in self._ghosts:
            receipt = ghost.receipt
            hastier = bucket.patience_s < ghost.bucket.patience_s
            if ghost.displaces or (hastier and not ghost.sent):
                continue
            fills = not ghost.sent and receipt.bucket == bucket.name
            if fills and queued == bucket.max_queue - 1:
                ghost.displaces = True
                continue
            with_it = without = False
            for option in options:
                slack_s = _slack_s(request, bucket, option)
                without = without or slack_s >= 0.0
                if option.backend == ghost.backend:
                    slack_s -= ghost.left_s
                with_it = with_it or slack_s >= 0.0
            ghost.displaces = without and not with_it

    def time_passes(self, now: float) -> None:
        """Let time pass until `now`. Nothing has happened since the last event."""
        gate, backends, before = self._gate, self._backends, self._until
        self._until = now = max(now, before)
        rooms = [b for b in backends.values() if gate.has_room(b, before)]
        later = [b for b in backends.values() if b not in rooms and gate.has_room(b, now)]
        for ghost in list(self._ghosts):
            backend = backends.get(ghost.backend)
            # The configuration may have changed: the backend or the bucket may be gone.
            gone = backend is None or ghost.waiting.bucket not in backend.queues
            if backend is None or gone or not backend.up:
                self._judge(ghost, "unjudged")
                continue
            if not ghost.sent:
                self._look(ghost, rooms, later, before, now)
            if ghost.sent:
                self._works_off(ghost, backends[ghost.backend], max(before, ghost.sent_at), now)
        self.watches = bool(self._ghosts)

    def starts(self, waiting: QueuedRequest, backend: Backend, now: float) -> None:
        """Note a request that is about to be sent: in a ghost's place, or delayed by a ghost."""
        slack_s = inf
        for ghost in list(self._ghosts):
            ours = ghost.waiting
            if not ghost.sent:
                first = ours.bucket == waiting.bucket and ours.flow == waiting.flow
                first = first and ours.key < waiting.key and _priced(ghost, backend)
                if first and self._gate.may_start(backend, ours, now):
                    self._send(ghost, backend, now)
            if ghost.sent and ghost.backend == backend.name and not ghost.displaces:
                if slack_s == inf:
                    slack_s = _slack_at_s(waiting, backend, self._buckets[waiting.bucket], now)
                ghost.displaces = 0.0 <= slack_s < ghost.left_s

    def _look(
        self,
        ghost: Ghost,
        rooms: list[Backend],
        later: list[Backend],
        before: float,
        now: float,
    ) -> None:
        """Send a ghost that would have been sent: to a backend with room before, or since."""
        gate, waiting, by_time = self._gate, ghost.waiting, None
        for backend in rooms:
            if _first(ghost, backend):
                if gate.may_start(backend, waiting, before):
                    self._send(ghost, backend, before)
                    return
                if by_time is None and gate.may_start(backend, waiting, now):
                    by_time = backend
        for backend in later:
            first = by_time is None and _first(ghost, backend)
            if first and gate.may_start(backend, waiting, now):
                room_at = backend.prefill_queue.below_at(gate.dispatch_ahead_s)
                room_at = max(room_at, backend.api_server.room_at)
                self._send(ghost, backend, max(before, min(now, room_at)))
                return
        if waiting.deadline < now:
            self._judge(ghost, "right")
        elif by_time is not None:
            self._send(ghost, by_time, now)

    def _send(self, ghost: Ghost, backend: Backend, at: float) -> None:
        """Note that a ghost would have been sent there and then."""
        waiting = ghost.waiting
        if _slack_at_s(waiting, backend, ghost.bucket, at) < 0.0:
            self._judge(ghost, "right")
        else:
            matched = backend.matched_tokens(waiting.request)
            ghost.sent, ghost.sent_at = True, at
            ghost.backend, ghost.left_s = backend.name, backend.prefill_s(waiting.request, matched)

    def _works_off(self, ghost: Ghost, backend: Backend, before: float, now: float) -> None:
        """Let idle time of the backend make up for the ghost's prefill."""
        if ghost.displaces:
            self._judge(ghost, "costs_another")
            return
        if backend.prefill_queue.backlog_s(before) <= 0.0:
            ghost.left_s -= now - before
        if ghost.left_s <= 0.0 or now - ghost.receipt.arrived_at > RETRY_MOST_S:
            self._judge(ghost, "false")

    def _judge(self, ghost: Ghost, verdict: str) -> None:
        if ghost in self._ghosts:
            self._ghosts.remove(ghost)
        ghost.receipt.hindsight = verdict
        self._receipts.tally(ghost.receipt.bucket).refusals[verdict] += 1


def _slack_s(request: Request, bucket: Bucket, option: Option) -> float:
    """Return the seconds by which the wait could grow and be `admission.attainable`."""
    return longest_wait_s(request, bucket, option) - option.wait_s - option.margin_s


def _slack_at_s(waiting: QueuedRequest, backend: Backend, bucket: Bucket, at: float) -> float:
    """Return the seconds by which a request sent then could begin later. Below 0 it is late."""
    request = waiting.request
    matched = backend.matched_tokens(request)
    ahead_s = backend.prefill_queue.ahead_s(request.prompt_tokens - matched, at)
    prefill_s = backend.prefill_s(request, matched)
    return in_time_wait_s(request, bucket, prefill_s) - (at - waiting.arrived_at + ahead_s)


def _priced(ghost: Ghost, backend: Backend) -> bool:
    """True if this backend could have served the request."""
    return any(option.backend == backend.name for option in ghost.receipt.options)


def _first(ghost: Ghost, backend: Backend) -> bool:
    """True if this backend could have served it before every other request of its bucket."""
    if not _priced(ghost, backend):
        return False
    if not backend.queued:
        return True
    return backend.queues[ghost.waiting.bucket].seconds_before(ghost.waiting.due) <= 0.0
