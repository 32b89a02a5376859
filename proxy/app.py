"""The public port: which paths exist, and the steps of each request through the proxy.

Raw paths are compared with an allow-list. Nothing else of a backend can be reached, however the
path is spelled.
"""

import asyncio
from dataclasses import replace
from functools import partial
from time import perf_counter

from aiohttp import web

from forebay.proxy.api import rejections
from forebay.proxy.api.body import ParsedBody, ReadSettings, read_fields
from forebay.proxy.api.dialects import DIALECTS, Dialect, dialect_of, types_errors
from forebay.proxy.api.dialects.continuation import SentText
from forebay.proxy.api.json_body import as_utf8, parse_any
from forebay.proxy.api.public_paths import methods_of
from forebay.proxy.api.unshaped_body import is_form, prepared
from forebay.proxy.backends.hold import HeldRequests
from forebay.proxy.backends.models import Wanted
from forebay.proxy.config.paths import ENGINELESS, FORMS, MODELS, kept_response, may_be_form
from forebay.proxy.config.schema import Config
from forebay.proxy.core.model import Reject, Request
from forebay.proxy.driver import Rejected
from forebay.proxy.http1 import errors
from forebay.proxy.http1.error_response import error_response, json_response
from forebay.proxy.http1.errors import ApiError
from forebay.proxy.http1.headers import REQUEST_ID, SERVER, request_id
from forebay.proxy.http1.server.byte_budget import ByteBudget, RequestMemory
from forebay.proxy.http1.server.client_body import read_client_body
from forebay.proxy.http1.server.cross_origin import Cors, answer_method
from forebay.proxy.http1.server.request_checks import answer_target
from forebay.proxy.http1.server.server import cannot_go_on, client_of
from forebay.proxy.relay.backend_request import ShapedRequest
from forebay.proxy.relay.delivery import Opening, large_bytes, send_whole, wait_taken
from forebay.proxy.runtime.memory import request_bytes
from forebay.proxy.runtime.turns import SHORT_S, LoopTurns
from forebay.proxy.security.allowances import Allowances, permitted_models
from forebay.proxy.security.quota import UnqueuedQuota
from forebay.proxy.security.spending import Spending
from forebay.proxy.services import Services
from forebay.proxy.telemetry.record import CLIENT_GONE, RequestRecord


class App:
    """Handles every request of the public port."""

    def __init__(self, config: Config, services: Services) -> None:
        # The services of the proxy, each by its name.
        self._port = services.port
        self._driver = services.driver
        self._backends = services.backends
        self._attempts = services.attempts
        self._relay = services.relay
        self._unshaped = services.unshaped
        self._watchdog = services.watchdog
        self._metrics = services.metrics
        self._estimate = services.estimate
        self._telemetry = services.telemetry
        self._protection = services.protection
        self._security = services.security
        # Limits of tenants, and of memory, that hold for every request.
        self._quota = UnqueuedQuota(services.driver, services.metrics)
        rejected, models = services.metrics.rejected, services.backends.models
        services.exchange.budgets = spending = Spending(services.driver.shaper.peering)
        self._allowances = Allowances(services.driver.clock, spending, models, rejected)
        self._budget = ByteBudget(request_bytes(config.limits), config.reject_status)
        self.turns = LoopTurns()
        self._parsed_count = 0
        # State that a drain waits for or changes.
        self.held = HeldRequests(models, config.hold.max_requests)
        self.leaving = False  # lame duck: requests are taken, but connections are told to close
        self.draining = False  # no more requests are taken
        self.active = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.reconfigure(config)

    @property
    def ready(self) -> bool:
        """True if requests are taken, and some backend is up or requests wait for it."""
        serves = self._backends.any_up() or self.held.on
        return serves and not self.draining and not self.leaving

    def reconfigure(self, config: Config) -> None:
        """Use this configuration for later requests."""
        self._config = config
        self._budget.limit = request_bytes(config.limits)
        self._budget.status = config.reject_status
        self._observes = config.mode == "observe"
        self._cors = Cors(config.cors_origins)
        self._reading = ReadSettings(
            estimate=self._estimate,
            block_bytes=config.affinity.block_bytes,
            sdk_timeout=config.admission.sdk_timeout,
            most_tokens=config.buckets[-1].up_to,
            models=self._backends.models,
            continue_streams=config.retries.continue_streams and not self._observes,
        )
        self.held.max_requests = config.hold.max_requests

    def end_all(self) -> None:
        """End all requests, waiting or running."""
        self._attempts.end_all()
        self.held.end_all(errors.draining)
        self._driver.end_waiting(errors.draining)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request, which is active until the client has taken the response."""
        self.active += 1
        self.idle.clear()
        try:
            with RequestMemory(self._budget) as memory:
                response = await self._answer(request, memory)
                await wait_taken(request, self._watchdog)
        finally:
            self.active -= 1
            if not self.active:
                self.idle.set()
        return response

    async def _answer(self, request: web.BaseRequest, memory: RequestMemory) -> web.StreamResponse:
        """Answer a request, and return the response that was sent. Errors have OpenAI's form."""
        began = perf_counter()
        id_ = request_id(request.headers)
        record = self._telemetry.new_record(id_, self._driver.clock())
        record.cors = self._cors.answer(request.headers)
        status = 500
        try:
            response = await self._route(request, record, memory)
            status = response.status
        except ApiError as error:
            record.reason = error.code
            self._metrics.error_sent(record, error.code)
            headers = record.cors | record.decision_headers(debug=self._config.debug_headers)
            typed = types_errors(request.path, self._config.listen.path_prefix)
            response = error_response(error, id_, headers, typed=typed)
            status = response.status
            if not memory.holder:  # the body was not read
                self._port.rejecting_s += min(SHORT_S, perf_counter() - began)
        except asyncio.CancelledError:
            status = CLIENT_GONE
            raise
        finally:
            self.turns.answered(holder := memory.holder or client_of(request))
            self._allowances.ended(record)
            self._telemetry.finished(record, status, self._driver.clock())
        # Complete the headers of a response that is not a stream, and send it.
        whole = not response.prepared
        if status >= 400:
            await self.turns.pace(holder, status, body_read=bool(memory.holder))
        if whole and REQUEST_ID not in response.headers:  # neither an error nor a backend's
            response.headers.update(self._stream_headers(record))
        # After a stream that promised keep-alive, the client may send one more request.
        may_close = whole or response.headers.get("Connection") == "close"
        if self.draining or (self.leaving and may_close) or cannot_go_on(request):
            response.force_close()
        memory.shrink(large_bytes(response))  # the request is not needed any more
        if whole:
            await send_whole(request, response, self._watchdog)
        return response

    async def _route(
        self, request: web.BaseRequest, record: RequestRecord, memory: RequestMemory
    ) -> web.StreamResponse:
        path = (raw := request.raw_path).partition("?")[0]
        if not (raw.isascii() and raw.startswith("/")) or "#" in raw:
            return answer_target(request, raw)
        prefix = self._config.listen.path_prefix
        if prefix:
            path = path.removeprefix(prefix) if path.startswith(f"{prefix}/") else ""
            raw = raw.removeprefix(prefix)
        methods = methods_of(path, self._config.routes, prefix)
        if request.method not in methods:
            return answer_method(request, methods, self._cors)
        if path in DIALECTS:
            target = raw if self._observes else path  # vLLM reads no query here
            return await self._shaped(request, target, DIALECTS[path], record, memory)
        if request.method != "POST" and request.can_read_body:
            # Servers differ in whether they read this body: forwarded, it could become a request.
            raise ApiError(400, "bad_http", f"{request.method} takes no body here.", close=True)
        if path == "/health":
            return web.Response(status=200 if self.ready else 503)
        return await self._forward(request, raw, record, memory)

    async def _let_in(self, request: web.BaseRequest, record: RequestRecord) -> None:
        record.tenant = await self._security.auth.tenant(request, record.arrived_at, self.turns)
        record.counts_as = self._config.tenants.counted_as(record.tenant)
        if self.draining:
            raise errors.draining()

    def _must_read(self, tenant: str) -> bool:
        """False if backends may judge a body that cannot be read. Else it could evade a check."""
        return not self._observes or tenant != "" or self._security.salts is not None

    async def _body(
        self, request: web.BaseRequest, record: RequestRecord, memory: RequestMemory
    ) -> bytes:
        memory.holder = record.counts_as or client_of(request)
        limit, wait_s = self._config.limits.body, self._config.timeouts.client_body
        turn, took = partial(self.turns.take, memory.holder), self._metrics.uploaded
        return await read_client_body(request, limit, wait_s, memory, took=took, turn=turn)

    async def _shaped(
        self, request: web.BaseRequest, target: str, dialect: Dialect, record: RequestRecord,
        memory: RequestMemory,
    ) -> web.StreamResponse:  # fmt: skip
        """Serve a shaped request: parse it, queue or reject it, relay the response."""
        # Without a valid key the body is not read.
        self._telemetry.started(record, dialect.operation, request.headers)
        record.path = dialect.path
        await self._let_in(request, record)
        body, observed = await self._body(request, record, memory), self._observes
        work = self._parsed(body, request, dialect, record.id, record.tenant)
        try:
            parsed = await self.turns.take(memory.holder, len(body), work)
        except ApiError:
            if self._must_read(record.tenant):
                raise
            return await self._unshaped.serve(
                request, target, body, model=Wanted(""), record=record, memory=memory,
                reply_headers=self._stream_headers(record), observed=True,
            )  # fmt: skip
        if parsed.previous_id:
            parsed = self._relay.going_on(parsed, record.tenant)
        body = parsed.body  # so that the received bytes are not kept, too
        # Reject what the tenant may not use, and what an overloaded proxy sheds.
        self._allowances.admit(self._config, record, parsed.model, parsed.request.prompt_tokens)
        record.request, record.token_ids = parsed.request, parsed.token_ids
        record.service_class, record.model = parsed.request.service_class, parsed.model
        if self._protection.shed:
            tenants, of = self._config.tenants, parsed.request.service_class
            if self._protection.rejects(tenants.class_among_all(record.tenant, of)):
                self._metrics.shed(of)
                raise errors.overloaded()
        reply_headers = partial(self._headers, record)
        every_s = self._config.timeouts.keep_alive if parsed.streams and not observed else 0.0
        with Opening(request, dialect, every_s, reply_headers, record, self._watchdog) as opening:
            shaped = ShapedRequest(
                request, target, body, parsed, record, reply_headers, memory, opening, observed,
                sent=SentText() if parsed.continues and len(self._backends.links) > 1 else None,
            )  # fmt: skip
            try:
                response = await self._granted(shaped)
            except ApiError as error:
                return await opening.failed(error)
            return await opening.finished(response)

    async def _granted(self, shaped: ShapedRequest) -> web.StreamResponse:
        """Relay the response to a request once it has a slot. Raises ApiError without a slot."""
        record, held = shaped.record, self.held
        deadline = record.arrived_at + shaped.parsed.request.timeout_s
        if held.on:
            await self._until_up(shaped, deadline)
        if not shaped.observed and self._backends.models.nobody_has(shaped.parsed.model):
            shaped.change(model=await self._backends.search.must_have(shaped.parsed.model))
        while True:
            granted = False
            try:
                async with self._driver.slot(shaped.parsed.request) as grant:
                    granted = True
                    record.sent(grant.send, self._driver.clock())
                    return await self._relay.serve(shaped, grant, held)
            except Rejected as rejected:
                lost = rejected.action.reason == "no_backend_available"
                if lost and await self._until_up(shaped, deadline, refused=granted):
                    continue
                raise self._rejection(shaped, rejected.action) from None

    def _rejection(self, shaped: ShapedRequest, action: Reject) -> ApiError:
        """Record that the policy rejected a request, and return the error for its client."""
        record, parsed = shaped.record, shaped.parsed
        self._metrics.rejected(action.bucket, action.reason)
        record.rejected = True
        record.bucket = action.bucket or "none"
        record.queued_s = record.held_s + action.queued_s
        receipt = self._telemetry.receipt(parsed.request.id)
        field, status = parsed.dialect.prompt_field, self._config.reject_status
        return rejections.rejected(action, field, status, receipt)

    async def _until_up(
        self, shaped: ShapedRequest, deadline: float, *, refused: bool = False
    ) -> bool:
        """Wait for a backend of the model, as long as in a queue. True if a backend came up."""
        record, parsed = shaped.record, shaped.parsed
        bucket = self._driver.shaper.bucket_of(parsed.request.prompt_tokens)
        if bucket is None:
            return False
        until = min(record.arrived_at + bucket.max_wait_s, deadline)
        tenant = parsed.request.tenant
        came = await self.held.until_up(parsed.model, tenant, until, refused=refused)
        now = self._driver.clock()
        record.held_s = now - record.arrived_at if came else record.held_s  # earlier queues, too
        # For its next arrival in the queue. The backend may have listed its models only now.
        model = self._backends.models.named(parsed.model).route
        shaped.change(timeout_s=deadline - now, model=model)
        return came

    async def parse_unsent(self, request: web.BaseRequest, tenant: str) -> Request:
        """Parse a body as if the tenant had sent it to the first API that has such bodies.

        Nothing is queued, sent or counted. Raises ApiError, as the public port would.
        """
        with RequestMemory(self._budget) as memory:
            memory.holder = "preview"
            limit, wait_s = self._config.limits.body, self._config.timeouts.client_body
            body = await read_client_body(request, limit, wait_s, memory)
            work = self._parsed(body, request, None, "preview", tenant)
            return (await self.turns.take(memory.holder, len(body), work)).request

    async def _parsed(
        self, body: bytes, request: web.BaseRequest, dialect: Dialect | None, id_: str, tenant: str
    ) -> ParsedBody:
        """Parse a body. Without `dialect`, its first API that has such bodies is taken."""
        body = as_utf8(body)
        fields = await parse_any(body, in_pieces=True)
        self._parsed_count += 1
        parsed = read_fields(
            self._reading, fields, body, request.headers,
            id_=f"{id_}/{self._parsed_count}",  # unique, though clients may repeat their id
            dialect=dialect or dialect_of(fields), tenant=tenant,
            salts=self._security.salts, ignore_salt=self._backends.salts.ignored,
            counted=bool(self._config.usage.path) or self._config.tenants.counts_usage(tenant),
        )  # fmt: skip
        if (counts_as := self._config.tenants.counted_as(tenant)) != tenant:
            parsed = replace(parsed, request=parsed.request.with_(tenant=counts_as))
        return parsed

    def _headers(self, record: RequestRecord) -> dict[str, str]:
        """Return our headers of a response to a shaped request."""
        debug = self._config.debug_headers
        return self._stream_headers(record) | record.decision_headers(debug=debug)

    def _stream_headers(self, record: RequestRecord) -> dict[str, str]:
        """Return our headers of a response that may be a stream."""
        headers = {**record.cors, REQUEST_ID: record.id, "Server": SERVER}
        if self.leaving or self.draining:
            headers["Connection"] = "close"
        return headers

    async def _forward(
        self, request: web.BaseRequest, raw: str, record: RequestRecord, memory: RequestMemory
    ) -> web.StreamResponse:
        """Forward a request that is not shaped, past admission and queues."""
        # Find the tenant, and the backend of a kept response, which no other backend has.
        await self._let_in(request, record)
        path, models = raw.partition("?")[0], self._backends.models
        kept_id, _ = kept_response(path)
        home = self._relay.home(record.tenant, kept_id) if kept_id else ""
        if not self._backends.any_up():
            raise errors.no_backend()
        # A list of models is our own page, if backends or tenants differ in their models.
        body = await self._body(request, record, memory)
        permitted = permitted_models(self._config, record.tenant, models)
        own_page = permitted is not None or (models.listed and models.matter)
        if path == MODELS and own_page and request.method != "POST":
            return json_response(models.page(permitted))
        # Charge the tenant's quota by the length of the body, since no queue does.
        form = path in FORMS and is_form(request.headers.get("content-type", ""))
        works = request.method == "POST" and path not in ENGINELESS and not kept_id
        if works:
            record.path = path
            record.estimated_tokens = 0 if form else self._estimate.untaught_tokens(len(body))
        charged = self._quota.charge(self._config, record.counts_as, record.estimated_tokens)
        try:
            return await self._pass_on(request, raw, body, record, memory, home)
        except ApiError:  # no backend has answered it
            self._quota.give_back(record.counts_as, charged)
            raise

    async def _pass_on(
        self, request: web.BaseRequest, raw: str, body: bytes, record: RequestRecord,
        memory: RequestMemory, home: str,
    ) -> web.StreamResponse:  # fmt: skip
        # Prepare the body: the salt of its tenant's cache, and the model as backends know it.
        path = raw.partition("?")[0]
        salts = None if path in ENGINELESS else self._security.salts  # no engine: no prefix cache
        models, model = self._backends.models, Wanted("")
        limited = permitted_models(self._config, record.tenant, models) is not None
        named = self._config.usage.path is not None and not may_be_form(path)
        if body and (salts or models.matter or named or limited):
            work = prepared(
                body, request.headers.get("content-type", ""), record.tenant, salts, models,
                form=may_be_form(path), names_model=limited, must=self._must_read(record.tenant),
            )  # fmt: skip
            body, model = await self.turns.take(memory.holder, len(body), work)
        if request.method == "POST" and not home:
            self._allowances.admit(self._config, record, model.name, record.estimated_tokens)
        if not self._observes:
            model = model._replace(route=await self._backends.search.must_have(model.name))
        record.model = model.name
        return await self._unshaped.serve(
            request, raw, body, model=model, record=record, memory=memory, home=home,
            reply_headers=self._stream_headers(record), observed=self._observes,
        )  # fmt: skip
