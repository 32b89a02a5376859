"""Forward one granted request and relay its answer, event by event, byte for byte.

Nothing is sent to the client before the backend's first event has been seen: until then a failure
is retried once on another backend, within a budget. Afterwards a failure is signalled: one error
event, then the framing is broken. Never a clean end, never `[DONE]`.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import aiohttp
import orjson
from aiohttp import web

from forebay.proxy.backends import UPSTREAM_FAULTS, Backends, Upstream, read_all
from forebay.proxy.config import Config
from forebay.proxy.core.model import Send
from forebay.proxy.driver import Grant, Rejected
from forebay.proxy.errors import ApiError, stream_error_event, upstream_error, upstream_timeout
from forebay.proxy.estimate import TokenEstimate
from forebay.proxy.headers import to_backend, to_client
from forebay.proxy.metrics import ProxyMetrics
from forebay.proxy.prompt import Asked
from forebay.proxy.sse import EventScanner, MalformedStream, parse_event
from forebay.proxy.translate import Translator
from forebay.proxy.watchdog import Stalled, Watch, Watchdog

ANSWER_BYTES = 64 << 20
RETRY_LEAST, RETRY_SHARE = 3, 0.1  # retries at once: of the requests at once
RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})
UPSTREAM_ERRORS = (*UPSTREAM_FAULTS, MalformedStream, Stalled)


class ClientGone(Exception):
    """The client cannot be written to any more."""


@dataclass(slots=True)  # not frozen: contextlib assigns an exception's traceback
class Failure(Exception):
    """The backend failed before the client was sent anything.

    Attributes:
        kind: for the metrics.
        answer: what the client gets if nobody else answers.
        retry: another backend may be asked.
    """

    kind: str
    answer: ApiError | web.Response
    retry: bool = True


@dataclass(slots=True)
class Exchange:
    """One request on its way: what came from the client and what is to be told."""

    incoming: web.BaseRequest
    path: str
    body: bytes
    asked: Asked
    id: str
    arrived_at: float
    reply_headers: Callable[[Send], dict[str, str]]


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
        self._active = 0
        self._retrying = 0
        self.translator: Translator | None = None  # is offered the prompts that were computed

    async def serve(self, exchange: Exchange, grant: Grant) -> web.StreamResponse:
        """The answer, sent or ready to be sent; raises ApiError."""
        self._active += 1
        retried = False
        try:
            while True:
                upstream = self._backends.upstreams[grant.send.backend]
                try:
                    return await self._attempt(exchange, grant, upstream)
                except Failure as failure:
                    self._metrics.upstream_errors.labels(upstream.name, failure.kind).inc()
                    if failure.retry and not retried and self._may_retry():
                        retried = True
                        self._retrying += 1
                        self._metrics.retries.labels(upstream.name).inc()
                        try:
                            await grant.retry()
                            continue
                        except Rejected:
                            pass  # nowhere else to go: the first backend's answer stands
                    if isinstance(failure.answer, ApiError):
                        raise failure.answer from failure
                    return failure.answer
        finally:
            self._active -= 1
            self._retrying -= retried

    def _may_retry(self) -> bool:
        return self._retrying < max(RETRY_LEAST, RETRY_SHARE * self._active)

    async def _attempt(
        self, exchange: Exchange, grant: Grant, upstream: Upstream
    ) -> web.StreamResponse:
        """Ask one backend; raises Failure while nothing has been sent to the client."""
        response: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout(self._config.timeouts.first_token):
                response = await self._open(exchange, upstream)
                self._backends.connected(upstream.name)
                if not _is_stream(response):
                    return await self._whole(exchange, grant, upstream, response)
                stream = Stream(self, exchange, grant, upstream, response)
                await stream.first_event()
        except aiohttp.ClientConnectorError as error:
            self._backends.connect_failed(upstream.name)
            raise Failure("connect", upstream_error()) from error
        except TimeoutError as error:
            if isinstance(error, aiohttp.ServerTimeoutError):  # the connect timeout
                self._backends.connect_failed(upstream.name)
                raise Failure("connect", upstream_error()) from error
            # The prefill may be under way: a second one elsewhere would double the load.
            raise Failure("timeout", upstream_timeout(), retry=False) from error
        except UPSTREAM_ERRORS as error:
            raise Failure("before_first_byte", upstream_error()) from error
        else:
            return await stream.relay()
        finally:
            if response is not None:
                response.close()  # not released: what was not read must not be waited for

    async def _open(self, exchange: Exchange, upstream: Upstream) -> aiohttp.ClientResponse:
        headers = to_backend(exchange.incoming.headers, exchange.id)
        response = await self._backends.request(
            "POST", upstream, exchange.path, exchange.body, headers
        )
        if 300 <= response.status < 400:
            response.close()
            raise Failure("redirect", upstream_error(), retry=False)
        return response

    async def _whole(
        self,
        exchange: Exchange,
        grant: Grant,
        upstream: Upstream,
        response: aiohttp.ClientResponse,
    ) -> web.Response:
        """An answer that is no stream: read whole, then given on."""
        with self._watchdog.watching(exchange.incoming, response) as watch:
            watch.reading_since = asyncio.get_running_loop().time()
            body = await read_all(response, ANSWER_BYTES)
        headers = {**exchange.reply_headers(grant.send), **to_client(response.headers)}
        answer = web.Response(status=response.status, headers=headers, body=body)
        if response.status in RETRIED_STATUSES:
            raise Failure(str(response.status), answer)
        if response.status == 200:
            fields = _fields(body)
            choices = fields.get("choices")
            if any(
                isinstance(choice, dict) and choice.get("finish_reason") == "abort"
                for choice in (choices if isinstance(choices, list) else ())
            ):
                raise Failure("abort", upstream_error())
            usage = fields.get("usage")
            self.used(exchange, grant, upstream, usage if isinstance(usage, dict) else {})
            self._computed(exchange, upstream)
        return answer

    def _computed(self, exchange: Exchange, upstream: Upstream) -> None:
        if self.translator is not None:
            self.translator.offer(exchange.body, exchange.asked, upstream)

    def used(
        self, exchange: Exchange, grant: Grant, upstream: Upstream, usage: dict[str, object]
    ) -> None:
        """Learn from the usage of an answer."""
        prompt_tokens = usage.get("prompt_tokens")
        if not isinstance(prompt_tokens, int):
            return
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        cached_tokens = cached if isinstance(cached, int) else None
        self._metrics.used(upstream.name, prompt_tokens, cached_tokens or 0)
        grant.prompt_cached(cached_tokens, prompt_tokens)
        self._estimate.learn(exchange.asked.prompt_bytes, prompt_tokens)

    def first_event(self, exchange: Exchange, grant: Grant, sent_at: float) -> None:
        """The backend has given its first output: the core and the metrics hear of it."""
        now = asyncio.get_running_loop().time()
        grant.first_token()
        send = grant.send
        self._computed(exchange, self._backends.upstreams[send.backend])
        self._metrics.first_token(send.bucket, now - exchange.arrived_at)
        self._metrics.prediction.labels(send.bucket).observe(
            (now - sent_at) / max(1e-6, send.predicted_ttft_s)
        )

    def watching(
        self, exchange: Exchange, response: aiohttp.ClientResponse
    ) -> AbstractContextManager[Watch]:
        return self._watchdog.watching(exchange.incoming, response)

    def cut(self, upstream: Upstream) -> None:
        self._metrics.upstream_errors.labels(upstream.name, "mid_stream").inc()


class Stream:
    """One streamed answer: the first event, then the rest."""

    def __init__(
        self,
        relay: Relay,
        exchange: Exchange,
        grant: Grant,
        upstream: Upstream,
        response: aiohttp.ClientResponse,
    ) -> None:
        self._relay = relay
        self._exchange = exchange
        self._grant = grant
        self._upstream = upstream
        self._response = response
        self._scanner = EventScanner()
        self._clock = asyncio.get_running_loop().time
        self._sent_at = self._clock()
        self._ready = bytearray()  # whole events, received and not yet given on
        self._usage: dict[str, object] = {}
        self._done = False
        self._failed = False

    async def first_event(self) -> None:
        """Wait for the first event that is no comment; raises Failure if it is an error."""
        seen = False
        while not seen:
            chunk = await self._response.content.readany()
            if not chunk:
                raise aiohttp.ClientPayloadError("the stream ended before its first event")
            for raw, payload in self._scanner.events(chunk):
                if payload and not seen:
                    seen = True
                    self._check_first(payload)
                self._take(raw, payload)

    def _check_first(self, payload: bytes) -> None:
        """A 503 can arrive as the first event of a 200: then it is the status."""
        if payload == b"[DONE]":
            raise Failure("empty", upstream_error())
        event = parse_event(payload)
        if event.error is not None:
            code = event.error.get("code")
            status = code if isinstance(code, int) and 400 <= code < 600 else 502
            body = orjson.dumps({"error": event.error})
            headers = self._exchange.reply_headers(self._grant.send)
            headers["content-type"] = "application/json"
            answer = web.Response(status=status, headers=headers, body=body)
            raise Failure(f"first_event_{status}", answer, retry=status in RETRIED_STATUSES)
        if event.finish_reason == "abort":
            raise Failure("abort", upstream_error())
        self._relay.first_event(self._exchange, self._grant, self._sent_at)

    async def relay(self) -> web.StreamResponse:
        """Give on what has come and what comes."""
        incoming = self._exchange.incoming
        headers = self._exchange.reply_headers(self._grant.send)
        headers |= to_client(self._response.headers)
        outgoing = web.StreamResponse(status=self._response.status, headers=headers)
        with self._relay.watching(self._exchange, self._response) as watch:
            try:
                await outgoing.prepare(incoming)
                if await self._to_the_end(outgoing, watch):
                    await outgoing.write_eof()
                else:
                    self._ready += stream_error_event()
                    await self._give_on(outgoing, watch)
                    self._relay.cut(self._upstream)
                    if incoming.transport is not None:
                        incoming.transport.close()  # flushes, and leaves out the last chunk
            except ClientGone:
                pass  # its connection is lost: aiohttp cancels or ends this handler
        return outgoing

    async def _to_the_end(self, outgoing: web.StreamResponse, watch: Watch) -> bool:
        """Give events on until the stream ends; whether it ended as it should."""
        while not self._failed:
            await self._give_on(outgoing, watch)
            watch.reading_since = self._clock()
            try:
                chunk = await self._response.content.readany()
                for raw, payload in self._scanner.events(chunk):
                    self._take(raw, payload)
            except UPSTREAM_ERRORS:
                return False
            finally:
                watch.reading_since = None
            if not chunk:
                return self._done and not self._failed and not self._scanner.mid_event
        return False

    def _take(self, raw: bytes, payload: bytes) -> None:
        """Look at one event, and keep it to be given on unless it ends the stream badly."""
        if self._failed:
            return
        if payload == b"[DONE]":
            self._done = True
        elif b'"usage"' in payload or b'"abort"' in payload or b'"error"' in payload:
            event = parse_event(payload)
            if event.error is not None or event.finish_reason == "abort":
                self._failed = True
                return
            if event.usage is not None and event.usage.get("completion_tokens"):
                self._usage = event.usage
        if self._done and self._usage:
            self._relay.used(self._exchange, self._grant, self._upstream, self._usage)
            self._usage = {}
        self._ready += raw

    async def _give_on(self, outgoing: web.StreamResponse, watch: Watch) -> None:
        if self._ready:
            data, self._ready = bytes(self._ready), bytearray()
            watch.writing_since = self._clock()
            try:
                await outgoing.write(data)
            except (ConnectionError, aiohttp.ClientConnectionError) as error:
                raise ClientGone from error  # never to be taken for the backend's failure
            watch.writing_since = None


def _is_stream(response: aiohttp.ClientResponse) -> bool:
    return response.status == 200 and response.content_type == "text/event-stream"


def _fields(body: bytes) -> dict[str, object]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}
