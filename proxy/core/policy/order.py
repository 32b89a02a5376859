"""Whose turn it is on one backend: classes, then length buckets, each with a guaranteed share.

The most urgent class goes first, and in it the bucket whose head has the earliest deadline. So
that nobody waits for ever, what comes last has a part of the seconds while it waits (`shares.py`):
each of two buckets 30 %, each class 5 %. The top class that has work keeps at least 90 %. A bucket
claims its part once somebody in it has waited half of what they can: a burst of chats is over
by then, and documents that wait a little for it cost nobody anything.

How this goes with `partition.py`: that says where a long prefill may start, and of n engines it
always leaves n - 1 to them, so it never takes the guarantee away; this says who is next there.
"""

from collections.abc import Mapping, Sequence

from forebay.proxy.core.model import CLASSES, STANDARD
from forebay.proxy.core.state.lanes import Lanes
from forebay.proxy.core.state.queue import Waiting
from forebay.proxy.core.state.shares import Shares

BUCKETS_SHARE = 0.6  # of the seconds, in equal parts to the buckets that wait
CLASS_SHARE = 0.05  # of the seconds, to each class that waits


class Turns:
    def __init__(self, queues: Mapping[str, Lanes]) -> None:
        self._queues = queues
        self.buckets = Shares(dict.fromkeys(queues, BUCKETS_SHARE / len(queues)))
        self.classes = Shares(dict.fromkeys(CLASSES, CLASS_SHARE))
        self._classed = False  # somebody waits, or has waited, in another class than standard

    def joined(self, waiting: Waiting) -> None:
        """Somebody waits in one of the queues now."""
        if waiting.rank != STANDARD:
            self._classed = True

    def nobody_waits(self) -> None:
        """Nobody waits any more."""
        if self.buckets.owing:
            self.buckets.clear()
        if self.classes.owing:
            self.classes.clear()

    def sent(self, bucket: str, rank: int, seconds: float, queued: int) -> None:
        """A prefill was sent while so many wait."""
        alone = not self._classed and self._queues[bucket].count == queued
        if alone and not self.buckets.owing:
            return  # nobody else to owe anything
        waiting = [name for name, queue in self._queues.items() if queue.count]
        self.buckets.went(bucket, seconds, waiting)
        if self._classed:
            ranks = {lane[0] for queue in self._queues.values() for lane in queue.lanes}
            self.classes.went(CLASSES[rank], seconds, [CLASSES[other] for other in ranks])

    def first(self, ready: Sequence[Waiting], now: float) -> Waiting:
        """Of heads that may all start."""
        if len(ready) == 1:
            return ready[0]
        return min(ready, key=lambda head: self._place(head, now))

    def _place(self, head: Waiting, now: float) -> tuple[bool, int, bool, float, int]:
        class_due = self._classed and self.classes.due(CLASSES[head.rank], head.next_s)
        owed = self.buckets.due(head.bucket, head.next_s)
        bucket_due = owed and self._queues[head.bucket].late_at() <= now
        return not class_due, head.rank, not bucket_due, head.deadline, head.order
