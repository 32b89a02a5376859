"""Whether a request is taken at all: the predicted wait against what the client can bear.

Refusing at once is kinder than queueing without hope: the client can go elsewhere, and no GPU
second is spent on an answer that comes too late. An idle backend never refuses work: a wrong
estimate must not turn requests away that could have been served (Layr-Labs/d-inference#381).
"""

from math import ceil

from forebay.proxy.core.model import Bucket, RejectReason, Request
from forebay.proxy.core.routing import Option

SAFETY = 1.25  # predicted waits are this much too short one time in ten
RETRY_LEAST_S, RETRY_MOST_S = 1.0, 60.0  # over 120 s openai-python gives up instead of waiting


def attainable(request: Request, bucket: Bucket, option: Option) -> bool:
    """The request would be sent within `max_wait_s` and answered within the client's timeout."""
    return (
        option.wait_s * SAFETY <= bucket.max_wait_s
        and option.wait_s * SAFETY + option.prefill_s <= request.timeout_s
    )


def refuse(
    request: Request, bucket: Bucket, option: Option, *, queued: int, idle: bool
) -> RejectReason | None:
    """Why the request must be refused, or None to take it.

    Args:
        option: where it would go.
        queued: requests of the bucket already waiting.
        idle: the backend of `option` has nothing to do.
    """
    if idle:
        return None
    if queued >= bucket.max_queue:
        return "queue_full"
    if not attainable(request, bucket, option):
        return "deadline_unattainable"
    return None


def retry_after_s(request: Request, bucket: Bucket, wait_s: float) -> float:
    """When the wait will have shrunk to what the request can bear, in whole seconds."""
    bearable_s = min(bucket.max_wait_s, request.timeout_s) / SAFETY
    return float(max(RETRY_LEAST_S, min(RETRY_MOST_S, ceil(wait_s - bearable_s))))
