"""The public port: which paths exist, and what each request goes through.

Raw paths against an allow-list: nothing else of a backend is reachable, however it is spelled.
"""

import asyncio
from functools import partial

from aiohttp import web

from forebay.proxy.api.body import parse_any, read_fields, salted
from forebay.proxy.api.token_estimate import TokenEstimate
from forebay.proxy.backends import Backends
from forebay.proxy.config.schema import Config
from forebay.proxy.driver import Driver, Rejected
from forebay.proxy.http1 import errors
from forebay.proxy.http1.client_body import ByteBudget, Hold, read_client_body
from forebay.proxy.http1.cross_origin import Cors
from forebay.proxy.http1.errors import ApiError
from forebay.proxy.http1.headers import REQUEST_ID, SERVER, request_id
from forebay.proxy.http1.server import cannot_go_on, error_response
from forebay.proxy.relay.relay import Relay, ShapedRequest
from forebay.proxy.runtime.load_shedding import Protection
from forebay.proxy.security.guards import Security
from forebay.proxy.telemetry.metrics import ProxyMetrics
from forebay.proxy.telemetry.observers import Telemetry
from forebay.proxy.telemetry.record import CLIENT_GONE, RequestRecord

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
        telemetry: Telemetry,
        protection: Protection,
        security: Security,
    ) -> None:
        self._config = config
        self._driver = driver
        self._backends = backends
        self._relay = relay
        self._metrics = metrics
        self._estimate = estimate
        self._telemetry = telemetry
        self._protection = protection
        self._security = security
        self._budget = ByteBudget(config.limits.queue_bytes, config.reject_status)
        self._cors = Cors(config.cors_origins)
        self._made = 0
        self.leaving = False  # work is still taken, but connections are told to close
        self.draining = False  # and now no more work
        self.active = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def ready(self) -> bool:
        """Some backend takes work, and so do we."""
        return self._backends.any_up and not self.draining and not self.leaving

    def reconfigure(self, config: Config) -> None:
        """Requests that come from now on find this configuration."""
        self._config = config
        self._budget.limit = config.limits.queue_bytes
        self._budget.status = config.reject_status
        self._cors = Cors(config.cors_origins)

    @property
    def _held_bytes(self) -> int:
        return self._budget.held

    def end_all(self) -> None:
        """End what waits for a backend, or has been sent to one and not ended by itself."""
        self._relay.end_all()
        self._driver.end_waiting(errors.draining)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; it is active until the client has taken its answer."""
        self.active += 1
        self.idle.clear()
        try:
            response = await self._answered(request)
            await self._relay.taken(request)
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()
        return response

    async def _answered(self, request: web.BaseRequest) -> web.StreamResponse:
        """The answer, sent; errors become OpenAI-shaped here."""
        id_ = request_id(request.headers)
        record = RequestRecord(id_, self._driver.now)
        status = 500
        try:
            response = await self._route(request, id_, record)
            status = response.status
        except ApiError as error:
            record.reason = error.code
            response = error_response(error, id_, self._way(record))
            status = response.status
        except asyncio.CancelledError:
            status = CLIENT_GONE
            raise
        finally:
            self._telemetry.finished(record, status, self._driver.now)
        whole = not response.prepared
        if whole:
            response.headers[REQUEST_ID] = id_
            response.headers["Server"] = SERVER
            response.headers.update(self._cors.answer(request.headers))
        # One that was told to keep its connection may use it once more before we are gone.
        told = whole or response.headers.get("Connection") == "close"
        if self.draining or (self.leaving and told) or cannot_go_on(request):
            response.force_close()
        if whole:
            await self._relay.send_whole(request, response)
        return response

    async def _route(
        self, request: web.BaseRequest, id_: str, record: RequestRecord
    ) -> web.StreamResponse:
        raw = request.raw_path
        path = raw.partition("?")[0]
        if not (raw.isascii() and raw.startswith("/")) or "#" in raw:
            if raw == "*" and request.method == "OPTIONS":
                return web.Response(status=204, headers={"Allow": "GET, HEAD, POST, OPTIONS"})
            raise ApiError(
                400, "bad_http", "The request target must be a path in ASCII.", close=True
            )
        if path in (CHAT, COMPLETIONS):
            methods: tuple[str, ...] = ("POST",)
        elif path == "/health":
            methods = ("GET", "HEAD")
        elif path in self._config.routes:
            methods = ("GET", "POST", "HEAD")
        else:
            raise errors.no_such_path()
        if request.method not in methods:
            allow = {"Allow": ", ".join((*methods, "OPTIONS"))}
            if request.method == "OPTIONS":
                allow |= self._cors.preflight(request.headers, methods)
                return web.Response(status=204, headers=allow)
            raise ApiError(405, "method_not_allowed", f"Use {methods[0]}.", headers=allow)
        if methods == ("POST",):
            with Hold(self._budget) as hold:
                return await self._shaped(request, path, id_, record, hold)
        if request.method != "POST" and request.can_read_body:
            # Servers differ in whether they read it: forwarded, it could become a request.
            raise ApiError(400, "bad_http", f"{request.method} takes no body here.", close=True)
        if path == "/health":
            return web.Response(status=200 if self.ready else 503)
        with Hold(self._budget) as hold:
            return await self._passed_on(request, raw, id_, record, hold)

    def _authenticate(self, request: web.BaseRequest, record: RequestRecord) -> None:
        """Whose request it is, before anything of its body is read; raises ApiError 401 or 429."""
        record.tenant = self._security.auth.tenant(request, record.arrived_at)

    async def _body(self, request: web.BaseRequest, hold: Hold) -> bytes:
        patience_s = self._config.timeouts.client_body
        return await read_client_body(request, self._config.limits.body, patience_s, hold)

    async def _shaped(
        self, request: web.BaseRequest, path: str, id_: str, record: RequestRecord, hold: Hold
    ) -> web.StreamResponse:
        """A chat or completion: estimated, queued or refused, relayed."""
        operation = "chat" if path == CHAT else "text_completion"
        self._telemetry.began(record, operation, request.headers)
        self._authenticate(request, record)
        if self.draining:
            raise errors.draining()
        body = await self._body(request, hold)
        self._made += 1
        fields = await parse_any(body)
        asked = read_fields(
            fields,
            body,
            request.headers,
            id_=f"{id_}/{self._made}",  # clients may send one id twice; the books may not
            chat=path == CHAT,
            estimate=self._estimate,
            block_bytes=self._config.affinity.block_bytes,
            tenant=record.tenant,
            salts=self._security.salts,
        )
        del fields
        body = asked.body  # what came is not kept beside it
        record.request, record.token_ids = asked.request, asked.token_ids
        record.service_class = asked.request.service_class
        if self._protection.refuses(asked.request.service_class):
            self._metrics.shed(asked.request.service_class)
            raise errors.overloaded()
        cors = self._cors.answer(request.headers)
        try:
            async with self._driver.slot(asked.request) as grant:
                record.sent(grant.send, self._driver.now)
                reply_headers = partial(self._headers, id_, cors, record)
                exchange = ShapedRequest(request, path, body, asked, id_, record, reply_headers)
                return await self._relay.serve(exchange, grant)
        except Rejected as refused:
            record.bucket = refused.action.bucket or "none"
            record.queued_s = refused.action.queued_s
            raise errors.rejected(refused.action, self._config.reject_status) from None

    def _way(self, record: RequestRecord) -> dict[str, str]:
        """What an answer or an error says about its request's way, as far as it went."""
        headers = {}
        if record.bucket != "none":
            headers["x-forebay-bucket"] = record.bucket
        if record.queued_s is not None:
            headers["x-forebay-queue-ms"] = f"{record.queued_s * 1e3:.1f}"
        if self._config.debug_headers and record.predicted_ttft_s is not None:
            headers["x-forebay-backend"] = record.backend
            headers["x-forebay-predicted-ms"] = f"{record.predicted_ttft_s * 1e3:.1f}"
        return headers

    def _headers(self, id_: str, cors: dict[str, str], record: RequestRecord) -> dict[str, str]:
        """What every answer to a shaped request says about its way."""
        return {**self._stream_headers(id_, cors), **self._way(record)}

    def _stream_headers(self, id_: str, cors: dict[str, str]) -> dict[str, str]:
        """What every answer says that may begin before its end is known."""
        headers = {**cors, REQUEST_ID: id_, "Server": SERVER}
        if self.leaving or self.draining:
            headers["Connection"] = "close"
        return headers

    async def _passed_on(
        self, request: web.BaseRequest, raw: str, id_: str, record: RequestRecord, hold: Hold
    ) -> web.StreamResponse:
        """A path that is not shaped: to any backend that is up; past admission and queues."""
        self._authenticate(request, record)
        if self.draining:
            raise errors.draining()
        if not self._backends.any_up:
            raise errors.no_backend()
        body = await self._body(request, hold)
        salts = self._security.salts
        if body and salts and raw.partition("?")[0] not in UNCACHED:
            body = await salted(body, request.content_type, record.tenant, salts)
        reply = self._stream_headers(id_, self._cors.answer(request.headers))
        return await self._relay.pass_on(request, raw, body, id_, record.tenant, reply)
