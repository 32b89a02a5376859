"""The public port: which paths exist, and what each request goes through.

Raw paths against an allow-list: nothing else of a backend is reachable, however it is spelled.
"""

import asyncio
from functools import partial

import aiohttp
from aiohttp import HttpVersion10, web

from forebay.proxy import errors
from forebay.proxy.backends import UPSTREAM_FAULTS, Backends, read_all
from forebay.proxy.client_body import read_client_body
from forebay.proxy.config import Config
from forebay.proxy.core.model import Send
from forebay.proxy.driver import Driver, Rejected
from forebay.proxy.errors import ApiError
from forebay.proxy.estimate import TokenEstimate
from forebay.proxy.headers import REQUEST_ID, SERVER, request_id, to_backend, to_client
from forebay.proxy.http_server import error_response
from forebay.proxy.metrics import ProxyMetrics
from forebay.proxy.prompt import read_body, salted
from forebay.proxy.relay import ANSWER_BYTES, Exchange, Relay
from forebay.proxy.security import Security

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
UNCACHED = ("/tokenize", "/detokenize")  # no prefix cache behind them, so no salt


class App:
    """Handles every request of the public port."""

    def __init__(
        self,
        config: Config,
        driver: Driver,
        backends: Backends,
        relay: Relay,
        metrics: ProxyMetrics,
        estimate: TokenEstimate,
        security: Security,
    ) -> None:
        self._config = config
        self._driver = driver
        self._backends = backends
        self._relay = relay
        self._metrics = metrics
        self._estimate = estimate
        self._security = security
        self._held_bytes = 0
        self._made = 0
        self.draining = False
        self.active = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def ready(self) -> bool:
        """Some backend takes work, and so do we."""
        return self._backends.any_up and not self.draining

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; errors become OpenAI-shaped here."""
        id_ = request_id(request.headers)
        bucket = ["none"]
        self.active += 1
        self.idle.clear()
        try:
            response = await self._route(request, id_, bucket)
        except ApiError as error:
            extra = {} if bucket == ["none"] else {"x-forebay-bucket": bucket[0]}
            response = error_response(error, id_, extra)
        except asyncio.CancelledError:
            self._metrics.client_gone.labels(bucket[0]).inc()
            raise
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()
        if not response.prepared:
            response.headers[REQUEST_ID] = id_
            response.headers["Server"] = SERVER
        if self.draining:
            response.force_close()
        self._metrics.answers.labels(bucket[0], str(response.status)).inc()
        return response

    async def _route(
        self, request: web.BaseRequest, id_: str, bucket: list[str]
    ) -> web.StreamResponse:
        if request.version < HttpVersion10:
            raise ApiError(505, "bad_http", "HTTP/1.0 or newer is needed.", close=True)
        raw = request.raw_path
        path = raw.partition("?")[0]
        if path in (CHAT, COMPLETIONS):
            self._allow(request, "POST")
            return await self._shaped(request, path, id_, bucket)
        if path == "/health":
            self._allow(request, "GET", "HEAD")
            return web.Response(status=200 if self.ready else 503)
        if path in self._config.routes:
            return await self._passed_on(request, raw, id_)
        raise ApiError(404, "not_found", "There is no such path here.")

    def _allow(self, request: web.BaseRequest, *methods: str) -> None:
        if request.method not in methods:
            raise ApiError(
                405,
                "method_not_allowed",
                f"Use {methods[0]}.",
                headers={"Allow": ", ".join(methods)},
            )

    async def _body(self, request: web.BaseRequest) -> bytes:
        limits, patience_s = self._config.limits, self._config.timeouts.client_body
        # Reserved before it is read: a burst must not be taken in and refused afterwards.
        if self._held_bytes + (request.content_length or 0) > limits.queue_bytes:
            raise errors.overfull()
        body = await read_client_body(request, limits.body, patience_s)
        if self._held_bytes + len(body) > limits.queue_bytes:
            raise errors.overfull()
        return body

    async def _shaped(
        self, request: web.BaseRequest, path: str, id_: str, bucket: list[str]
    ) -> web.StreamResponse:
        """A chat or completion: estimated, queued or refused, relayed."""
        arrived_at = self._driver.now
        tenant = self._security.auth.tenant(request, arrived_at)
        if self.draining:
            raise errors.draining()
        body = await self._body(request)
        self._made += 1
        asked = read_body(
            body,
            request.headers,
            id_=f"{id_}/{self._made}",  # clients may send one id twice; the books may not
            chat=path == CHAT,
            estimate=self._estimate,
            block_bytes=self._config.affinity.block_bytes,
            tenant=tenant,
            salts=self._security.salts,
        )
        body = asked.body
        self._held_bytes += len(body)
        try:
            async with self._driver.slot(asked.request) as grant:
                bucket[0] = grant.send.bucket
                exchange = Exchange(
                    request, path, body, asked, id_, arrived_at, partial(self._headers, id_)
                )
                return await self._relay.serve(exchange, grant)
        except Rejected as refused:
            bucket[0] = refused.action.bucket or "none"
            error = errors.rejected(refused.action, self._config.reject_status)
            error.headers = {
                **error.headers, "x-forebay-queue-ms": f"{refused.action.queued_s * 1e3:.1f}"
            }  # fmt: skip
            raise error from None
        finally:
            self._held_bytes -= len(body)

    def _headers(self, id_: str, send: Send) -> dict[str, str]:
        """What every answer to a shaped request says about its way."""
        headers = {
            REQUEST_ID: id_,
            "Server": SERVER,
            "x-forebay-queue-ms": f"{send.queued_s * 1e3:.1f}",
            "x-forebay-bucket": send.bucket,
        }
        if self._config.debug_headers:
            headers["x-forebay-backend"] = send.backend
            headers["x-forebay-predicted-ms"] = f"{send.predicted_ttft_s * 1e3:.1f}"
        return headers

    async def _passed_on(self, request: web.BaseRequest, raw: str, id_: str) -> web.StreamResponse:
        """A path that is not shaped: to any backend that is up, answer read whole."""
        self._allow(request, "GET", "POST", "HEAD")
        tenant = self._security.auth.tenant(request, self._driver.now)
        if self.draining:
            raise errors.draining()
        upstream = self._backends.next_up()
        if upstream is None:
            raise ApiError(
                503, "no_backend_available", "No backend is available.", errors.SERVER,
                headers=errors.retry_headers(1.0),
            )  # fmt: skip
        body = await self._body(request)
        salts = self._security.salts
        if body and salts and raw.partition("?")[0] not in UNCACHED:
            body = salted(body, request.content_type, tenant, salts)
        try:
            async with (
                asyncio.timeout(self._config.timeouts.first_token),
                self._backends.request(
                    request.method,
                    upstream,
                    raw,
                    body,
                    to_backend(request.headers, id_, authorization=not tenant),
                ) as response,
            ):
                if 300 <= response.status < 400:
                    raise errors.upstream_error()
                answer = await read_all(response, ANSWER_BYTES)
        except TimeoutError:
            raise errors.upstream_timeout() from None
        except UPSTREAM_FAULTS as error:
            if isinstance(error, aiohttp.ClientConnectorError):
                self._backends.connect_failed(upstream.name)
            raise errors.upstream_error() from error
        return web.Response(
            status=response.status, headers=to_client(response.headers), body=answer
        )
