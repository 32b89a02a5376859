"""Who of several tenants is next, in seconds of prefill (VTC, OSDI'24, charged in what it costs).

Each tenant has a counter of the uncached prefill seconds it was given, divided by its weight; of
those who wait, the smallest counter goes first. A tenant that comes back is lifted to where the
one sent last began: what it did not use is gone, and it is next. Charged when sent, corrected
when it is known what really was computed.
"""

from collections.abc import Iterable, Mapping
from math import exp, inf

from forebay.proxy.core.model import Tenant

RATE_S = 10.0  # time constant of what a tenant was given lately
ACTIVE_S = 10.0  # a tenant with an arrival this lately is active
FORGET_S = 300.0  # an idle tenant is forgotten
LOOK_EVERY_S = 0.5  # between two counts of who is active
LARGEST_SHARE = 0.5  # of a queue: what one tenant may hold while another is active


class Account:
    """One tenant's use."""

    __slots__ = ("active_at", "name", "queued", "rate", "rate_at", "served", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.served = 0.0  # prefill seconds over weight
        self.queued = 0
        self.rate = 0.0  # prefill seconds a second, as of `rate_at`
        self.rate_at = 0.0
        self.active_at = -inf

    def rate_now(self, now: float) -> float:
        return self.rate * exp((self.rate_at - now) / RATE_S) if self.rate else 0.0


class Fairness:
    """All tenants' counters; does nothing until a request names a tenant."""

    def __init__(self, tenants: Iterable[Tenant], default_weight: float) -> None:
        self._weights = {tenant.name: tenant.weight for tenant in tenants}
        self._default_weight = default_weight
        self._accounts: dict[str, Account] = {}
        self._queueing: dict[str, Account] = {}
        self._floor = 0.0  # the counter of whoever was sent last, before it was
        self._all = Account("", 1.0)  # for its rate
        self._looked_at = -inf
        self._active_weight = 0.0
        self._active = 0
        self.on = False

    def reconfigure(self, tenants: Iterable[Tenant], default_weight: float) -> None:
        """Other weights from now on.

        What was served so far was right by the weights of then: only the distance from where all
        stand counts by the new ones, or one tenant would have to catch up with all the past.
        """
        self._weights = {tenant.name: tenant.weight for tenant in tenants}
        self._default_weight = default_weight
        floor = self._lowest()
        for account in self._accounts.values():
            weight = self._weights.get(account.name, default_weight)
            account.served = floor + (account.served - floor) * account.weight / weight
            account.weight = weight

    def account(self, name: str) -> Account:
        account = self._accounts.get(name)
        if account is None:
            account = Account(name, self._weights.get(name, self._default_weight))
            self._accounts[name] = account
        return account

    def counters(self) -> Mapping[str, float]:
        """Of each tenant known: prefill seconds over its weight; comparisons only."""
        return {name: account.served for name, account in self._accounts.items()}

    # What changes the counters.

    def arrived(self, name: str, now: float) -> None:
        """The tenant asks for something: what it did not use while it was away is gone."""
        account = self.account(name)
        if not account.queued:
            account.served = max(account.served, self._lowest())
        if now - account.active_at > ACTIVE_S:
            self._looked_at = -inf  # count anew
        account.active_at = now

    def queued(self, name: str) -> None:
        account = self.account(name)
        account.queued += 1
        self._queueing[name] = account

    def left_queue(self, name: str) -> None:
        account = self.account(name)
        account.queued -= 1
        if not account.queued:
            del self._queueing[name]

    def charge(self, name: str, prefill_s: float, now: float) -> None:
        """A request of the tenant is sent."""
        account = self.account(name)
        self._floor = account.served
        account.served += prefill_s / account.weight
        for one in (account, self._all):
            one.rate = one.rate_now(now) + prefill_s / RATE_S
            one.rate_at = now

    def correct(self, name: str, more_s: float) -> None:
        """It took so much more than was charged, or less when negative."""
        account = self.account(name)
        account.served += more_s / account.weight

    def given(self, seconds: Mapping[str, float], now: float) -> None:
        """Other proxies gave tenants so many prefill seconds lately, or took some back."""
        before = inf
        for name, more_s in seconds.items():
            self.arrived(name, now)  # there
            account = self.account(name)
            if more_s <= 0.0:
                self.correct(name, more_s)
                continue
            before = min(before, account.served)
            self.charge(name, more_s, now)
        if before < inf:
            self._floor = before  # of several, whose order is not known

    # What is asked.

    def counter(self, name: str) -> float:
        account = self._accounts.get(name)
        return self._floor if account is None else account.served

    def shared(self, now: float) -> bool:
        """Whether more than one tenant is active."""
        self._look(now)
        return self._active > 1

    def others_share(self, name: str, engines: int, now: float) -> float:
        """Share of the engines that others take while requests of this tenant wait in line.

        What they took lately, but no more than leaves this one its fair share.
        """
        self._look(now)
        account = self.account(name)
        others = max(0.0, self._all.rate_now(now) - account.rate_now(now)) / max(1, engines)
        weights = max(account.weight, self._active_weight)
        return min(others, 1.0 - account.weight / weights)

    def ahead_s(self, name: str, other: str, queued_s: float, engines: int) -> float:
        """Of what another tenant has queued at one of `engines`: what goes before this one."""
        account = self.account(other)
        gap_s = (self.counter(name) - account.served) * account.weight / max(1, engines)
        return max(0.0, min(queued_s, gap_s))

    def _lowest(self) -> float:
        """Where whoever is next stands."""
        waiting = [account.served for account in self._queueing.values()]
        return min(self._floor, *waiting) if waiting else self._floor

    def _look(self, now: float) -> None:
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        self._active, self._active_weight = 0, 0.0
        idle: list[str] = []
        for name, account in self._accounts.items():
            if account.queued or now - account.active_at <= ACTIVE_S:
                self._active += 1
                self._active_weight += account.weight
            elif now - account.active_at > FORGET_S:
                idle.append(name)
        for name in idle:
            del self._accounts[name]
