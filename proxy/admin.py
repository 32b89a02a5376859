"""The admin port: health checks, metrics, status, live page, drain and reload.

Nothing of it can be reached through the public port.
"""

import asyncio
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, unquote

import orjson
from aiohttp import web

from forebay.proxy.api.dialects import DIALECTS
from forebay.proxy.api.token_estimate import TokenEstimate
from forebay.proxy.app import App
from forebay.proxy.backends.pool import Backends
from forebay.proxy.core.explain.receipt import Receipts
from forebay.proxy.core.health import Health
from forebay.proxy.core.policy.long_prefills import blocks_short_prompts
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.diagnose.backend_facts import backend_facts
from forebay.proxy.diagnose.receipt_text import preview_verdict, receipt_fields
from forebay.proxy.diagnose.request_list import BAD_QUERY, BadQuery, listed
from forebay.proxy.driver import Driver
from forebay.proxy.http1 import errors
from forebay.proxy.http1.error_response import error_response
from forebay.proxy.http1.errors import CLIENT, ApiError, error_body
from forebay.proxy.http1.headers import request_id
from forebay.proxy.http1.server.cross_origin import cross_site_refusal
from forebay.proxy.reload import Reloader
from forebay.proxy.runtime.load_shedding import Protection
from forebay.proxy.share.exchange import PeerExchange
from forebay.proxy.telemetry.logs.capture import Capture
from forebay.proxy.telemetry.logs.usage_ledger import UsageLedger
from forebay.proxy.telemetry.metrics.proxy_metrics import ProxyMetrics
from forebay.traces.command_line.messages import SHOWN, shortlist

VERSIONS = {
    "forebay": version("forebay"),
    "python": platform.python_version(),
    "aiohttp": version("aiohttp"),
}

ALLOW = {  # the methods of each path
    **dict.fromkeys(("/", "/metrics", "/status", "/requests", "/backends"), "GET"),
    **dict.fromkeys(("/healthz", "/readyz"), "GET, HEAD"),
    **dict.fromkeys(("/preview", "/drain", "/reload"), "POST"),
}
SAME_ID = 20  # bound of the named requests that share an id
MOST_SHOWN = 128  # characters of an unknown id in the error message


class Admin:
    def __init__(
        self,
        app: App,
        driver: Driver,
        backends: Backends,
        metrics: ProxyMetrics,
        estimate: TokenEstimate,
        exchange: PeerExchange,
        drain: Callable[[], None],
        reloader: Reloader,
        protection: Protection,
        capture: Capture | None,
        ledger: UsageLedger | None,
        receipts: Receipts,
    ) -> None:
        self._app = app
        self._driver = driver
        self._backends = backends
        self._health = backends.health
        self._metrics = metrics
        self._estimate = estimate
        self._exchange = exchange
        self._drain = drain
        self._reloader = reloader
        self._protection = protection
        self._capture = capture
        self._ledger = ledger
        self._receipts = receipts
        self._page = files("forebay.proxy").joinpath("live.html").read_bytes()
        self._started_at = asyncio.get_running_loop().time()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if (refusal := cross_site_refusal(request)) is not None:
            return refusal
        match request.method, request.raw_path.partition("?")[0]:
            case "GET" | "HEAD", "/healthz":
                return web.Response(text="ok\n")
            case "GET" | "HEAD", "/readyz":
                ready = self._app.ready
                return web.Response(status=200 if ready else 503, text=f"ready: {ready}\n")
            case "GET", "/metrics":
                text = self._metrics.text()
                return web.Response(
                    body=text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"}
                )
            case "GET", "/status" if (id_ := requested_id(request)) is not None:
                return self._explain(id_)
            case "GET", "/status":
                return web.Response(
                    body=orjson.dumps(self.status()), content_type="application/json"
                )
            case "GET", "/requests":
                return self._list(request)
            case "GET", "/backends":
                facts = await backend_facts(self._backends)
                return web.Response(body=orjson.dumps(facts), content_type="application/json")
            case "POST", "/preview":
                return await self._preview(request)
            case "POST", path if (named := named_backend(path)) is not None:
                return self._drain_one(*named)
            case "GET", "/":
                return web.Response(body=self._page, content_type="text/html", charset="utf-8")
            case "POST", "/drain":
                self._drain()
                return web.Response(status=202, text="draining\n")
            case "POST", "/reload":
                return await self._reload()
        return wrong_request(request)

    def _drain_one(self, name: str, state: str) -> web.Response:
        """Take a backend out of use, or back; 404 if it is unknown."""
        if name not in self._backends.upstreams or name not in self._driver.shaper.backends:
            return unknown_backend(name, self._backends.upstreams)
        self._backends.drain(name, drained=state == "drain")
        backend = self._driver.shaper.backends[name]
        fields = {
            "backend": name,
            "draining": self._backends.upstreams[name].drained,
            "in_flight": len(backend.in_flight) + backend.passing,
        }
        return web.Response(body=orjson.dumps(fields), content_type="application/json")

    async def _reload(self) -> web.Response:
        result = await self._reloader.reload()
        message = self._reloader.message
        text = message if message == result else f"{result}: {message}"
        return web.Response(status=400 if result == "failed" else 200, text=f"{text}\n")

    def _explain(self, request_id: str) -> web.Response:
        """Answer with the decisions about one request; 404 if it is unknown or forgotten."""
        receipts, now = self._receipts, self._driver.clock()
        self._driver.shaper.settle(now)
        found = receipts.named(request_id)
        if not found:
            return unknown_request(request_id, receipts.keep)
        same_id = [receipt.id for receipt in found[1 : SAME_ID + 1]]
        body = orjson.dumps(receipt_fields(found[0], now, receipts.keep, same_id))
        return web.Response(body=body, content_type="application/json")

    def _list(self, request: web.BaseRequest) -> web.Response:
        """Answer with the requests that ended lately, the slowest or the rejected ones."""
        now = self._driver.clock()
        self._driver.shaper.settle(now)
        try:
            buckets = self._driver.shaper.buckets
            fields = listed(self._receipts, query_of(request), now, buckets)
        except BadQuery as error:
            body = error_body(str(error), CLIENT, BAD_QUERY)
            return web.Response(status=400, body=body, content_type="application/json")
        return web.Response(body=orjson.dumps(fields), content_type="application/json")

    async def _preview(self, request: web.BaseRequest) -> web.Response:
        """Answer with what would be decided now about the body, as if its tenant had sent it."""
        tenant = query_of(request).get("tenant", [""])[0]
        try:
            asked, stopped = await self._app.preview(request, tenant)
        except ApiError as error:
            return error_response(error, request_id(request.headers))
        now = self._driver.clock()
        self._driver.shaper.settle(now)
        receipt = self._driver.shaper.preview(asked, now)
        fields = receipt_fields(receipt, now, self._receipts.keep)
        fields["request"] = "dry run"
        fields["accepted"] = receipt.state != "refused" and not stopped
        fields["verdict"] = preview_verdict(receipt)
        if stopped:
            fields["verdict"] = f"Would be rejected: {stopped}."
        return web.Response(body=orjson.dumps(fields), content_type="application/json")

    def _is_drained(self, name: str) -> bool:
        upstream = self._backends.upstreams.get(name)
        return upstream is not None and upstream.drained

    def status(self) -> dict[str, Any]:
        """Return the JSON of `/status`."""
        shaper, now = self._driver.shaper, self._driver.clock()
        return {
            "ready": self._app.ready,
            "mode": self._reloader.config.mode,
            "draining": self._app.draining or self._app.leaving,
            "versions": VERSIONS,
            "config": {
                "generation": self._reloader.generation,
                "last_reload": self._reloader.message,
                "needs_restart": list(self._reloader.restart),
            },
            "shedding_classes": self._protection.shed,
            "short_of": list(self._protection.reading.over(0)),
            "uptime_s": round(now - self._started_at, 1),
            "active_requests": self._app.active,
            "tasks": len(asyncio.all_tasks()),
            "bytes_per_token": round(self._estimate.bytes_per_token, 3),
            "queued": {bucket: shaper.queued(bucket) for bucket in shaper.buckets},
            "held": self._app.held.count,
            "capture": self._capture.status() if self._capture else None,
            "usage": self._ledger.status() if self._ledger else None,
            "share": self._exchange.status(),
            "backends": [
                {
                    **_backend(backend, shaper, now),
                    **_state(self._health, backend.name, now),
                    "draining": backend.draining or self._is_drained(backend.name),
                }
                for backend in shaper.backends.values()
            ],
        }


def wrong_request(request: web.BaseRequest) -> web.Response:
    """Return a 405 for another method of a path of the admin port, a 404 for another path."""
    id_ = request_id(request.headers)
    path = request.raw_path.partition("?")[0]
    allow = "POST" if named_backend(path) else ALLOW.get(path, "")
    error = errors.no_such_path()
    if allow and request.method not in allow.split(", "):
        error = ApiError(405, "method_not_allowed", f"Use {allow}.", headers={"Allow": allow})
    return error_response(error, id_)


def requested_id(request: web.BaseRequest) -> str | None:
    """Return the id in `/status?request=ID`; None if there is none."""
    return query_of(request).get("request", [None])[0]


def named_backend(path: str) -> tuple[str, str] | None:
    """Return name and state of `/backends/NAME/drain` or `/backends/NAME/ready`, else None."""
    match path.split("/"):
        case ["", "backends", name, "drain" | "ready" as state] if name:
            return unquote(name), state
    return None


def unknown_backend(name: str, names: Iterable[str]) -> web.Response:
    """Return a 404 that names the backends that there are."""
    message = f"No backend {name[:MOST_SHOWN]!r}. There are: {shortlist(names)}."
    body = error_body(message, CLIENT, "unknown_backend", "name")
    return web.Response(status=404, body=body, content_type="application/json")


def query_of(request: web.BaseRequest) -> Mapping[str, Sequence[str]]:
    """Return the parameters of the query; none if there are too many."""
    query = request.raw_path.partition("?")[2]
    try:
        return parse_qs(query, keep_blank_values=True, max_num_fields=8)
    except ValueError:
        return {}


def unknown_request(request_id: str, keep: int) -> web.Response:
    """Return a 404 with JSON in the form of the public port's errors."""
    message = (
        f"No request {request_id[:MOST_SHOWN]!r} is remembered. A proxy remembers the last {keep} "
        "ended requests that reached its queue (metrics.receipts), until it restarts."
    )
    body = error_body(message, CLIENT, "unknown_request", "request")
    return web.Response(status=404, body=body, content_type="application/json")


def _backend(backend: Backend, shaper: Shaper, now: float) -> dict[str, Any]:
    fixed, linear, pairs = backend.cost.scale
    return {
        "name": backend.name,
        "up": backend.up,
        "draining": backend.draining,
        "in_flight": len(backend.in_flight) + backend.passing,
        "in_flight_elsewhere": backend.running - backend.sequences - backend.passing,
        "max_concurrency": backend.spec.max_concurrency,
        "long_prefill_token_threshold": (
            int(backend.spec.chunk_tokens) if backend.prefill_queue.chunked else None
        ),
        "long_prompts_block": blocks_short_prompts(backend.spec, shaper.buckets.values()),
        "prefills": len(backend.prefills),
        "backlog_s": round(backend.prefill_queue.backlog_s(now), 3),
        "queued": {bucket: len(queue) for bucket, queue in backend.queues.items()},
        "kv_tokens": None if backend.kv_tokens == float("inf") else backend.kv_tokens,
        "models": None if backend.models is None else sorted(backend.models)[:SHOWN],
        "models_count": None if backend.models is None else len(backend.models),
        "kv_reserved_tokens": backend.kv.tokens,
        "prefix_index_blocks": len(backend.cache.prefixes),
        "prefix_index": _prefix_index(backend),
        "prompt_tokens_sent": backend.sent_prompt_tokens,
        "prefill_cost": {
            "observations": backend.cost.observations,
            "relative_error": round(backend.cost.error.at(1.0), 3),
            "seconds_10k_tokens": round(backend.cost.predict_s(10_000, 10_000), 4),
            "seconds_100k_tokens": round(backend.cost.predict_s(100_000, 100_000), 4),
            "scale": [round(x, 4) for x in (fixed, linear, pairs)],
        },
    }


def _state(health: Health, name: str, now: float) -> dict[str, Any]:
    """Return the state of a backend, why, and for how long; nothing for one that leaves."""
    if name not in health:
        return {}
    return {
        "state": health.state(name),
        "reason": health.reason(name),
        "why": health.why(name),
        "state_s": round(now - health.since(name), 1),
    }


def _prefix_index(backend: Backend) -> dict[str, Any]:
    """Return how the cached prefixes are known, and the error of that in tokens per request."""
    error, held = backend.cache.error, backend.cache.engine_blocks
    return {
        "mode": backend.cache.mode,
        "paths": {
            # Only these prompts can be tokenised as the engine does it (kv_events/tokenize.py).
            path: backend.cache.mode if dialect.classic else backend.cache.estimate
            for path, dialect in DIALECTS.items()
        },
        "held_engine_blocks": None if held is None else len(held),
        "kept_share": round(backend.cache.kept, 3),
        "answers": error.answers,
        "mean_error_tokens": round(error.mean_tokens, 1),
        "bias_tokens": round(error.bias_tokens, 1),
        "within_a_block": round(error.within_block_share, 4),
    }
