"""Errors of the OpenAI-compatible API, with the messages recorded from vLLM 0.32."""

import json
from typing import Any

import orjson

from forebay.replay.engine.loop.core_loop import Unavailable

_UNAVAILABLE = {
    Unavailable.QUEUE_FULL: (
        503,
        "The engine is currently busy and cannot accept new requests. "
        "Please try again later or on a different instance.",
    ),
    Unavailable.BACKLOG_FULL: (
        503,
        "The engine has reached its prefill token backlog limit. "
        "Please try again later or on a different instance.",
    ),
    Unavailable.SHUTTING_DOWN: (500, "cannot schedule new futures after shutdown"),
    Unavailable.ENGINE_DEAD: (
        500,
        "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    ),
}
_KINDS = {500: "InternalServerError", 503: "Service Unavailable"}


class EngineApiError(Exception):
    """An error answer: status and the body's four keys."""

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
        """Return the error as an event of a stream, where vLLM's JSON has spaces."""
        return b"data: " + json.dumps(self.payload()).encode() + b"\n\n"


def bad_request(message: str, param: str | None = None) -> EngineApiError:
    return EngineApiError(400, message, "Bad Request", param)


def bad_value(message: str, param: str | None = None) -> EngineApiError:
    return EngineApiError(400, message, "BadRequestError", param)


def unavailable(why: Unavailable) -> EngineApiError:
    status, message = _UNAVAILABLE[why]
    return EngineApiError(status, message, _KINDS[status])


def invalid(kind: str, where: str, message: str, value: str, context: str = "") -> EngineApiError:
    """Return a validation error with the message of vLLM's schema library."""
    place = f"body.{where}" if where else "body"
    entry = (
        f"{{'type': '{kind}', 'loc': '{place}', 'msg': '{message}', 'input': '{value}'{context}}}"
    )
    return bad_request(f"1 validation error:\n  {entry}", place)


def shown(value: Any) -> str:
    """Describe a rejected input by kind and size, without the text of strings and containers."""
    if isinstance(value, dict):
        return f"<dict of {len(value)} items>"
    if isinstance(value, list):
        return f"<list of {len(value)} items>"
    if isinstance(value, str):
        return f"<string of {len(value)} characters>"
    return str(value)
