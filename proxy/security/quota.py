"""Charge tenants with a quota for requests that pass no queue, by the length of their bodies."""

from forebay.proxy.api import rejections
from forebay.proxy.config.schema import Config
from forebay.proxy.driver import Driver
from forebay.proxy.telemetry.metrics.proxy_metrics import ProxyMetrics


class UnqueuedQuota:
    """Charges requests before they are sent, and refunds them if no backend has answered."""

    def __init__(self, driver: Driver, metrics: ProxyMetrics) -> None:
        self._driver = driver
        self._metrics = metrics

    def charge(self, config: Config, tenant: str, tokens: int) -> int:
        """Charge a tenant that has a quota. Raises ApiError 429.

        Returns the tokens that were charged, 0 without a quota.
        """
        if not tokens or config.mode == "observe" or not config.tenants.has_quota(tenant):
            return 0
        wait_s = self._driver.shaper.charge_unqueued(tenant, tokens, self._driver.clock())
        if wait_s:
            self._metrics.rejected("", "tenant_quota")
            raise rejections.over_quota(wait_s, config.reject_status)
        return tokens

    def give_back(self, tenant: str, tokens: int) -> None:
        """Return the charge of a request that no backend has answered."""
        if tokens:
            self._driver.shaper.charge_unqueued(tenant, -tokens, self._driver.clock())
