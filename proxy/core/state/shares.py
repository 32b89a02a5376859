"""Guaranteed shares of prefill time, by deficit round robin (Shreedhar and Varghese 1995).

While requests of a kind wait, every second of prefill that is sent adds that kind's share to the
seconds it is owed. Once a kind is owed as much as its next request takes, that request goes first.
So the guarantee is a lower bound, and the order of the queues decides about the rest.
"""

from collections.abc import Container, Mapping
from typing import Final

from forebay.proxy.core.model import CLASSES, STANDARD
from forebay.proxy.core.state.bucket_queue import BucketQueue
from forebay.proxy.core.state.kv_budget import Holdings
from forebay.proxy.core.state.queue import QueuedRequest

BUCKETS_SHARE: Final = 0.6
"""Share of the seconds that all buckets with waiting requests get, in equal parts. At 0.8, 74
instead of 82 % are in time at 1.5 times the capacity. It cannot be doubled."""
CLASS_SHARE: Final = 0.05
"""Share of the seconds that each class with waiting requests gets. Doubled: batch takes a tenth of
overload."""


class Shares:
    """Seconds of prefill that one backend owes to each kind of request.

    Args:
        share: guaranteed share of prefill seconds, by kind.
    """

    def __init__(self, share: dict[str, float]) -> None:
        self.share = share
        self._owed = dict.fromkeys(share, 0.0)
        self.owing = False  # whether any kind is owed something

    def owed_s(self, kind: str) -> float:
        return self._owed[kind]

    def clear(self) -> None:
        """Owe nothing: no request waits."""
        self._owed = dict.fromkeys(self.share, 0.0)
        self.owing = False

    def sent(self, kind: str, seconds: float, waiting: Container[str]) -> None:
        """Note a prefill that was sent while requests of the kinds `waiting` wait."""
        self.owing = False
        for name, owed_s in self._owed.items():
            owed_s = owed_s + self.share[name] * seconds if name in waiting else 0.0
            if name == kind:
                owed_s = max(0.0, owed_s - seconds)
            self._owed[name] = owed_s
            self.owing = self.owing or owed_s > 0.0

    def due(self, kind: str, seconds: float) -> bool:
        """True if its next request, which takes `seconds`, goes first."""
        owed_s = self._owed[kind]
        return owed_s > 0.0 and owed_s >= seconds


class Turns:
    """Decides whose turn it is on one backend.

    It keeps the guaranteed shares of each bucket (60 % together) and each class (5 %), and tells
    the queues of changes in the order of tenants.

    Attributes:
        classed: a request of another class than standard has waited.
        ranked: a request has waited whose other class counts among all tenants.
    """

    def __init__(self, queues: Mapping[str, BucketQueue]) -> None:
        self._queues = queues
        self.buckets = Shares(dict.fromkeys(queues, BUCKETS_SHARE / len(queues)))
        self.classes = Shares(dict.fromkeys(CLASSES, CLASS_SHARE))
        self.classed = self.ranked = False

    def joined(self, waiting: QueuedRequest) -> None:
        """Note a request that waits in one of the queues."""
        if waiting.own_rank != STANDARD:
            self.classed = True
            self.ranked = self.ranked or waiting.rank != STANDARD

    def clear(self) -> None:
        """Owe nothing: no request waits."""
        if self.buckets.owing:
            self.buckets.clear()
        if self.classes.owing:
            self.classes.clear()

    def sent(self, bucket: str, rank: int, seconds: float, queued: int) -> None:
        """Note a prefill that was sent while `queued` requests wait."""
        alone = not self.classed and self._queues[bucket].count == queued
        if alone and not self.buckets.owing:
            return  # no other bucket or class waits
        waiting = [name for name, queue in self._queues.items() if queue.count]
        self.buckets.sent(bucket, seconds, waiting)
        if self.classed:
            queues = self._queues.values()
            waiting = [
                name
                for other, name in enumerate(CLASSES)
                if any(queue.of_class[other] for queue in queues)
            ]
            self.classes.sent(CLASSES[rank], seconds, waiting)

    def order_by_counters(self, holdings: Holdings) -> None:
        """Order tenants by their counters, as nothing is scarce."""
        last, holdings.scarce, holdings.last = holdings.last, False, frozenset()
        for tenant in last:
            self.fell(tenant)

    def fell(self, tenant: str) -> None:
        """Note that the turn of a waiting tenant may have come nearer."""
        for queue in self._queues.values():
            queue.turn_fell(tenant)
