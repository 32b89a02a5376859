"""Serve a shaped request: send it to its backend, and relay the response byte for byte.

Read `Relay.serve` from the top. Nothing but heartbeats is sent to the client before the backend's
first event has been seen. Until then a failure is retried once on another backend, within a budget
(`retries.py`). A later failure is signalled by an error event and a broken connection: never by a
clean end, and never with `[DONE]`.
"""

from dataclasses import replace

from aiohttp import web

from forebay.proxy.api.body import ParsedBody
from forebay.proxy.api.fields import with_members
from forebay.proxy.api.token_estimate import TokenEstimate
from forebay.proxy.backends.failures import NO_MODEL, Failure, check_whole
from forebay.proxy.backends.hold import HeldRequests
from forebay.proxy.backends.link import BackendLink, must_be_home
from forebay.proxy.backends.pool import Backends
from forebay.proxy.backends.retries import Tries
from forebay.proxy.driver import Grant, Rejected
from forebay.proxy.http1.errors import upstream_error
from forebay.proxy.http1.headers import to_backend
from forebay.proxy.kv_events.tokenize import Translator
from forebay.proxy.relay.attempts import Attempt, Attempts
from forebay.proxy.relay.backend_request import BackendRequest, ShapedRequest
from forebay.proxy.relay.exchange import Answer
from forebay.proxy.relay.kept_responses import KeptResponses
from forebay.proxy.relay.lessons import Learners, Lessons
from forebay.proxy.relay.stream import Stream
from forebay.proxy.relay.timeouts import Watchdog
from forebay.proxy.relay.whole_answer import LargeAnswer
from forebay.proxy.telemetry.metrics.proxy_metrics import ProxyMetrics


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
    ) -> None:
        self.translator = translator
        self.kept = KeptResponses()
        self._attempts = attempts
        self._backends = backends
        self._metrics = metrics
        self._clock = watchdog.clock
        self._learners = Learners(
            backends=backends, estimate=estimate, kept=self.kept, metrics=metrics,
            translator=translator, watchdog=watchdog,
        )  # fmt: skip

    def going_on(self, parsed: ParsedBody, *, owned: bool) -> ParsedBody:
        """Return a request with the conversation of an earlier response.

        Raises ApiError 404, or 503 while the backend of that response is down.

        Args:
            owned: the id of that response was made for this tenant.
        """
        request = self.kept.going_on(parsed.request, parsed.previous_id, owned=owned)
        must_be_home(self._backends.links, request.home)
        return replace(parsed, request=request)

    async def serve(
        self, shaped: ShapedRequest, grant: Grant, held: HeldRequests
    ) -> web.StreamResponse:
        """Serve a request that has a slot. Raises ApiError.

        Raises Rejected where every backend refused the connection and `held` can keep the request.

        Returns the response: a stream that has been sent, or a whole response yet to be sent.
        """
        with Tries(self._attempts.budget) as tries:
            while True:
                link = self._backends.links[grant.send.backend]
                try:
                    return await self._send(shaped, grant, link, tries)
                except Failure as failure:
                    shaped.missed = failure.kind == NO_MODEL
                    if shaped.missed:
                        self._backends.models.forget(link, shaped.parsed.model)
                    self._metrics.upstream_error(link.name, failure.kind)
                    # A fleet that is busy as a whole must not get every request twice.
                    model = grant.send.request.model
                    hopeless = failure.declined and not self._backends.others_willing(link, model)
                    retry = failure.retry
                    if hopeless or not await self._attempts.may_retry(link, retry, tries):
                        return failure.result()
                    self._metrics.retries.of[(link.name,)].inc()
                    try:
                        send = await grant.retry(refused=retry == "refused")
                    except Rejected as rejected:
                        if retry == "refused" and held.on:
                            raise  # it may be up again soon
                        if rejected.action.reason != "no_backend_available":
                            raise  # the others are busy: the client may come back
                        # There is no other backend: the first backend's response stands.
                        return failure.result()
                    shaped.record.sent(send, self._clock())

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
        return await response.relay() if isinstance(response, (Stream, LargeAnswer)) else response

    async def _first_response(
        self, shaped: ShapedRequest, grant: Grant, attempt: Attempt
    ) -> Answer:
        """Wait for the first event of a stream, or for a whole response. Raises Failure.

        Of a large response the beginning is enough: the engine has computed all of it by then.
        """
        link = attempt.link
        lessons = Lessons(self._learners, shaped, grant, link)
        response = await self._attempts.ask(attempt, _to_send(shaped, grant), lessons)
        if shaped.missed and response.status == 200:
            self._backends.models.learn(link, shaped.parsed.model)
        if isinstance(response, Stream):
            return response
        fields = None
        if isinstance(response, web.Response):
            assert isinstance(response.body, bytes)
            fields = check_whole(response.body)
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


def _to_send(shaped: ShapedRequest, grant: Grant) -> BackendRequest:
    parsed = shaped.parsed
    return BackendRequest(
        incoming=shaped.incoming,
        method="POST",
        target=shaped.path,
        body=_body(shaped, grant),
        headers=_request_headers(shaped),
        model=grant.send.request.model,
        reply_headers=shaped.reply_headers,
        memory=shaped.memory,
        streams=parsed.streams,
        dialect=parsed.dialect,
        hides_usage=parsed.hides_usage,
        opening=shaped.opening,
        wrote=shaped.record.wrote,
    )


def _body(shaped: ShapedRequest, grant: Grant) -> bytes:
    """Return the body for the granted backend: with its place in an engine that orders by it."""
    priority, body = grant.send.priority, shaped.body
    return body if priority is None else with_members(body, {"priority": str(priority)})


def _request_headers(shaped: ShapedRequest) -> dict[str, str]:
    record = shaped.record
    headers = to_backend(
        shaped.incoming.headers, record.upstream_id, authorization=not record.tenant
    )
    if record.span is not None:
        headers |= record.span.headers()
    return headers
