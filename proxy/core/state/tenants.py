"""Tenants: fair shares of prefill time, and quotas of prompt tokens.

Fair shares follow VTC (Sheng et al., OSDI 2024), charged in predicted cost. Each tenant has a
counter of the uncached prefill seconds it was given, divided by its weight. Of the tenants with
waiting requests, the one with the smallest counter goes first. A tenant that returns is lifted to
half a second below the lowest counter among waiting tenants. The rest of its unused share is lost.
So a few prompts at once of a tenant below its share all go first, as they would without the others.
A tenant is charged when its request is sent. The charge is corrected once the computed tokens are
known.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import exp, fsum, inf
from typing import Final

from forebay.proxy.core.learn.decay import LOAD_TIME_S, RECENT_S
from forebay.proxy.core.model import REMEMBERED_MOST, ServiceClass, Tenant
from forebay.proxy.core.ordered import ChangeLog, First

LATELY_S: Final = 0.5
"""Seconds of prefill, over its weight, that a tenant may catch up on after it used less than its
share. Also the time between two counts of the active tenants. Doubled: a light tenant that returns
keeps others waiting for longer, and fair shares adapt 0.5 s later after a tenant has left."""


@dataclass(slots=True, eq=False)
class Account:
    """The prefill seconds that one tenant used."""

    name: str
    weight: float
    served: float = 0.0  # prefill seconds over weight
    queued: int = 0
    rate: float = 0.0  # prefill seconds a second, as of `rate_at`
    rate_at: float = 0.0
    active_at: float = -inf

    def rate_now(self, now: float) -> float:
        return self.rate * exp((self.rate_at - now) / RECENT_S) if self.rate else 0.0


class Fairness:
    """The fair-share counters of all tenants.

    Only `reconfigure` and `counters` look at all tenants.

    Attributes:
        on: a request has named a tenant.
        highest_sent: highest counter at which a tenant was sent.
        moved: tenants with waiting requests whose counter has changed.
    """

    def __init__(self, tenants: Iterable[Tenant] = (), default_weight: float = 1.0) -> None:
        self._accounts: dict[str, Account] = {}
        self._queueing = First(self._served)
        # Accounts that were active in the last RECENT_S, and in the last LOAD_TIME_S before that,
        # both in order of activity.
        self._recent = OrderedDict[str, Account]()
        self._earlier = OrderedDict[str, Account]()
        # Accounts that are recent or queueing: now, and as of `_counted_at`.
        self._present = self._active = 0
        self._present_weight = self._active_weight = 0.0
        self._counted_at = -inf
        self.highest_sent = 0.0
        self.moved = ChangeLog[str](REMEMBERED_MOST)
        self._all = Account("", 1.0)  # sums up the rates
        self.on = False
        self.reconfigure(tenants, default_weight)

    def reconfigure(self, tenants: Iterable[Tenant], default_weight: float) -> None:
        """Change the weights.

        The new weights apply to a counter's distance from the lowest one only. Else a tenant
        would have to make up for the whole past.
        """
        self.tenants = configured = list(tenants)
        self._weights = {tenant.name: tenant.weight for tenant in configured}
        self._classes = {tenant.name: tenant.classes for tenant in configured if tenant.classes}
        self.default_weight = default_weight
        lowest = self.highest_sent = self._lowest_waiting()
        for account in self._accounts.values():
            weight = self._weights.get(account.name, default_weight)
            account.served = lowest + (account.served - lowest) * account.weight / weight
            account.weight = weight
            if account.queued:
                self._queueing.note(account.name)
        present = (a for a in self._accounts.values() if a.queued or a.name in self._recent)
        self._present_weight = fsum(account.weight for account in present)

    def account(self, name: str) -> Account:
        account = self._accounts.get(name)
        if account is None:
            account = Account(name, self._weights.get(name, self.default_weight))
            self._accounts[name] = account
            self._forget_soon(account)
        return account

    def counters(self) -> Mapping[str, float]:
        """Return each tenant's prefill seconds over its weight. Only differences have a meaning."""
        return {name: account.served for name, account in self._accounts.items()}

    # Events.

    def arrived(self, name: str, now: float) -> None:
        """Note an arrival of a tenant. Most of its unused share from before is lost."""
        account = self.account(name)
        self._lift(account)
        if now - account.active_at > RECENT_S:
            self._counted_at = -inf  # count the active tenants again
        account.active_at = now
        if name in self._recent:
            self._recent.move_to_end(name)
            return
        self._earlier.pop(name, None)
        self._recent[name] = account
        if not account.queued:
            self._add_present(account, 1)

    def try_arrival(self, name: str, now: float) -> Callable[[], None]:
        """Note an arrival. Returns a function that undoes it and all notes of later questions."""
        if not self.on:
            return _nothing
        new = name not in self._accounts
        account = self.account(name)
        served = account.served
        counted = self._counted_at, self._active, self._active_weight
        self._lift(account)
        self._age(now)
        recent = name in self._recent
        if not recent or now - self._counted_at >= LATELY_S:
            more = int(not recent and not account.queued)
            self._counted_at = now
            self._active = self._present + more
            self._active_weight = self._present_weight + more * account.weight

        def undo() -> None:
            self._counted_at, self._active, self._active_weight = counted
            account.served = served
            if new:
                del self._accounts[name], self._earlier[name]

        return undo

    def queued(self, name: str) -> None:
        account = self.account(name)
        account.queued += 1
        if account.queued == 1:
            self._queueing.note(name)
            if name not in self._recent:
                self._add_present(account, 1)

    def left_queue(self, name: str) -> None:
        account = self.account(name)
        account.queued -= 1
        if account.queued:
            return
        self._queueing.forget(name)
        if name not in self._recent:
            self._add_present(account, -1)
            if name not in self._earlier:
                self._forget_soon(account)

    def charge(self, name: str, prefill_s: float, now: float) -> None:
        """Charge a tenant whose request is sent."""
        account = self.account(name)
        # Else each tenant that returns would be lifted to a lower counter.
        self.highest_sent = max(self.highest_sent, account.served)
        account.served += prefill_s / account.weight
        for charged in (account, self._all):
            charged.rate = charged.rate_now(now) + prefill_s / RECENT_S
            charged.rate_at = now
        if account.queued:
            self.moved.add(name)

    def correct(self, name: str, more_s: float) -> None:
        """Correct a charge by `more_s`, which may be negative."""
        account = self.account(name)
        account.served += more_s / account.weight
        if account.queued:
            self.moved.add(name)
            if more_s < 0.0:
                self._queueing.note(name)

    def used_elsewhere(self, seconds: Mapping[str, float], now: float) -> None:
        """Charge prefill seconds used at other proxies. Negative seconds are corrections."""
        highest, before = self.highest_sent, inf
        for name, more_s in seconds.items():
            self.arrived(name, now)
            account = self.account(name)
            if more_s <= 0.0:
                self.correct(name, more_s)
                continue
            before = min(before, account.served)
            self.charge(name, more_s, now)
        if before < inf:
            self.highest_sent = max(highest, before)  # the order of several is unknown

    # Questions.

    def counter(self, name: str) -> float:
        account = self._accounts.get(name)
        return self.highest_sent if account is None else account.served

    def behind_s(self, name: str) -> float:
        """Return the seconds a tenant may catch up on, up to the highest counter sent."""
        return max(0.0, min(LATELY_S, self.highest_sent - self.counter(name)))

    def grants(self, name: str, service_class: ServiceClass) -> bool:
        """True if a class of this tenant counts among the requests of all tenants."""
        return service_class in self._classes.get(name, ())

    def weight(self, name: str) -> float:
        return self._weights.get(name, self.default_weight)

    def shared(self, now: float) -> bool:
        """True if more than one tenant is active."""
        self._count_active(now)
        return self._active > 1

    def others_share(self, name: str, engines: int, now: float) -> float:
        """Return the share of the engines that other tenants take while this tenant waits.

        Their recent use, capped so that this tenant keeps its fair share.
        """
        self._count_active(now)
        account = self.account(name)
        others = max(0.0, self._all.rate_now(now) - account.rate_now(now)) / max(1, engines)
        weights = max(account.weight, self._active_weight)
        return min(others, 1.0 - account.weight / weights)

    def seconds_before(self, name: str, other: str, queued_s: float, engines: int) -> float:
        """Return the part of another tenant's queued seconds that goes before this tenant."""
        account = self.account(other)
        gap_s = (self.counter(name) - account.served) * account.weight / max(1, engines)
        return max(0.0, min(queued_s, gap_s))

    def _served(self, name: str) -> float:
        return self._accounts[name].served

    def _lowest_waiting(self) -> float:
        """Return the counter of the tenant that is next."""
        first = self._queueing.first()
        return self.highest_sent if first is None else min(self.highest_sent, self._served(first))

    def _lift(self, account: Account) -> None:
        """Lift the counter of a tenant that returns, without waiting requests."""
        if not account.queued:
            account.served = max(account.served, self._lowest_waiting() - LATELY_S)

    def _count_active(self, now: float) -> None:
        if now - self._counted_at < LATELY_S:
            return
        self._counted_at = now
        self._age(now)
        self._active, self._active_weight = self._present, self._present_weight
        while self._earlier:
            account = next(iter(self._earlier.values()))
            if now - account.active_at <= LOAD_TIME_S:
                break
            del self._earlier[account.name]
            if not account.queued:
                del self._accounts[account.name]

    def _age(self, now: float) -> None:
        """Note which tenants were not active in the last RECENT_S."""
        while self._recent:
            account = next(iter(self._recent.values()))
            if now - account.active_at <= RECENT_S:
                break
            del self._recent[account.name]
            self._earlier[account.name] = account
            if not account.queued:
                self._add_present(account, -1)

    def _add_present(self, account: Account, number: int) -> None:
        """Count a tenant that has become active, or no longer is if `number` is -1."""
        self._present += number
        self._present_weight += number * account.weight
        if not self._present:
            self._present_weight = 0.0  # no rounding error lasts

    def _forget_soon(self, account: Account) -> None:
        """Forget an account without recent activity at the next count."""
        self._earlier[account.name] = account
        self._earlier.move_to_end(account.name, last=False)


def _nothing() -> None:
    """Undo nothing."""


class TokenBucket:
    """A token bucket: fills with `tokens_per_s` up to `burst_tokens` and starts full."""

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, tokens_per_s: float, burst_tokens: float, now: float) -> None:
        self._rate = tokens_per_s
        self._burst = burst_tokens if burst_tokens < inf else tokens_per_s
        self._level = self._burst
        self._at = now

    def wait_s(self, tokens: int, now: float) -> float:
        """Return the seconds until `tokens` may be taken, or 0 for now.

        A prompt larger than the bucket may go when the bucket is full, and leaves a debt.
        """
        return max(0.0, min(float(tokens), self._burst) - self._level_at(now)) / self._rate

    def take(self, tokens: float, now: float) -> None:
        self._level = self._level_at(now) - tokens
        self._at = now

    def _level_at(self, now: float) -> float:
        return min(self._burst, self._level + self._rate * (now - self._at))


class Quotas:
    """The token buckets of tenants with a limit. `any` is True if any tenant has a limit.

    With `tokens_per_s` but no `burst_tokens`, the burst is one second's worth. A burst without a
    rate limits nothing.
    """

    def __init__(self, tenants: Iterable[Tenant] = ()) -> None:
        self._limited: dict[str, Tenant] = {}
        self._buckets: dict[str, TokenBucket] = {}
        self.any = False
        self.reconfigure(tenants)

    def reconfigure(self, tenants: Iterable[Tenant]) -> None:
        """Change the limits. A tenant whose limits stay keeps its level."""
        before = self._limited
        self._limited = {t.name: t for t in tenants if t.tokens_per_s < inf}
        for name in list(self._buckets):
            old, new = before[name], self._limited.get(name)
            if (
                new is None
                or new.tokens_per_s != old.tokens_per_s
                or new.burst_tokens != old.burst_tokens
            ):
                del self._buckets[name]
        self.any = bool(self._limited)

    def wait_s(self, tenant: str, tokens: int, now: float) -> float:
        """Return the seconds until the tenant may send a prompt of `tokens` tokens."""
        bucket = self._buckets.get(tenant)  # an unused bucket is full
        return 0.0 if bucket is None else bucket.wait_s(tokens, now)

    def take(self, tenant: str, tokens: float, now: float) -> None:
        """Charge tokens of a prompt that was admitted here or by another proxy."""
        bucket = self._bucket(tenant, now)
        if bucket is not None:
            bucket.take(tokens, now)

    def _bucket(self, name: str, now: float) -> TokenBucket | None:
        bucket = self._buckets.get(name)
        if bucket is None and (limits := self._limited.get(name)):
            bucket = TokenBucket(limits.tokens_per_s, limits.burst_tokens, now)
            self._buckets[name] = bucket
        return bucket
