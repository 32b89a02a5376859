"""Classify the outcome of a request as ok, rejected or failed, with a reason. Pure.

    ok        answered to the end
    rejected  rejected by admission: 429 or 503 with a named code, which is the reason
    failed    for want of an answer: its status as 429, 503, 4xx or 5xx, or tls, timeout, stall,
              cancelled, never_sent, or one of these:

`connect` is any failure before an answer began: connection refused, reset or closed. After the
answer began, an end before `[DONE]` is `truncated`, an error event in place of the rest is
`stream_error`, and bytes that are not an OpenAI stream are `malformed`.
"""

from typing import Any

import orjson

# These codes report a failure of the service, not a decision about the request.
_NOT_ADMISSION = frozenset({"no_backend_available", "draining"})
_MAX_CODE = 64
MAX_WORDS = 200


def of_status(status: int, body: bytes) -> tuple[str, str]:
    """Return outcome and reason of an answer with a status other than 200."""
    code = error_code(body)
    if isinstance(code, str) and is_admission(status, code):
        return "rejected", code
    return "failed", _class_of(status)


def is_admission(status: int, code: str) -> bool:
    """True if an answer with this status and error code is a rejection by admission."""
    named = bool(code) and not code.isdigit() and code not in _NOT_ADMISSION
    return status in (429, 503) and named


def of_stream_error(error: dict[str, Any]) -> str:
    """Return the failure class of an error event inside a stream."""
    code = error.get("code")
    if type(code) is int and 400 <= code < 500:
        return _class_of(code)
    return "stream_error"


def _class_of(status: int) -> str:
    if status in (429, 503):
        return str(status)
    if 400 <= status < 500:
        return "4xx"
    return "5xx" if status >= 500 else "malformed"  # such as a redirect or a 204


def error_code(body: bytes) -> str | int | None:
    """Return `error.code` of an OpenAI error body, or None if it has no code."""
    error = _json_object(body).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, str) and code:
        return code[:_MAX_CODE]
    return code if type(code) is int else None


def _json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`, or an empty one if it has another form."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}


def first_words(body: bytes) -> str | None:
    """Return the message of an error body, in one line of at most MAX_WORDS characters.

    This is the message of an OpenAI error, else the text itself. None if it is blank.
    """
    answer = _json_object(body)
    for key in ("error", "message", "detail"):
        if (value := answer.get(key)) is not None:
            return error_words(value)
    return words_of(body[: 4 * MAX_WORDS].decode("utf-8", "replace"))


def error_words(error: Any) -> str | None:
    """Return the message of an error object, in one line."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("code") or error
    return words_of(error if isinstance(error, str) else orjson.dumps(error).decode())


def words_of(text: str) -> str | None:
    """Return a text as one printable line of at most MAX_WORDS characters, or None if blank."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if len(line) > MAX_WORDS:
        line = f"{line[: MAX_WORDS - 1]}…"
    return line or None


def token_count(value: Any) -> int | None:
    """Return `value`, such as 8 or 8.0, if it is a plausible token count, else None."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < 1 << 40 else None


def seconds_header(value: str | None, scale: float = 1.0) -> float | None:
    """Read a number from a header and multiply it by `scale`. None if it is not a number."""
    try:
        number = float(value) * scale if value is not None else -1.0
    except ValueError:
        return None
    return number if 0 <= number < 1e9 else None
