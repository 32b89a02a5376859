"""Whether a request is taken at all: the predicted wait against what the client can bear.

Refusing at once is kinder than queueing without hope: the client can go elsewhere, and no GPU
second is spent on an answer that comes too late. An idle backend never refuses work: a wrong
estimate must not turn requests away that could have been served (Layr-Labs/d-inference#381).
"""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Final

from forebay.proxy.core.model import Bucket, RejectReason, Request
from forebay.proxy.core.policy.routing import Option

RETRY_LEAST_S: Final = 1.0
RETRY_MOST_S: Final = 60.0  # over 120 s openai-python gives up instead of waiting
SURE: Final = 2.0  # by so much a prediction may be wrong


def attainable(request: Request, bucket: Bucket, option: Option) -> bool:
    """The request would be sent within `max_wait_s` and answered within the client's timeout."""
    wait_s = option.wait_s + option.margin_s
    return wait_s <= bucket.max_wait_s and wait_s + option.prefill_s <= request.timeout_s


def hopeless(request: Request, options: Sequence[Option]) -> bool:
    """Its own prefill alone is certain to take longer than the client waits, wherever it goes."""
    return min(option.prefill_s for option in options) > SURE * request.timeout_s


def refuse(
    request: Request, bucket: Bucket, option: Option, queued: int, idle: bool
) -> RejectReason | None:
    """Why the request must be refused, or None to take it.

    Args:
        option: where it would go.
        queued: requests of the bucket already waiting; -1 if this one would not wait.
        idle: the backend of `option` has nothing to do.
    """
    if queued >= bucket.max_queue:
        return "queue_full"
    if not idle and not attainable(request, bucket, option):
        return "deadline_unattainable"
    return None


Admit = Callable[[Request, Bucket, Option, int, bool], RejectReason | None]
"""`refuse`, or what takes its place to learn what would have been."""


def retry_after_s(request: Request, bucket: Bucket, wait_s: float) -> float:
    """When the wait will have shrunk to what the request can bear, in whole seconds."""
    bearable_s = min(bucket.max_wait_s, request.timeout_s)
    return whole_s(wait_s - bearable_s)


def whole_s(seconds: float) -> float:
    """Whole seconds within what clients obey."""
    return float(ceil(max(RETRY_LEAST_S, min(RETRY_MOST_S, seconds))))
