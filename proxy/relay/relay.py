"""Serve a shaped request: send it to its backend, and relay the response byte for byte.

Read `Relay.serve` from the top. Nothing but heartbeats is sent to the client before the backend's
first event has been seen. Until then a failure is retried once on another backend, within a budget
(`retries.py`). After a later failure another backend goes on with a text, within the same budget.
Else an error event and a broken connection signal it: never a clean end, and never `[DONE]`.
"""

from dataclasses import replace
from math import inf

import orjson
from aiohttp import web

from forebay.proxy.api.body import ParsedBody
from forebay.proxy.api.dialects.continuation import CannotContinue, generated, limited, with_text
from forebay.proxy.api.fields import with_members
from forebay.proxy.api.response_ids import FIELD as RESPONSE_ID
from forebay.proxy.api.response_ids import ResponseIds
from forebay.proxy.api.token_estimate import TokenEstimate
from forebay.proxy.backends.failures import MID_STREAM, MOVED, NO_MODEL, Failure, check_whole
from forebay.proxy.backends.hold import HeldRequests
from forebay.proxy.backends.link import BackendLink, must_be_home
from forebay.proxy.backends.pool import Backends
from forebay.proxy.backends.retries import Tries
from forebay.proxy.core.model import Request
from forebay.proxy.driver import Grant, Rejected
from forebay.proxy.http1.errors import ApiError, stream_error_event, upstream_error
from forebay.proxy.http1.headers import to_backend
from forebay.proxy.kv_events.tokenize import TOKENIZE, NotTokenised, Translator
from forebay.proxy.relay.attempts import Attempt, Attempts
from forebay.proxy.relay.backend_request import BackendRequest, ShapedRequest
from forebay.proxy.relay.delivery import end_with
from forebay.proxy.relay.exchange import Answer
from forebay.proxy.relay.kept_responses import KeptResponses
from forebay.proxy.relay.lessons import Learners, Lessons
from forebay.proxy.relay.stream import Stream
from forebay.proxy.relay.timeouts import Watchdog
from forebay.proxy.relay.whole_answer import LargeAnswer
from forebay.proxy.telemetry.metrics.proxy_metrics import ProxyMetrics
from forebay.traces.ground.sse import read_object

MOST_BODY_BYTES = 2 << 20  # of a request whose answer may go on: parsing it takes 10 ms


class Relay:
    """Serves shaped requests.

    Attributes:
        translator: is offered each prompt that a backend has computed.
        kept: responses that later requests may go on from.
    """

    def __init__(
        self,
        attempts: Attempts,
        backends: Backends,
        watchdog: Watchdog,
        *,
        metrics: ProxyMetrics,
        estimate: TokenEstimate,
        translator: Translator,
        response_ids: ResponseIds,
    ) -> None:
        self.translator = translator
        self._response_ids = response_ids
        self.kept = KeptResponses()
        self._attempts = attempts
        self._backends = backends
        self._metrics = metrics
        self._clock = watchdog.clock
        self._watchdog = watchdog
        self._streams: dict[Stream, tuple[ShapedRequest, BackendLink]] = {}
        self._learners = Learners(
            backends=backends, estimate=estimate, kept=self.kept, metrics=metrics,
            translator=translator, watchdog=watchdog,
        )  # fmt: skip

    def going_on(self, parsed: ParsedBody, tenant: str) -> ParsedBody:
        """Return a request with the conversation of an earlier response.

        Raises ApiError 404, or 503 while the backend of that response is down.
        """
        id_, links = parsed.previous_id, self._backends.links
        owned, home = self._response_ids.owns(tenant, id_), self._named(tenant, id_)
        request = self.kept.going_on(tenant, parsed.request, id_, owned=owned, home=home)
        must_be_home(links, request.home)
        return replace(parsed, request=request)

    def home(self, tenant: str, id_: str) -> str:
        """Return the backend that keeps a response of this tenant. Raises ApiError 404."""
        return self._named(tenant, id_) or self.kept.home(tenant, id_)

    def _named(self, tenant: str, id_: str) -> str:
        """Return the backend that an id names, or ""."""
        return self._response_ids.home(tenant, id_, self._backends.links)

    async def serve(
        self, shaped: ShapedRequest, grant: Grant, held: HeldRequests
    ) -> web.StreamResponse:
        """Serve a request that has a slot. Raises ApiError.

        Raises Rejected where every backend refused the connection and `held` can keep the request.

        Returns the response: a stream that has been sent, or a whole response yet to be sent.
        """
        response: web.StreamResponse | None = None
        try:
            response = await self._tried(shaped, grant, held)
        except (ApiError, Rejected):
            if shaped.outgoing is None:
                raise
        outgoing = shaped.outgoing or response
        assert outgoing is not None
        if outgoing is not response:  # the client has a part of it, and no backend goes on
            shaped.record.reason = "upstream_stream_error"
            event = stream_error_event(shaped.sent.limit if shaped.sent is not None else "")
            await end_with(event, shaped.incoming, outgoing, self._watchdog, whole=False)
        return outgoing

    async def _tried(
        self, shaped: ShapedRequest, grant: Grant, held: HeldRequests
    ) -> web.StreamResponse:
        """Ask backends, as far as failures allow. Raises and returns as `serve`.

        Raises any ApiError, or returns another response, if no backend goes on with a stream.
        """
        with Tries(self._attempts.budget) as tries:
            while True:
                link = self._backends.links[grant.send.backend]
                try:
                    return await self._send(shaped, grant, link, tries)
                except Failure as failure:
                    self._note_failure(shaped, link, failure)
                    if shaped.outgoing is not None and _is_complete(shaped):
                        end = shaped.incoming, shaped.outgoing, self._watchdog
                        await end_with(b"data: [DONE]\n\n", *end, whole=True)
                        return shaped.outgoing
                    # A fleet that is busy as a whole must not get every request twice.
                    model = grant.send.request.model
                    hopeless = failure.declined and not self._backends.others_willing(link, model)
                    if hopeless or not await self._attempts.may_retry(link, failure.retry, tries):
                        return failure.result()
                    rest = None
                    if failure.kind in (MID_STREAM, MOVED):
                        rest = await self._rest(shaped, link)
                        if rest is None:
                            return failure.result()
                    if not await self._sent_again(shaped, grant, link, failure, rest, held):
                        return failure.result()

    def _note_failure(self, shaped: ShapedRequest, link: BackendLink, failure: Failure) -> None:
        shaped.missed = failure.kind == NO_MODEL
        if shaped.missed:
            self._backends.models.forget(link, shaped.parsed.model)
        kind = failure.kind
        if kind == MID_STREAM and failure.limit:
            kind = "own_limit"
            self._backends.faults.limited(link.name, failure.limit)
        if kind != MOVED:
            self._metrics.upstream_error(link.name, kind)

    async def _sent_again(
        self, shaped: ShapedRequest, grant: Grant, link: BackendLink, failure: Failure,
        rest: Request | None, held: HeldRequests,
    ) -> bool:  # fmt: skip
        """Wait for a slot on another backend after a failure of `link`. Raises Rejected.

        Returns False without another backend.

        Args:
            rest: the request for the rest of its answer, if a part was sent to the client.
        """
        self._metrics.retries.of[(link.name,)].inc()
        if rest is not None and shaped.sent is not None:
            shaped.sent.go_on(rest.prompt_tokens - shaped.parsed.request.prompt_tokens)
        refused = failure.retry == "refused"
        try:
            send = await grant.retry(refused=refused, rest=rest)
        except Rejected as rejected:
            if refused and held.on:
                raise  # it may be up again soon
            if rejected.action.reason != "no_backend_available":
                raise  # the others are busy: the client may come back
            return False  # there is no other backend: the first backend's response stands
        if shaped.outgoing is None:
            shaped.record.sent(send, self._clock())
        shaped.record.backend = send.backend
        return True

    async def _send(
        self, shaped: ShapedRequest, grant: Grant, link: BackendLink, tries: Tries
    ) -> web.StreamResponse:
        """Ask one backend. Raises Failure while only heartbeats have been sent to the client.

        Raises ApiError for an error that is too large for an event.
        """
        with self._attempts.start_shaped(
            grant, link, tries, shows_first_token=shaped.parsed.streams
        ) as attempt:
            response = await self._first_response(shaped, grant, attempt)
        # Not isinstance(response, web.Response): that class is abstract, which takes a Python call.
        if isinstance(response, LargeAnswer) and shaped.opening.close() is not None:
            response.close()
            raise upstream_error()
        if isinstance(response, Stream):
            return await self._stream(response, shaped, link)
        return await response.relay() if isinstance(response, LargeAnswer) else response

    async def _stream(
        self, stream: Stream, shaped: ShapedRequest, link: BackendLink
    ) -> web.StreamResponse:
        """Send a stream on. Raises Failure if another backend could go on with it."""
        self._streams[stream] = shaped, link
        try:
            return await stream.relay()
        except Failure:
            shaped.outgoing = stream.outgoing
            raise
        finally:
            del self._streams[stream]

    async def move_off(self, link: BackendLink) -> None:
        """Let other backends go on with the streams of a backend, as far as they can."""
        for stream, (shaped, at) in list(self._streams.items()):
            if at is link and stream.movable and await self._rest(shaped, link):
                stream.move()

    async def _rest(self, shaped: ShapedRequest, link: BackendLink) -> Request | None:
        """Prepare the request for the rest of an answer.

        None if no other backend can go on with it, or if none is up.
        """
        sent, parsed = shaped.sent, shaped.parsed
        other = self._backends.next_up(TOKENIZE, parsed.request.model, link)
        if sent is None or sent.lost or sent.ended or other is None:
            return None
        if len(shaped.body) > MOST_BODY_BYTES or self._attempts.draining:
            return None
        try:
            fields = orjson.loads(shaped.body)
            text = sent.words()
            longer, tokens = with_text(fields, text), 0
            if text:
                alone = {"prompt": text, "add_special_tokens": False, "model": fields.get("model")}
                each = [await self.translator.tokens(other, of) for of in (alone, fields, longer)]
                tokens = generated(*each)
            shaped.rest = orjson.dumps(limited(longer, parsed.dialect.limits, tokens))
        except (ApiError, NotTokenised, CannotContinue, ValueError):
            sent.lost = True
            return None
        request = parsed.request
        return request.with_(
            prompt_tokens=request.prompt_tokens + tokens,
            output_tokens=max(1, request.output_tokens - tokens),
            timeout_s=inf,  # the client has its first token
        )

    async def _first_response(
        self, shaped: ShapedRequest, grant: Grant, attempt: Attempt
    ) -> Answer:
        """Wait for the first event of a stream, or for a whole response. Raises Failure.

        Of a large response the beginning is enough: the engine has computed all of it by then.
        """
        link = attempt.link
        lessons = Lessons(self._learners, shaped, grant, link)
        response = await self._attempts.ask(attempt, self._to_send(shaped, grant), lessons)
        if shaped.missed and response.status == 200:
            self._backends.models.learn(link, shaped.parsed.model)
        if isinstance(response, Stream):
            return response
        fields = None
        if isinstance(response, web.Response):
            assert isinstance(response.body, bytes)
            fields = check_whole(response.body, may_abort=shaped.observed)
            if fields is None and response.status == 200 and not shaped.parsed.streams:
                # For another backend to compute it again would not help.
                kind = "not_json" if response.body else "empty"
                self._metrics.upstream_error(link.name, kind)
                self._backends.faults.came(link.name, kind)
        if response.status == 200 and shaped.parsed.streams:
            lessons.unexpected(fields)
        elif response.status == 200:
            lessons.whole_response(fields)
        return response

    def _to_send(self, shaped: ShapedRequest, grant: Grant) -> BackendRequest:
        parsed = shaped.parsed
        return BackendRequest(
            incoming=shaped.incoming,
            method="POST",
            target=shaped.path,
            body=self._body(shaped, grant),
            headers=_request_headers(shaped),
            model=grant.send.request.model,
            reply_headers=shaped.reply_headers,
            memory=shaped.memory,
            streams=parsed.streams,
            dialect=parsed.dialect,
            hides_usage=parsed.hides_usage,
            observed=shaped.observed,
            opening=shaped.opening if shaped.outgoing is None else None,
            wrote=shaped.record.wrote,
            sent=shaped.sent,
            outgoing=shaped.outgoing,
        )

    def _body(self, shaped: ShapedRequest, grant: Grant) -> bytes:
        """Return the body for the granted backend: with its place in an engine that orders by it,
        and with an id of the response that names the backend.
        """
        send, body, members = grant.send, shaped.rest or shaped.body, dict[str, str]()
        if shaped.observed:
            return body
        if send.priority is not None:
            members["priority"] = str(send.priority)
        if shaped.parsed.dialect.keeps_responses:
            tenant = shaped.record.tenant
            # Without keys a client may choose the id, and one backend needs none.
            chosen = len(self._backends.links) == 1 or b'"request_id"' in body
            if tenant or not chosen:
                members[RESPONSE_ID] = f'"{self._response_ids.new(tenant, send.backend)}"'
        return with_members(body, members)


def _is_complete(shaped: ShapedRequest) -> bool:
    """True if the client has all of a stream but its `[DONE]`."""
    if shaped.sent is None or not shaped.sent.ended:
        return False
    options = (read_object(shaped.body) or {}).get("stream_options")
    asks = isinstance(options, dict) and options.get("include_usage")
    return shaped.sent.counted or shaped.parsed.hides_usage or not asks


def _request_headers(shaped: ShapedRequest) -> dict[str, str]:
    record = shaped.record
    headers = to_backend(
        shaped.incoming.headers, record.upstream_id, authorization=not record.tenant
    )
    if record.span is not None:
        headers |= record.span.headers()
    return headers
