"""Limit the requests that are passed on past the queues (`relay/unshaped.py`).

They take slots of `max_concurrency` like all others. While several tenants use a backend, each may
have only one engine step's work passed on there, so that a shaped request of another tenant waits
for little. Work that does not fit waits here, in order for each tenant.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from forebay.proxy.backends.link import BackendLink
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.driver import Driver
from forebay.proxy.http1 import errors

STEP_TOKENS: Final = 8_192
"""Limit of one tenant on one backend, while others use it: one step of an engine. One larger
request may run alone. Doubled: others wait twice as long behind it."""
LEAST_TOKENS: Final = 1_024  # that a request of the engine counts: audio has no estimate
ACTIVE_S: Final = 10.0  # a tenant uses a backend until this long after its last request there
LOOK_S: Final = 0.05  # between two looks for room that shaped requests have left


class _Lease(NamedTuple):
    """A slot that is held."""

    name: str
    backend: Backend | None
    tenant: str
    tokens: int


@dataclass(slots=True, eq=False)
class _Waiter:
    future: asyncio.Future[_Lease]
    tokens: int
    lease: _Lease | None = None


@dataclass(slots=True)
class _Here:
    """The requests that are passed on to one backend.

    Attributes:
        tokens: the engine's running work for each tenant, in tokens.
        count: requests of each tenant that run.
        waiting: the waiting requests of each tenant; the tenant served last is at the end.
        active: time of each tenant's latest request there, shaped or not.
    """

    tokens: Counter[str] = field(default_factory=Counter)
    count: Counter[str] = field(default_factory=Counter)
    waiting: dict[str, deque[_Waiter]] = field(default_factory=dict)
    active: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class PassedOn:
    """Gives slots to requests that pass no queue.

    Attributes:
        patience_s: returns how long a request may wait for its slot.
        load_status: returns the status of a request that got no slot.
        observes: returns whether every request gets its slot at once.
    """

    driver: Driver
    patience_s: Callable[[], float]
    load_status: Callable[[], int]
    observes: Callable[[], bool] = lambda: False
    _here: dict[str, _Here] = field(default_factory=dict)
    _waited_for: set[str] = field(default_factory=set)  # backends with waiting requests
    _timer: asyncio.TimerHandle | None = None
    _refusal: Callable[[], Exception] | None = None

    def _at(self, backend: str) -> _Here:
        here = self._here.get(backend)
        if here is None:
            here = self._here[backend] = _Here()
        return here

    def seen(self, backend: str, tenant: str) -> None:
        """A request of this tenant has been sent to the backend."""
        here = self._at(backend)
        now = self.driver.clock()
        here.active.pop(tenant, None)
        here.active[tenant] = now
        while here.active and (first := next(iter(here.active))) != tenant:
            if here.active[first] > now - ACTIVE_S:
                break
            del here.active[first]

    def has_room(self, link: BackendLink, tenant: str, tokens: int) -> bool:
        """True if a request would get a slot at once."""
        here = self._at(link.name)
        return not here.waiting.get(tenant) and self._fits(link.name, here, tenant, tokens)

    @asynccontextmanager
    async def slot(self, link: BackendLink, tenant: str, tokens: int) -> AsyncIterator[None]:
        """Hold a slot while the block runs. Raises ApiError if no slot is free in time.

        Args:
            tokens: work for the engine; 0: the API server alone answers.
        """
        if self.has_room(link, tenant, tokens):
            lease = self._take(link.name, tenant, tokens)
        else:
            lease = await self._wait(link, tenant, tokens)
        try:
            yield
        finally:
            self._leave(lease)

    def _take(self, name: str, tenant: str, tokens: int) -> _Lease:
        backend, here = self.driver.shaper.backends.get(name), self._here[name]
        self.seen(name, tenant)
        here.tokens[tenant] += tokens
        here.count[tenant] += 1
        self._pass_by(backend, 1)
        return _Lease(name, backend, tenant, tokens)

    def _leave(self, lease: _Lease) -> None:
        here, tenant = self._here[lease.name], lease.tenant
        here.tokens[tenant] -= lease.tokens
        here.count[tenant] -= 1
        if not here.count[tenant]:
            del here.count[tenant], here.tokens[tenant]
        self._pass_by(lease.backend, -1)
        self._grant(lease.name)

    def forget(self, name: str) -> None:
        """Forget a backend that is gone."""
        here = self._here.get(name)
        if here is not None and not here.count and not here.waiting:
            del self._here[name]
            self._waited_for.discard(name)

    def end_all(self, refusal: Callable[[], Exception]) -> None:
        """Fail all requests that wait for a slot, and all that would, with `refusal()`."""
        self._refusal = refusal
        for here in self._here.values():
            for line in here.waiting.values():
                for waiter in line:
                    if not waiter.future.done():
                        waiter.future.set_exception(refusal())

    def _fits(self, name: str, here: _Here, tenant: str, tokens: int) -> bool:
        backend = self.driver.shaper.backends.get(name)
        if backend is None or not backend.up or self.observes():
            return True  # the attempt fails at once, and goes elsewhere
        slots = backend.spec.max_concurrency
        if backend.running >= slots:
            return False
        since = self.driver.clock() - ACTIVE_S
        if not tenant or not any(
            at > since for other, at in here.active.items() if other != tenant
        ):
            return True
        if not tokens:
            return here.count[tenant] < max(1, slots // 2)
        return not here.tokens[tenant] or here.tokens[tenant] + tokens <= STEP_TOKENS

    async def _wait(self, link: BackendLink, tenant: str, tokens: int) -> _Lease:
        if self._refusal is not None:
            raise self._refusal()
        waiter = _Waiter(asyncio.get_running_loop().create_future(), tokens)
        waiting = self._here[link.name].waiting
        waiting.setdefault(tenant, deque()).append(waiter)
        self._waited_for.add(link.name)
        self._look_again()
        try:
            async with asyncio.timeout(self.patience_s()):
                return await waiter.future
        except BaseException as error:
            if waiter.lease is not None:  # it was granted as the client left, or too late
                self._leave(waiter.lease)
            elif waiter in (line := waiting.get(tenant, deque())):
                line.remove(waiter)
                if not line:
                    del waiting[tenant]
            if isinstance(error, TimeoutError):
                raise errors.no_slot(self.load_status()) from None
            raise

    def _grant(self, name: str) -> None:
        """Give slots to requests that wait, one for each tenant in turn, as far as they fit."""
        while self._grant_each(name):
            pass

    def _grant_each(self, name: str) -> bool:
        """Give a slot to the first request of each tenant. True if any got a slot."""
        here, granted = self._here[name], False
        for tenant in list(here.waiting):
            line = here.waiting[tenant]
            if self._fits(name, here, tenant, line[0].tokens):
                waiter = line.popleft()
                del here.waiting[tenant]
                if line:
                    here.waiting[tenant] = line  # behind the other tenants
                if not waiter.future.done():
                    waiter.lease = self._take(name, tenant, waiter.tokens)
                    waiter.future.set_result(waiter.lease)
                granted = True
        return granted

    def _look_again(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Shaped requests leave slots, and tenants leave, without a word to this class."""
        self._timer = None
        for name in list(self._waited_for):
            self._grant(name)
            if not self._here[name].waiting:
                self._waited_for.discard(name)
        if self._waited_for:
            self._look_again()

    def _pass_by(self, backend: Backend | None, count: int) -> None:
        if backend is not None:
            self.driver.change(lambda core, now: core.changes.pass_by(backend, count, now))
