"""The work that other proxies have on our backends, as each of them last reported it.

Every proxy decides alone, from its own state and the sum of the other proxies' reports. A report is
old when it is used: its prefill seconds shrink as time passes, and everything else stands until the
next report. Counters are cumulative, so a lost report costs nothing. The first report of a proxy
that is new or has restarted is a baseline.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, inf
from typing import Final

from forebay.proxy.core.learn.cost import Vector
from forebay.proxy.core.model import HISTORY

SILENT_S: Final = 1.0
"""A proxy without a report for this long is gone. Its work on a backend no longer counts. Within it
every other proxy reports the prefills that ended, so an observation of shared work takes as long.
Doubled: the work of a proxy that died holds a backend for 2 s."""


@dataclass(slots=True)
class BackendReport:
    """The work that one proxy has on one backend.

    Attributes:
        backlog_s: predicted prefill seconds left of the requests it sent.
        running: requests sent and not finished.
        kv_tokens: KV cache that these hold or will hold.
        longest_s: its longest prefill in the engine, seconds.
        short_s: the part of backlog_s that a short prefill waits for; less in a chunking engine.
        load: prompt tokens of its last requests (a DecayedSum).
        fresh_tokens: tokens that its requests put into the prefix cache, ever, without the blocks
            in `ProxyReport.computed`.
        work: cost terms (cost.features) of all prefills it saw the end of, ever.
        prefills: requests without a first token, by bucket.
        queued_s: prefill seconds that wait for the backend, by bucket.
        worked: share of the engine's recent time that prefills took, by bucket.
    """

    backlog_s: float = 0.0
    running: int = 0
    kv_tokens: float = 0.0
    longest_s: float = 0.0
    load: float = 0.0
    fresh_tokens: float = 0.0
    work: Vector = (0.0, 0.0, 0.0)
    prefills: Mapping[str, int] = field(default_factory=dict)
    queued_s: Mapping[str, float] = field(default_factory=dict)
    worked: Mapping[str, float] = field(default_factory=dict)
    short_s: float = 0.0


@dataclass(slots=True)
class TenantUse:
    """The use of one tenant.

    Attributes:
        prefill_s: may shrink: a prefill that was not computed after all is subtracted.
        prompt_tokens: admitted, for quotas.
        charged, refunded: tokens of the budgets of an hour and a day. Both only rise.
        running: requests now, waiting requests too; 0 for a tenant without limits.
    """

    prefill_s: float = 0.0
    prompt_tokens: float = 0.0
    charged: float = 0.0
    refunded: float = 0.0
    running: int = 0

    def add(self, more: "TenantUse") -> None:
        """Add all but the running requests."""
        self.prefill_s += more.prefill_s
        self.prompt_tokens += more.prompt_tokens
        self.charged += more.charged
        self.refunded += more.refunded

    def since(self, before: "TenantUse") -> "TenantUse":
        """Return the use since an earlier report of the same proxy."""
        if before.prompt_tokens > self.prompt_tokens or before.charged > self.charged:
            return self  # its tokens shrank, so it starts from 0
        return TenantUse(
            self.prefill_s - before.prefill_s,
            self.prompt_tokens - before.prompt_tokens,
            self.charged - before.charged,
            self.refunded - before.refunded,
        )


@dataclass(slots=True)
class ProxyReport:
    """One report of one proxy.

    Attributes:
        tenants: the use of recently active tenants.
        computed: the blocks of prompts computed since the last report, by backend.
    """

    backends: Mapping[str, BackendReport]
    tenants: Mapping[str, TenantUse] = field(default_factory=dict)
    computed: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)


class Elsewhere:
    """The summed work of all other proxies on one backend."""

    def __init__(self) -> None:
        # Done by other proxies since their first report: only grows.
        self.work: Vector = (0.0, 0.0, 0.0)
        self.update((), 0.0)

    def update(self, reports: Sequence[tuple[BackendReport, float]], now: float) -> None:
        """Sum up the latest report of each proxy, given with its time."""
        self.since = now
        self._ends = [at + report.backlog_s for report, at in reports if report.backlog_s > 0.0]
        self.running = 0
        self.kv_tokens = self.longest_s = self.load = self.short_s = 0.0
        self.prefills: dict[str, int] = {}
        self.queued_s: dict[str, float] = {}
        self.worked: dict[str, float] = {}
        for report, _ in reports:
            self.running += report.running
            self.kv_tokens += report.kv_tokens
            self.load += report.load
            self.short_s += report.short_s
            self.longest_s = max(self.longest_s, report.longest_s)
            for bucket, count in report.prefills.items():
                self.prefills[bucket] = self.prefills.get(bucket, 0) + count
            _add(self.queued_s, report.queued_s)
            _add(self.worked, report.worked)

    def prefill_s(self, now: float) -> float:
        """Return the prefill seconds left. Each proxy's part shrinks from its report on."""
        left = 0.0
        for end in self._ends:
            if end > now:
                left += end - now
        return left

    def below_at(self, limit_s: float) -> float:
        """Return when `prefill_s` falls below `limit_s` (above 0), or -inf if it is below already.

        The sum falls by one second per second for each proxy that still has work.
        """
        ends = sorted(self._ends)
        while ends:
            # Until the first of these ends the sum is a line: sum(ends) - len(ends) * t.
            at = (fsum(ends) - limit_s) / len(ends)
            if at <= ends[0]:
                return at if at > self.since else -inf
            ends.pop(0)
        return -inf

    def done_at(self) -> float:
        """Return when `prefill_s` falls to 0, or -inf if no proxy reported any work."""
        return max(self._ends, default=-inf)


class Peers:
    """The other proxies, the latest report of each, and their sum on each backend."""

    def __init__(self) -> None:
        self._used: dict[str, TenantUse] = {}  # used at other proxies since `used` was last called
        self._reports: dict[str, tuple[ProxyReport, float]] = {}
        self._on: dict[str, Elsewhere] = {}  # by backend

    def __len__(self) -> int:
        return len(self._reports)

    def know(self, backends: Iterable[str], now: float) -> None:
        """Sum up reports about these backends. Reports about other backends are ignored."""
        new = [name for name in backends if name not in self._on]
        for name in new:
            self._on[name] = Elsewhere()
        if new:
            self.sum_up(now)

    def forget(self, backend: str) -> None:
        """Stop summing up reports about this backend."""
        self._on.pop(backend, None)

    def used(self) -> dict[str, TenantUse]:
        """Return the use of tenants at other proxies since the last call."""
        used, self._used = self._used, {}
        return used

    def running(self, tenant: str) -> int:
        """Return the requests that a tenant has at other proxies."""
        uses = (report.tenants.get(tenant) for report, _ in self._reports.values())
        return sum(use.running for use in uses if use is not None)

    def elsewhere(self, backend: str) -> Elsewhere:
        """Return the sum for one known backend, always as the same object."""
        return self._on[backend]

    @property
    def names(self) -> list[str]:
        return sorted(self._reports)

    def heard_at(self, peer: str) -> float:
        """Return the time of this proxy's latest report, or -inf without any."""
        latest = self._reports.get(peer)
        return latest[1] if latest is not None else -inf

    def keep(self, peer: str, report: ProxyReport, now: float) -> dict[str, float]:
        """Replace a proxy's latest report. Returns its new `fresh_tokens` by backend.

        `sum_up` must follow, once for several reports.
        """
        last = self._reports.get(peer)
        fresh: dict[str, float] = {}
        if last is not None:
            for name, backend in report.backends.items():
                before, elsewhere = last[0].backends.get(name), self._on.get(name)
                if before is None or elsewhere is None:
                    continue
                fresh[name] = max(0.0, backend.fresh_tokens - before.fresh_tokens)
                a, b, c = elsewhere.work
                elsewhere.work = (
                    a + max(0.0, backend.work[0] - before.work[0]),
                    b + max(0.0, backend.work[1] - before.work[1]),
                    c + max(0.0, backend.work[2] - before.work[2]),
                )
        self._reports[peer] = report, now
        if last is not None:  # the first report of a proxy is its baseline
            self._charge(report.tenants, last[0].tenants)
        return fresh

    def gone(self, peer: str, now: float) -> bool:
        """Forget a proxy that has left. Returns True if it was known."""
        if self._reports.pop(peer, None) is None:
            return False
        self.sum_up(now)
        return True

    def silent(self, now: float) -> list[str]:
        """Return the proxies without a report for SILENT_S."""
        return sorted(peer for peer, (_, at) in self._reports.items() if now - at > SILENT_S)

    def _charge(self, tenants: Mapping[str, TenantUse], last: Mapping[str, TenantUse]) -> None:
        for name, use in tenants.items():
            before = last.get(name)  # None: it was left out for a while, so it starts from 0
            more = use if before is None else use.since(before)
            if more.prefill_s or more.prompt_tokens or more.charged or more.refunded:
                self._used.setdefault(name, TenantUse()).add(more)

    def sum_up(self, now: float) -> None:
        """Sum up the latest reports for each backend."""
        for name, elsewhere in self._on.items():
            reports = [
                (report.backends[name], at)
                for report, at in self._reports.values()
                if name in report.backends
            ]
            elsewhere.update(reports, now)


def _add(into: dict[str, float], more: Mapping[str, float]) -> None:
    for key, value in more.items():
        into[key] = into.get(key, 0.0) + value


class RecentUse:
    """Recent use of this proxy's tenants, for other proxies to charge as well.

    A tenant's sums start with its first use. Every report repeats them until 1.5 SILENT_S after its
    last use, so a lost report costs nothing. Then the tenant starts from 0 again, here and at the
    other proxies.

    Attributes:
        running: requests of tenants with limits, waiting requests included.
    """

    def __init__(self) -> None:
        self._use: dict[str, TenantUse] = {}
        self._at: dict[str, float] = {}
        self.running: Counter[str] = Counter()

    def admitted(self, tenant: str, prompt_tokens: int, now: float) -> None:
        """Add a prompt that was admitted."""
        self._of(tenant, now).prompt_tokens += prompt_tokens

    def computed(self, tenant: str, prefill_s: float, now: float) -> None:
        """Add prefill seconds. Negative seconds were not computed after all."""
        self._of(tenant, now).prefill_s += prefill_s

    def spent(self, tenant: str, tokens: float, now: float) -> None:
        """Charge tokens to the budgets of a tenant. Negative tokens are a refund."""
        use = self._of(tenant, now)
        use.charged += max(0.0, tokens)
        use.refunded += max(0.0, -tokens)

    def lately(self, now: float) -> dict[str, TenantUse]:
        """Return the sums to report, and drop all others."""
        for name in self.running:  # it stays in the reports, though it uses nothing new
            self._of(name, now)
        names = [name for name, at in self._at.items() if now - at <= 1.5 * SILENT_S]
        if len(names) > HISTORY:
            names = sorted(names, key=lambda name: self._at[name])[-HISTORY:]
        self._at = {name: self._at[name] for name in names}
        self._use = {name: self._use[name] for name in names}
        return {name: replace(use, running=self.running[name]) for name, use in self._use.items()}

    def _of(self, tenant: str, now: float) -> TenantUse:
        """Return the sums of a tenant that is active now."""
        self._at[tenant] = now
        return self._use.setdefault(tenant, TenantUse())
