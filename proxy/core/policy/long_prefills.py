"""How are short prompts protected from long prefills? In two ways.

A prefill that takes longer than a chat is willing to wait blocks every chat behind it:
 1. The backend chunks long prefills itself (BackendSpec.chunk_tokens): chats pass them. In a fleet
    of fewer than four nothing else is needed.
 2. One backend is kept clear: a long prefill may not take the last clear backend until another
    is clear, or until its own patience ends. Of eight or more, several are kept clear if
    the short prompts need them; of four or more that chunk, too. The only backend of a model cannot
    be kept clear: there, only vLLM's `--long-prefill-token-threshold` helps.
The second applies only while requests of a more urgent bucket flow (`long_s`): for `RECENT_S` after
each, but not after the first in a while (`LOAD_TIME_S`).
"""

from collections.abc import Iterable, Mapping, Sequence
from math import fsum, inf

from forebay.proxy.core.learn.cost import FULL_STEP_TOKENS
from forebay.proxy.core.learn.decay import LOAD_TIME_S, RECENT_S, DecayedSum
from forebay.proxy.core.model import HISTORY, MAJORITY, BackendSpec, Bucket, serves
from forebay.proxy.core.policy.order import due_at
from forebay.proxy.core.policy.precedence import worked_share
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.queue import QueuedRequest


class Flow:
    """The requests of one bucket that certain backends may get.

    Attributes:
        came_at: time of the last arrival.
        flowed_at: time of the last arrival that came soon after another.
        rejected_share: rejected share of the last requests.
    """

    __slots__ = ("came_at", "flowed_at", "rate", "rejected_share")

    def __init__(self) -> None:
        self.came_at = self.flowed_at = -inf
        self.rejected_share = 0.0
        self.rate = DecayedSum(RECENT_S)


class LongPrefills:
    """Keeps backends clear of long prefills while short requests flow.

    Backends of different models have different requests, so chats of one model hold back no
    document of another.
    """

    def __init__(self, backends: Mapping[str, Backend], buckets: Mapping[str, Bucket]) -> None:
        self._backends = backends
        self._buckets = buckets
        self._flows: dict[frozenset[str] | None, dict[str, Flow]] = {}

    def rebuild(self) -> None:
        """Note that backends or buckets have changed. Flows that were seen before are kept."""
        buckets = self._buckets
        # By bucket: the buckets with less patience.
        self._hastier = {
            bucket.name: [b for b in buckets.values() if b.patience_s < bucket.patience_s]
            for bucket in buckets.values()
        }
        # By the models of backends, then by bucket.
        before, self._flows = self._flows, {}
        for models in [backend.models for backend in self._backends.values()]:
            seen = before.get(models, {})
            self._flows[models] = {name: seen.get(name) or Flow() for name in buckets}

    def arrived(self, bucket: str, model: str, now: float) -> None:
        for models, flows in self._flows.items():
            if serves(models, model):
                flow = flows[bucket]
                if now - flow.came_at < LOAD_TIME_S:
                    flow.flowed_at = now
                flow.came_at = now
                flow.rate.add(1.0, now)

    def decided(self, bucket: str, model: str, *, rejected: bool) -> None:
        """Note an admission or rejection."""
        for models, flows in self._flows.items():
            if serves(models, model):
                flow = flows[bucket]
                if rejected or flow.rejected_share:
                    flow.rejected_share += (rejected - flow.rejected_share) / HISTORY

    def long_s(self, bucket: str, backend: Backend, now: float) -> float:
        """Return the prefill time above which requests of this bucket block more urgent requests.

        inf while the backend gets no requests of a more urgent bucket.
        """
        least, flows = inf, self._flows[backend.models]
        for other in self._hastier[bucket]:
            if other.patience_s < least and now - flows[other.name].flowed_at < RECENT_S:
                least = other.patience_s
        return least

    def _rejected(self, bucket: str, backend: Backend, now: float) -> float:
        """Return the largest recently rejected share of the more urgent buckets that flow."""
        most, flows = 0.0, self._flows[backend.models]
        for other in self._hastier[bucket]:
            if now - (flow := flows[other.name]).flowed_at < RECENT_S:
                most = max(most, flow.rejected_share)
        return most

    def clear_at(
        self, backend: Backend, waiting: QueuedRequest, prefill_s: float, long_s: float, now: float
    ) -> float:
        """Return when the request may start here and leave enough other backends clear."""
        if prefill_s <= long_s:
            return now
        up = self._up(waiting.request.model)
        others = [other.prefill_queue for other in up if other is not backend]
        if not others:
            return now
        count = self._clear_count(backend, waiting.bucket, up, now)
        if not count:
            return now
        clear_from = sorted(
            queue.ends_at(now) if queue.has_longer(long_s) else now for queue in others
        )
        next_clear_at = clear_from[count - 1]
        if next_clear_at <= now:
            return now
        # Buckets that no longer flow have earlier arrivals: they do not change the latest.
        flows = self._flows[backend.models]
        latest = max(flows[b.name].flowed_at for b in self._hastier[waiting.bucket])
        patience_ends = waiting.arrived_at + self._buckets[waiting.bucket].patience_s
        if count == 1:
            hasty = sum(flows[b.name].rate.rate(now) for b in self._hastier[waiting.bucket])
            if hasty * prefill_s > 1.0:
                patience_ends = inf
        return min(patience_ends, latest + RECENT_S, next_clear_at)

    def _up(self, model: str) -> list[Backend]:
        return [b for b in self._backends.values() if b.up and serves(b.models, model)]

    def _clear_count(self, backend: Backend, bucket: str, up: Sequence[Backend], now: float) -> int:
        """Return the number of these backends that long prefills leave to more urgent requests.

        Enough for prefills of these to take at most half of the time there. Where engines chunk,
        urgent requests pass long prefills, so the number is rounded, and may be 0.
        """
        most = len(up) // 4  # half of four would make documents' p99 40 % longer in overload
        least, more = (0, 0.5) if backend.prefill_queue.chunked else (1, 1.0)
        if most <= least:
            return least
        hasty = [other.name for other in self._hastier[bucket]]
        busy = fsum(worked_share(b, name, now) for b in up for name in hasty)
        return max(least, min(most, int(more + busy / MAJORITY)))

    def crowd_s(
        self, backend: Backend, waiting: QueuedRequest, prefill_s: float, long_s: float, now: float
    ) -> float:
        """Return the wait of a long prefill while all backends not kept clear compute them."""
        if self._rejected(waiting.bucket, backend, now) <= 1.0 / HISTORY:
            return 0.0  # at most one of the last requests was rejected
        up = self._up(waiting.request.model)
        count = self._clear_count(backend, waiting.bucket, up, now)
        if not count:
            return 0.0
        deadline = min(waiting.deadline, now + self._buckets[waiting.bucket].deadline_s)
        due = due_at(waiting.arrived_at, deadline, prefill_s)
        ahead_s = fsum(
            b.prefill_queue.backlog_s(now) for b in up if b.prefill_queue.has_longer(long_s)
        )
        ahead_s += fsum(b.queues[waiting.bucket].seconds_before(due) for b in up if b.queued)
        if waiting.backend:
            ahead_s -= waiting.work_s
        # Prefills are not interrupted: count one more prefill like this.
        return (max(0.0, ahead_s) + prefill_s) / max(1, len(up) - count)

    def next_moment(self, heads: Iterable[QueuedRequest], now: float) -> float:
        """Return when one of these heads may take the last clear backend without an event."""
        least = inf
        for flows in self._flows.values():
            for flow in flows.values():
                if now < flow.flowed_at + RECENT_S < least:
                    least = flow.flowed_at + RECENT_S
        holds = False  # some head may be a long prefill that waits
        for head in heads:
            if not self._hastier[head.bucket]:
                continue
            holds = True
            patience_ends = head.arrived_at + self._buckets[head.bucket].patience_s
            if now < patience_ends < least:
                least = patience_ends
        if holds and len(self._backends) > 1:  # the only one is never kept clear
            for backend in self._backends.values():
                if now < (at := backend.prefill_queue.ends_at(now)) < least:
                    least = at
        return least


def blocks_short_prompts(spec: BackendSpec, buckets: Iterable[Bucket]) -> bool:
    """True if this backend's engine lets requests of a more urgent bucket wait for long prompts.

    A long prompt takes several engine steps.
    """
    if spec.chunk_tokens < inf:
        return False
    allowed = [b for b in buckets if not b.backends or spec.name in b.backends]
    longest = max(allowed, key=lambda bucket: bucket.up_to, default=None)
    if longest is None or longest.up_to <= FULL_STEP_TOKENS:
        return False
    return any(bucket.patience_s < longest.patience_s for bucket in allowed)
