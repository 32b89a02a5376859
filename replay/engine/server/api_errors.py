"""Errors of the OpenAI-compatible API in the words recorded from vLLM 0.32."""

import json
from typing import Any

import orjson

QUEUE_FULL = (
    "The engine is currently busy and cannot accept new requests. "
    "Please try again later or on a different instance."
)
BACKLOG_FULL = (
    "The engine has reached its prefill token backlog limit. "
    "Please try again later or on a different instance."
)
ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
SHUTTING_DOWN = "cannot schedule new futures after shutdown"


class ApiError(Exception):
    """An answer that is an error: status and the body's four keys."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def payload(self) -> dict[str, Any]:
        error = {
            "message": str(self),
            "type": self.kind,
            "param": self.param,
            "code": self.status,
        }
        return {"error": error}

    def body(self) -> bytes:
        return orjson.dumps(self.payload())

    def event(self) -> bytes:
        """The same inside a stream, where vLLM's JSON has spaces."""
        return b"data: " + json.dumps(self.payload()).encode() + b"\n\n"


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, "Bad Request", param)


def bad_value(message: str, param: str) -> ApiError:
    return ApiError(400, message, "BadRequestError", param)


def overloaded(message: str) -> ApiError:
    return ApiError(503, message, "Service Unavailable")


def server_error(message: str) -> ApiError:
    return ApiError(500, message, "InternalServerError")


def invalid(kind: str, where: str, message: str, given: str, context: str = "") -> ApiError:
    """A validation error in the words of vLLM's schema library."""
    place = f"body.{where}" if where else "body"
    entry = (
        f"{{'type': '{kind}', 'loc': '{place}', 'msg': '{message}', 'input': '{given}'{context}}}"
    )
    return bad_request(f"1 validation error:\n  {entry}", place)


def shown(value: Any) -> str:
    """A rejected input in a message: its kind and size, never its text."""
    if isinstance(value, dict):
        return f"<dict of {len(value)} items>"
    if isinstance(value, list):
        return f"<list of {len(value)} items>"
    if isinstance(value, str):
        return f"<string of {len(value)} characters>"
    return str(value)
