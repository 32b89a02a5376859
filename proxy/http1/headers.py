"""Headers that are passed on: allow-lists, so that headers that frame a message never are."""

import re
from collections.abc import Mapping
from os import urandom

from multidict import CIMultiDictProxy

REQUEST_ID = "x-request-id"
SERVER = "forebay"  # replaces aiohttp's name and version
# Authorization passes: a vLLM started with --api-key checks it.
# vLLM puts the session into KV events. Its x-vllm-priority must not pass: a client would jump the
# queue of others.
_TO_BACKEND = (
    "content-type", "accept", "authorization", "traceparent", "tracestate", "x-session-id",
)  # fmt: skip
_TO_CLIENT = ("content-type", "x-should-retry")
# Times to wait, beside an error only, each with the most that is passed on: a day.
_WAITS = {"retry-after": 86_400, "retry-after-ms": 86_400_000}
_PRIVATE = ("no-store", "no-cache", "private")  # directives that keep shared caches away
_WELL_FORMED = re.compile(r"[A-Za-z0-9._-]{1,64}")


def request_id(headers: Mapping[str, str]) -> str:
    """Return the client's id if it is well-formed, else a new one."""
    id_ = headers.get(REQUEST_ID, "")
    return id_ if _WELL_FORMED.fullmatch(id_) else urandom(16).hex()


def unforwardable(headers: CIMultiDictProxy[str]) -> str | None:
    """Return the first header that should be passed on but must not be, or None.

    Two credentials are rejected: parsers differ in which one counts.
    """
    for name in _TO_BACKEND:
        if name in headers:
            values = headers.getall(name)
            text = "".join(values)
            if not (text.isascii() and text.isprintable()):
                return name
            if len(values) > 1 and name == "authorization":
                return name
    return None


def to_backend(
    headers: CIMultiDictProxy[str], id_: str, *, authorization: bool = True
) -> dict[str, str]:
    """Return the client's headers for a backend.

    Args:
        authorization: pass the client's key on; False if the proxy has checked it.
    """
    passed = {name: ", ".join(headers.getall(name)) for name in _TO_BACKEND if name in headers}
    passed[REQUEST_ID] = id_
    if not authorization:
        passed.pop("authorization", None)
    return passed


def to_client(headers: Mapping[str, str], status: int) -> dict[str, str]:
    """Return the backend's headers for the client.

    A wait that is no whole number from 1 to a day is left out, and so is a Cache-Control that would
    let a shared cache keep the response.
    """
    passed = {name: headers[name] for name in _TO_CLIENT if name in headers}
    if status >= 400:
        for name, most in _WAITS.items():
            value = headers.get(name, "")
            if value.isascii() and value.isdecimal() and len(value) <= 8 and 0 < int(value) <= most:
                passed[name] = value
    if (control := headers.get("cache-control")) is not None:
        words = control.lower()
        if "public" not in words and any(word in words for word in _PRIVATE):
            passed["cache-control"] = control
    return passed
