"""What makes a backend's answer a failure, while nothing has been sent to the client yet.

HTTP allows more than may be passed on: framing given twice, other content types, compressed bodies
that nobody asked for. Each of these is refused here, in one place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import orjson
from aiohttp import web

from forebay.proxy.http1.client import UpstreamResponse
from forebay.proxy.http1.errors import ApiError, retry_headers, upstream_error
from forebay.proxy.relay.retries import Retry

Verdict = Literal["failed", "refused", "full", "answered", "nothing"]
FULL = frozenset({429, 503})  # too busy for now: not broken


@dataclass(slots=True)  # not frozen: whoever hands an exception on may set its traceback
class Failure(Exception):
    """The backend failed before the client was sent anything.

    Attributes:
        kind: for the metrics; one of a few words, never what the backend sent.
        answer: what the client gets if nobody else answers.
        retry: whether another backend may be asked.
        verdict: what it says about the health of the backend.
        retry_after_s: of a backend that is full, when it wants to be asked again.
    """

    kind: str
    answer: ApiError | web.Response
    retry: Retry = "shared"
    verdict: Verdict = "failed"
    retry_after_s: float = 0.0

    @property
    def declined(self) -> bool:
        """The backend answered, and the answer was that it cannot serve."""
        return self.kind in ("full", "5xx")


def check_head(response: UpstreamResponse) -> None:
    """Raise Failure unless status line and headers are those of an answer to be passed on."""
    headers, status = response.headers, response.status
    if 300 <= status < 400:  # it could lead anywhere
        raise Failure("redirect", upstream_error())
    if "transfer-encoding" in headers and "content-length" in headers:
        raise Failure("framing", upstream_error())  # whoever is behind us may see it otherwise
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Failure("encoding", upstream_error())  # none was offered


def check_type(response: UpstreamResponse, streams: bool) -> None:
    """Raise Failure if a success is not of the kind that was asked for."""
    wanted = "text/event-stream" if streams else "application/json"
    if response.status == 200 and response.content_type != wanted:
        raise Failure("content_type", upstream_error())


def check_status(response: UpstreamResponse, answer: web.Response) -> None:
    """Raise Failure if the status, read with its body, is one that another backend may not give."""
    status = response.status
    if status in FULL:
        raise full(answer, response.headers)
    if status >= 500:
        raise Failure("5xx", answer)


def check_whole(status: int, body: bytes) -> dict[str, Any]:
    """The fields of a whole answer; raises Failure if it is no answer, or was broken off."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        if status == 200:
            raise Failure("not_json", upstream_error())
        return {}
    choices = fields.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        # A vLLM that is shut down ends what runs so: a success by every other sign.
        if isinstance(choice, dict) and choice.get("finish_reason") == "abort":
            raise Failure("abort", upstream_error())
    return fields


def full(answer: web.Response, given: Mapping[str, str]) -> Failure:
    """The backend is too busy: its own words, with a time to come back added if it gave none."""
    after_s = _seconds(given.get("retry-after"))
    if "retry-after" not in given:
        answer.headers.update(retry_headers(1.0))
    return Failure("full", answer, verdict="full", retry_after_s=after_s)


def _seconds(text: str | None) -> float:
    """Of a Retry-After in seconds; 0 for a date, which needs a wall clock that agrees with ours."""
    try:
        seconds = float(text or 0)
    except ValueError:
        return 0.0
    return max(0.0, seconds) if isfinite(seconds) else 0.0
