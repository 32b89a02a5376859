"""Errors as OpenAI-shaped responses. No message holds prompt text or the address of a backend."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import orjson

NAMED = 20  # models that an error names
NAMED_CHARS = 200  # characters of a client's model name in an error
CLIENT, LOAD, SERVER = "invalid_request_error", "rate_limit_error", "server_error"


@dataclass(slots=True)
class ApiError(Exception):
    """An error response.

    Attributes:
        close: close the connection: the body was not read, or the framing is in doubt.
    """

    status: int
    code: str
    message: str
    type: str = CLIENT
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    close: bool = False

    def body(self, *, typed: bool = False) -> bytes:
        return error_body(self.message, self.type, self.code, self.param, typed=typed)


def error_body(
    message: str, type_: str, code: str, param: str | None = None, *, typed: bool = False
) -> bytes:
    """Return an error as JSON, always with the four keys that OpenAI clients expect.

    Args:
        typed: add the type of the JSON, as Anthropic's clients expect.
    """
    kind = {"type": "error"} if typed else {}
    error = {"message": message, "type": type_, "param": param, "code": code}
    return orjson.dumps({**kind, "error": error})


def invalid_type(what: str, right: str, param: str | None) -> ApiError:
    return ApiError(400, "invalid_type", f"{what} must be {right}.", param=param)


def stream_error_event(limit: str, *, typed: bool = False) -> bytes:
    """Return the last event of a stream that was cut. Neither `[DONE]` nor a clean end follows.

    Args:
        limit: a sentence about the limit of this proxy that ended it, "" if the backend did.
        typed: the events of the stream have types.
    """
    text = limit or "The server stopped before the response was complete."
    return error_event(error_body(text, SERVER, "upstream_stream_error", typed=typed), typed=typed)


def error_event(body: bytes, *, typed: bool) -> bytes:
    """Return the event of an error.

    Args:
        body: the error as JSON, in one line.
        typed: the events of the stream have types.
    """
    return (b"event: error\n" if typed else b"") + b"data: " + body + b"\n\n"


def retry_headers(seconds: float) -> dict[str, str]:
    """Return Retry-After in whole seconds, and in milliseconds for OpenAI's clients."""
    return {"Retry-After": str(max(1, round(seconds))), "retry-after-ms": str(round(seconds * 1e3))}


def draining() -> ApiError:
    return ApiError(
        503, "draining", "The server is shutting down.", SERVER, headers=retry_headers(1.0)
    )


def no_such_path(available: Iterable[str] = ()) -> ApiError:
    """Return a 404 that names the paths that exist."""
    paths = ", ".join(available)
    message = f"Unknown path. Available: {paths}." if paths else "Unknown path."
    return ApiError(404, "not_found", message)


def no_such_model(model: str, available: Sequence[str]) -> ApiError:
    """Return a 404 that names some of the models that exist. It begins as vLLM's does."""
    names = ", ".join(available[:NAMED])
    more = f" and {len(available) - NAMED} more" if len(available) > NAMED else ""
    message = f"The model `{model[:NAMED_CHARS]}` does not exist. Available: {names}{more}."
    return ApiError(404, "model_not_found", message, param="model")


def no_such_response(param: str = "id") -> ApiError:
    message = "No response with this id is kept; make it again."
    return ApiError(404, "response_not_found", message, param=param)


def cross_site() -> ApiError:
    return ApiError(403, "cross_site", "Web pages of other sites may not do this.")


def overloaded() -> ApiError:
    """The proxy is short of a resource, and serves more urgent classes only."""
    return ApiError(
        503, "overloaded", "The server is overloaded; retry after 2 s.", SERVER,
        headers=retry_headers(2.0),
    )  # fmt: skip


def overfull(load_status: int = 429) -> ApiError:
    """The bodies of all requests have reached limits.queue_bytes."""
    return ApiError(
        load_status, "queue_full", "Waiting requests use too much memory; retry after 1 s.", LOAD,
        headers=retry_headers(1.0), close=True,
    )  # fmt: skip


def too_many_connections() -> ApiError:
    return ApiError(
        503, "too_many_connections", "Too many connections are open; retry after 1 s.", SERVER,
        headers=retry_headers(1.0), close=True,
    )  # fmt: skip


def upstream_error() -> ApiError:
    return ApiError(502, "upstream_error", "The backend failed to respond.", SERVER)


def upstream_timeout(text: str = "The backend did not respond in time.") -> ApiError:
    return ApiError(504, "upstream_timeout", text, SERVER)


def answer_too_large(limit: str) -> ApiError:
    """Return a 502 with a sentence about the limit. The next response would be as large."""
    return ApiError(502, "upstream_error", limit, SERVER, headers={"x-should-retry": "false"})


def no_slot(load_status: int) -> ApiError:
    """Return the error of a request that passes no queue, and for which no slot was free."""
    headers = retry_headers(1.0)
    message = "Too many such requests are running; retry after 1 s."
    return ApiError(load_status, "queue_full", message, LOAD, headers=headers)


def no_backend() -> ApiError:
    return ApiError(
        503, "no_backend_available", "No backend is available; retry after 1 s.", SERVER,
        headers=retry_headers(1.0),
    )  # fmt: skip
