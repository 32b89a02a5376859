"""Build a proxy from its parts, run it, and drain it."""

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.http_parser import HttpRequestParser, HttpRequestParserPy

from forebay.proxy.admin import Admin
from forebay.proxy.api.token_estimate import TokenEstimate
from forebay.proxy.app import App
from forebay.proxy.backends.discovery import Discovery
from forebay.proxy.backends.pool import Backends
from forebay.proxy.config.schema import Config
from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.observe import ObservingShaper
from forebay.proxy.driver import Driver
from forebay.proxy.http1 import errors
from forebay.proxy.http1.server.handover import stop_listening
from forebay.proxy.http1.server.listen import listen, listen_fault, url_host
from forebay.proxy.http1.server.server import HttpServer
from forebay.proxy.kv_events.follower import Followers
from forebay.proxy.relay.attempts import Attempts
from forebay.proxy.relay.relay import Relay
from forebay.proxy.relay.timeouts import Watchdog
from forebay.proxy.relay.unshaped import UnshapedRelay
from forebay.proxy.reload import Parts, Reloader
from forebay.proxy.routing import live_options
from forebay.proxy.runtime.load_shedding import Protection
from forebay.proxy.security.guards import Security
from forebay.proxy.share.exchange import Link, PeerExchange, exchanging
from forebay.proxy.share.redis_link import RedisLink
from forebay.proxy.telemetry.hlog import HlogWriter, IntervalLog
from forebay.proxy.telemetry.log_events import LogEvent, Say
from forebay.proxy.telemetry.logs.access_log import AccessLog, InternalErrors
from forebay.proxy.telemetry.logs.capture import capturing
from forebay.proxy.telemetry.logs.tracing import Tracer
from forebay.proxy.telemetry.logs.usage_ledger import UsageLedger, open_at_once, why_not
from forebay.proxy.telemetry.metrics.backend_metrics import BackendMetrics
from forebay.proxy.telemetry.metrics.decision_metrics import DecisionMetrics
from forebay.proxy.telemetry.metrics.proxy_metrics import ProxyMetrics
from forebay.proxy.telemetry.observers import Telemetry
from forebay.traces.errors import InputError

HLOG_INTERVAL_S = 1.0
# More than the lines of one interval. Lines that a full disk does not take wait in this buffer, and
# beyond it whole lines are left out: a torn line would make the file unreadable.
HLOG_BUFFER_BYTES = 1 << 20
CHECK_CLIENTS_S = 0.05  # interval of the check whether the last client has left
# Time to write error events after a drain that took too long. Clients that neither send nor read
# take all of it; then the process needs some time to end.
LAST_EVENTS_S = 0.25


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running proxy; setting `stop` ends it."""

    app: App
    driver: Driver
    backends: Backends
    metrics: ProxyMetrics
    reloader: Reloader
    protection: Protection
    security: Security
    exchange: PeerExchange
    stop: asyncio.Event
    url: str
    admin_url: str
    listeners: tuple[tuple[web.ServerRunner, HttpServer], ...]

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

        After `patience_s` streams are ended with an error event and other requests with a 503;
        connections that are still open then are cut. Returns the number of these requests.
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
    environ: Mapping[str, str] = os.environ,
    links: Sequence[Link] = (),
    share_port: bool = False,
) -> AsyncIterator[Proxy]:
    """Run a proxy while the block runs.

    Raises InputError if a port cannot be listened on, the histogram log cannot be written, a file
    of keys or certificates is wrong, or tracing is on and not installed.

    Args:
        say: logs a line.
        load: reads the configuration again for a reload; without it the proxy cannot reload.
        watch: a change of this file, or of `backends_file`, causes a reload.
        tracer: replaces the one of the configuration.
        environ: may hold API keys and the secret of cache salts.
        links: to other proxies in front of the same backends, besides `config.share`.
        share_port: other workers listen on the public port too.
    """
    # The pure-Python parser has open request-smuggling advisories.
    if HttpRequestParser is HttpRequestParserPy:
        raise InputError(
            "aiohttp runs without its C parser: reinstall it, unset AIOHTTP_NO_EXTENSIONS"
        )
    discovery, read = Discovery(say), config
    await discovery.look_up(read)
    config = discovery.expand(read)
    security = Security(config, environ)
    security.say_notes(say)
    security.report_plain_http(say, asyncio.get_running_loop().time)
    recorder = DecisionRecorder(config.metrics.receipts)
    shaper = ObservingShaper(
        config.core_backends(),
        config.core_buckets(),
        **live_options(config, say),
        recorder=recorder,
    )
    metrics = ProxyMetrics(shaper, lambda: len(public.connections), config.tenants.known)
    metrics.registry.register(
        DecisionMetrics(shaper, recorder.receipts, asyncio.get_running_loop().time)
    )
    estimate = TokenEstimate(config.tokens.bytes_per_token)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        driver = Driver(shaper, metrics.decided)
        stack.callback(driver.close)
        await stack.enter_async_context(_histogram_log(config, metrics, say))
        backends = await stack.enter_async_context(
            Backends(config, driver, say, security.upstream_tls)
        )
        metrics.registry.register(BackendMetrics(shaper, backends.health, recorder.receipts))
        watchdog = await stack.enter_async_context(
            Watchdog(config.timeouts.idle, config.timeouts.client_write)
        )
        followers = await stack.enter_async_context(Followers(config, driver, backends, say))
        attempts = Attempts(config, backends, watchdog)
        relay = Relay(attempts, backends, watchdog, metrics, estimate, followers.translator)
        unshaped = UnshapedRelay(attempts, backends, watchdog, metrics)
        protection = await stack.enter_async_context(Protection(config.limits, say, metrics.lagged))
        metrics.read_shedding(lambda: protection.shed)
        if tracer is None and config.tracing.enabled:
            tracer = Tracer(config.tracing)
        if tracer is not None:
            stack.callback(tracer.close)
        access = AccessLog(config.logs)
        capture = await stack.enter_async_context(capturing(config, environ, say))
        ledger = None
        if config.usage.path is not None:
            ledger = stack.enter_context(UsageLedger(config.usage.path, say))
        telemetry = Telemetry(metrics, access, tracer, capture, recorder.receipts, ledger)
        app = App(
            config,
            driver,
            backends,
            attempts,
            relay,
            unshaped,
            watchdog,
            metrics,
            estimate,
            telemetry,
            protection,
            security,
        )
        public = HttpServer(
            app.handle,
            header_bytes=config.limits.header,
            client_headers_s=config.timeouts.client_headers,
            client_write_s=config.timeouts.client_write,
            max_connections=config.max_connections(),
            failed=InternalErrors(say, asyncio.get_running_loop().time).failed,
        )
        protection.strangers_s = lambda: public.parsing_s + app.rejecting_s
        parts = Parts(
            app=app,
            attempts=attempts,
            backends=backends,
            driver=driver,
            watchdog=watchdog,
            public=public,
            protection=protection,
            access=access,
            metrics=metrics,
            security=security,
            followers=followers,
        )
        if config.share is not None:
            links = [*links, RedisLink(config.share.get_secret_value())]
        exchange = await stack.enter_async_context(exchanging(driver, links, say))
        metrics.read_alone(lambda: exchange.alone_since is not None)
        reloader = await stack.enter_async_context(
            Reloader(config, read, discovery, parts, say, load, watch)
        )
        admin = Admin(
            app,
            driver,
            backends,
            metrics,
            estimate,
            exchange,
            stop.set,
            reloader,
            protection,
            capture,
            ledger,
            recorder.receipts,
        )
        admin_server = HttpServer(admin.handle)
        share_port = share_port or config.listen.reuse_port
        if share_port:
            await backends.wait_probed()  # once it listens, connections come
        at = config.listen
        admin_host = at.effective_admin_host
        tls = security.tls.context if security.tls else None
        runner, port = await _listen(
            stack, public, at.host, at.port, "port", reuse_port=share_port, tls=tls
        )
        admin_runner, admin_port = await _listen(
            stack, admin_server, admin_host, at.admin_port, "admin_port", reuse_port=at.reuse_port
        )
        renewal = asyncio.create_task(security.watch(say))
        stack.push_async_callback(_cancel, renewal)
        yield Proxy(
            app,
            driver,
            backends,
            metrics,
            reloader,
            protection,
            security,
            exchange,
            stop,
            f"{'https' if tls else 'http'}://{url_host(at.host)}:{port}",
            f"http://{url_host(admin_host)}:{admin_port}",
            ((runner, public), (admin_runner, admin_server)),
        )


async def _listen(
    stack: AsyncExitStack,
    server: HttpServer,
    host: str,
    port: int,
    key: str,
    *,
    reuse_port: bool,
    tls: ssl.SSLContext | None = None,
) -> tuple[web.ServerRunner, int]:
    try:
        runner, real_port = await listen(server, host, port, reuse_port=reuse_port, tls=tls)
    except OSError as error:
        raise listen_fault(key, host, port, error) from error
    stack.push_async_callback(runner.cleanup)
    return runner, real_port


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def _histogram_log(config: Config, metrics: ProxyMetrics, say: Say) -> AsyncIterator[None]:
    """Write the TTFT of each bucket to an .hlog once a second, if the configuration names one.

    A full disk loses intervals and never stops the proxy. It is logged once until it has room.
    """
    path = config.metrics.hlog
    if path is None:
        yield
        return
    try:
        file = open_at_once(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        stream = os.fdopen(file, "w", HLOG_BUFFER_BYTES, encoding="utf-8")
    except OSError as error:
        raise InputError(f"metrics.hlog: cannot write {path} ({why_not(error)})") from error
    clock = asyncio.get_running_loop().time
    start = clock()
    failing = False

    def attempt(step: Callable[[], None]) -> None:
        nonlocal failing
        try:
            step()
        except OSError as error:
            if not failing:
                line = f"metrics.hlog: {path} cannot be written ({error.strerror}); trying again"
                say(LogEvent.HLOG_FAILED, line)
            failing = True
        else:
            failing = False

    def flush() -> None:
        log.flush(clock() - start)
        stream.flush()

    def close() -> None:
        with stream:
            log.close(clock() - start)

    async def flush_each_interval() -> None:
        while True:
            await asyncio.sleep(HLOG_INTERVAL_S)
            attempt(flush)

    log = metrics.log = IntervalLog(HlogWriter(stream, time.time(), ["forebay proxy: TTFT"]))
    task = asyncio.create_task(flush_each_interval())
    try:
        yield
    finally:
        await _cancel(task)
        attempt(close)
