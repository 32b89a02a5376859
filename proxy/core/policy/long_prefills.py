"""Keep one engine clear of long prefills while short requests come in.

A prefill longer than a chat is willing to wait blocks every chat that meets it. With two
engines, one such prefill at a time leaves the other to the chats; so a long prefill may not take
the last clear engine until another will soon be clear, or until it has waited a good part of its
own patience, and nearly all of it while more than a few of the short requests are being refused.
Below that, at sustained load beyond one engine, every long prefill has waited long enough, both
engines work, and nothing is lost.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import fsum, inf
from typing import Final

from forebay.proxy.core.model import Bucket
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.queue import Waiting, due_at

PATIENCE_SHARE: Final = (
    0.5  # of the bucket's max_wait: after that it may take the last clear engine
)
LAST_MOMENT_SHARE: Final = 0.9  # the same while short requests are refused: whom we took, we serve
OVERLAP_SHARE: Final = (
    0.4  # of the patience of those it holds up: another engine is this near to being clear again
)
FLOWING_S: Final = 10.0  # a bucket with an arrival this lately is flowing
REFUSED_MOST: Final = (
    0.005  # of the short requests, lately: what long prefills may cost them, so that p99 holds
)
REFUSED_GAIN: Final = 0.002  # smoothing of the share of requests refused: over the last 500 or so


class Partition:
    """Knows who came and who was refused lately, of each bucket."""

    def __init__(self, backends: Sequence[Backend], buckets: Mapping[str, Bucket]) -> None:
        self._backends = backends
        self._buckets = buckets
        # The buckets with less patience than each.
        self._hastier = {
            bucket.name: [b for b in buckets.values() if b.max_wait_s < bucket.max_wait_s]
            for bucket in buckets.values()
        }
        self._last_arrival = dict.fromkeys(buckets, -inf)
        self._refused_share = dict.fromkeys(buckets, 0.0)

    def remember(self, before: "Partition") -> None:
        """What one for other backends or buckets has seen of those that are still there."""
        for name in self._buckets:
            self._last_arrival[name] = before._last_arrival.get(name, -inf)
            self._refused_share[name] = before._refused_share.get(name, 0.0)

    def arrived(self, bucket: str, now: float) -> None:
        self._last_arrival[bucket] = now

    def decided(self, bucket: str, *, refused: bool) -> bool:
        """A newcomer was refused or taken; whether long prefills may start sooner for it."""
        share = self._refused_share[bucket]
        if not refused and not share:
            return False
        now = self._refused_share[bucket] = share + REFUSED_GAIN * (refused - share)
        return now <= REFUSED_MOST < share

    def long_s(self, bucket: str, now: float) -> float:
        """What a prefill of this bucket must exceed to be in the way of others that come in now."""
        least = inf
        for other in self._hastier[bucket]:
            if other.max_wait_s < least and now - self._last_arrival[other.name] < FLOWING_S:
                least = other.max_wait_s
        return least

    def _refused(self, bucket: str, now: float) -> float:
        """The largest share refused lately of those that come in with less patience."""
        most = 0.0
        for other in self._hastier[bucket]:
            if now - self._last_arrival[other.name] < FLOWING_S:
                most = max(most, self._refused_share[other.name])
        return most

    def clear_at(
        self, backend: Backend, waiting: Waiting, prefill_s: float, long_s: float, now: float
    ) -> float:
        """When the request may start here without taking the last engine clear of long prefills."""
        if prefill_s <= long_s:
            return now
        others, next_clear_at = False, inf
        for other in self._backends:
            if other.up and other is not backend:
                if not other.prefills_longer(long_s):
                    return now
                others = True
                next_clear_at = min(next_clear_at, other.done_in_at(OVERLAP_SHARE * long_s, now))
        if not others or next_clear_at <= now:
            return now
        # Those that come in no longer have arrived earlier: they do not change the latest.
        latest = max(self._last_arrival[b.name] for b in self._hastier[waiting.bucket])
        flowing_until, refused = latest + FLOWING_S, self._refused(waiting.bucket, now)
        max_wait_s = self._buckets[waiting.bucket].max_wait_s
        may_at = may_take_last_at(waiting.arrived_at, max_wait_s, flowing_until, refused)
        return min(may_at, next_clear_at)

    def crowd_s(self, waiting: Waiting, prefill_s: float, long_s: float, now: float) -> float:
        """The wait of a long prefill while one engine less than all take turns at them."""
        if not crowded_out(self._refused(waiting.bucket, now)):
            return 0.0
        deadline = min(waiting.deadline, now + self._buckets[waiting.bucket].max_wait_s)
        due = due_at(waiting.arrived_at, deadline, prefill_s)
        up = [b for b in self._backends if b.up]
        ahead_s = fsum(b.backlog_s(now) for b in up if b.prefills_longer(long_s))
        ahead_s += fsum(b.queues[waiting.bucket].ahead_s(due) for b in up if b.queued)
        if waiting.backend:
            ahead_s -= waiting.work_s
        # Work comes in lumps that are not interrupted: reckon with one more like this one.
        return (max(0.0, ahead_s) + prefill_s) / max(1, len(up) - 1)

    def next_moment(self, heads: Iterable[Waiting], now: float) -> float:
        """When one of these may be able to take the last engine, without an event."""
        least = inf
        for arrived_at in self._last_arrival.values():
            if now < arrived_at + FLOWING_S < least:
                least = arrived_at + FLOWING_S
        overlaps_s = set()
        for head in heads:
            if not self._hastier[head.bucket]:
                continue
            overlaps_s.add(OVERLAP_SHARE * self.long_s(head.bucket, now))
            max_wait_s = self._buckets[head.bucket].max_wait_s
            for refused_share in (0.0, 1.0):
                at = may_take_last_at(head.arrived_at, max_wait_s, inf, refused_share)
                if now < at < least:
                    least = at
        for overlap_s in overlaps_s:
            for backend in self._backends:
                at = backend.done_in_at(overlap_s, now)
                if now < at < least:
                    least = at
        return least


def may_take_last_at(
    arrived_at: float, max_wait_s: float, flowing_until: float, refused_share: float
) -> float:
    """When a long prefill may take the last clear engine.

    Args:
        arrived_at: of the long request.
        max_wait_s: of its bucket.
        flowing_until: when the shorter buckets stop flowing unless one more arrives.
        refused_share: of the requests of the shorter buckets, lately.
    """
    share = LAST_MOMENT_SHARE if refused_share > REFUSED_MOST else PATIENCE_SHARE
    return min(arrived_at + share * max_wait_s, flowing_until)


def crowded_out(refused_share: float) -> bool:
    """Whether long prefills must reckon with one engine less.

    Half of what would forbid it: who is taken now starts later, when more may be refused.
    """
    return refused_share > REFUSED_MOST / 2
