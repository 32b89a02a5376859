"""Accepted or rejected? Why a new request is rejected, and when its client should come back.

A rejection at once is kinder than a queue without hope: the client can go elsewhere, and no GPU
second is spent on an answer that comes too late. A predicted wait never rejects at an idle backend:
a wrong estimate must not reject a request that could have been served
(Layr-Labs/d-inference#381).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from typing import Final

from forebay.proxy.core.learn.cost import FAR_OFF
from forebay.proxy.core.model import (
    MAJORITY,
    REMEMBERED_MOST,
    SLACK,
    Bucket,
    Reject,
    RejectReason,
    Request,
)
from forebay.proxy.core.policy.routing import Option
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.fleet import FleetQueues
from forebay.proxy.core.state.queue import QueuedRequest, keys_of
from forebay.proxy.core.state.tenants import Fairness, Quotas

RETRY_MOST_S: Final = 60.0  # openai-python gives up above 120 s; doubled: at its limit
SURE: Final = 2.0
"""Times the mean error of predictions: nine in ten normal errors are smaller. At 2.5, 94.7 instead
of 96.7 % are in time next to unshared 120k documents. Doubled: still fewer."""
RETURN_SHARE: Final = 0.2
"""Clients that come back have this share of the engines and of the queue kept for them. Doubled:
they come back twice as early and nearly all are served, but 2 % less work is done in time."""


class Placement:
    """Where a new request would go, and how.

    Attributes:
        options: the forecasts for all backends that were priced.
        option: the option that the route picked, on `backend`.
        starts: it may start there now.
        sent_now: it may start, and no request of its bucket waits there.
        queued: requests of its bucket that wait already; -1 if it would not wait.
        limits: its bucket, with the `max_wait` that applies to it.
        gives_way: the request that would leave the full queue for it.
    """

    def __init__(
        self,
        options: list[Option],
        option: Option,
        backend: Backend,
        starts: bool,
        queued: int,
        limits: Bucket,
    ) -> None:
        self.options = options
        self.option = option
        self.backend = backend
        self.starts = starts
        self.sent_now = False
        self.queued = queued
        self.limits = limits
        self.gives_way: QueuedRequest | None = None


def early_reject(
    request: Request, bucket: Bucket | None, quotas: Quotas, now: float
) -> Reject | None:
    """Reject a request that no forecast could help: too long for every bucket, or over its quota.

    Args:
        bucket: the first bucket that holds the prompt, or None.
    """
    if bucket is None:
        return Reject(request, "prompt_too_long", "", 0.0, inf)
    if quotas.any:
        quota_s = quotas.wait_s(request.tenant, request.charged_tokens, now)
        if quota_s > 0:
            return Reject(request, "tenant_quota", bucket.name, 0.0, whole_s(quota_s))
    return None


def in_time_wait_s(request: Request, bucket: Bucket, prefill_s: float) -> float:
    """Return the longest wait with which the request is in time.

    Its own prefill must end within the target of its bucket and the limit of its client. A prompt
    whose prefill alone takes about as long as the target may wait for a tenth of it.
    """
    within_s = max(bucket.target_s - prefill_s, SLACK * bucket.target_s)
    return min(bucket.max_wait_s, within_s, request.timeout_s - prefill_s)


def longest_wait_s(request: Request, bucket: Bucket, option: Option) -> float:
    """Return the longest wait, with its margin, at which the request would be admitted.

    Prefills that the engine was sent before cannot be taken back: while the queue does not stand,
    their seconds are no reason to reject.
    """
    wait_s = in_time_wait_s(request, bucket, option.prefill_s)
    if option.sent_s > 0.0:
        most_s = min(bucket.max_wait_s, request.timeout_s - option.prefill_s)
        wait_s = min(most_s, wait_s + option.sent_s)
    return wait_s


def attainable(request: Request, bucket: Bucket, option: Option) -> bool:
    """True if its wait is expected to be short enough."""
    return option.wait_s + option.margin_s <= longest_wait_s(request, bucket, option)


def stands(bucket: Bucket, backend: Backend, queued_s: float, now: float) -> bool:
    """True if a queue is no burst: it was never empty for longer than a burst lasts.

    A queue that stands serves no more requests than a short one, and all of them later (CoDel,
    Nichols and Jacobson 2012). So new requests may fill half of it. Nothing can start before the
    prefills end that the backend was sent, so a queue behind them need not be empty.

    Args:
        queued_s: seconds for which requests have waited without a break.
    """
    if backend.long_prefill_s > bucket.patience_s:
        queued_s = min(queued_s, now - backend.long_ended_at)
    return queued_s > MAJORITY * bucket.patience_s + backend.prefill_queue.total_s


def hopeless(request: Request, options: Sequence[Option]) -> bool:
    """True if its prefill alone takes far longer than the client waits, on every backend."""
    return min(option.prefill_s for option in options) > FAR_OFF * request.timeout_s


def refuse(
    request: Request, bucket: Bucket, option: Option, queued: int, idle: bool
) -> RejectReason | None:
    """Return the reason to reject the request, or None to admit it.

    Args:
        option: where it would go.
        queued: requests of the bucket that wait already; -1 if this request would not wait.
        idle: the backend of `option` has nothing to do.
    """
    if queued >= bucket.max_queue:
        return "queue_full"
    if not idle and not attainable(request, bucket, option):
        return "deadline_unattainable"
    return None


Admit = Callable[[Request, Bucket, Option, int, bool], RejectReason | None]
"""The type of `refuse`. The simulator takes other functions, to compare rules."""


def tenant_holds_too_much(
    backends: Mapping[str, Backend],
    queues: FleetQueues,
    fairness: Fairness,
    backend: Backend,
    waiting: QueuedRequest,
    bucket: Bucket,
    now: float,
) -> bool:
    """True if the tenant would hold too large a part of the bucket's queues."""
    if not fairness.on or not fairness.shared(now):
        return False
    tenant = waiting.request.tenant
    here, here_s = backend.queues[bucket.name].of_tenant(tenant)
    if not here:
        return False
    if here_s > MAJORITY * bucket.patience_s:
        return True
    if waiting.request.model:
        held = queues.held[bucket.name, waiting.request.model, tenant]
    else:
        held = sum(b.queues[bucket.name].of_tenant(tenant)[0] for b in backends.values())
    return held >= MAJORITY * bucket.max_queue


def gives_way(queues: FleetQueues, waiting: QueuedRequest, bucket: Bucket) -> QueuedRequest | None:
    """Return the request that leaves the bucket's full queue for a new request, or None.

    The first of these that exists:
     - the last request of the least urgent class, if that is less urgent than the new request;
     - the last request of a less urgent class of the same tenant;
     - the last request of another tenant that holds more than half of the queue, if it is no more
       urgent than the new request.
    """
    full, own = queues.full(bucket.name, waiting.request.model), waiting.request.tenant
    last = full.last()
    if last is None or last.rank > waiting.rank:
        return last
    last = full.least_urgent_of(own)
    if last is not None and last.own_rank > waiting.own_rank:
        return last
    tenant = full.heaviest()
    if tenant == own or full.held[tenant] <= MAJORITY * bucket.max_queue:
        return None
    return full.last_of(flow for flow in keys_of(tenant) if flow[0] >= waiting.rank)


def whole_s(seconds: float) -> float:
    """Round up to whole seconds, at least 1 s, within the range that clients obey."""
    return float(ceil(max(1.0, min(RETRY_MOST_S, seconds))))


class ReturnTimes:
    """When rejected clients should come back: one after the other.

    When the predicted wait is over, all work in front of the request is done. The queue has room
    earlier, but while the overload lasts new requests take that room first. If every client
    rejected meanwhile got the same time, all would come back together and be rejected again. So
    each is booked behind the clients rejected before it, as if new requests left them RETURN_SHARE
    of the engines.

    Without memory a policy rejects a request that comes back as often as a new request. So it is
    recognised by its prompt and tenant. While clients do come back, new requests may fill the queue
    up to 1 - RETURN_SHARE of their limits only.
    """

    def __init__(self, buckets: Mapping[str, Bucket]) -> None:
        self._booked_until: dict[tuple[str, str], float] = {}  # by model and bucket
        # By name and share: the buckets with this share of their patience.
        self._limited = {
            (bucket.name, share): replace(bucket, max_wait_s=share * bucket.patience_s)
            for bucket in buckets.values()
            for share in (MAJORITY, 1.0 - RETURN_SHARE)
        }
        self._due_back: dict[tuple[str, int], float] = {}  # in order of rejection
        self._came_back_at: dict[str, float] = {}  # by model

    def book(
        self,
        request: Request,
        bucket: str,
        wait_s: float,
        prefill_s: float,
        engines: int,
        now: float,
    ) -> float:
        """Note a new request that is rejected. Returns whole seconds, as `note` does.

        Args:
            wait_s: the wait that was predicted for it.
            prefill_s: its prefill.
            engines: engines that share the work of its model.
        """
        key = request.model, bucket
        if len(self._booked_until) >= REMEMBERED_MOST:  # adapters come and go
            self._booked_until.clear()
        booked_until = max(now, self._booked_until.get(key, -inf))
        booked_until += prefill_s / (RETURN_SHARE * max(1, engines))
        self._booked_until[key] = min(now + RETRY_MOST_S, booked_until)
        return self.note(request, max(wait_s, booked_until - now), now)

    def note(self, request: Request, wait_s: float, now: float) -> float:
        """Return the whole seconds after which the client of a rejected request should come back.

        Args:
            wait_s: the wait that the request would have now.
        """
        retry_after_s = whole_s(wait_s)
        if not request.identity:
            return retry_after_s
        due, key = self._due_back, (request.tenant, request.identity)
        due.pop(key, None)
        while due and due[oldest := next(iter(due))] + RETRY_MOST_S <= now:
            del due[oldest]
        if len(due) < REMEMBERED_MOST:  # a further client is not recognised
            due[key] = now + retry_after_s
        return retry_after_s

    def is_back(self, request: Request, now: float) -> bool:
        """True if this request was rejected and comes back at its time, not earlier."""
        at = self._due_back.get((request.tenant, request.identity), inf)
        return at <= now < at + RETRY_MOST_S

    def limits(self, bucket: Bucket, request: Request, now: float, *, halved: bool) -> Bucket:
        """Return the bucket with the limits that apply to a request when it arrives.

        Args:
            halved: new requests may fill only half of the queue of its bucket and model.
        """
        back_lately = now < self._came_back_at.get(request.model, -inf) + RETRY_MOST_S
        if not (halved or back_lately) or self.is_back(request, now):
            return bucket
        return self._limited[bucket.name, MAJORITY if halved else 1.0 - RETURN_SHARE]

    def arrived(self, request: Request, now: float) -> bool:
        """Note an arrival. Call it after `limits`. Returns True if it comes back at its time."""
        if not self._due_back or not self.is_back(request, now):
            return False
        del self._due_back[request.tenant, request.identity]
        if len(self._came_back_at) >= REMEMBERED_MOST:
            self._came_back_at.clear()
        self._came_back_at[request.model] = now
        return True
