"""Token buckets: how many prompt tokens a tenant may send, in the long run and at once."""

from collections.abc import Iterable
from math import inf

from forebay.proxy.core.model import Tenant


class TokenBucket:
    """Fills with `tokens_per_s` up to `burst_tokens`; starts full."""

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, tokens_per_s: float, burst_tokens: float, now: float) -> None:
        self._rate = tokens_per_s
        self._burst = burst_tokens if burst_tokens < inf else tokens_per_s
        self._level = self._burst
        self._at = now

    def wait_s(self, tokens: int, now: float) -> float:
        """Seconds until so many may be taken; 0 when they may be now.

        A prompt larger than the bucket goes when the bucket is full, and leaves a debt.
        """
        self._fill(now)
        return max(0.0, min(float(tokens), self._burst) - self._level) / self._rate

    def take(self, tokens: float, now: float) -> None:
        self._fill(now)
        self._level -= tokens

    def _fill(self, now: float) -> None:
        self._level = min(self._burst, self._level + self._rate * (now - self._at))
        self._at = now


class Quotas:
    """The buckets of the tenants that have a limit; others are never held up.

    A tenant with `tokens_per_s` and no `burst_tokens` may send a second's worth at once; a burst
    without a rate limits nothing.
    """

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self._limited: dict[str, Tenant] = {}
        self._buckets: dict[str, TokenBucket] = {}
        self.any = False
        self.reconfigure(tenants)

    def reconfigure(self, tenants: Iterable[Tenant]) -> None:
        """Other limits from now on; who has the same keeps what was taken."""
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
        """Seconds until the tenant may send a prompt of so many tokens."""
        bucket = self._bucket(tenant, now)
        return 0.0 if bucket is None else bucket.wait_s(tokens, now)

    def take(self, tenant: str, tokens: float, now: float) -> None:
        """Prompts of so many tokens were taken in, here or by another proxy."""
        bucket = self._bucket(tenant, now)
        if bucket is not None:
            bucket.take(tokens, now)

    def _bucket(self, name: str, now: float) -> TokenBucket | None:
        bucket = self._buckets.get(name)
        if bucket is None and (limits := self._limited.get(name)):
            bucket = TokenBucket(limits.tokens_per_s, limits.burst_tokens, now)
            self._buckets[name] = bucket
        return bucket
