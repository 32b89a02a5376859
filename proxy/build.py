"""Build the services of a proxy from its configuration.

Read `build_services` first: it calls one builder for each part of the proxy. An exit stack ends
the services again, the latest first.
"""

import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack

from forebay.proxy.api.cache_salt import SECRET, share_key
from forebay.proxy.api.token_estimate import TokenEstimate
from forebay.proxy.backends.pool import Backends
from forebay.proxy.config.schema import Config
from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.observe import ObservingShaper
from forebay.proxy.driver import Driver
from forebay.proxy.kv_events.follower import Followers
from forebay.proxy.log_events import LogEvent
from forebay.proxy.relay.attempts import Attempts
from forebay.proxy.relay.relay import Relay
from forebay.proxy.relay.timeouts import Watchdog
from forebay.proxy.relay.unshaped import UnshapedRelay
from forebay.proxy.routing import live_options
from forebay.proxy.runtime.load_shedding import Protection
from forebay.proxy.security.guards import Security
from forebay.proxy.services import PublicPort, Services
from forebay.proxy.share.exchange import Link, PeerExchange, exchanging
from forebay.proxy.share.redis_link import RedisLink
from forebay.proxy.telemetry.histogram_log import histogram_log
from forebay.proxy.telemetry.logs.access_log import AccessLog
from forebay.proxy.telemetry.logs.capture import Capture, capturing
from forebay.proxy.telemetry.logs.rejection_log import RejectionLog
from forebay.proxy.telemetry.logs.tracing import Tracer
from forebay.proxy.telemetry.logs.usage_ledger import UsageLedger
from forebay.proxy.telemetry.metrics.backend_metrics import BackendMetrics
from forebay.proxy.telemetry.metrics.decision_metrics import DecisionMetrics
from forebay.proxy.telemetry.metrics.live_history import LiveHistory
from forebay.proxy.telemetry.metrics.past_metrics import PastMetrics
from forebay.proxy.telemetry.metrics.proxy_metrics import ProxyMetrics
from forebay.proxy.telemetry.metrics.scaling_metrics import ScalingMetrics
from forebay.proxy.telemetry.observers import Telemetry
from forebay.proxy.telemetry.recent_events import RecentEvents
from forebay.traces.ground.event_loop import background


class Builder:
    """Builds the parts of one proxy. `stack` ends them."""

    def __init__(self, stack: AsyncExitStack, config: Config, say: RecentEvents) -> None:
        self.stack = stack
        self.config = config
        self.say = say
        self.rejections = RejectionLog(say)
        self.port = PublicPort()
        self.recorder = DecisionRecorder(config.metrics.receipts)

    async def driver(self) -> tuple[Driver, ProxyMetrics]:
        """Build the policy, the driver that runs it, and the metrics that record its decisions."""
        config, recorder = self.config, self.recorder
        shaper = ObservingShaper(
            config.core_backends(),
            config.core_buckets(),
            **live_options(config, self.say),
            recorder=recorder,
        )
        metrics = ProxyMetrics(shaper, self.port.connections, config.tenants.known)
        clock = asyncio.get_running_loop().time
        metrics.registry.register(DecisionMetrics(shaper, recorder.receipts, clock))
        driver = Driver(shaper, metrics.decided)
        self.stack.callback(driver.close)
        await self.stack.enter_async_context(histogram_log(config.metrics.hlog, metrics, self.say))
        return driver, metrics

    async def backends(
        self, driver: Driver, metrics: ProxyMetrics, security: Security
    ) -> tuple[Backends, Watchdog, Followers]:
        """Build the backends, the watchdog of their requests, and the followers of their caches."""
        config, enter = self.config, self.stack.enter_async_context
        backends = await enter(Backends(config, driver, self.say, security.upstream_tls))
        receipts = self.recorder.receipts
        metrics.registry.register(BackendMetrics(driver.shaper, backends.health, receipts))
        timeouts = config.timeouts
        watchdog = Watchdog(timeouts.idle, timeouts.client_write)
        await enter(background(watchdog.run()))
        metrics.client_waits.of[("download",)].read = lambda: watchdog.untaken_s
        followers = await enter(Followers(config, driver, backends, self.say))
        return backends, watchdog, followers

    async def protection(self, metrics: ProxyMetrics) -> Protection:
        """Build the part that sheds load while the proxy itself is short of a resource."""
        protection = Protection(
            self.config.limits, self.say, metrics.lag.observe, strangers_s=self.port.strangers_s
        )
        await self.stack.enter_async_context(background(protection.run()))
        metrics.shedding.set_function(lambda: protection.shed)
        return protection

    async def observers(
        self, metrics: ProxyMetrics, tracer: Tracer | None
    ) -> tuple[Telemetry, AccessLog, Capture | None, UsageLedger | None]:
        """Build the parts that report each request."""
        config = self.config
        if tracer is None and config.tracing.enabled:
            tracer = Tracer(config.tracing)
        if tracer is not None:
            self.stack.callback(tracer.close)
        access = AccessLog(config.logs)
        capture = await self.stack.enter_async_context(capturing(config, os.environ, self.say))
        ledger = None
        if config.usage.path is not None:
            ledger = self.stack.enter_context(UsageLedger(config.usage.path, self.say))
        receipts = self.recorder.receipts
        telemetry = Telemetry(metrics, access, tracer, capture, receipts, ledger, self.rejections)
        return telemetry, access, capture, ledger

    async def history(
        self, driver: Driver, metrics: ProxyMetrics
    ) -> tuple[PastMetrics, LiveHistory]:
        """Build the metrics of the last hour, and the live history of 15 minutes."""
        past = PastMetrics(metrics.text, driver.clock)
        history = metrics.history = LiveHistory(driver.shaper, driver.clock)
        scaling = ScalingMetrics(driver.shaper, driver.clock)
        metrics.registry.register(scaling)
        ticks = past.kept(self.rejections.tick, history.take, scaling.look)
        await self.stack.enter_async_context(ticks)
        return past, history

    async def exchange(
        self, driver: Driver, metrics: ProxyMetrics, links: Sequence[Link]
    ) -> PeerExchange:
        """Build the exchange with other proxies in front of the same backends."""
        if self.config.share is not None:
            links = [*links, RedisLink(self.config.share.get_secret_value())]
            if not share_key(os.environ):
                line = "share: whoever writes to the channel can lock tenants out, and spend or "
                line += f"refund their budgets; set {SECRET} alike at all proxies"
                self.say(LogEvent.SHARE_UNSIGNED, line)
        exchange = await self.stack.enter_async_context(
            exchanging(driver, links, self.say, share_key(os.environ))
        )
        metrics.alone.set_function(lambda: exchange.alone_since is not None)
        return exchange


async def build_services(
    stack: AsyncExitStack,
    config: Config,
    say: RecentEvents,
    *,
    tracer: Tracer | None,
    links: Sequence[Link],
) -> Services:
    """Build and start all services. Raises InputError. Arguments as in `start_proxy`."""
    # In the order of their needs: security, the policy, backends, and the parts that watch them.
    build = Builder(stack, config, say)
    security = Security(config, os.environ)
    await security.jwks.refresh(say)
    security.say_notes(say)
    security.report_handshakes(say, asyncio.get_running_loop().time)
    driver, metrics = await build.driver()
    backends, watchdog, followers = await build.backends(driver, metrics, security)
    # Then the parts of the request path, and the parts that report it.
    estimate = TokenEstimate(config.tokens.bytes_per_token)
    attempts = Attempts(config, backends, watchdog)
    protection = await build.protection(metrics)
    telemetry, access, capture, ledger = await build.observers(metrics, tracer)
    past, history = await build.history(driver, metrics)
    # Relays come last, because they use nearly all others.
    return Services(
        access=access,
        attempts=attempts,
        backends=backends,
        capture=capture,
        driver=driver,
        estimate=estimate,
        events=say,
        exchange=await build.exchange(driver, metrics, links),
        followers=followers,
        history=history,
        ledger=ledger,
        metrics=metrics,
        past=past,
        port=build.port,
        protection=protection,
        receipts=build.recorder.receipts,
        relay=Relay(
            attempts,
            backends,
            watchdog,
            metrics=metrics,
            estimate=estimate,
            translator=followers.translator,
            response_ids=security.response_ids,
        ),
        security=security,
        telemetry=telemetry,
        unshaped=UnshapedRelay(attempts, backends, metrics),
        watchdog=watchdog,
    )
