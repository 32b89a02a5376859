"""Serve a shaped request: send it to its backend, and relay the response byte for byte.

Read `Relay.serve` from the top. Nothing but heartbeats is sent to the client before the backend's
first event has been seen. Until then a failure is retried once on another backend, within a budget
(`retries.py`). A later failure is signalled by an error event and a broken connection: never by a
clean end, and never with `[DONE]`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from forebay.proxy.api.body import ParsedBody
from forebay.proxy.api.dialects import RESPONSES
from forebay.proxy.api.members import with_member
from forebay.proxy.api.token_estimate import TokenEstimate
from forebay.proxy.backends.pool import Backends
from forebay.proxy.backends.probes import Upstream
from forebay.proxy.backends.served_models import must_be_home
from forebay.proxy.driver import Grant, Rejected
from forebay.proxy.http1.errors import upstream_error
from forebay.proxy.http1.headers import to_backend
from forebay.proxy.http1.server.byte_budget import RequestMemory
from forebay.proxy.kv_events.tokenize import Translator
from forebay.proxy.relay.attempts import Attempt, Attempts
from forebay.proxy.relay.delivery import Opening
from forebay.proxy.relay.failures import NO_MODEL, Failure, check_head, check_type, check_whole
from forebay.proxy.relay.kept_responses import KeptResponses
from forebay.proxy.relay.retries import Tries
from forebay.proxy.relay.stream import Stream, StreamListener
from forebay.proxy.relay.timeouts import Watchdog
from forebay.proxy.relay.whole_answer import LargeAnswer
from forebay.proxy.telemetry.metrics.proxy_metrics import ProxyMetrics
from forebay.proxy.telemetry.record import RequestRecord

MOST_TOKENS = 1 << 24  # of a prompt or an output; a row of a capture has one number for each 512


@dataclass(slots=True)
class ShapedRequest:
    """A chat or completion that is being served.

    Attributes:
        body: the bytes for the backend, with the tenant's cache salt.
        parsed: what the policy knows of the body.
        id: the x-request-id.
        reply_headers: returns our headers of the response. They hold the queueing time, so it is
            called once the request has been sent.
        memory: the memory of the request and of its response.
        opening: of the response, before its first event.
        missed: the backend that was asked before does not have the model.
    """

    incoming: web.BaseRequest
    path: str
    body: bytes
    parsed: ParsedBody
    id: str
    record: RequestRecord
    reply_headers: Callable[[], dict[str, str]]
    memory: RequestMemory
    opening: Opening
    missed: bool = False


class Relay:
    """Serves shaped requests.

    Attributes:
        translator: is offered each prompt that a backend has computed.
        kept: responses that later requests may go on from.
        keeps: whether requests wait where no backend is up.
    """

    def __init__(
        self,
        attempts: Attempts,
        backends: Backends,
        watchdog: Watchdog,
        metrics: ProxyMetrics,
        estimate: TokenEstimate,
        translator: Translator,
    ) -> None:
        self.translator = translator
        self.kept = KeptResponses()
        self.keeps: Callable[[], bool] = lambda: False
        self._attempts = attempts
        self._backends = backends
        self._watchdog = watchdog
        self._metrics = metrics
        self._estimate = estimate
        self._clock = asyncio.get_running_loop().time

    async def serve(self, shaped: ShapedRequest, grant: Grant) -> web.StreamResponse:
        """Serve a request that has a slot; raises ApiError.

        Returns the response: a stream that has been sent, or a whole one that is yet to be sent.
        """
        with Tries(self._attempts.budget) as tries:
            while True:
                upstream = self._backends.upstreams[grant.send.backend]
                try:
                    return await self._send(shaped, grant, upstream, tries)
                except Failure as failure:
                    shaped.missed = failure.kind == NO_MODEL
                    if shaped.missed:
                        self._backends.models.forget(upstream, shaped.parsed.model)
                    self._metrics.upstream_error(upstream.name, failure.kind)
                    # A fleet that is busy as a whole must not get every request twice.
                    model = grant.send.request.model
                    hopeless = failure.declined and not self._backends.others_willing(
                        upstream, model
                    )
                    if hopeless or not tries.again(failure.retry):
                        return failure.result()
                    self._metrics.retries.of[(upstream.name,)].inc()
                    try:
                        send = await grant.retry(refused=failure.retry == "refused")
                    except Rejected:  # no other backend: the first one's response stands
                        if failure.retry == "refused" and self.keeps():
                            raise  # it may be up again soon
                        return failure.result()
                    shaped.record.sent(send, self._clock())

    async def _send(
        self, shaped: ShapedRequest, grant: Grant, upstream: Upstream, tries: Tries
    ) -> web.StreamResponse:
        """Ask one backend; raises Failure while only heartbeats have been sent to the client.

        Raises ApiError for an error that is too large for an event.
        """
        with self._attempts.start_shaped(
            grant, upstream, tries, shows_first_token=shaped.parsed.streams
        ) as attempt:
            response = await self._first_response(shaped, grant, attempt)
        # Not isinstance(response, web.Response): that class is abstract, which takes a Python call.
        if isinstance(response, LargeAnswer) and shaped.opening.close() is not None:
            response.close()
            raise upstream_error()
        return await response.relay() if isinstance(response, (Stream, LargeAnswer)) else response

    async def _first_response(
        self, shaped: ShapedRequest, grant: Grant, attempt: Attempt
    ) -> Stream | LargeAnswer | web.Response:
        """Wait for the first event of a stream, or for a whole response; raises Failure.

        Of a large response the beginning is enough: the engine has computed all of it by then.
        """
        upstream = attempt.upstream
        response = await self._attempts.within_limit(attempt, self._ask(shaped, grant, upstream))
        if shaped.missed and response.status == 200:
            self._backends.models.learn(upstream, shaped.parsed.model)
        if isinstance(response, Stream):
            return response
        usage, kept_id = None, None
        if isinstance(response, web.Response):
            assert isinstance(response.body, bytes)
            fields = check_whole(response.status, response.body)
            if fields is not None:
                usage, kept_id = fields.get("usage"), fields.get("id")
            elif response.status == 200:  # for another backend to compute it again would not help
                self._metrics.upstream_error(upstream.name, "not_json")
        if response.status == 200:
            if shaped.parsed.request.streams:
                grant.first_token()  # a response of one token: its end is its first token
            self.prompt_computed(shaped, upstream)
            if isinstance(usage, dict):
                self.usage_reported(shaped, grant, upstream, usage)
            if isinstance(kept_id, str):
                self.response_kept(shaped, upstream, kept_id)
        return response

    async def _ask(
        self, shaped: ShapedRequest, grant: Grant, upstream: Upstream
    ) -> Stream | LargeAnswer | web.Response:
        streams = shaped.parsed.streams
        response = await self._backends.open(
            "POST", upstream, shaped.path, _body(shaped, grant), _request_headers(shaped),
            grant.send.request.model, shaped.record.wrote,
        )  # fmt: skip
        relaying = False
        try:
            check_head(response)
            check_type(response, streams)
            reply = shaped.reply_headers()
            listener = ShapedStreamListener(self, shaped, grant, upstream)
            if streams and response.status == 200:
                stream = Stream(
                    shaped.incoming, upstream, response, reply, listener, self._watchdog,
                    memory=shaped.memory, dialect=shaped.parsed.dialect,
                    hides_usage=shaped.parsed.hides_usage, opening=shaped.opening,
                )  # fmt: skip
                await stream.first_event()
                relaying = True
                return stream
            answer = await self._attempts.read_whole(
                shaped.incoming, upstream, response, reply, shaped.memory, listener
            )
            relaying = isinstance(answer, LargeAnswer)
            return answer
        finally:
            if not relaying:
                response.close()

    def go_on(self, parsed: ParsedBody, *, owned: bool) -> None:
        """Let a request go on from an earlier response; raises ApiError 404, or 503 for a while.

        Args:
            owned: the id of that response was made for this tenant.
        """
        self.kept.go_on(parsed.request, parsed.previous_id, owned=owned)
        must_be_home(self._backends.upstreams, parsed.request.home)

    # What responses teach.

    def first_token(self, shaped: ShapedRequest, grant: Grant, upstream: Upstream) -> None:
        """Report the first output to the policy, the record and the metrics."""
        now = self._clock()
        grant.first_token()
        self.prompt_computed(shaped, upstream)
        shaped.record.first_token(now)
        self._metrics.first_token(shaped.record, now)

    def prompt_computed(self, shaped: ShapedRequest, upstream: Upstream) -> None:
        """Offer a prompt that the engine now holds for translation; the salted body counts."""
        wanted = self._backends.models.named(shaped.parsed.model)
        if wanted.may_be_adapter or not shaped.parsed.dialect.classic:
            return  # the engine keys its blocks by more; /tokenize reads no such body
        self.translator.offer(shaped.body, shaped.parsed, upstream)

    def usage_reported(
        self, shaped: ShapedRequest, grant: Grant, upstream: Upstream, usage: dict[str, Any]
    ) -> None:
        """Learn from the usage of a response; implausible counts teach nothing."""
        prompt_tokens, cached_tokens, output_tokens = usage_tokens(usage)
        if not prompt_tokens:
            return
        grant.report_usage(output_tokens, cached_tokens, prompt_tokens)
        shaped.record.used(prompt_tokens, cached_tokens or 0, output_tokens)
        self._metrics.used(upstream.name, prompt_tokens, shaped.record.cached_tokens)
        parsed = shaped.parsed
        self._estimate.learn(parsed.prompt_bytes, prompt_tokens, parsed.request.tenant)

    def response_kept(self, shaped: ShapedRequest, upstream: Upstream, id_: str) -> None:
        """Note where a response is kept, for requests that go on from it."""
        if shaped.parsed.dialect is RESPONSES:
            record = shaped.record
            tokens = record.prompt_tokens + record.output_tokens
            self.kept.add(id_, shaped.parsed.request, upstream.name, tokens)

    def stream_cut(self, shaped: ShapedRequest, upstream: Upstream) -> None:
        """A stream ended too early."""
        shaped.record.reason = "upstream_stream_error"
        self._metrics.upstream_error(upstream.name, "mid_stream")
        upstream.poke.set()  # the backend may have died: probe it now


class ShapedStreamListener(StreamListener):
    """Reports the events of one shaped stream."""

    __slots__ = ("_grant", "_relay", "_shaped", "_upstream")

    def __init__(
        self, relay: Relay, shaped: ShapedRequest, grant: Grant, upstream: Upstream
    ) -> None:
        self._relay = relay
        self._shaped = shaped
        self._grant = grant
        self._upstream = upstream

    def first_event(self) -> None:
        self._relay.first_token(self._shaped, self._grant, self._upstream)

    def usage(self, usage: dict[str, Any]) -> None:
        self._relay.usage_reported(self._shaped, self._grant, self._upstream, usage)

    def no_usage(self, events: int) -> None:
        self._grant.report_events(events)

    def response_kept(self, response_id: str) -> None:
        self._relay.response_kept(self._shaped, self._upstream, response_id)

    def cut(self) -> None:
        self._relay.stream_cut(self._shaped, self._upstream)


def _body(shaped: ShapedRequest, grant: Grant) -> bytes:
    """Return the body for the granted backend: with its place in an engine that orders by it."""
    priority = grant.send.priority
    return shaped.body if priority is None else with_member(shaped.body, "priority", str(priority))


def _request_headers(shaped: ShapedRequest) -> dict[str, str]:
    record = shaped.record
    headers = to_backend(
        shaped.incoming.headers, record.upstream_id, authorization=not record.tenant
    )
    if record.span is not None:
        headers |= record.span.headers()
    return headers


def usage_tokens(usage: object) -> tuple[int, int | None, int]:
    """Tokens of the prompt, those of it cached (None if not reported), tokens of the output.

    An implausible count is 0 or None. Chats and completions call them prompt and completion tokens;
    the other APIs input and output tokens. Anthropic's input tokens are without those read from a
    cache or written to it; where both are 0, vLLM may not report them.
    """
    if not isinstance(usage, dict):
        return 0, None, 0
    prompt, output = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    prompt_tokens = _count(usage.get(f"{prompt}_tokens"))
    if prompt_tokens is None:
        return 0, None, 0
    details = usage.get(f"{prompt}_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    read, written = (
        _count(usage.get(f"cache_{what}_input_tokens")) for what in ("read", "creation")
    )
    if read or written:
        cached = read or 0
        prompt_tokens += cached + (written or 0)
    known = None if cached is None else min(cached, prompt_tokens)
    return prompt_tokens, known, _count(usage.get(f"{output}_tokens")) or 0


def _count(value: object) -> int | None:
    """Return a number of tokens, such as 8 or 8.0; None if it is none that can be."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and 0 <= value <= MOST_TOKENS else None
