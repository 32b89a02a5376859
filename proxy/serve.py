"""Run a proxy, and drain it."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.http_parser import HttpRequestParser, HttpRequestParserPy

from forebay.proxy.admin.port import Admin
from forebay.proxy.admin.watch import Watch
from forebay.proxy.app import App
from forebay.proxy.backends.discovery import Discovery
from forebay.proxy.backends.pool import Backends
from forebay.proxy.build import build_services
from forebay.proxy.config.schema import Config
from forebay.proxy.driver import Driver
from forebay.proxy.http1 import errors
from forebay.proxy.http1.server.handover import stop_listening
from forebay.proxy.http1.server.listen import listen, listen_fault, url_host
from forebay.proxy.http1.server.server import HttpServer
from forebay.proxy.log_events import Say
from forebay.proxy.reload import Reloader
from forebay.proxy.runtime.load_shedding import Protection
from forebay.proxy.security.guards import Security
from forebay.proxy.services import Services
from forebay.proxy.share.exchange import Link, PeerExchange
from forebay.proxy.telemetry.logs.access_log import InternalErrors
from forebay.proxy.telemetry.logs.tracing import Tracer
from forebay.proxy.telemetry.metrics.proxy_metrics import ProxyMetrics
from forebay.proxy.telemetry.recent_events import RecentEvents
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.event_loop import background

CHECK_CLIENTS_S = 0.05  # interval of the check whether the last client has left
# Time to write error events after a drain that took too long. Clients that neither send nor read
# take all of it. Then the process needs some time to end.
LAST_EVENTS_S = 0.25

Listener = tuple[web.ServerRunner, HttpServer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A running proxy. Setting `stop` ends it."""

    app: App
    driver: Driver
    backends: Backends
    metrics: ProxyMetrics
    reloader: Reloader
    protection: Protection
    security: Security
    exchange: PeerExchange
    watch: Watch
    stop: asyncio.Event
    url: str
    admin_url: str
    listeners: tuple[Listener, Listener]

    async def lame_duck(self) -> None:
        """Send clients elsewhere, but still take their requests, for `timeouts.lame_duck`.

        With `listen.reuse_port` another process serves the port. Then listening stops first, and
        this ends as soon as no client is connected.
        """
        config = self.reloader.config
        self.app.leaving = True
        if config.listen.reuse_port:
            for runner, server in self.listeners:
                await stop_listening(runner, server)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(config.timeouts.lame_duck):
                public = self.listeners[0][1]
                while not config.listen.reuse_port or public.connections:  # noqa: ASYNC110
                    await asyncio.sleep(CHECK_CLIENTS_S)

    async def drain(self, patience_s: float) -> int:
        """Take no more requests, and wait until the active ones are answered.

        After `patience_s` streams are ended with an error event and other requests with a 503, and
        connections that are still open are cut. Returns the number of these requests.
        """
        self.app.draining = True
        self.app.held.end_all(errors.draining)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.app.idle.wait(), patience_s)
            return 0
        left = self.app.active
        self.app.end_all()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.app.idle.wait(), LAST_EVENTS_S)
        for connection in self.listeners[0][1].connections:
            if connection.transport is not None:
                connection.transport.abort()  # this cancels its handler
        return left


@asynccontextmanager
async def start_proxy(
    config: Config,
    say: Say,
    *,
    load: Callable[[], Config] | None = None,
    watch: Path | None = None,
    tracer: Tracer | None = None,
    links: Sequence[Link] = (),
    share_port: bool = False,
) -> AsyncIterator[Proxy]:
    """Run a proxy while the block runs. Raises InputError if a part of it cannot start.

    Args:
        say: logs a line.
        load: reads the configuration again for a reload. Without it the proxy cannot reload.
        watch: a change of this file, or of `backends_file`, causes a reload.
        tracer: replaces the tracer of the configuration.
        links: links to other proxies in front of the same backends, besides `config.share`.
        share_port: other workers listen on the public port, too.
    """
    # Backends behind one host name become several.
    _check_parser()
    events = RecentEvents(say, asyncio.get_running_loop().time)
    discovery, read = Discovery(events), config
    await discovery.look_up(read)
    config = discovery.expand(read)
    async with AsyncExitStack() as stack:
        services = await build_services(stack, config, events, tracer=tracer, links=links)
        app = App(config, services)
        services.port.server = _public_server(config, app, events)
        # A reload reads the file again, and looks up the hosts of backends again.
        reloader = Reloader(
            config, services, events,
            app=app, discovery=discovery, read=read, load=load, watch=watch,
        )  # fmt: skip
        await stack.enter_async_context(reloader)
        # A listener next to others gets connections at once, so it first knows the backends.
        share_port = share_port or config.listen.reuse_port
        if share_port:
            await services.backends.wait_probed()
        if any(tenant.budgeted for tenant in config.tenants.known.values()):
            await services.exchange.wait_told()
        yield await _listen_on_both(stack, services, app, reloader, share_port=share_port)


def _check_parser() -> None:
    """Raise InputError for the pure-Python parser, which has open request-smuggling advisories."""
    if HttpRequestParser is HttpRequestParserPy:
        raise InputError(
            "aiohttp runs without its C parser: reinstall it, unset AIOHTTP_NO_EXTENSIONS"
        )


def _public_server(config: Config, app: App, say: Say) -> HttpServer:
    return HttpServer(
        app.handle,
        header_bytes=config.limits.header,
        client_headers_s=config.timeouts.client_headers,
        client_write_s=config.timeouts.client_write,
        max_connections=config.max_connections(),
        failed=InternalErrors(say, asyncio.get_running_loop().time).failed,
    )


async def _listen_on_both(
    stack: AsyncExitStack, services: Services, app: App, reloader: Reloader, *, share_port: bool
) -> Proxy:
    """Open the public and the admin port. Raises InputError."""
    # The servers of both ports.
    public, security, stop = services.port.server, services.security, asyncio.Event()
    assert public is not None
    watch = Watch(services, app=app, reloader=reloader)
    await stack.enter_async_context(background(watch.run()))
    admin = HttpServer(Admin(services, watch, app=app, reloader=reloader, drain=stop.set).handle)
    at, tls = reloader.config.listen, security.tls.context if security.tls else None
    admin_host = at.effective_admin_host
    # Listen on both.
    runner, port = await _listen(
        stack, public, at.host, at.port, key="port", reuse_port=share_port, tls=tls
    )
    admin_runner, admin_port = await _listen(
        stack, admin, admin_host, at.admin_port, key="admin_port", reuse_port=at.reuse_port
    )
    # Renew keys and certificates while the proxy runs.
    await stack.enter_async_context(background(security.watch(reloader.say)))
    return Proxy(
        app=app,
        driver=services.driver,
        backends=services.backends,
        metrics=services.metrics,
        reloader=reloader,
        protection=services.protection,
        security=security,
        exchange=services.exchange,
        watch=watch,
        stop=stop,
        url=f"{'https' if tls else 'http'}://{url_host(at.host)}:{port}",
        admin_url=f"http://{url_host(admin_host)}:{admin_port}",
        listeners=((runner, public), (admin_runner, admin)),
    )


async def _listen(
    stack: AsyncExitStack,
    server: HttpServer,
    host: str,
    port: int,
    *,
    key: str,
    reuse_port: bool,
    tls: ssl.SSLContext | None = None,
) -> tuple[web.ServerRunner, int]:
    try:
        runner, real_port = await listen(server, host, port, reuse_port=reuse_port, tls=tls)
    except OSError as error:
        raise listen_fault(key, host, port, error) from error
    stack.push_async_callback(runner.cleanup)
    return runner, real_port
