"""The same backends with other proxies: what each tells the other, and what that changes here."""

from collections.abc import Mapping

from forebay.proxy.core.policy.forecast import Outlook
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.elsewhere import Books, Peers, TenantUse
from forebay.proxy.core.state.quota import Quotas
from forebay.proxy.core.state.spending import Spending
from forebay.proxy.core.state.tenants import Fairness


class Sharing:
    """`on` while there are any."""

    def __init__(self, backends: Mapping[str, Backend], fairness: Fairness, quotas: Quotas) -> None:
        self._backends = backends
        self._fairness = fairness
        self._quotas = quotas
        self._spending = Spending()
        self.peers = Peers()
        self.on = False

    # What we tell.

    def took(self, tenant: str, prompt_tokens: int, now: float) -> None:
        """A prompt was taken in."""
        if self.on and self._fairness.on:
            self._spending.took(tenant, prompt_tokens, now)

    def gave(self, tenant: str, prefill_s: float, now: float) -> None:
        """So many prefill seconds; fewer than none when some were not computed after all."""
        if self.on and self._fairness.on:
            self._spending.gave(tenant, prefill_s, now)

    def books(self, now: float) -> Books:
        """What we have under way; of the tenants those of the last seconds."""
        lately = self._spending.lately(now)
        return Books({name: b.books(now) for name, b in self._backends.items()}, lately)

    # What we are told.

    def heard(self, peer: str, books: Books, now: float) -> dict[str, TenantUse]:
        """Another proxy says what it has under way; what tenants were given there since."""
        self.peers.know(self._backends, now)
        for name, tokens in self.peers.say(peer, books, now).items():
            if tokens > 0.0 and name in self._backends:  # it may have been removed
                self._backends[name].crowded(tokens)
        return self.peers.given()

    def charge(self, given: Mapping[str, TenantUse], now: float) -> None:
        """What tenants were given elsewhere counts as if it had been here."""
        self._fairness.given({name: use.prefill_s for name, use in given.items()}, now)
        if self._quotas.any:
            for name, use in given.items():
                self._quotas.take(name, use.prompt_tokens, now)

    def settle(self, outlook: Outlook, now: float) -> None:
        """Proxies have spoken, come or gone, or backends have: every backend's books change."""
        on = len(self.peers) > 0
        if on != self.on:
            self.on = on
            outlook.share_with(self.peers if on else None)
            if not on:
                for backend in self._backends.values():
                    backend.share_with(None, now)
        if on:
            self.peers.know(self._backends, now)
        for backend in self._backends.values():
            if on and backend.others is None:
                backend.share_with(self.peers.elsewhere(backend.name), now)
            outlook.moved(backend)
