"""Run a shaper on an asyncio loop: the only place where decisions meet the clock."""

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf

from forebay.proxy.core.model import Action, Reject, Request, Send
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import UNLIMITED


class Rejected(Exception):
    """The shaper refused the request; `action` says why and when to come back."""

    def __init__(self, action: Reject) -> None:
        super().__init__(action.reason)
        self.action = action


class Grant:
    """A slot on a backend. `send` says which; it changes when the request is tried elsewhere."""

    def __init__(self, driver: "Driver", send: Send) -> None:
        self._driver = driver
        self.send = send

    def first_token(self) -> None:
        """The backend has given its first output."""
        self._driver.apply(self._driver.shaper.first_token(self.send.request.id, self._driver.now))

    def used(
        self, output_tokens: int, cached_tokens: int | None = None, prompt_tokens: int = 0
    ) -> None:
        """The answer told its usage; to be called before the slot is left.

        0, and None for `cached_tokens`, where it does not say.
        """
        driver, request_id = self._driver, self.send.request.id
        driver.shaper.used(request_id, output_tokens, driver.now, cached_tokens, prompt_tokens)

    async def computed(self, cached_tokens: int | None, prompt_tokens: int) -> Send:
        """The piece of the prompt is computed: wait for the next turn; raises Rejected.

        Args:
            cached_tokens: of the piece, found in the backend's cache; None where it does not say.
            prompt_tokens: of the piece, as the backend counts; 0 where it does not say.
        """
        shaper = self._driver.shaper
        return await self._again(
            partial(shaper.piece_computed, cached_tokens=cached_tokens, prompt_tokens=prompt_tokens)
        )

    async def not_in_pieces(self) -> Send:
        """No piece of it can be computed: wait for a turn of the whole; raises Rejected."""
        return await self._again(self._driver.shaper.not_split)

    async def retry(self) -> Send:
        """Give the slot back and wait for one on another backend; raises Rejected if none is."""
        return await self._again(self._driver.shaper.retry)

    async def _again(self, decide: Callable[[str, float], list[Action]]) -> Send:
        driver, request_id = self._driver, self.send.request.id
        future = driver.expect(request_id)
        driver.apply(decide(request_id, driver.now))
        self.send = await driver.granted(request_id, future)
        return self.send


class Slot:
    """One request's on a backend: waited for on entering, freed on leaving, however that comes.

    As a class it takes a request 10 us less than as an `asynccontextmanager`.
    """

    __slots__ = ("_driver", "_request")

    def __init__(self, driver: "Driver", request: Request) -> None:
        self._driver = driver
        self._request = request

    async def __aenter__(self) -> Grant:
        driver, request = self._driver, self._request
        future = driver.expect(request.id)
        driver.apply(driver.shaper.arrive(request, driver.now))
        return Grant(driver, await driver.granted(request.id, future))

    async def __aexit__(self, *_: object) -> None:
        self._driver.leave(self._request.id)


class Driver:
    """Carries the shaper's actions out on futures and keeps its timer."""

    def __init__(self, shaper: Shaper, record: Callable[[float, Action], None]) -> None:
        self.shaper = shaper
        self._record = record
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, asyncio.Future[Action]] = {}
        self._held: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: Callable[[], Exception] | None = None

    @property
    def now(self) -> float:
        return self._loop.time()

    def slot(self, request: Request) -> Slot:
        """Wait for a backend: `async with` gives the Grant; raises Rejected."""
        return Slot(self, request)

    def leave(self, request_id: str) -> None:
        """Its slot is free; a retry that was refused or cancelled has given it back already."""
        if request_id in self._held:
            self._held.remove(request_id)
            self.apply(self.shaper.finish(request_id, self.now))

    def expect(self, request_id: str) -> asyncio.Future[Action]:
        self._held.discard(request_id)
        self._waiting[request_id] = future = self._loop.create_future()
        return future

    async def granted(self, request_id: str, future: asyncio.Future[Action]) -> Send:
        if self._refusal is not None:
            self.end_waiting(self._refusal)  # this one, unless it was sent at once
        try:
            action = await future
        except asyncio.CancelledError:
            # The decision may have raced the cancellation: give back whichever we hold.
            if self._waiting.pop(request_id, None):
                self.apply(self.shaper.cancel(request_id, self.now))
            else:
                self.leave(request_id)
            raise
        if isinstance(action, Reject):
            raise Rejected(action)
        return action

    def backend_up(
        self, name: str, kv_tokens: float | None = None, most_prefills: int = UNLIMITED
    ) -> None:
        self.apply(self.shaper.backend_up(name, self.now, kv_tokens, most_prefills))

    def backend_down(self, name: str, keeps_cache: bool = False) -> None:
        self.apply(self.shaper.backend_down(name, self.now, keeps_cache))

    def change(self, change: Callable[[Shaper, float], list[Action]]) -> None:
        """Let an operator's change of the shaper take effect now."""
        self.apply(change(self.shaper, self.now))

    def end_waiting(self, refusal: Callable[[], Exception]) -> None:
        """Take out whoever waits, and whoever would from now on: `slot` and `retry` raise it."""
        self._refusal = refusal
        while self._waiting:
            request_id, future = self._waiting.popitem()
            # Others may be sent for it: those do not wait any more.
            self.apply(self.shaper.cancel(request_id, self.now))
            if not future.cancelled():
                future.set_exception(refusal())

    def close(self) -> None:
        """Stop the timer; requests still held are finished by their own tasks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def apply(self, actions: list[Action]) -> None:
        now = self.now
        for action in actions:
            self._record(now, action)
            if isinstance(action, Send):
                self._held.add(action.request.id)
            future = self._waiting.pop(action.request.id)
            if not future.cancelled():  # else its task runs soon, and gives back what it got
                future.set_result(action)
        self._rearm()

    def _rearm(self) -> None:
        self.close()
        at = self.shaper.wake_at()
        if at < inf:
            self._timer = self._loop.call_at(at, self._on_timer, at)

    def _on_timer(self, at: float) -> None:
        # The loop may fire a hair early; the shaper is told the time it asked for.
        self.apply(self.shaper.wake(max(at, self.now)))
