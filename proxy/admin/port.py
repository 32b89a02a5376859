"""The admin port: health checks, metrics, status, live page, drain and reload.

None of its paths can be reached through the public port.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, unquote

from aiohttp import web

from forebay.proxy.admin.backend_facts import backend_facts
from forebay.proxy.admin.preview import preview_fields
from forebay.proxy.admin.request_list import BAD_QUERY, BadQuery, listed
from forebay.proxy.admin.watch import RECENT_S, Watch
from forebay.proxy.app import App
from forebay.proxy.diagnose.receipt_text import receipt_fields
from forebay.proxy.http1 import errors
from forebay.proxy.http1.error_response import error_response, json_response
from forebay.proxy.http1.errors import CLIENT, ApiError, error_body
from forebay.proxy.http1.headers import request_id
from forebay.proxy.http1.server.cross_origin import cross_site_refusal
from forebay.proxy.reload import Reloader
from forebay.proxy.services import Services
from forebay.traces.ground.command_line.messages import shortlist

ALLOW = {  # the methods of each path
    **dict.fromkeys(("/", "/metrics", "/status", "/history", "/requests"), "GET"),
    **dict.fromkeys(("/backends", "/capture"), "GET"),
    **dict.fromkeys(("/healthz", "/readyz"), "GET, HEAD"),
    **dict.fromkeys(("/preview", "/drain", "/reload"), "POST"),
}
PARAMETERS = {  # of each path that takes any
    "/capture": ("offset",),
    "/metrics": ("ago",),
    "/status": ("request",),
    "/requests": ("by", "count", "bucket", "since_s"),
    "/preview": ("tenant",),
}
SAME_ID = 20  # bound of the named requests that share an id
MOST_DIGITS = 15  # of an offset
MOST_SHOWN = 128  # characters of an unknown id in the error message


class Admin:
    """Handles every request of the admin port.

    Args:
        drain: begins the drain of the proxy.
    """

    def __init__(
        self,
        services: Services,
        watch: Watch,
        *,
        app: App,
        reloader: Reloader,
        drain: Callable[[], None],
    ) -> None:
        self._services = services
        self._watch = watch
        self._app = app
        self._reloader = reloader
        self._drain = drain
        self._driver = services.driver
        self._receipts = services.receipts
        self._page = files("forebay.proxy.admin").joinpath("live.html").read_bytes()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if (refusal := refusal_of(request)) is not None:
            return refusal
        match request.method, request.raw_path.partition("?")[0]:
            case "GET" | "HEAD", "/healthz":
                return web.Response(text="ok\n")
            case "GET" | "HEAD", "/readyz":
                ready = self._app.ready
                return web.Response(status=200 if ready else 503, text=f"ready: {ready}\n")
            case "GET", "/metrics":
                # A page takes milliseconds, so scrapes take turns.
                page = self._metrics(seconds_ago(request))
                return await self._app.turns.take("/metrics", 0, page, long=True)
            case "GET", "/status" if (id_ := requested_id(request)) is not None:
                return self._explain(id_)
            case "GET", "/status" | "/history" as path:
                fields = {"/status": self._watch.status, "/history": self._history}[path]()
                return json_response(fields)
            case "GET", "/requests":
                return self._list(request)
            case "GET", "/backends" | "/capture" as path:
                ask = {"/backends": self._facts, "/capture": self._capture}[path]
                return await ask(request)
            case "POST", "/preview":
                return await self._preview(request)
            case "POST", path if (named := named_backend(path)) is not None:
                return await self._drain_one(*named, now="now" in query_of(request))
            case "GET", "/":
                return web.Response(body=self._page, content_type="text/html", charset="utf-8")
            case "POST", "/drain":
                self._drain()
                return web.Response(status=202, text="draining\n")
            case "POST", "/reload":
                return await self._reload()
        return wrong_request(request)

    async def _metrics(self, ago_s: float | None) -> web.Response:
        services = self._services
        past = services.past
        text = services.metrics.text() if ago_s is None else past.ago(ago_s) + past.age(ago_s)
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=text, headers={"content-type": kind})

    def _history(self) -> dict[str, Any]:
        fields = self._services.history.fields()
        fields["events"] = self._services.events.within(fields["kept_s"])
        return fields

    async def _drain_one(self, name: str, state: str, *, now: bool) -> web.Response:
        """Take a backend out of use, or back. 404 if it is unknown.

        Args:
            now: other backends go on with its streams, as far as they can.
        """
        backends, core_backends = self._services.backends, self._driver.shaper.backends
        if name not in backends.links or name not in core_backends:
            return unknown_backend(name, backends.links)
        backends.drain(name, drained=state == "drain")
        if now and state == "drain":
            await self._services.relay.move_off(backends.links[name])
        backend = core_backends[name]
        fields = {
            "backend": name,
            "draining": backends.links[name].drained,
            "in_flight": len(backend.in_flight) + backend.passing,
        }
        return json_response(fields)

    async def _reload(self) -> web.Response:
        result = await self._reloader.reload()
        message = self._reloader.message
        text = message if message == result else f"{result}: {message}"
        return web.Response(status=400 if result == "failed" else 200, text=f"{text}\n")

    def _explain(self, request_id: str) -> web.Response:
        """Answer with the decisions about a request. 404 if it is unknown or forgotten."""
        receipts, now = self._receipts, self._driver.clock()
        self._driver.shaper.settle(now)
        matches = receipts.named(request_id)
        if not matches:
            return unknown_request(request_id, receipts.keep)
        same_id = [receipt.id for receipt in matches[1 : SAME_ID + 1]]
        return json_response(receipt_fields(matches[0], now, receipts.keep, same_id))

    async def _facts(self, request: web.BaseRequest) -> web.Response:
        """Answer with what each backend says of itself."""
        return json_response(await backend_facts(self._services.backends))

    async def _capture(self, request: web.BaseRequest) -> web.Response:
        """Answer with a part of the captured traffic, from the byte of `offset` on."""
        capture, text = self._services.capture, query_of(request).get("offset", ["0"])[0]
        if capture is None or not text.isdecimal() or len(text) > MOST_DIGITS:
            what = "no capture.path is set" if capture is None else "offset: give bytes"
            return json_response(error_body(f"{what}.", CLIENT, BAD_QUERY), 400)
        part = await asyncio.to_thread(capture.part, int(text))
        return web.Response(body=part, content_type="application/x-ndjson")

    def _list(self, request: web.BaseRequest) -> web.Response:
        """Answer with the slowest or the rejected requests that ended recently."""
        now = self._driver.clock()
        self._driver.shaper.settle(now)
        try:
            buckets = self._driver.shaper.buckets
            fields = listed(self._receipts, query_of(request), now, buckets)
            since_s = RECENT_S if fields["since_s"] is None else fields["since_s"]
            fields["findings"] = self._watch.findings(min(RECENT_S, since_s))
        except BadQuery as error:
            return json_response(error_body(str(error), CLIENT, BAD_QUERY), 400)
        return json_response(fields)

    async def _preview(self, request: web.BaseRequest) -> web.Response:
        """Answer with the decision about the body, as if its tenant had sent it now."""
        tenant = query_of(request).get("tenant", [""])[0]
        try:
            services, config = self._services, self._reloader.config
            fields = await preview_fields(
                request, tenant, services=services, app=self._app, config=config
            )
        except ApiError as error:
            return error_response(error, request_id(request.headers))
        return json_response(fields)


def wrong_request(request: web.BaseRequest) -> web.Response:
    """Return a 405 for another method of a path of the admin port, a 404 for another path."""
    id_ = request_id(request.headers)
    path = request.raw_path.partition("?")[0]
    allow = "POST" if named_backend(path) else ALLOW.get(path, "")
    error = errors.no_such_path()
    if allow and request.method not in allow.split(", "):
        error = ApiError(405, "method_not_allowed", f"Use {allow}.", headers={"Allow": allow})
    return error_response(error, id_)


def refusal_of(request: web.BaseRequest) -> web.Response | None:
    """Return a 403 for a POST by another site, a 400 for an unknown parameter, else None.

    `POST /drain?backend=NAME` must not end the proxy. Health checks may carry any parameter.
    """
    if (refusal := cross_site_refusal(request)) is not None:
        return refusal
    path, _, query = request.raw_path.partition("?")
    parameters = PARAMETERS.get(path, ())
    names = [unquote(part.partition("=")[0]) for part in query.split("&") if part]
    unknown = [name for name in names if name not in parameters]
    if not unknown or path not in ALLOW or ALLOW[path] == "GET, HEAD":
        return None
    message = f"Unknown parameter {unknown[0][:MOST_SHOWN]!r}; {path} takes "
    message += f"{shortlist(parameters) or 'none'}."
    if path == "/drain":
        message += " It ends the proxy; POST /backends/NAME/drain drains one backend."
    return error_response(ApiError(400, "unknown_parameter", message), request_id(request.headers))


def requested_id(request: web.BaseRequest) -> str | None:
    """Return the id in `/status?request=ID`, or None."""
    return query_of(request).get("request", [None])[0]


def seconds_ago(request: web.BaseRequest) -> float | None:
    """Return the number in `/metrics?ago=SECONDS`, or None for the metrics of now."""
    text = query_of(request).get("ago", [""])[0]
    return float(text) if text.isdecimal() and len(text) < 8 else None


def named_backend(path: str) -> tuple[str, str] | None:
    """Return name and state of `/backends/NAME/drain` or `/backends/NAME/ready`, else None."""
    match path.split("/"):
        case ["", "backends", name, "drain" | "ready" as state] if name:
            return unquote(name), state
    return None


def unknown_backend(name: str, names: Iterable[str]) -> web.Response:
    """Return a 404 that names the configured backends."""
    message = f"No backend {name[:MOST_SHOWN]!r}. There are: {shortlist(names)}."
    return json_response(error_body(message, CLIENT, "unknown_backend", "name"), 404)


def query_of(request: web.BaseRequest) -> Mapping[str, Sequence[str]]:
    """Return the parameters of the query, or an empty mapping if it has too many."""
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
    return json_response(error_body(message, CLIENT, "unknown_request", "request"), 404)
