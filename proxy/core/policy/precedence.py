"""What goes before a request on one backend where several classes or tenants wait.

With one class and one tenant that is whatever is due earlier. Otherwise the prediction
follows the order of `turns.py` and `fairness.py`: a light tenant does not wait for a heavy one's
queue, and a heavy one's own queue moves only as fast as the others leave it room.
"""

from collections.abc import Iterable, Mapping
from math import exp

from forebay.proxy.core.model import CLASSES, Bucket
from forebay.proxy.core.policy.order import CLASS_SHARE
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.queue import Waiting
from forebay.proxy.core.state.tenants import LARGEST_SHARE, Fairness

RATE_S = 10.0  # time constant of what a class took lately
MOST = 1.0 - CLASS_SHARE  # of the engines that more urgent classes can take


class Ahead:
    """Knows the backends; `on` once a request has named a tenant or another class."""

    def __init__(self, backends: Mapping[str, Backend], fairness: Fairness) -> None:
        self._backends = backends
        self.fairness = fairness
        self.on = False
        self._classed = False
        self._rate = [0.0] * len(CLASSES)  # prefill seconds a second, as of `_rate_at`
        self._rate_at = [0.0] * len(CLASSES)

    def tell_classes_apart(self) -> None:
        """A request of another class than standard has come."""
        self.on = self._classed = True

    def sent(self, waiting: Waiting, prefill_s: float, now: float) -> None:
        if self.fairness.on:
            self.fairness.charge(waiting.request.tenant, prefill_s, now)
        if self._classed:
            rank = waiting.rank
            self._rate[rank] = self._rate_now(rank, now) + prefill_s / RATE_S
            self._rate_at[rank] = now

    def of(
        self, backend: Backend, waiting: Waiting, deadline: float, due: float
    ) -> tuple[float, int]:
        """Seconds of prefill queued here that go before the request, and how many requests."""
        rank, tenant = waiting.lane
        engines = self._engines()
        seconds, count = 0.0, 0.0
        for name, queue in backend.queues.items():
            for (other_rank, other), lane in queue.lanes.items():
                if other_rank > rank:
                    continue
                if other_rank < rank:
                    ahead_s = lane.work_s
                elif name != waiting.bucket:
                    ahead_s, _ = lane.urgent(deadline)
                elif other == tenant:
                    ahead_s = lane.ahead_s(due)
                else:
                    ahead_s = self.fairness.ahead_s(tenant, other, lane.work_s, engines)
                seconds += ahead_s
                if lane.work_s > 0:
                    count += len(lane) * min(1.0, ahead_s / lane.work_s)
        return seconds, max(1, round(count)) if seconds > 0.0 else 0  # part of one is one

    def overtaken(self, waiting: Waiting, now: float) -> float:
        """Share of the engines that go to those who come later and yet go before the request."""
        engines = self._engines()
        share = sum(self._rate_now(rank, now) for rank in range(waiting.rank)) / engines
        if self.fairness.on:
            share += self.fairness.others_share(waiting.request.tenant, engines, now)
        return min(MOST, share)

    def too_much(self, backend: Backend, waiting: Waiting, bucket: Bucket, now: float) -> bool:
        """Whether the tenant would hold more of the bucket's queues than leaves others room."""
        if not self.fairness.on or not self.fairness.shared(now):
            return False
        tenant = waiting.request.tenant
        here, here_s = backend.queues[bucket.name].of_tenant(tenant)
        if not here:
            return False
        if here_s > LARGEST_SHARE * bucket.max_wait_s:
            return True
        queues = [other.queues[bucket.name] for other in self._backends.values()]
        held = sum(queue.of_tenant(tenant)[0] for queue in queues)
        return held >= LARGEST_SHARE * bucket.max_queue

    def gives_way(self, waiting: Waiting, bucket: Bucket) -> Waiting | None:
        """Who must leave the bucket's full queue for a newcomer; None when it is the newcomer.

        The last of the least urgent class, if that is less urgent than the newcomer's; else the
        last of a tenant that holds more than half.
        """
        mates = [w for b in self._backends.values() for w in b.queues[bucket.name].everyone()]
        if not mates:
            return None
        last_rank = max(mate.rank for mate in mates)
        if last_rank > waiting.rank:
            return _last(mate for mate in mates if mate.rank == last_rank)
        held: dict[str, int] = {}
        for mate in mates:
            held[mate.request.tenant] = held.get(mate.request.tenant, 0) + 1
        tenant = max(held, key=lambda name: held[name])
        if tenant == waiting.request.tenant or held[tenant] <= LARGEST_SHARE * bucket.max_queue:
            return None
        return _last(
            mate for mate in mates if mate.request.tenant == tenant and mate.rank >= waiting.rank
        )

    def _rate_now(self, rank: int, now: float) -> float:
        return self._rate[rank] * exp((self._rate_at[rank] - now) / RATE_S)

    def _engines(self) -> int:
        return max(1, sum(backend.up for backend in self._backends.values()))


def _last(mates: Iterable[Waiting]) -> Waiting | None:
    return max(mates, key=lambda mate: mate.key, default=None)
