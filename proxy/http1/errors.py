"""The one place where what went wrong becomes an OpenAI-shaped answer.

No message holds prompt text or the address of a backend.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from forebay.proxy.core.model import Reject

CLIENT, LOAD, SERVER = "invalid_request_error", "rate_limit_error", "server_error"


@dataclass(slots=True)
class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        close: the connection cannot be used again: the body was not read, or framing is in doubt.
    """

    status: int
    code: str
    message: str
    type: str = CLIENT
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    close: bool = False

    def body(self) -> bytes:
        return error_body(self.message, self.type, self.code, self.param)


def error_body(message: str, type_: str, code: str, param: str | None = None) -> bytes:
    """The four keys that OpenAI clients expect, all of them always."""
    return orjson.dumps(
        {"error": {"message": message, "type": type_, "param": param, "code": code}}
    )


def invalid_type(what: str, right: str, param: str | None) -> ApiError:
    return ApiError(400, "invalid_type", f"{what} must be {right}.", param=param)


def stream_error_event() -> bytes:
    """The last event of a stream that was cut; no `[DONE]` follows, and no clean end."""
    body = error_body(
        "The server stopped before the answer was complete.", SERVER, "upstream_stream_error"
    )
    return b"data: " + body + b"\n\n"


_REASONS = {
    "queue_full": "Too many requests of this length are waiting.",
    "deadline_unattainable": "The server cannot answer this request in time.",
    "no_backend_available": "No backend is available.",
    "tenant_quota": "This API key has used up its quota.",
    "prompt_too_long": "The prompt is longer than any backend takes.",
}


def rejected(action: Reject, load_status: int = 429) -> ApiError:
    """The answer to a refused request."""
    message = _REASONS[action.reason]
    if action.reason == "prompt_too_long":
        return ApiError(413, action.reason, message, param="messages")
    headers = retry_headers(action.retry_after_s)
    if action.reason == "no_backend_available":
        return ApiError(503, action.reason, message, SERVER, headers=headers)
    if action.hopeless:  # OpenAI's clients obey, and do not come back in vain
        headers["x-should-retry"] = "false"
    return ApiError(
        load_status, action.reason, f"{message} Try again later.", LOAD, headers=headers
    )


def retry_headers(seconds: float) -> dict[str, str]:
    """Both spellings: whole seconds for everyone, milliseconds for OpenAI's clients."""
    return {"Retry-After": str(max(1, round(seconds))), "retry-after-ms": str(round(seconds * 1e3))}


def draining() -> ApiError:
    return ApiError(
        503, "draining", "The server is shutting down.", SERVER, headers=retry_headers(1.0)
    )


def no_such_path() -> ApiError:
    return ApiError(404, "not_found", "There is no such path here.")


def cross_site() -> ApiError:
    return ApiError(403, "cross_site", "Pages of other sites may not do this.")


def overloaded() -> ApiError:
    """The proxy itself is short of something: it serves the more urgent."""
    return ApiError(
        503, "overloaded", "The server is overloaded. Try again later.", SERVER,
        headers=retry_headers(2.0),
    )  # fmt: skip


def overfull(load_status: int = 429) -> ApiError:
    """The bytes of all waiting requests have reached their bound."""
    return ApiError(
        load_status, "queue_full", "Too many bytes are waiting. Try again later.", LOAD,
        headers=retry_headers(1.0), close=True,
    )  # fmt: skip


def too_many_connections() -> ApiError:
    return ApiError(
        503, "too_many_connections", "Too many connections are open. Try again later.", SERVER,
        headers=retry_headers(1.0), close=True,
    )  # fmt: skip


def upstream_error() -> ApiError:
    return ApiError(502, "upstream_error", "The backend failed to answer.", SERVER)


def upstream_timeout() -> ApiError:
    return ApiError(504, "upstream_timeout", "The backend did not answer in time.", SERVER)


def answer_too_large(limit: int) -> ApiError:
    return ApiError(
        502, "upstream_error", f"The backend's answer is larger than {limit} bytes.", SERVER
    )


def no_backend() -> ApiError:
    return ApiError(
        503, "no_backend_available", _REASONS["no_backend_available"], SERVER,
        headers=retry_headers(1.0),
    )  # fmt: skip
