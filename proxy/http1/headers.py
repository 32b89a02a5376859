"""Which headers pass, both ways: an allow-list, so that nothing that frames a message ever does."""

import re
from collections.abc import Mapping
from os import urandom

from multidict import CIMultiDictProxy

REQUEST_ID = "x-request-id"
SERVER = "forebay"  # else aiohttp names itself and its version
# Authorization passes: a vLLM started with --api-key checks it.
_TO_BACKEND = ("content-type", "accept", "authorization", "traceparent", "tracestate")
_TO_CLIENT = ("content-type", "retry-after", "retry-after-ms", "x-should-retry", "cache-control")
_WELL_FORMED = re.compile(r"[A-Za-z0-9._-]{1,64}")


def request_id(headers: Mapping[str, str]) -> str:
    """The client's id if it is well-formed, else a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if _WELL_FORMED.fullmatch(given) else urandom(16).hex()


def unforwardable(headers: CIMultiDictProxy[str]) -> str | None:
    """The first header that should pass but cannot as it stands, None if all can.

    Two credentials are refused: which one counts would be for each reader to choose.
    """
    for name in _TO_BACKEND:
        if name in headers:
            values = headers.getall(name)
            for value in values:
                if not (value.isascii() and value.isprintable()):
                    return name
            if name == "authorization" and len(values) > 1:
                return name
    return None


def to_backend(
    headers: CIMultiDictProxy[str], id_: str, *, authorization: bool = True
) -> dict[str, str]:
    """What a backend sees of the client's headers.

    Args:
        authorization: the client's key is the backend's to check; False once we have.
    """
    passed = {name: ", ".join(headers.getall(name)) for name in _TO_BACKEND if name in headers}
    passed[REQUEST_ID] = id_
    if not authorization:
        passed.pop("authorization", None)
    return passed


def to_client(headers: Mapping[str, str]) -> dict[str, str]:
    """What a client sees of the backend's headers."""
    return {name: headers[name] for name in _TO_CLIENT if name in headers}
