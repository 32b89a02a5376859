"""Judge refusals afterwards: would the request have made its target, had it been taken?

An estimate from what the backends then did. A request that was refused for want of time or room
is followed as if it stood in the line where it would have stood, alone:

- It would have been sent at the first moment at which a backend it was priced for would have let
  it start and nobody waited before it there; or in place of the first one behind it in line that
  was sent. What the line ahead really took is thus observed, not predicted.
- It then meets its target if the wait so far and what that backend has left to prefill are within
  `max_wait`, and both and its own prefill, which is predicted, within the client's limit. Else
  refusing it was `right`.
- Its prefill delays those behind it until its backend has been without work for as long. If that
  would have had somebody refused who was taken, or made somebody late who was in time, then the
  request would only have taken that one's place: `displacing`. While it stands in line those of
  hastier buckets go before it, and do not count.
- If nobody was, the refusal was `false`.

So in a long overload, when the engines work without a break, a refusal is displacing, not false:
nothing was left for one more. Not modelled: the KV cache that it would have taken, and where those
behind it would have gone instead. Of each bucket `MOST` are followed at a time and the rest is
`unjudged`, so that the cost is bounded.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

from forebay.proxy.core.explain.receipt import Receipt, Receipts
from forebay.proxy.core.model import Bucket, Request
from forebay.proxy.core.policy.forecast import Outlook
from forebay.proxy.core.policy.routing import Option
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.queue import Waiting, due_at

MOST: Final = 8
HORIZON_S: Final = 60.0  # who has cost nobody anything for so long has cost nothing


class Ghost:
    """A refused request, followed as if it had been taken.

    Attributes:
        backend: whose line it stands in, or where it would have been sent.
        sent: it would have been, at `sent_at`.
        left_s: of its prefill, not yet made up for by a backend without work.
        displaces: somebody else would have paid for it.
    """

    __slots__ = ("backend", "displaces", "left_s", "receipt", "sent", "sent_at", "waiting")

    def __init__(self, waiting: Waiting, receipt: Receipt, option: Option) -> None:
        self.waiting = waiting
        self.receipt = receipt
        self.backend = option.backend
        self.left_s = option.prefill_s
        self.sent = False
        self.sent_at = 0.0
        self.displaces = False


class Hindsight:
    """`watches` while it follows anybody."""

    def __init__(self, receipts: Receipts) -> None:
        self._receipts = receipts
        self._ghosts: list[Ghost] = []
        self._until = 0.0  # up to when it has looked
        self.watches = False

    def refused(self, waiting: Waiting, receipt: Receipt, option: Option, now: float) -> None:
        """A newcomer was refused for want of time or room; it was priced as `option`."""
        ghost = Ghost(waiting, receipt, option)
        if sum(g.receipt.bucket == receipt.bucket for g in self._ghosts) >= MOST:
            self._judge(ghost, "unjudged")
            return
        receipt.hindsight = "pending"
        bearable_s = min(receipt.max_wait_s, receipt.timeout_s - option.prefill_s)
        waiting.deadline = now + max(0.0, bearable_s)
        waiting.due = due_at(waiting.arrived_at, waiting.deadline, option.prefill_s)
        self._ghosts.append(ghost)
        self._until = now
        self.watches = True

    def took(
        self, request: Request, bucket: Bucket, options: Sequence[Option], queued: int
    ) -> None:
        """Another newcomer was taken, at these prices and with so many of its bucket waiting."""
        for ghost in self._ghosts:
            receipt = ghost.receipt
            hastier = bucket.max_wait_s < receipt.max_wait_s
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

    def passes(
        self, outlook: Outlook, backends: Mapping[str, Backend], ahead_s: float, now: float
    ) -> None:
        """Time passes until `now`, and nothing has happened since the last event.

        Args:
            ahead_s: a backend is sent more while its backlog is below this.
        """
        before = self._until
        self._until = now = max(now, before)
        rooms = [b for b in backends.values() if outlook.has_room(b, before)]
        later = [b for b in backends.values() if b not in rooms and outlook.has_room(b, now)]
        for ghost in list(self._ghosts):
            backend = backends.get(ghost.backend)
            # The configuration may have been changed since: no such backend, no such bucket.
            gone = backend is None or ghost.waiting.bucket not in backend.queues
            if backend is None or gone or not backend.up:
                self._judge(ghost, "unjudged")
                continue
            if not ghost.sent:
                self._look(ghost, outlook, rooms, later, ahead_s, before, now)
            if ghost.sent:
                self._works_off(ghost, backends[ghost.backend], max(before, ghost.sent_at), now)
        self.watches = bool(self._ghosts)

    def sends(
        self,
        waiting: Waiting,
        backend: Backend,
        outlook: Outlook,
        buckets: Mapping[str, Bucket],
        now: float,
    ) -> None:
        """One who was taken is about to be sent: in the place of one of ours, or late by it."""
        slack_s = inf
        for ghost in list(self._ghosts):
            ours = ghost.waiting
            if not ghost.sent:
                first = ours.bucket == waiting.bucket and ours.lane == waiting.lane
                first = first and ours.key < waiting.key and _priced(ghost, backend)
                if first and outlook.may_start(backend, ours, now):
                    self._send(ghost, backend, now)
            if ghost.sent and ghost.backend == backend.name and not ghost.displaces:
                if slack_s == inf:
                    slack_s = _slack_now_s(waiting, backend, buckets[waiting.bucket], now)
                ghost.displaces = 0.0 <= slack_s < ghost.left_s

    def _look(
        self,
        ghost: Ghost,
        outlook: Outlook,
        rooms: list[Backend],
        later: list[Backend],
        ahead_s: float,
        before: float,
        now: float,
    ) -> None:
        """Whether it would have been sent by now: to those with room before, or since `later`."""
        waiting, by_time = ghost.waiting, None
        for backend in rooms:
            if _first(ghost, backend):
                if outlook.may_start(backend, waiting, before):
                    self._send(ghost, backend, before)
                    return
                if by_time is None and outlook.may_start(backend, waiting, now):
                    by_time = backend
        for backend in later:
            first = by_time is None and _first(ghost, backend)
            if first and outlook.may_start(backend, waiting, now):
                room_at = backend.backlog_below_at(ahead_s)
                self._send(ghost, backend, max(before, min(now, room_at)))
                return
        if waiting.deadline < now:
            self._judge(ghost, "right")
        elif by_time is not None:
            self._send(ghost, by_time, now)

    def _send(self, ghost: Ghost, backend: Backend, at: float) -> None:
        """It would have been sent there and then."""
        request, receipt = ghost.waiting.request, ghost.receipt
        matched = backend.matched_tokens(request)
        wait_s = at - receipt.arrived_at + backend.ahead_s(request.prompt_tokens - matched, at)
        prefill_s = backend.prefill_s(request, matched)
        if wait_s > receipt.max_wait_s or wait_s + prefill_s > receipt.timeout_s:
            self._judge(ghost, "right")
        else:
            ghost.sent, ghost.sent_at = True, at
            ghost.backend, ghost.left_s = backend.name, prefill_s

    def _works_off(self, ghost: Ghost, backend: Backend, before: float, now: float) -> None:
        """A backend without work would have done what the request had added."""
        if ghost.displaces:
            self._judge(ghost, "displacing")
            return
        if backend.backlog_s(before) <= 0.0:
            ghost.left_s -= now - before
        if ghost.left_s <= 0.0 or now - ghost.receipt.arrived_at > HORIZON_S:
            self._judge(ghost, "false")

    def _judge(self, ghost: Ghost, verdict: str) -> None:
        if ghost in self._ghosts:
            self._ghosts.remove(ghost)
        ghost.receipt.hindsight = verdict
        self._receipts.tally(ghost.receipt.bucket).refusals[verdict] += 1


def _slack_s(request: Request, bucket: Bucket, option: Option) -> float:
    """How much longer the wait could be for the request to be taken (`admission.attainable`)."""
    wait_s = option.wait_s + option.margin_s
    return min(bucket.max_wait_s - wait_s, request.timeout_s - wait_s - option.prefill_s)


def _slack_now_s(waiting: Waiting, backend: Backend, bucket: Bucket, now: float) -> float:
    """How much later one who is being sent could begin, and be in time; below 0: it is late."""
    request = waiting.request
    matched = backend.matched_tokens(request)
    prefill_s = backend.prefill_s(request, matched)
    begins_s = now + backend.ahead_s(request.prompt_tokens - matched, now) - waiting.arrived_at
    return min(bucket.max_wait_s, request.timeout_s - prefill_s) - begins_s


def _priced(ghost: Ghost, backend: Backend) -> bool:
    """Whether it could have gone there."""
    return any(option.backend == backend.name for option in ghost.receipt.options)


def _first(ghost: Ghost, backend: Backend) -> bool:
    """Whether it could have gone there, and nobody of its bucket would have gone before it."""
    if not _priced(ghost, backend):
        return False
    if not backend.queued:
        return True
    return backend.queues[ghost.waiting.bucket].ahead_s(ghost.waiting.due) <= 0.0
