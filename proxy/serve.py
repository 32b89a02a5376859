"""Put the proxy together, run it, and let it run out."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from aiohttp.http_parser import HttpRequestParser, HttpRequestParserPy

from forebay.proxy.admin import Admin
from forebay.proxy.app import App
from forebay.proxy.backends import Backends
from forebay.proxy.config import Config
from forebay.proxy.core.policies import ROUTES
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.driver import Driver
from forebay.proxy.estimate import TokenEstimate
from forebay.proxy.hlog import HlogWriter, IntervalLog
from forebay.proxy.http_server import HttpServer, listen
from forebay.proxy.metrics import ProxyMetrics
from forebay.proxy.relay import Relay
from forebay.proxy.share.exchange import Exchange, Link, exchanging
from forebay.proxy.share.redis_link import RedisLink
from forebay.proxy.watchdog import Watchdog
from forebay.traces.errors import InputError

HLOG_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running proxy; `stop` is set by whoever wants it to end."""

    app: App
    driver: Driver
    backends: Backends
    metrics: ProxyMetrics
    exchange: Exchange
    stop: asyncio.Event
    url: str
    admin_url: str

    async def drained(self, patience_s: float) -> bool:
        """Take no new work and wait until what runs is answered; False if it took too long."""
        self.app.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.app.idle.wait(), patience_s)
        return not self.app.active


@asynccontextmanager
async def start_proxy(
    config: Config, say: Callable[[str], None], links: Sequence[Link] = ()
) -> AsyncIterator[Proxy]:
    """A proxy that listens while the block runs; `say` gets a line when something changes.

    `links` lead to other proxies in front of the same backends, besides `config.share`.

    Raises InputError when a port or the histogram log cannot be had.
    """
    # The pure-Python parser has open request-smuggling advisories.
    if HttpRequestParser is HttpRequestParserPy:
        raise InputError(
            "aiohttp runs without its C parser: reinstall it, unset AIOHTTP_NO_EXTENSIONS"
        )
    shaper = Shaper(
        config.core_backends(),
        config.core_buckets(),
        route=ROUTES[config.routing],
        affinity=config.core_affinity(),
        dispatch_ahead_s=config.admission.dispatch_ahead,
    )
    metrics = ProxyMetrics(shaper)
    estimate = TokenEstimate(config.tokens.bytes_per_token)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        driver = Driver(shaper, metrics.decided)
        stack.callback(driver.close)
        await stack.enter_async_context(_histogram_log(config, metrics))
        backends = await stack.enter_async_context(Backends(config, driver, say))
        watchdog = await stack.enter_async_context(
            Watchdog(config.timeouts.idle, config.timeouts.client_write)
        )
        relay = Relay(config, backends, watchdog, metrics, estimate)
        app = App(config, driver, backends, relay, metrics, estimate)
        if config.share is not None:
            links = [*links, RedisLink(config.share.get_secret_value())]
        exchange = await stack.enter_async_context(exchanging(driver, links, say))
        admin = Admin(app, driver, metrics, estimate, exchange, stop.set)
        public = HttpServer(
            app.handle,
            header_bytes=config.limits.header,
            client_headers_s=config.timeouts.client_headers,
            max_connections=config.max_connections(),
            failed=lambda error: say(f"internal error: {type(error).__name__}"),
        )
        host = config.listen.host
        reuse = config.listen.reuse_port
        port = await _listen(stack, public, host, config.listen.port, "listen.port", reuse)
        admin_port = await _listen(
            stack, HttpServer(admin.handle), host, config.listen.admin_port, "listen.admin_port"
        )
        urls = (f"http://{_bracketed(host)}:{p}" for p in (port, admin_port))
        yield Proxy(app, driver, backends, metrics, exchange, stop, *urls)


async def _listen(
    stack: AsyncExitStack,
    server: HttpServer,
    host: str,
    port: int,
    key: str,
    reuse_port: bool = False,
) -> int:
    try:
        runner, real_port = await listen(server, host, port, reuse_port=reuse_port)
    except OSError as error:
        raise InputError(f"{key}: cannot listen on {host}:{port} ({error.strerror})") from error
    stack.push_async_callback(runner.cleanup)
    return real_port


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@asynccontextmanager
async def _histogram_log(config: Config, metrics: ProxyMetrics) -> AsyncIterator[None]:
    """Write the TTFT of each bucket to an .hlog once a second, if the configuration names one."""
    path = config.metrics.hlog
    if path is None:
        yield
        return
    try:
        stream = path.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"metrics.hlog: cannot write {path} ({error.strerror})") from error
    clock = asyncio.get_running_loop().time
    start = clock()

    async def flush() -> None:
        while True:
            await asyncio.sleep(HLOG_INTERVAL_S)
            log.flush(clock() - start)
            stream.flush()

    with stream:
        log = metrics.log = IntervalLog(HlogWriter(stream, time.time(), ["forebay proxy: TTFT"]))
        task = asyncio.create_task(flush())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            log.close(clock() - start)
