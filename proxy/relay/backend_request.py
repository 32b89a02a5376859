"""A shaped request in the relay, and a request as it is sent to a backend."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from forebay.proxy.api.body import ParsedBody
from forebay.proxy.api.dialects import Dialect
from forebay.proxy.api.dialects.continuation import SentText
from forebay.proxy.http1.server.byte_budget import RequestMemory
from forebay.proxy.relay.delivery import Opening
from forebay.proxy.telemetry.record import RequestRecord


@dataclass(slots=True)
class ShapedRequest:
    """A chat or completion that is being served.

    Attributes:
        body: the bytes for the backend, with the tenant's cache salt.
        parsed: the facts of the body for the policy.
        reply_headers: returns our headers of the response. They hold the queueing time, so it is
            called once the request has been sent.
        memory: the memory of the request and of its response.
        opening: the beginning of the response, before its first event.
        observed: the proxy changes neither the request nor its answer.
        missed: the backend that was asked before does not have the model.
        sent: the text that the client has been sent, if another backend could go on with it.
        outgoing: the response, once a backend has stopped in the middle of it.
        rest: the body that asks another backend for the rest of the response.
    """

    incoming: web.BaseRequest
    path: str
    body: bytes
    parsed: ParsedBody
    record: RequestRecord
    reply_headers: Callable[[], dict[str, str]]
    memory: RequestMemory
    opening: Opening
    observed: bool = False
    missed: bool = False
    sent: SentText | None = None
    outgoing: web.StreamResponse | None = None
    rest: bytes = b""

    def change(self, **changes: Any) -> None:
        """Let the policy see a changed request when it arrives for the next time."""
        self.parsed = replace(self.parsed, request=self.parsed.request.with_(**changes))
        self.record.request = self.parsed.request


@dataclass(slots=True, kw_only=True)
class BackendRequest:
    """One request to a backend.

    Attributes:
        incoming: the client's request, which the response is for.
        target: an allowed raw path with its query.
        model: as `Request.model`.
        reply_headers: returns our headers of the response; called once the backend has answered.
        memory: gets the bytes of the response.
        streams: True if a successful response must be a stream; None: the backend decides.
        dialect: its streams are complete when their last event, or `[DONE]`, has come. None: any
            end between two events is a complete one.
        hides_usage: the client did not ask for the event with the usage.
        opening: passes heartbeats of the backend on before the first event. None: they are kept.
        observed: the answer is sent on as it is, also if it is an error.
        wrote: called when the head of the request was written.
        heartbeats: the backend has sent heartbeats, and no event yet.
        sent, outgoing: as of `ShapedRequest`.
    """

    incoming: web.BaseRequest
    method: str
    target: str
    body: bytes
    headers: dict[str, str]
    model: str
    reply_headers: Callable[[], dict[str, str]]
    memory: RequestMemory
    streams: bool | None = None
    dialect: Dialect | None = None
    hides_usage: bool = False
    opening: Opening | None = None
    observed: bool = False
    wrote: Callable[[], None] | None = None
    heartbeats: bool = False
    sent: SentText | None = None
    outgoing: web.StreamResponse | None = None


class StreamListener:
    """Receives the events of a stream that matter to metrics and to the policy."""

    __slots__ = ()

    def first_event(self) -> None:
        """The first event has come, and it is no error."""

    def usage(self, usage: dict[str, Any]) -> None:
        """The stream is complete, and this was its usage."""

    def no_usage(self, events: int) -> None:
        """The stream is complete, without usage: it had `events` events."""

    def response_kept(self, response_id: str) -> None:
        """The response has an id by which a later request may refer to it."""

    def cut(self, limit: str) -> None:
        """The stream ended too early. `limit` names the proxy's limit that ended it, or is ""."""
