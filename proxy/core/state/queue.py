"""The bounded waiting room of one bucket on one backend, and who leaves it first.

Shortest first, with aging: a request is due five times its prefill after it came, and at its
deadline at the latest; who is due first leaves first. So hits do not wait for a document that came
before them, and nothing that comes much later passes that. (Between buckets the earliest deadline
goes first: `turns.py`.)

Everything the shaper asks on every event is O(log n) or O(1); `ahead_s` looks at each waiting
request only when a newcomer is not due last, and the queue is bounded by `max_queue`.
"""

from heapq import heappop, heappush
from math import fsum, inf
from typing import Final

from forebay.proxy.core.model import STANDARD, Request

NONE_EXCLUDED: frozenset[str] = frozenset()
STRETCH: Final = 5.0
LONG_WAIT: Final = 0.5  # of what somebody can wait


def due_at(arrived_at: float, deadline: float, prefill_s: float) -> float:
    """When a request is due: this orders a queue."""
    return min(deadline, arrived_at + STRETCH * prefill_s)


class Waiting:
    """A request in the queue of `backend`. `order` breaks ties: the shaper counts arrivals.

    Attributes:
        rank: that of its class; `lane` is whom it queues with.
        output_tokens: how many it is reckoned to generate.
        paid: its tokens count against its tenant's quota, and it was not sent.
        work_s: seconds of its prefill; `next_s`: of what is sent of it next; `rest_s`: of what
            comes after the piece that was sent.
        follows: it waits for one that its backend computes, or will for `leader`, who waits too.
        followed: how many have it as their `leader`.
        began_at: when the first piece of its prompt was sent; inf before.
        piece_blocks: how many blocks of its prompt were sent last, as a piece, to `piece_on`.
    """

    __slots__ = (
        "arrived_at",
        "backend",
        "began_at",
        "bucket",
        "deadline",
        "due",
        "excluded",
        "followed",
        "follows",
        "lane",
        "leader",
        "looks_again_at",
        "next_s",
        "order",
        "output_tokens",
        "paid",
        "piece_blocks",
        "piece_on",
        "rank",
        "request",
        "rest_s",
        "work_s",
    )

    def __init__(
        self,
        request: Request,
        bucket: str,
        arrived_at: float,
        deadline: float,
        order: int,
        work_s: float = 0.0,
        rank: int = STANDARD,
    ) -> None:
        self.request = request
        self.rank = rank
        self.lane = (rank, request.tenant)
        self.output_tokens = request.output_tokens
        self.paid = False
        self.began_at = inf
        self.piece_blocks = 0
        self.piece_on = ""
        self.bucket = bucket
        self.arrived_at = arrived_at
        self.deadline = deadline
        self.due = deadline
        self.order = order
        self.work_s = self.next_s = work_s
        self.rest_s = 0.0
        self.follows = False
        self.leader: Waiting | None = None
        self.followed = 0
        self.backend = ""
        self.excluded: frozenset[str] = NONE_EXCLUDED
        self.looks_again_at = -inf  # at other backends than the one it waits for

    @property
    def key(self) -> tuple[float, int]:
        return self.due, self.order


def late_at(waiting: Waiting) -> float:
    """When it will have waited long."""
    return waiting.arrived_at + LONG_WAIT * (waiting.deadline - waiting.arrived_at)


class DueQueue:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._ends: list[tuple[float, int, str]] = []  # by deadline
        self._waiting: dict[str, Waiting] = {}
        self._latest = self._last_end = -inf
        self.work_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, waiting: Waiting) -> None:
        self._waiting[waiting.request.id] = waiting
        heappush(self._heap, (*waiting.key, waiting.request.id))
        heappush(self._ends, (waiting.deadline, waiting.order, waiting.request.id))
        self._latest = max(self._latest, waiting.due)
        self._last_end = max(self._last_end, waiting.deadline)
        self.work_s += waiting.work_s

    def head(self) -> Waiting | None:
        """Who is next; None when nobody waits."""
        while self._heap:
            due, order, request_id = self._heap[0]
            waiting = self._waiting.get(request_id)
            if waiting is not None and waiting.key == (due, order):
                return waiting
            heappop(self._heap)  # removed earlier: drop its ticket now
        return None

    def earliest(self) -> Waiting | None:
        """Whose deadline is over first; None when nobody waits."""
        while self._ends:
            deadline, order, request_id = self._ends[0]
            waiting = self._waiting.get(request_id)
            if waiting is not None and (waiting.deadline, waiting.order) == (deadline, order):
                return waiting
            heappop(self._ends)
        return None

    def remove(self, request_id: str) -> Waiting | None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self.work_s -= waiting.work_s
            if not self._waiting:
                self._heap.clear()
                self._ends.clear()
                self._latest = self._last_end = -inf
                self.work_s = 0.0
        return waiting

    def ahead_s(self, due: float) -> float:
        """Seconds of prefill that leave before a newcomer who is due then."""
        if due >= self._latest:
            return self.work_s
        return fsum(w.work_s for w in self._waiting.values() if w.due <= due)

    def urgent(self, deadline: float) -> tuple[float, int]:
        """Seconds of prefill with a deadline no later than this one, and how many requests."""
        if deadline >= self._last_end:
            return self.work_s, len(self._waiting)
        works = [w.work_s for w in self._waiting.values() if w.deadline <= deadline]
        return fsum(works), len(works)

    def ahead(self, due: float) -> int:
        """How many leave before a newcomer who is due then."""
        if due >= self._latest:
            return len(self._waiting)
        return sum(w.due <= due for w in self._waiting.values())

    def everyone(self) -> list[Waiting]:
        """All who wait, in the order in which they leave."""
        return sorted(self._waiting.values(), key=lambda w: w.key)
