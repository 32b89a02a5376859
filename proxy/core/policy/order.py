"""Which waiting request of one backend is next?

 1. A class that is owed its guaranteed share, then the most urgent class: without tenants the class
    that a request names, else only a class that its tenant was granted.
 2. In it, a bucket that is owed its share, once a request in it has waited for half of its time: a
    burst of chats is over by then, and documents that wait a little for it lose nothing.
 3. Then the bucket whose head has the earliest deadline.
 4. In a bucket, the tenant with the smallest counter (`state/tenants.py`) or, while slots or KV
    cache are short, the tenant that holds least of them (`state/kv_budget.py`).
 5. Of that tenant, the class that is owed its share, then the most urgent class, and in it the
    request that is due first: shortest first with aging.

Engines that order by priority (`BackendSpec.priority`) get `engine_priority`, by which classes and
tenants go before requests that were sent earlier.

Guaranteed shares never take the last clear backend (`long_prefills.py`): that rule decides where a
long prefill may start, this rule decides which request is next there.
"""

from collections.abc import Sequence
from typing import Final

from forebay.proxy.core.model import CLASSES, STANDARD
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.queue import QueuedRequest

STRETCH: Final = 5.0
"""A request is due this many times its prefill after its arrival, and at its deadline at the
latest. In a bucket the request that is due first goes first. So cache hits pass documents that came
before them, and no request that arrives much later passes a document.
Doubled: 0.3 to 0.4 points more in time, but more rejections after a wait, and documents' p99 in
overload 1 to 18 % longer."""


def due_at(arrived_at: float, deadline: float, prefill_s: float) -> float:
    """Return the time at which a request is due. Its queue is ordered by this time."""
    return min(deadline, arrived_at + STRETCH * prefill_s)


def engine_priority(backend: Backend, waiting: QueuedRequest, behind_s: float) -> int:
    """Return the priority of a request in an engine that begins the lowest first.

    1,000 for each class below standard, less the milliseconds of prefill by which its tenant is
    behind, 500 at most. Most requests of a class so have the same number, and the engine keeps the
    order in which they were sent. A number means the same at all times, so several proxies need no
    common clock. A class that is owed its guaranteed share is as urgent as the first class: else
    its request could wait in the engine forever.

    Args:
        behind_s: `Fairness.behind_s` of its tenant.
    """
    rank, turns = waiting.rank, backend.turns
    if turns.ranked and turns.classes.due(CLASSES[waiting.own_rank], waiting.work_s):
        rank = 0
    return round(1e3 * (rank - STANDARD - behind_s))


def first(backend: Backend, ready: Sequence[QueuedRequest], now: float) -> QueuedRequest:
    """Return the head that starts next, of several heads of queues that may all start."""
    if len(ready) == 1:
        return ready[0]
    turns = backend.turns
    next_ = min(ready, key=lambda head: _place(backend, head, head.rank, now, turns.ranked))
    if not turns.classed:
        return next_
    own = [h for h in ready if h.rank == next_.rank and h.request.tenant == next_.request.tenant]
    return min(own, key=lambda head: _place(backend, head, head.own_rank, now, True))


def _place(
    backend: Backend, head: QueuedRequest, rank: int, now: float, by_class: bool
) -> tuple[bool, int, bool, float, int]:
    turns = backend.turns
    class_due = by_class and turns.classes.due(CLASSES[head.own_rank], head.work_s)
    owed = turns.buckets.due(head.bucket, head.work_s)
    bucket_due = owed and backend.queues[head.bucket].late_at() <= now
    return not class_due, rank, not bucket_due, head.deadline, head.order
