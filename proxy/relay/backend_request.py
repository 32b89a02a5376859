"""A request as it is sent to a backend, and the kind of response that is expected."""

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from forebay.proxy.api.dialects import Dialect
from forebay.proxy.http1.server.byte_budget import RequestMemory
from forebay.proxy.relay.delivery import Opening


@dataclass(slots=True, kw_only=True)
class BackendRequest:
    """One request to a backend.

    Attributes:
        incoming: the client's request, which the response is for.
        target: an allowed raw path with its query.
        model: as `Request.model`.
        reply_headers: returns our headers of the response; called once the backend has answered.
        memory: gets the bytes of the response.
        streams: whether a successful response must be a stream; None: the backend decides.
        dialect: its streams are complete when their last event, or `[DONE]`, has come. None: any
            end between two events is a complete one.
        hides_usage: the client did not ask for the event with the usage.
        opening: passes heartbeats of the backend on before the first event. None: they are kept.
        wrote: called when the head of the request was written.
        heartbeats: the backend has sent heartbeats, and no event yet.
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
    wrote: Callable[[], None] | None = None
    heartbeats: bool = False
