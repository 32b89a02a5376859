"""Rejections of the policy as errors for clients: the words, and when to come back."""

from math import ceil, inf

from forebay.proxy.core.explain.receipt import Receipt
from forebay.proxy.core.model import Reject
from forebay.proxy.http1.errors import LOAD, SERVER, ApiError, retry_headers

_REASONS = {
    "queue_full": "Too many requests of this length are waiting",
    "deadline_unattainable": "The server cannot answer this request in time",
    "no_backend_available": "No backend is available",
    "tenant_quota": "This API key has used up its quota",
    "prompt_too_long": "The prompt is longer than the largest bucket allows",
}


LONG_S = 60.0  # no client waits longer between two tries
TOO_LONG = "context_length_exceeded"  # as OpenAI calls it: clients then shorten the prompt


def rejected(
    action: Reject, field: str, load_status: int = 429, receipt: Receipt | None = None
) -> ApiError:
    """Return the error of a request that the policy rejected.

    Args:
        field: name of the field that holds the prompt.
        receipt: the record of the decision, whose figures the message quotes. None if forgotten.
    """
    message = rejection(action, receipt)
    if action.reason == "prompt_too_long":
        return ApiError(400, TOO_LONG, f"{message}.", param=field)
    headers = retry_headers(action.retry_after_s)
    again = f"{message}; retry after {headers['Retry-After']} s."
    if action.reason == "no_backend_available":
        return ApiError(503, action.reason, again, SERVER, headers=headers)
    if action.hopeless:  # OpenAI's clients obey this header
        headers["x-should-retry"] = "false"
        again = f"{message}. A retry will not help: the prompt alone takes longer."
    return ApiError(load_status, action.reason, again, LOAD, headers=headers)


def rejection(action: Reject, receipt: Receipt | None) -> str:
    """Return the reason of a rejection for its client, without a full stop."""
    if receipt is None:
        return _REASONS[action.reason]
    value, limit = receipt.value, receipt.limit
    match receipt.rule:
        case "max_wait":
            return f"Expected wait {_spoken(value)}, limit {_spoken(limit)}"
        case "target":
            return f"Expected first token after {_spoken(value)}, limit {_spoken(limit)}"
        case "timeout":
            return f"Expected first token after {_spoken(value)}, your timeout is {_spoken(limit)}"
        case "line_full" if not receipt.tries and limit < inf:
            return f"{value:.0f} requests of this length are waiting, limit {limit:.0f}"
        case "tenant_share":
            return "Your own requests fill your share of the queue"
        case "gave_way":
            return "Gave its place in a full queue to another tenant, or to a more urgent request"
        case "prompt_too_long":
            return f"Prompt is about {value:,.0f} tokens; maximum context length {limit:,.0f}"
        case "deadline_passed":
            return f"Waited {_spoken(action.queued_s)} in the queue without being served"
    return _REASONS[action.reason]


def _spoken(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"


def over_quota(wait_s: float, load_status: int) -> ApiError:
    """Return the error of a request that exceeds its tenant's quota."""
    headers = retry_headers(wait_s)
    message = f"{_REASONS['tenant_quota']}; retry after {headers['Retry-After']} s."
    return ApiError(load_status, "tenant_quota", message, LOAD, headers=headers)


def over_budget(budget: int, what: str, wait_s: float, load_status: int) -> ApiError:
    """Return the error of a request whose tenant has used up its tokens of an hour or a day."""
    headers = retry_headers(ceil(wait_s))
    if wait_s > LONG_S:  # without this header OpenAI's clients come back sooner
        headers["x-should-retry"] = "false"
    message = (
        f"This tenant has used up its {budget:,} tokens of this {what}; "
        f"retry after {headers['Retry-After']} s."
    )
    return ApiError(load_status, "tenant_quota", message, LOAD, headers=headers)


def too_many_at_once(most: int, load_status: int) -> ApiError:
    """Return the error of a request whose tenant already has `most` requests at once."""
    message = f"This tenant has {most} requests at once, its limit; retry after 1 s."
    headers = retry_headers(1.0)
    return ApiError(load_status, "tenant_concurrency", message, LOAD, headers=headers)
