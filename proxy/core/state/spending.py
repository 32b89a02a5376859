"""What this proxy gave its tenants lately, for other proxies to charge as well.

A tenant's sums start when it is given something and are dropped when it was given nothing for
NEWS_S: until then they are repeated in every message, so that a lost one costs nothing. Whoever
is left out starts again from nothing, here and in the books of those who hear it.
"""

from typing import Final

from forebay.proxy.core.state.elsewhere import TenantUse

NEWS_S: Final = 1.5  # longer than the silence after which others forget us
MOST: Final = 256  # tenants in one message: the latest


class Spending:
    """Sums of each tenant of the last seconds."""

    def __init__(self) -> None:
        self._use: dict[str, TenantUse] = {}
        self._at: dict[str, float] = {}

    def took(self, tenant: str, prompt_tokens: int, now: float) -> None:
        """A prompt was taken in."""
        self._add(tenant, 0.0, prompt_tokens, now)

    def gave(self, tenant: str, prefill_s: float, now: float) -> None:
        """So many prefill seconds; fewer than none when some were not computed after all."""
        self._add(tenant, prefill_s, 0, now)

    def lately(self, now: float) -> dict[str, TenantUse]:
        """The sums to tell; all others are forgotten."""
        names = [name for name, at in self._at.items() if now - at <= NEWS_S]
        if len(names) > MOST:
            names = sorted(names, key=lambda name: self._at[name])[-MOST:]
        self._at = {name: self._at[name] for name in names}
        self._use = {name: self._use[name] for name in names}
        return {name: use.copy() for name, use in self._use.items()}

    def _add(self, tenant: str, prefill_s: float, prompt_tokens: int, now: float) -> None:
        use = self._use.get(tenant)
        if use is None:
            use = self._use[tenant] = TenantUse()
        use.add(prefill_s, prompt_tokens)
        self._at[tenant] = now
