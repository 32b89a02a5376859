"""Count what tenants with limits use: requests at once, and the tokens of an hour and a day.

An hour begins with the first token that is charged in it, at any proxy. Other proxies report what
they charge and how many requests they have, so the sums are at most one report behind.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from forebay.proxy.core.model import HISTORY, REMEMBERED_MOST
from forebay.proxy.core.peers import Peering

HOUR_S: Final = 3_600.0
DAY_S: Final = 86_400.0


class BudgetWindow:
    """The tokens of an hour or a day."""

    __slots__ = ("ends_at", "tokens")

    def __init__(self) -> None:
        self.ends_at = 0.0
        self.tokens = 0.0


class Spending:
    """The use of tenants with limits, here and at other proxies.

    Args:
        peering: exchanges reports with other proxies.
    """

    def __init__(self, peering: Peering) -> None:
        self._recent = peering.recent_use
        self._peers = peering.peers
        self._windows: dict[tuple[str, float], BudgetWindow] = {}
        peering.spent_elsewhere = self.charged_elsewhere

    def began(self, tenant: str) -> None:
        """Count a request that was let in."""
        self._recent.running[tenant] += 1

    def ended(self, tenant: str) -> None:
        """Give its place back."""
        self._recent.running[tenant] -= 1
        if not self._recent.running[tenant]:
            del self._recent.running[tenant]

    def running(self, tenant: str) -> int:
        """Return the requests of a tenant at all proxies."""
        return self._recent.running[tenant] + self._peers.running(tenant)

    def window(self, tenant: str, seconds: float, now: float) -> BudgetWindow:
        """Return the current hour or day of a tenant. After the last window a new window begins."""
        window = self._windows.get((tenant, seconds))
        if window is None:
            window = self._windows[tenant, seconds] = BudgetWindow()
        if now >= window.ends_at:
            window.ends_at, window.tokens = now + seconds, 0.0
        return window

    def forget(self, tenant: str, seconds: float) -> None:
        """Drop a window: the tenant has no such budget."""
        self._windows.pop((tenant, seconds), None)

    def charge(self, tenant: str, tokens: float, now: float) -> None:
        """Charge tokens to the open windows of a tenant. Negative tokens are a refund."""
        # A request that ends may be charged to a later window than the window at its arrival.
        windows = [self._windows.get((tenant, seconds)) for seconds in (HOUR_S, DAY_S)]
        for window in windows:
            if window is not None:
                window.tokens = max(0.0, window.tokens + tokens)
        if tokens and any(windows) and len(self._peers):
            self._recent.spent(tenant, tokens, now)

    def windows(self, now: float) -> dict[str, list[float]]:
        """Return tokens and seconds left of the hour and the day of each tenant, for a new proxy.

        The tenants that were charged first are left out of more than HISTORY tenants.
        """
        rows: dict[str, list[float]] = {}
        for (tenant, seconds), window in self._windows.items():
            if window.tokens and now < window.ends_at:
                row = rows.setdefault(tenant, [0.0] * 4)
                place = 0 if seconds == HOUR_S else 2
                row[place : place + 2] = round(window.tokens), round(window.ends_at - now, 3)
        return {name: rows[name] for name in list(rows)[-HISTORY:]}

    def at_least(self, budgets: Mapping[str, Sequence[float]], now: float) -> None:
        """Take over what another proxy knows of budgets: a proxy that is new knows nothing."""
        for tenant, row in budgets.items():
            for seconds, tokens, left_s in ((HOUR_S, *row[:2]), (DAY_S, *row[2:])):
                if 0.0 < left_s <= seconds and len(self._windows) < REMEMBERED_MOST:
                    window = self.window(tenant, seconds, now)
                    if tokens > window.tokens:
                        window.tokens, window.ends_at = tokens, now + left_s

    def charged_elsewhere(self, tenant: str, tokens: float, now: float) -> None:
        """Charge tokens that another proxy has charged."""
        if not tokens or len(self._windows) >= REMEMBERED_MOST:
            return
        for seconds in (HOUR_S, DAY_S):
            window = self.window(tenant, seconds, now)
            window.tokens = max(0.0, window.tokens + tokens)
