"""The simulated vLLM server: aiohttp around an engine core.

`start_engine` is what tests, the demo and the `engine` command use.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import orjson
from aiohttp import web

from forebay.replay.engine.api_errors import ApiError, bad_value, invalid
from forebay.replay.engine.async_engine import new_core
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.faults import Fault
from forebay.replay.engine.generation import HEADERS, JSON, Generator
from forebay.replay.engine.loop import EngineLoop
from forebay.replay.engine.metrics import EngineMetrics
from forebay.replay.engine.protocol import check_model, read_json, read_tokenize
from forebay.replay.engine.tokenizer import decode_ids

MAX_BODY_BYTES = 64 << 20
KEEP_ALIVE_S = 5.0  # uvicorn's, VLLM_HTTP_TIMEOUT_KEEP_ALIVE
SHUTDOWN_S = 1.0  # for handlers to write their last chunks
BACKLOG = 2048  # uvicorn's
VERSION = "0.32.0"  # of the vLLM whose behaviour is imitated

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A server that listens; `stepping` only ends by failing."""

    host: str
    port: int
    core: EngineCore
    loop: EngineLoop
    metrics: EngineMetrics
    generator: Generator
    stepping: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def set_fault(self, fault: Fault | None) -> None:
        """How requests from now on fail."""
        self.generator.fault = fault


@asynccontextmanager
async def start_engine(
    config: EngineConfig, *, host: str = "127.0.0.1", port: int = 0, fault: Fault | None = None
) -> AsyncIterator[RunningEngine]:
    """A server for the time of the block; leaving it ends streams as SIGTERM ends vLLM's."""
    core = new_core(config)
    metrics = EngineMetrics(core, config.served_name)
    loop = EngineLoop(core, metrics, config.time_scale)
    generator = Generator(config, loop, fault)
    runner = web.AppRunner(
        make_app(config, loop, metrics, generator),
        handler_cancellation=True,
        keepalive_timeout=KEEP_ALIVE_S,
        access_log=None,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    stepping = asyncio.create_task(loop.run(), name="engine steps")
    try:
        await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        bound = runner.addresses[0][1]
        yield RunningEngine(host, bound, core, loop, metrics, generator, stepping)
    finally:
        loop.abort_all()
        stepping.cancel()
        await runner.cleanup()
        with suppress(asyncio.CancelledError):
            await stepping  # raises what ended it, had it failed


def make_app(
    config: EngineConfig, loop: EngineLoop, metrics: EngineMetrics, generator: Generator
) -> web.Application:
    """The routes of a vLLM API server that a client or a proxy may use."""
    pages = _Pages(config, loop, metrics, generator)

    @web.middleware
    async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            headers = generator.with_request_id(request, JSON)
            return web.Response(body=error.body(), status=error.status, headers=headers)
        except web.HTTPException as error:
            headers = generator.with_request_id(request, JSON)
            if "Allow" in error.headers:
                headers = {**headers, "Allow": error.headers["Allow"]}
            detail = orjson.dumps({"detail": error.reason})
            return web.Response(body=detail, status=error.status, headers=headers)

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors])
    app.add_routes(
        [
            web.post("/v1/chat/completions", generator.chat),
            web.post("/v1/completions", generator.completion),
            web.get("/v1/models", pages.models),
            web.get("/health", pages.health),
            web.get("/ping", pages.health),
            web.post("/ping", pages.health),
            web.get("/version", pages.version),
            web.get("/load", pages.load),
            web.get("/metrics", pages.metrics),
            web.post("/tokenize", pages.tokenize),
            web.post("/detokenize", pages.detokenize),
        ]
    )
    return app


class _Pages:
    """Everything but generation."""

    def __init__(
        self, config: EngineConfig, loop: EngineLoop, metrics: EngineMetrics, generator: Generator
    ) -> None:
        self._config = config
        self._loop = loop
        self._metrics = metrics
        self._generator = generator
        self._created = int(time.time())

    async def health(self, request: web.Request) -> web.Response:
        fault = self._generator.fault
        status = 200 if fault is None or fault.health is None else fault.health
        return web.Response(status=status, headers=self._headers(request, HEADERS))

    async def version(self, request: web.Request) -> web.Response:
        return self._json(request, {"version": VERSION})

    async def load(self, request: web.Request) -> web.Response:
        return self._json(request, {"server_load": self._generator.load})

    async def models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._config.served_name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self._config.model,
            "parent": None,
            "max_model_len": self._config.context,
            "permission": [],
        }
        return self._json(request, {"object": "list", "data": [model]})

    async def metrics(self, request: web.Request) -> web.Response:
        kind = {**HEADERS, "Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._metrics.exposition(), headers=self._headers(request, kind))

    async def tokenize(self, request: web.Request) -> web.Response:
        body = read_json(await request.read(), request.content_type)
        prompt = read_tokenize(body, self._config.served_name)
        ids = prompt.token_ids()
        strings = [decode_ids([i]) for i in ids] if body.get("return_token_strs") else None
        answer = {
            "count": prompt.tokens,
            "max_model_len": self._config.context,
            "tokens": ids,
            "token_strs": strings,
        }
        return self._json(request, answer)

    async def detokenize(self, request: web.Request) -> web.Response:
        body = read_json(await request.read(), request.content_type)
        check_model(body, self._config.served_name)
        tokens = body.get("tokens")
        if tokens is None:
            raise invalid("missing", "tokens", "Field required", f"<dict of {len(body)} items>")
        try:
            return self._json(request, {"prompt": decode_ids(tokens)})
        except (TypeError, ValueError):
            raise bad_value("tokens must be a list of token ids.", "tokens") from None

    def _json(self, request: web.Request, value: object) -> web.Response:
        return web.Response(body=orjson.dumps(value), headers=self._headers(request, JSON))

    def _headers(self, request: web.Request, headers: dict[str, str]) -> dict[str, str]:
        return self._generator.with_request_id(request, headers)
