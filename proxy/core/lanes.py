"""The waiting room of one bucket on one backend: a queue for each class and tenant in it.

With one class and one tenant it is that one queue, earliest deadline first.
"""

from math import fsum

from forebay.proxy.core.fairness import Fairness
from forebay.proxy.core.queueing import DeadlineQueue, Waiting

Lane = tuple[int, str]  # rank of the class, tenant


class Lanes:
    """Lanes exist while somebody waits in them."""

    def __init__(self, fairness: Fairness) -> None:
        self._fairness = fairness
        self.lanes: dict[Lane, DeadlineQueue] = {}
        self._only: DeadlineQueue | None = None  # the lane, while there is one only
        self.count = 0  # who wait

    def __len__(self) -> int:
        return self.count

    @property
    def work_s(self) -> float:
        return fsum(lane.work_s for lane in self.lanes.values())

    def push(self, waiting: Waiting) -> None:
        key = waiting.lane
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = DeadlineQueue()
            self._only = lane if len(self.lanes) == 1 else None
        lane.push(waiting)
        self.count += 1

    def remove(self, waiting: Waiting) -> None:
        key = waiting.lane
        lane = self.lanes[key]
        lane.remove(waiting.request.id)
        self.count -= 1
        if not len(lane):
            del self.lanes[key]
            self._only = None
            if len(self.lanes) == 1:
                self._only = next(iter(self.lanes.values()))

    def heads(self) -> list[Waiting]:
        """Who is next of each class: the tenant with the smallest counter, earliest first."""
        if not self.count:
            return []
        if self._only is not None:
            only = self._only.head()
            return [only] if only else []
        best: dict[int, tuple[float, float, int]] = {}
        heads: dict[int, Waiting] = {}
        for (rank, tenant), lane in self.lanes.items():
            if head := lane.head():
                key = (self._fairness.counter(tenant), head.deadline, head.order)
                if rank not in best or key < best[rank]:
                    best[rank], heads[rank] = key, head
        return [heads[rank] for rank in sorted(heads)]

    def earliest(self) -> Waiting | None:
        """Whose deadline is over first."""
        if self._only is not None:
            return self._only.head()
        first: Waiting | None = None
        for lane in self.lanes.values():
            head = lane.head()
            if head and (first is None or head.key < first.key):
                first = head
        return first

    def ahead_s(self, deadline: float) -> float:
        """Seconds of prefill with a deadline no later than this one."""
        if self._only is not None:
            return self._only.ahead_s(deadline)
        if not self.count:
            return 0.0
        return fsum(lane.ahead_s(deadline) for lane in self.lanes.values())

    def ahead(self, deadline: float) -> int:
        """How many have a deadline no later than this one."""
        if self._only is not None:
            return self._only.ahead(deadline)
        return sum(lane.ahead(deadline) for lane in self.lanes.values())

    def of_tenant(self, tenant: str) -> tuple[int, float]:
        """How many of the tenant wait, and their seconds of prefill."""
        count, seconds = 0, 0.0
        for (_, name), lane in self.lanes.items():
            if name == tenant:
                count += len(lane)
                seconds += lane.work_s
        return count, seconds

    def everyone(self) -> list[Waiting]:
        """All who wait, by deadline."""
        all_ = [waiting for lane in self.lanes.values() for waiting in lane.everyone()]
        return sorted(all_, key=lambda w: w.key)
