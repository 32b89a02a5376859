"""What other proxies have under way on our backends, as each of them last said.

Every proxy decides alone, on its own books and on the sum of the others'. What is said is old by
the time it is used: prefill seconds shrink as time passes since, everything else stands until the
next news. Counters are cumulative, so that a lost message costs nothing; who is new or has
restarted begins with a baseline.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import fsum, inf

from forebay.proxy.core.learn.cost import Vector

NEWS_S = 1.0
"""A proxy that has said nothing for this long is gone; what it had on a backend counts no more."""

NOTHING: Vector = (0.0, 0.0, 0.0)


class BackendBooks:
    """What one proxy has under way on one backend.

    Attributes:
        backlog_s: predicted prefill seconds left of what it sent.
        running: requests sent and not finished.
        kv_tokens: KV cache that they hold or will.
        longest_s: the longest prefill in its line, seconds.
        short_s: of backlog_s, what a short prefill waits for: less where it passes longer ones.
        load: prompt tokens it sent lately (Backend.load).
        fresh_tokens: tokens that it gave the engine to put into the cache, ever.
        work: terms of all prefills it saw the end of (cost.features), ever.
        prefills: by bucket, requests without a first token.
        queued_s: by bucket, prefill seconds of those who wait for the backend.
        worked: by bucket, share of the engine's time that prefills took lately.
    """

    __slots__ = (
        "backlog_s",
        "fresh_tokens",
        "kv_tokens",
        "load",
        "longest_s",
        "prefills",
        "queued_s",
        "running",
        "short_s",
        "work",
        "worked",
    )

    def __init__(
        self,
        backlog_s: float = 0.0,
        running: int = 0,
        kv_tokens: float = 0.0,
        longest_s: float = 0.0,
        load: float = 0.0,
        fresh_tokens: float = 0.0,
        work: Vector = NOTHING,
        prefills: Mapping[str, int] | None = None,
        queued_s: Mapping[str, float] | None = None,
        worked: Mapping[str, float] | None = None,
        short_s: float = 0.0,
    ) -> None:
        self.backlog_s = backlog_s
        self.running = running
        self.kv_tokens = kv_tokens
        self.longest_s = longest_s
        self.load = load
        self.fresh_tokens = fresh_tokens
        self.work = work
        self.prefills: Mapping[str, int] = prefills or {}
        self.queued_s: Mapping[str, float] = queued_s or {}
        self.worked: Mapping[str, float] = worked or {}
        self.short_s = short_s


class TenantUse:
    """What a tenant was given: prefill seconds and prompt tokens.

    Seconds may become fewer: what turns out not to have been computed is taken off.
    """

    __slots__ = ("prefill_s", "prompt_tokens")

    def __init__(self, prefill_s: float = 0.0, prompt_tokens: float = 0.0) -> None:
        self.prefill_s = prefill_s
        self.prompt_tokens = prompt_tokens

    def copy(self) -> "TenantUse":
        return TenantUse(self.prefill_s, self.prompt_tokens)

    def add(self, prefill_s: float, prompt_tokens: float) -> None:
        self.prefill_s += prefill_s
        self.prompt_tokens += prompt_tokens


class Books:
    """All that one proxy says at a time; `tenants` are those that were given something lately."""

    __slots__ = ("backends", "tenants")

    def __init__(
        self,
        backends: Mapping[str, BackendBooks],
        tenants: Mapping[str, TenantUse] | None = None,
    ) -> None:
        self.backends = backends
        self.tenants: Mapping[str, TenantUse] = tenants or {}


class Elsewhere:
    """The sum of what the others have on one backend."""

    __slots__ = (
        "_ends",
        "kv_tokens",
        "load",
        "longest_s",
        "prefills",
        "queued_s",
        "running",
        "short_s",
        "since",
        "work",
        "worked",
    )

    def __init__(self) -> None:
        self.work = NOTHING  # done by others since we know them: only grows
        self.update((), 0.0)

    def update(self, told: Sequence[tuple[BackendBooks, float]], now: float) -> None:
        """Sum up anew what each proxy said, and when that was."""
        self.since = now
        self._ends = [at + books.backlog_s for books, at in told if books.backlog_s > 0.0]
        self.running = 0
        self.kv_tokens = self.longest_s = self.load = self.short_s = 0.0
        self.prefills: dict[str, int] = {}
        self.queued_s: dict[str, float] = {}
        self.worked: dict[str, float] = {}
        for books, _ in told:
            self.running += books.running
            self.kv_tokens += books.kv_tokens
            self.load += books.load
            self.short_s += books.short_s
            self.longest_s = max(self.longest_s, books.longest_s)
            for bucket, count in books.prefills.items():
                self.prefills[bucket] = self.prefills.get(bucket, 0) + count
            _add(self.queued_s, books.queued_s)
            _add(self.worked, books.worked)

    def prefill_s(self, now: float) -> float:
        """Prefill seconds left; each proxy's shrink as time passes since it spoke."""
        left = 0.0
        for end in self._ends:
            if end > now:
                left += end - now
        return left

    def below_at(self, limit_s: float) -> float:
        """When `prefill_s` falls below `limit_s`, a positive number; -inf if it is from the start.

        It falls by a second a second for each proxy that still has some.
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
        """When `prefill_s` falls to nothing; -inf if nobody had any."""
        return max(self._ends, default=-inf)

    def busy_since(self, at: float) -> bool:
        """Whether the others had prefills on the engine at `at` or since, as far as we know."""
        return self.done_at() > at


class Peers:
    """The other proxies, what each said last, and what that comes to on each backend."""

    def __init__(self) -> None:
        self._given: dict[str, TenantUse] = {}  # by others, since we last asked
        self.load = 0.0  # on all backends
        self._told: dict[str, tuple[Books, float]] = {}
        self._use: dict[str, Mapping[str, TenantUse]] = {}  # as each proxy said last
        self._on: dict[str, Elsewhere] = {}  # by backend

    def __len__(self) -> int:
        return len(self._told)

    def know(self, backends: Iterable[str], now: float) -> None:
        """These backends matter; what is said of others is not looked at."""
        new = [name for name in backends if name not in self._on]
        for name in new:
            self._on[name] = Elsewhere()
        if new:
            self._sum(now)

    def forget(self, backend: str) -> None:
        """The backend matters no longer."""
        elsewhere = self._on.pop(backend, None)
        if elsewhere is not None:
            self.load -= elsewhere.load

    def given(self) -> dict[str, TenantUse]:
        """What others gave tenants since this was last asked."""
        given, self._given = self._given, {}
        return given

    def elsewhere(self, backend: str) -> Elsewhere:
        """What they have on one backend that is known; the same object for good."""
        return self._on[backend]

    @property
    def names(self) -> list[str]:
        return sorted(self._told)

    def heard_at(self, peer: str) -> float:
        """When this proxy last spoke; -inf if it never did."""
        told = self._told.get(peer)
        return told[1] if told is not None else -inf

    def say(self, peer: str, books: Books, now: float) -> dict[str, float]:
        """The news of one proxy replace its last; fresh tokens by backend since then."""
        last = self._told.get(peer)
        fresh: dict[str, float] = {}
        if last is not None:
            for name, backend in books.backends.items():
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
        self._told[peer] = books, now
        self._charge(peer, books.tenants, known=last is not None)
        self._sum(now)
        return fresh

    def gone(self, peer: str, now: float) -> bool:
        """The proxy has left: what it had counts no more. Whether it was known."""
        self._use.pop(peer, None)
        if self._told.pop(peer, None) is None:
            return False
        self._sum(now)
        return True

    def silent(self, now: float) -> list[str]:
        """Who has said nothing for NEWS_S."""
        return sorted(peer for peer, (_, at) in self._told.items() if now - at > NEWS_S)

    def _charge(self, peer: str, tenants: Mapping[str, TenantUse], *, known: bool) -> None:
        last = self._use.get(peer, {})
        self._use[peer] = tenants
        if not known:
            return  # of a proxy that we have just met, what it gave before is no news
        for name, now in tenants.items():
            prefill_s, prompt_tokens = now.prefill_s, now.prompt_tokens
            before = last.get(name)
            # Who is left out for a while, or counts fewer tokens than before, starts from nothing.
            if before is not None and before.prompt_tokens <= prompt_tokens:
                prefill_s -= before.prefill_s
                prompt_tokens -= before.prompt_tokens
            if prefill_s or prompt_tokens:
                self._given.setdefault(name, TenantUse()).add(prefill_s, prompt_tokens)

    def _sum(self, now: float) -> None:
        for name, elsewhere in self._on.items():
            told = [
                (books.backends[name], at)
                for books, at in self._told.values()
                if name in books.backends
            ]
            elsewhere.update(told, now)
        self.load = fsum(elsewhere.load for elsewhere in self._on.values())


def _add(into: dict[str, float], more: Mapping[str, float]) -> None:
    for key, value in more.items():
        into[key] = into.get(key, 0.0) + value
