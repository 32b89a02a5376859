"""The routes of a vLLM API server for clients and proxies, with its errors and API keys."""

import hmac
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from random import Random

import orjson
from aiohttp import web

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.loop.ranks import EngineRanks
from forebay.replay.engine.server.api_errors import EngineApiError, bad_value, invalid
from forebay.replay.engine.server.dialects.apis import APIS
from forebay.replay.engine.server.exposition import Exposition
from forebay.replay.engine.server.generation import HEADERS, JSON, Generator
from forebay.replay.engine.server.options import ServerOptions
from forebay.replay.engine.server.protocol import check_model, read_json, read_tokenize
from forebay.replay.engine.tokenizer import decode_ids

MAX_BODY_BYTES = 64 << 20
GUARDED = "/v1"  # paths that require an API key
UNAUTHORIZED = {"Server": "uvicorn", "Content-Type": "application/json"}  # no Vary, no request id

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    config: EngineConfig,
    options: ServerOptions,
    loop: EngineRanks,
    generator: Generator,
) -> web.Application:
    # An error of a handler becomes a response in vLLM's form.
    pages = _Pages(config, options, loop, generator)
    keys = [key.encode() for key in options.api_key or ()]

    @web.middleware
    async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        if keys and request.path.startswith(GUARDED) and not _authorized(request, keys):
            body = orjson.dumps({"error": "Unauthorized"})
            return web.Response(body=body, status=401, headers=UNAUTHORIZED)
        try:
            return await handler(request)
        except EngineApiError as error:
            headers = generator.with_request_id(request, JSON)
            return web.Response(body=error.body(), status=error.status, headers=headers)
        except web.HTTPException as error:
            headers = generator.with_request_id(request, JSON)
            if "Allow" in error.headers:
                headers = {**headers, "Allow": error.headers["Allow"]}
            detail = orjson.dumps({"detail": error.reason})
            return web.Response(body=detail, status=error.status, headers=headers)

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors])
    # The paths of vLLM's server.
    reads: list[tuple[str, Handler]] = [
        ("/v1/models", pages.models),
        ("/health", pages.health),
        ("/ping", pages.health),
        ("/version", pages.version),
        ("/load", pages.load),
        ("/metrics", pages.metrics),
        ("/kv_event_sources", pages.kv_event_sources),
    ]
    writes: list[tuple[str, Handler]] = [
        *((path, partial(generator.serve, api=api)) for path, api in APIS.items()),
        ("/ping", pages.health),
        ("/tokenize", pages.tokenize),
        ("/detokenize", pages.detokenize),
    ]
    if options.server_dev_mode:
        writes.append(("/reset_prefix_cache", pages.reset_prefix_cache))
    for path, page in reads:
        app.router.add_get(path, page, allow_head=False)  # as vLLM: HEAD is a 405
    for path, page in writes:
        app.router.add_post(path, page)
    return app


def _authorized(request: web.Request, keys: list[bytes]) -> bool:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    token_bytes = token.encode("utf-8", "surrogateescape")
    matches = [hmac.compare_digest(token_bytes, key) for key in keys]
    return request.method == "OPTIONS" or (scheme.lower() == "bearer" and any(matches))


class _Pages:
    """The pages besides generation."""

    def __init__(
        self,
        config: EngineConfig,
        options: ServerOptions,
        loop: EngineRanks,
        generator: Generator,
    ) -> None:
        self._config = config
        self._options = options
        self._loop = loop
        self._exposition = Exposition(*loop.metrics)
        self._generator = generator
        self._random = Random(config.seed)

    async def health(self, request: web.Request) -> web.Response:
        fault = self._generator.fault
        status = 200 if fault is None or fault.health is None else fault.health
        if self._loop.died.is_set():
            status = 503
        return web.Response(status=status, headers=self._headers(request, HEADERS))

    async def version(self, request: web.Request) -> web.Response:
        return self._json(request, {"version": self._config.release.wheel})

    async def load(self, request: web.Request) -> web.Response:
        counts = self._options.enable_server_load_tracking
        return self._json(request, {"server_load": self._generator.load if counts else 0})

    async def kv_event_sources(self, request: web.Request) -> web.Response:
        config = self._options.kv_events
        publishes = config is not None and config.publishes
        sources = (
            {str(rank): asdict(config.of_rank(rank)) for rank in range(len(self._loop.loops))}
            if config and publishes
            else {}
        )
        return self._json(request, sources)

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Drop the prefix cache. The success is false while a request holds blocks."""
        return self._json(request, {"success": self._loop.forget_all()})

    async def models(self, request: web.Request) -> web.Response:
        created = int(time.time())
        # vLLM lists a permission with each model, as OpenAI did once.
        permission = {
            "id": f"modelperm-{self._random.getrandbits(64):016x}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        # The model itself, with its context for clients that cut prompts.
        model = {
            "id": self._config.served_name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": self._config.model_name,
            "parent": None,
            "max_model_len": self._config.context,
            "permission": [permission],
            "random_weights": True,  # unlike vLLM's: a score of such answers means nothing
        }
        return self._json(request, {"object": "list", "data": [model]})

    async def metrics(self, request: web.Request) -> web.Response:
        kind = {**HEADERS, "Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._exposition.text(), headers=self._headers(request, kind))

    async def tokenize(self, request: web.Request) -> web.Response:
        body = read_json(await request.read(), request.content_type)
        prompt = read_tokenize(body, self._config.served_name)
        await self._loop.receive(prompt.tokens, text=True)
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
