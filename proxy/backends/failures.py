"""Check a backend's response before anything is sent to the client. A bad response is a `Failure`.

HTTP allows more than may be passed on: framing given twice, other content types, compression that
the proxy cannot undo. All of these checks are here. Answers that no sound server gives are logged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import orjson
from aiohttp import web

from forebay.proxy.backends.retries import Retry
from forebay.proxy.http1.client.connection import UpstreamResponse
from forebay.proxy.http1.errors import ApiError, retry_headers, upstream_error
from forebay.proxy.log_events import LogEvent, Say, SparseLines
from forebay.traces.ground.sse import read_object

Verdict = Literal["failed", "refused", "full", "answered", "nothing"]
NO_MODEL = "no_model"  # the kind of a 404 for a model or an adapter: another backend may have it
ONLY_HEARTBEATS = "only_heartbeats"  # the kind of a time-out behind comments or pings
MID_STREAM = "mid_stream"  # the kind of a stream that ended too early
MOVED = "moved"  # the kind of a stream that is taken from its backend: no failure
EVENTS = "text/event-stream"
MOST_STATUS = 599  # RFC 9110, 15: others are invalid
MALFORMED = {
    "bad_http": "it is not HTTP/1.1, or could be read in two ways",
    "large_head": "its headers are too large",
    "bad_coding": "its compressed body is damaged",
    "bad_status": "its status is above 599",
    "transfer_coding": "its Transfer-Encoding is not `chunked`",
    "framing": "it gives its length in two ways",
    "encoding": "it has a Content-Encoding that was not asked for",
    "redirect": "it is a redirect, and none is followed",
    "content_type": "it has another content type than was asked for",
    "empty": "it is empty",
}
"""Kinds of answers that no sound server gives, in words for the log."""
BUSY_STATUSES = frozenset({429, 503})  # the backend is too busy, not broken


@dataclass(slots=True)  # not frozen: a traceback is set on exceptions
class Failure(Exception):
    """The backend failed before the client was sent anything, or another backend may go on.

    Attributes:
        kind: a label for the metrics (metrics.KINDS), never text of the backend.
        answer: the response for the client if no other backend serves the request.
        retry: the retries at other backends that it allows.
        verdict: the meaning of the failure for the health of the backend.
        retry_after_s: the Retry-After of a full backend, in seconds.
        limit: a sentence about the limit of this proxy that ended it; "": the backend failed.
    """

    kind: str
    answer: ApiError | web.Response
    retry: Retry = "shared"
    verdict: Verdict = "failed"
    retry_after_s: float = 0.0
    limit: str = ""

    @property
    def declined(self) -> bool:
        """The backend itself answered that it cannot serve."""
        return self.kind in ("full", "5xx")

    @property
    def provokable(self) -> bool:
        """The request may be the cause: another backend's answer to it will show that."""
        return self.verdict == "failed" and self.retry in ("shared", "lost")

    def result(self) -> web.Response:
        """Return the response for the client, or raise it if it is an ApiError."""
        if isinstance(self.answer, ApiError):
            raise self.answer from self
        return self.answer


def check_head(response: UpstreamResponse) -> None:
    """Raise Failure unless status and headers belong to a response that may be passed on."""
    headers, status = response.headers, response.status
    if status > MOST_STATUS:
        raise Failure("bad_status", upstream_error())
    if 300 <= status < 400:  # the target could be anywhere
        raise Failure("redirect", upstream_error())
    coding = headers.get("transfer-encoding", "chunked").strip().lower()
    if coding != "chunked":
        raise Failure("transfer_coding", upstream_error())  # none was asked for
    if "transfer-encoding" in headers and "content-length" in headers:
        raise Failure("framing", upstream_error())  # another parser may choose the other value
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Failure("encoding", upstream_error())  # none was asked for


def check_type(response: UpstreamResponse) -> None:
    """Raise Failure if a successful response is a page of a gateway.

    Any other is passed on, even a whole one to a request for a stream: it has been computed.
    """
    if response.status == 200 and response.content_type == "text/html":
        raise Failure("content_type", upstream_error())


def check_status(
    response: UpstreamResponse, answer: web.Response, *, observed: bool = False
) -> None:
    """Raise Failure for a status that another backend might not give. The body has been read.

    Args:
        observed: the answer stays as it is.
    """
    status = response.status
    if status in BUSY_STATUSES:
        raise full(answer, response.headers, observed=observed)
    if status >= 500:
        raise Failure("5xx", answer)
    if status == 404 and _lacks_model(answer.body):
        raise Failure(NO_MODEL, answer, "lost", "answered")


def _lacks_model(body: object) -> bool:
    """True if an error says that the backend has no such model, as vLLM says it."""
    fields = read_object(body) if isinstance(body, bytes) else None
    if fields is None:
        return False
    error = fields.get("error", fields)  # vLLM up to 0.10 has no `error`
    if not isinstance(error, dict):
        return False
    message = error.get("message")
    said = isinstance(message, str) and message.startswith("The model `")
    return said or error.get("param") == "model" or error.get("code") == "model_not_found"


def check_whole(body: bytes, *, may_abort: bool = False) -> dict[str, Any] | None:
    """Parse a whole response. None if it is no JSON object, which is passed on all the same.

    Raises Failure if it was aborted, and must not be.
    """
    fields = read_object(body)
    if fields is None or may_abort:
        return fields
    choices = fields.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        # A vLLM that shuts down ends running requests like this; all else looks like a success.
        if isinstance(choice, dict) and choice.get("finish_reason") == "abort":
            raise Failure("abort", upstream_error())
    return fields


def full(answer: web.Response, headers: Mapping[str, str], *, observed: bool = False) -> Failure:
    """Make the failure of a backend that is too busy.

    Adds a Retry-After if it gave none, unless the answer is `observed` as it is.
    """
    after_s = _seconds(headers.get("retry-after"))
    if "retry-after" not in answer.headers and not observed:
        answer.headers.update(retry_headers(1.0))
    return Failure("full", answer, verdict="full", retry_after_s=after_s)


def event_failure(error: dict[str, Any], headers: Mapping[str, str]) -> Failure:
    """Make the failure of a stream whose first event is an error.

    Args:
        headers: our headers of the response.
    """
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 502
    body = orjson.dumps({"error": error})
    own = {**headers, "content-type": "application/json"}
    answer = web.Response(status=status, headers=own, body=body)
    if status in BUSY_STATUSES:
        return full(answer, {})
    if status < 500:
        return Failure("4xx_event", answer, "never", "answered")
    return Failure("5xx_event", answer)


def _seconds(text: str | None) -> float:
    """Parse a Retry-After. Returns 0 for a date, as that needs a clock that agrees with ours."""
    try:
        seconds = float(text or 0)
    except ValueError:
        return 0.0
    return max(0.0, seconds) if isfinite(seconds) else 0.0


class FaultLog:
    """Logs the kind of a malformed answer, never its bytes, and limits that ended answers.

    Args:
        clock: the time of the event loop.
    """

    def __init__(self, say: Say, clock: Callable[[], float]) -> None:
        self._say = say
        self._clock = clock
        self._lines = SparseLines()

    def came(self, backend: str, kind: str) -> None:
        """A backend has failed a request. Kinds that are not malformed answers are ignored."""
        if kind not in MALFORMED:
            return
        if (more := self._lines.more(kind, self._clock())) is not None:
            line = f"backend {backend} sent a malformed answer: {MALFORMED[kind]}{more}"
            self._say(LogEvent.BACKEND_MALFORMED, line, backend, kind)

    def limited(self, backend: str, limit: str) -> None:
        """A limit of this proxy has ended a response, as the sentence says. "" is no limit."""
        key = limit.rpartition("(")[2]
        if limit and (more := self._lines.more(key, self._clock())) is not None:
            line = f"a response of backend {backend} was ended by this proxy: {limit}{more}"
            self._say(LogEvent.LIMIT_REACHED, line, backend)
