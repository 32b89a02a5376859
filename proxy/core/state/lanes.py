"""The waiting room of one bucket on one backend: a queue for each class and tenant in it.

With one class and one tenant it is that one queue.
"""

from math import fsum, inf

from forebay.proxy.core.state.queue import DueQueue, Waiting, late_at
from forebay.proxy.core.state.tenants import Fairness

Lane = tuple[int, str]  # rank of the class, tenant


class Lanes:
    """Lanes exist while somebody waits in them."""

    def __init__(self, fairness: Fairness) -> None:
        self._fairness = fairness
        self.lanes: dict[Lane, DueQueue] = {}
        self._only: DueQueue | None = None  # the lane, while there is one only
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
            lane = self.lanes[key] = DueQueue()
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
        """Who is next of each class: of the tenant with the smallest counter."""
        if not self.count:
            return []
        if self._only is not None:
            only = self._only.head()
            return [only] if only else []
        best: dict[int, tuple[float, float, int]] = {}
        heads: dict[int, Waiting] = {}
        for (rank, tenant), lane in self.lanes.items():
            if head := lane.head():
                key = (self._fairness.counter(tenant), head.due, head.order)
                if rank not in best or key < best[rank]:
                    best[rank], heads[rank] = key, head
        return [heads[rank] for rank in sorted(heads)]

    def earliest(self) -> Waiting | None:
        """Whose deadline is over first."""
        if self._only is not None:
            return self._only.earliest()
        first: Waiting | None = None
        for lane in self.lanes.values():
            one = lane.earliest()
            if one and (first is None or one.deadline < first.deadline):
                first = one
        return first

    def late_at(self) -> float:
        """When somebody in it has waited long; inf when nobody waits."""
        first = self.earliest()
        return inf if first is None else late_at(first)

    def ahead_s(self, due: float) -> float:
        """Seconds of prefill that are due no later than then."""
        if self._only is not None:
            return self._only.ahead_s(due)
        if not self.count:
            return 0.0
        return fsum(lane.ahead_s(due) for lane in self.lanes.values())

    def urgent(self, deadline: float) -> tuple[float, int]:
        """Seconds of prefill with a deadline no later than this one, and how many requests."""
        if self._only is not None:
            return self._only.urgent(deadline)
        found = [lane.urgent(deadline) for lane in self.lanes.values()]
        return fsum(seconds for seconds, _ in found), sum(count for _, count in found)

    def ahead(self, due: float) -> int:
        """How many are due no later than then."""
        if self._only is not None:
            return self._only.ahead(due)
        return sum(lane.ahead(due) for lane in self.lanes.values())

    def of_tenant(self, tenant: str) -> tuple[int, float]:
        """How many of the tenant wait, and their seconds of prefill."""
        count, seconds = 0, 0.0
        for (_, name), lane in self.lanes.items():
            if name == tenant:
                count += len(lane)
                seconds += lane.work_s
        return count, seconds

    def everyone(self) -> list[Waiting]:
        """All who wait, in the order in which they are due."""
        all_ = [waiting for lane in self.lanes.values() for waiting in lane.everyone()]
        return sorted(all_, key=lambda w: w.key)
