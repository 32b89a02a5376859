"""Forward one granted request and relay its answer, event by event, byte for byte.

Nothing is sent to the client before the backend's first event has been seen: until then a failure
is retried once on another backend, within a budget (`retries.py`). Afterwards a failure is
signalled: one error event, then the framing is broken. Never a clean end, never `[DONE]`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar

import aiohttp
from aiohttp import web

from forebay.proxy.api.body import ParsedBody
from forebay.proxy.api.prefix_request import piece_of
from forebay.proxy.api.token_estimate import TokenEstimate
from forebay.proxy.backends import AnswerTooLarge, Backends, Upstream, read_all
from forebay.proxy.config.schema import Config
from forebay.proxy.driver import Grant, Rejected
from forebay.proxy.http1 import errors
from forebay.proxy.http1.client import ConnectFault, LocalShortage, LostConnection, UpstreamResponse
from forebay.proxy.http1.errors import ApiError
from forebay.proxy.http1.headers import to_backend, to_client
from forebay.proxy.http1.sse import EventTooLarge
from forebay.proxy.kv_events.tokenize import Translator
from forebay.proxy.relay.failures import Failure, check_head, check_status, check_type, check_whole
from forebay.proxy.relay.retries import RetryBudget, Tries
from forebay.proxy.relay.stream import UPSTREAM_ERRORS, Stream, StreamCallbacks
from forebay.proxy.relay.timeouts import Limit, Watchdog
from forebay.proxy.telemetry.metrics import ProxyMetrics
from forebay.proxy.telemetry.record import RequestRecord

T = TypeVar("T")
ENGINELESS = ("/tokenize", "/detokenize")  # as GETs: the API server answers, its engine dead or not


@dataclass(slots=True)
class ShapedRequest:
    """One request on its way: what came from the client and what is to be told."""

    incoming: web.BaseRequest
    path: str
    body: bytes
    asked: ParsedBody
    id: str
    record: RequestRecord
    reply_headers: Callable[[], dict[str, str]]


class Attempt:
    """One request at one backend, before the first byte of its answer."""

    def __init__(self, upstream: Upstream, tries: Tries, limit: Limit) -> None:
        self.upstream = upstream
        self.tries = tries
        self.limit = limit
        self.ended: Literal["", "hang", "draining"] = ""

    def end(self, why: Literal["hang", "draining"]) -> None:
        if not self.ended and not self.limit.expired:
            self.ended = why
            self.limit.end()


class _Trying:
    """An attempt while it is under way; of its end its backend's health hears."""

    __slots__ = ("_attempt", "_attempts", "_backends", "_request_id")

    def __init__(
        self, attempt: Attempt, attempts: dict[Attempt, None], backends: Backends, request_id: str
    ) -> None:
        self._attempt = attempt
        self._attempts = attempts
        self._backends = backends
        self._request_id = request_id

    def __enter__(self) -> Attempt:
        self._attempts[self._attempt] = None
        return self._attempt

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        name = self._attempt.upstream.name
        try:
            if isinstance(error, Failure):
                self._backends.judge(name, self._request_id, error)
            elif error is not None:
                self._backends.left(name, self._request_id)
        finally:
            del self._attempts[self._attempt]
        if error is None:
            self._backends.answered(name, self._request_id)


class Relay:
    def __init__(
        self,
        config: Config,
        backends: Backends,
        watchdog: Watchdog,
        metrics: ProxyMetrics,
        estimate: TokenEstimate,
    ) -> None:
        self._config = config
        self._backends = backends
        self._watchdog = watchdog
        self._metrics = metrics
        self._estimate = estimate
        self._attempts: dict[Attempt, None] = {}  # the oldest first: they go elsewhere first
        self._ending = False
        self.translator: Translator | None = None  # is offered the prompts that were computed
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self.budget = RetryBudget()
        backends.on_hang = self._give_up
        watchdog.on_tick = self._end_late

    def reconfigure(self, config: Config) -> None:
        """Requests that are sent from now on find this configuration."""
        self._config = config

    async def serve(self, exchange: ShapedRequest, grant: Grant) -> web.StreamResponse:
        """The answer, sent or ready to be sent; raises ApiError."""
        with Tries(self.budget) as tries:
            while True:
                upstream = self._backends.upstreams[grant.send.backend]
                try:
                    if grant.send.piece_blocks:
                        told = await self._compute(exchange, grant, upstream, tries)
                        exchange.record.piece(*told or (None, 0))
                        send = await grant.computed(*told) if told else await grant.not_in_pieces()
                        exchange.record.sent(send, self._clock())
                        continue
                    return await self._attempt(exchange, grant, upstream, tries)
                except Failure as failure:
                    self._metrics.upstream_error(upstream.name, failure.kind)
                    # A fleet that declines as one is not asked twice as often for it.
                    hopeless = failure.declined and not self._backends.others_willing(upstream)
                    if not hopeless and tries.again(failure.retry):
                        self._metrics.retries.labels(upstream.name).inc()
                        try:
                            send = await grant.retry()
                            exchange.record.sent(send, self._clock())
                            continue
                        except Rejected:
                            pass  # nowhere else to go: the first backend's answer stands
                    if isinstance(failure.answer, ApiError):
                        raise failure.answer from failure
                    return failure.answer

    async def send_whole(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Send an answer that is ready; a client that does not take it is cut off."""
        with self._watchdog.watching(request, None) as watch:
            watch.writing_since = self._clock()
            try:
                await response.prepare(request)
                await response.write_eof()
            except (ConnectionError, aiohttp.ClientConnectionError):
                pass  # it has gone

    async def taken(self, request: web.BaseRequest) -> None:
        """Until the client has taken what was written; one that does not is cut off.

        Writing waits only while more than 64 KiB are left: nobody would look after these, and a
        proxy that ends would lose them.
        """
        transport = request.transport
        if transport is None or not transport.get_write_buffer_size():
            return
        await asyncio.sleep(0)  # uvloop writes at the end of the turn: mostly that is all
        if transport.is_closing() or not transport.get_write_buffer_size():
            return
        with self._watchdog.watching(request, None) as watch:
            watch.writing_since = self._clock()
            transport.set_write_buffer_limits(0)  # so that `drain` waits for all of it
            try:
                await request.writer.drain()
            except (ConnectionError, aiohttp.ClientConnectionError):
                return  # it has gone
            if not transport.is_closing():
                transport.set_write_buffer_limits()

    def end_all(self) -> None:
        """End what has not ended by itself: streams with an error event, the rest with a 503.

        What is sent to a backend from now on, for a slot was freed, is a 503 too.
        """
        self._ending = True
        for attempt in self._attempts:
            attempt.end("draining")
        self._watchdog.end_all("the proxy is shutting down")

    def _end_late(self, now: float) -> None:
        for attempt in self._attempts:
            if now > attempt.limit.at:
                attempt.limit.end()

    def _give_up(self, upstream: Upstream) -> None:
        """The backend hangs: ask another one for what it has not begun to answer."""
        for attempt in self._attempts:
            if attempt.upstream is upstream and not (attempt.ended or attempt.tries.spent):
                if not self._backends.others_up(upstream) or not attempt.tries.reserve():
                    break
                attempt.end("hang")

    async def _attempt(
        self, exchange: ShapedRequest, grant: Grant, upstream: Upstream, tries: Tries
    ) -> web.StreamResponse:
        """Ask one backend; raises Failure while nothing has been sent to the client."""
        with self._trying(grant, upstream, tries, seen=exchange.asked.streams) as attempt:
            answer = await self._begin(exchange, grant, attempt)
        return await answer.relay() if isinstance(answer, Stream) else answer

    async def _compute(
        self, exchange: ShapedRequest, grant: Grant, upstream: Upstream, tries: Tries
    ) -> tuple[int | None, int] | None:
        """Have a backend compute a piece of the prompt; raises Failure.

        Returns how much of it was cached and how long it was, in tokens, None and 0 if it does not
        say. None if the prompt cannot be cut there or the backend refuses the piece: what it finds
        wrong with that it may say of the whole.
        """
        asked = exchange.asked
        length = grant.send.piece_blocks * asked.block_bytes
        body = await piece_of(exchange.body, length, chat=asked.chat)
        if body is None:
            return None
        with self._trying(grant, upstream, tries, seen=True) as attempt:
            answer = await self._within(attempt, self._ask_for_piece(exchange, upstream, body))
        if answer.status != 200:
            return None
        assert isinstance(answer.body, bytes)
        tokens, cached_tokens, _ = _counted(check_whole(200, answer.body).get("usage"))
        return cached_tokens, tokens

    def _trying(self, grant: Grant, upstream: Upstream, tries: Tries, *, seen: bool) -> _Trying:
        """An attempt at one backend.

        Args:
            seen: its first token is.
        """
        if self._ending:
            raise errors.draining()
        timeouts = self._config.timeouts
        self._backends.sent(grant.send, seen=seen)
        limit_s = timeouts.first_token if seen else timeouts.whole_answer
        attempt = Attempt(upstream, tries, Limit(self._clock() + limit_s, self._loop))
        return _Trying(attempt, self._attempts, self._backends, grant.send.request.id)

    async def _within(self, attempt: Attempt, asking: Awaitable[T]) -> T:
        """What comes of it until the attempt's limit; raises Failure where something goes wrong."""
        try:
            with attempt.limit:
                return await asking
        except TimeoutError as error:
            raise self._too_late(attempt) from error
        except UPSTREAM_ERRORS as error:
            raise self._fault(error) from error

    async def _ask_for_piece(
        self, exchange: ShapedRequest, upstream: Upstream, body: bytes
    ) -> web.Response:
        response = await self._backends.open(
            "POST", upstream, exchange.path, body, self._to_backend(exchange)
        )
        try:
            check_head(response)
            check_type(response, False)
            return await self._whole(exchange.incoming, upstream, response, {})
        finally:
            response.close()

    def _to_backend(self, exchange: ShapedRequest) -> dict[str, str]:
        """Headers of what is sent for the request."""
        headers = to_backend(
            exchange.incoming.headers, exchange.id, authorization=not exchange.record.tenant
        )
        if exchange.record.span is not None:
            headers |= exchange.record.span.headers()
        return headers

    async def _begin(
        self, exchange: ShapedRequest, grant: Grant, attempt: Attempt
    ) -> Stream | web.Response:
        """The first event of a stream, or the whole of another answer; raises Failure."""
        upstream = attempt.upstream
        answer = await self._within(attempt, self._ask(exchange, grant, upstream))
        if isinstance(answer, Stream):
            return answer
        assert isinstance(answer.body, bytes)
        usage = check_whole(answer.status, answer.body).get("usage")
        if answer.status == 200 and exchange.asked.request.streams:
            grant.first_token()  # an answer of one token: its end is its first
        if answer.status == 200:
            self._computed(exchange, upstream)
            if isinstance(usage, dict):
                self._used(exchange, grant, upstream, usage)
        return answer

    async def _ask(
        self, exchange: ShapedRequest, grant: Grant, upstream: Upstream
    ) -> Stream | web.Response:
        streams = exchange.asked.streams
        response = await self._backends.open(
            "POST", upstream, exchange.path, exchange.body, self._to_backend(exchange)
        )
        begun = False
        try:
            check_head(response)
            check_type(response, streams)
            reply = exchange.reply_headers()
            if streams and response.status == 200:
                told = StreamCallbacks(
                    self._first_event(exchange, grant, upstream),
                    lambda usage: self._used(exchange, grant, upstream, usage),
                    lambda: self._cut(exchange, upstream),
                )
                stream = Stream(exchange.incoming, upstream, response, reply, told, self._watchdog)
                await stream.first_event()
                begun = True
                return stream
            return await self._whole(exchange.incoming, upstream, response, reply)
        finally:
            if not begun:
                response.close()

    async def _whole(
        self,
        incoming: web.BaseRequest,
        upstream: Upstream,
        response: UpstreamResponse,
        headers: dict[str, str],
    ) -> web.Response:
        """An answer that is no stream: read whole, then given on."""
        clock = self._clock
        with self._watchdog.watching(incoming, response) as watch:

            def heard() -> None:
                watch.reading_since = clock()
                upstream.heard = True

            heard()
            body = await read_all(response, self._config.limits.answer, heard)
        headers = {**headers, **to_client(response.headers)}
        answer = web.Response(status=response.status, headers=headers, body=body)
        check_status(response, answer)
        return answer

    def _too_late(self, attempt: Attempt) -> Failure:
        if attempt.ended == "hang":
            return Failure("hang", errors.upstream_timeout(), "reserved")
        if attempt.ended == "draining":
            return Failure("draining", errors.draining(), "never", "nothing")
        # The prefill may be under way: a second one elsewhere would double the load.
        return Failure("timeout", errors.upstream_timeout(), "never")

    def _fault(self, error: Exception) -> Failure:
        if isinstance(error, ConnectFault):
            return Failure("connect", errors.no_backend(), "refused", "refused")
        if isinstance(error, LocalShortage):
            # On the way to another backend we would lack the same.
            return Failure("shortage", errors.overloaded(), "never", "nothing")
        if isinstance(error, (AnswerTooLarge, EventTooLarge)):  # it would be as large elsewhere
            return Failure("too_large", errors.answer_too_large(error.limit), "never", "nothing")
        retry: Literal["lost", "shared"] = "lost" if isinstance(error, LostConnection) else "shared"
        return Failure("before_first_byte", errors.upstream_error(), retry)

    async def pass_on(
        self,
        incoming: web.BaseRequest,
        target: str,
        body: bytes,
        id_: str,
        tenant: str,
        reply: dict[str, str],
    ) -> web.StreamResponse:
        """A path that is not shaped: to any backend that takes work; raises ApiError.

        Args:
            reply: headers of an answer that is a stream.
        """
        headers = to_backend(incoming.headers, id_, authorization=not tenant)
        upstream, failure = self._backends.next_up(), None
        with Tries(self.budget) as tries:
            while upstream is not None:
                if self._ending:
                    raise errors.draining()
                asking = self._ask_unshaped(upstream, incoming, target, body, headers, reply)
                try:
                    answer = await self._pass_to(upstream, tries, asking)
                    # An answer without the engine proves as little as /health does: if it counted,
                    # one that fails all else would never be put out while /v1/models is polled.
                    if incoming.method == "POST" and target.partition("?")[0] not in ENGINELESS:
                        self._backends.answered(upstream.name, "")
                    return await answer.relay() if isinstance(answer, Stream) else answer
                except Failure as failed:
                    failure = failed
                    self._backends.judge(upstream.name, "", failed)
                    self._metrics.upstream_error(upstream.name, failed.kind)
                    tried = upstream
                    # A refusal is not an attempt, but here nothing else bounds their number.
                    again = "lost" if failed.retry == "refused" else failed.retry
                    upstream = self._backends.next_up(tried) if tries.again(again) else None
        if failure is None:
            raise errors.no_backend()
        if isinstance(failure.answer, ApiError):
            raise failure.answer from failure
        return failure.answer

    async def _pass_to(self, upstream: Upstream, tries: Tries, asking: Awaitable[T]) -> T:
        """What comes of `asking` it, within the limit of a first token; raises Failure."""
        limit_s = self._config.timeouts.first_token
        attempt = Attempt(upstream, tries, Limit(self._clock() + limit_s, self._loop))
        self._attempts[attempt] = None
        try:
            return await self._within(attempt, asking)
        finally:
            del self._attempts[attempt]

    async def _ask_unshaped(
        self,
        upstream: Upstream,
        incoming: web.BaseRequest,
        target: str,
        body: bytes,
        headers: dict[str, str],
        reply: dict[str, str],
    ) -> Stream | web.Response:
        # HEAD is GET, less its body.
        method = "POST" if incoming.method == "POST" else "GET"
        response = await self._backends.open(method, upstream, target, body, headers)
        begun = False
        try:
            check_head(response)
            streams = response.content_type == "text/event-stream"
            if streams and response.status == 200 and method == "POST":
                told = StreamCallbacks(lambda: None, lambda _: None, lambda: self._lost(upstream))
                stream = Stream(
                    incoming, upstream, response, reply, told, self._watchdog,
                    until_done=False,  # /v1/responses ends without it
                )  # fmt: skip
                await stream.first_event()
                begun = True
                return stream
            return await self._whole(incoming, upstream, response, {})
        finally:
            if not begun:
                response.close()

    def _used(
        self, exchange: ShapedRequest, grant: Grant, upstream: Upstream, usage: dict[str, Any]
    ) -> None:
        """Learn from the usage of an answer; what makes no sense teaches nothing."""
        prompt_tokens, known, output_tokens = _counted(usage)
        if not prompt_tokens:
            return
        grant.used(output_tokens, known, prompt_tokens)
        exchange.record.used(prompt_tokens, known or 0, output_tokens)
        self._metrics.used(upstream.name, prompt_tokens, exchange.record.cached_tokens)
        asked = exchange.asked
        self._estimate.learn(asked.prompt_bytes, prompt_tokens, asked.request.tenant)

    def _computed(self, exchange: ShapedRequest, upstream: Upstream) -> None:
        """Its engine holds the prompt now: the body that was really sent says which."""
        if self.translator is not None:
            self.translator.offer(exchange.body, exchange.asked, upstream)

    def _first_event(
        self, exchange: ShapedRequest, grant: Grant, upstream: Upstream
    ) -> Callable[[], None]:
        """The backend has given its first output: the core and the metrics hear of it."""
        clock = self._clock
        sent_at, send = clock(), grant.send

        def told() -> None:
            now = clock()
            grant.first_token()
            self._computed(exchange, upstream)
            exchange.record.first_token(now)
            self._metrics.first_token(send.bucket, now - exchange.record.arrived_at)
            self._metrics.predicted(send.bucket, (now - sent_at) / max(1e-6, send.predicted_ttft_s))

        return told

    def _cut(self, exchange: ShapedRequest, upstream: Upstream) -> None:
        exchange.record.reason = "upstream_stream_error"
        self._lost(upstream)

    def _lost(self, upstream: Upstream) -> None:
        """A stream of its has ended too early."""
        self._metrics.upstream_error(upstream.name, "mid_stream")
        upstream.poke.set()  # it may have died: ask its health now


def _counted(usage: object) -> tuple[int, int | None, int]:
    """Tokens of the prompt, of it cached (None if not said) and of the answer; 0 for nonsense."""
    if not isinstance(usage, dict):
        return 0, None, 0
    prompt_tokens = usage.get("prompt_tokens")
    if not isinstance(prompt_tokens, int) or prompt_tokens < 0:
        return 0, None, 0
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    known = min(cached, prompt_tokens) if isinstance(cached, int) and cached >= 0 else None
    output = usage.get("completion_tokens")
    return prompt_tokens, known, output if isinstance(output, int) and output >= 0 else 0
