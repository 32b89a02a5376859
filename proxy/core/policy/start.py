"""Why a request that waits may not be sent: `Outlook.may_start`, in words. Decides nothing."""

from typing import Literal

from forebay.proxy.core.model import Bucket
from forebay.proxy.core.policy.forecast import Outlook
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.queue import Waiting

Block = Literal[
    "",  # nothing: it may start
    "down",  # the backend takes no work
    "slots",  # max_concurrency run there, or as many as keep the pace asked for
    "trial",  # it came back from a failure, or said that it is full: few prefills at once
    "line",  # what it was sent keeps it busy for longer than `dispatch_ahead`
    "kv",  # the KV cache would not hold it
    "prefill_limit",  # `prefills_per_backend` of the bucket are in prefill there
    "partition",  # it is long, and this is the last engine clear of long prefills
    "leader",  # what it begins with is being computed there, for somebody else
    "policy",  # another rule
]


def blocked_by(
    outlook: Outlook, backend: Backend, waiting: Waiting, bucket: Bucket, now: float
) -> Block:
    """What keeps the request, were it next, from being sent to this backend now."""
    if outlook.may_start(backend, waiting, now):
        return ""
    if not backend.up:
        return "down"
    if backend.running >= backend.limit:
        return "slots"
    if not backend.tries_more:
        return "trial"
    request = waiting.request
    uncached = request.prompt_tokens - backend.matched_tokens(request)
    if not outlook.has_room(backend, now) or outlook.behind(backend, uncached, now):
        return "line"
    if not backend.kv_fits(waiting, now):
        return "kv"
    if backend.keeps(waiting):
        return "leader"
    prefills = backend.line.prefills_of[bucket.name]
    if backend.others is not None:
        prefills += backend.others.prefills.get(bucket.name, 0)
    if prefills >= bucket.prefills_per_backend:
        return "prefill_limit"
    long_s = outlook.partition.long_s(bucket.name, now)
    prefill_s = backend.prefill_s(request, request.prompt_tokens - uncached)
    next_s = backend.next_s(request, prefill_s)
    if outlook.partition.clear_at(backend, waiting, next_s, long_s, now) > now:
        return "partition"
    return "policy"
