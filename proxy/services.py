"""The long-lived objects of a proxy, by name.

`build.py` makes them. App, Admin and Reloader take all of them as one argument.
"""

from dataclasses import dataclass

from forebay.proxy.api.token_estimate import TokenEstimate
from forebay.proxy.backends.pool import Backends
from forebay.proxy.core.explain.receipt import Receipts
from forebay.proxy.driver import Driver
from forebay.proxy.http1.server.server import HttpServer
from forebay.proxy.kv_events.follower import Followers
from forebay.proxy.relay.attempts import Attempts
from forebay.proxy.relay.relay import Relay
from forebay.proxy.relay.timeouts import Watchdog
from forebay.proxy.relay.unshaped import UnshapedRelay
from forebay.proxy.runtime.load_shedding import Protection
from forebay.proxy.security.guards import Security
from forebay.proxy.share.exchange import PeerExchange
from forebay.proxy.telemetry.logs.access_log import AccessLog
from forebay.proxy.telemetry.logs.capture import Capture
from forebay.proxy.telemetry.logs.usage_ledger import UsageLedger
from forebay.proxy.telemetry.metrics.live_history import LiveHistory
from forebay.proxy.telemetry.metrics.past_metrics import PastMetrics
from forebay.proxy.telemetry.metrics.proxy_metrics import ProxyMetrics
from forebay.proxy.telemetry.observers import Telemetry
from forebay.proxy.telemetry.recent_events import RecentEvents


class PublicPort:
    """The public port, for parts that are built before its server and read its figures later.

    Attributes:
        server: None until it is built.
        rejecting_s: seconds of work for requests that were rejected before their body was read.
    """

    def __init__(self) -> None:
        self.server: HttpServer | None = None
        self.rejecting_s = 0.0

    def connections(self) -> int:
        """Return the number of open connections."""
        return len(self.server.connections) if self.server is not None else 0

    def strangers_s(self) -> float:
        """Return the seconds of work so far on requests before their body is read."""
        return self.rejecting_s + (self.server.parsing_s if self.server is not None else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """All objects that live as long as the proxy and that more than one part uses.

    Attributes:
        access: the log with a line for each request.
        capture, ledger: None if they are not configured.
        past: the metrics of the last hour.
        history, events: the last 15 minutes, and the last events, for the live page.
    """

    access: AccessLog
    attempts: Attempts
    backends: Backends
    capture: Capture | None
    driver: Driver
    estimate: TokenEstimate
    events: RecentEvents
    exchange: PeerExchange
    followers: Followers
    history: LiveHistory
    ledger: UsageLedger | None
    metrics: ProxyMetrics
    past: PastMetrics
    port: PublicPort
    protection: Protection
    receipts: Receipts
    relay: Relay
    security: Security
    telemetry: Telemetry
    unshaped: UnshapedRelay
    watchdog: Watchdog
