"""Run a shaper on an asyncio loop. Only here do its decisions meet the clock."""

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf

from forebay.proxy.core.model import Action, Reject, Request, Send
from forebay.proxy.core.shaper import Shaper


class Rejected(Exception):
    """The shaper rejected the request. `action` holds the reason and the Retry-After."""

    def __init__(self, action: Reject) -> None:
        super().__init__(action.reason)
        self.action = action


class Grant:
    """A slot on a backend.

    Attributes:
        send: names the backend, and changes when the request is sent again.
    """

    def __init__(self, driver: "Driver", send: Send) -> None:
        self._driver = driver
        self.send = send

    def first_token(self) -> None:
        """Report the first output of the backend."""
        self._driver.apply(
            self._driver.shaper.first_token(self.send.request.id, self._driver.clock())
        )

    def report_usage(
        self, output_tokens: int, cached_tokens: int | None = None, prompt_tokens: int = 0
    ) -> None:
        """Report the usage of the response, before the slot is freed.

        An unknown count is 0, or None for `cached_tokens`.
        """
        driver, request_id = self._driver, self.send.request.id
        driver.shaper.used(request_id, output_tokens, driver.clock(), cached_tokens, prompt_tokens)

    def report_events(self, count: int) -> None:
        """Report the event count of a complete stream without usage, before the slot is freed."""
        self._driver.shaper.generated(self.send.request.id, count)

    async def retry(self, *, refused: bool, rest: Request | None = None) -> Send:
        """Give the slot back, and wait for a slot on another backend. Raises Rejected.

        Args:
            refused: the backend did not even take the connection.
            rest: as of `Shaper.retry`.
        """
        driver, request_id = self._driver, self.send.request.id
        decide = partial(driver.shaper.retry, refused=refused, rest=rest)
        self.send = await driver.wait_granted(request_id, driver.ask(request_id, decide))
        return self.send


class Slot:
    """The slot of a request: entering waits for it, and leaving frees it in any case.

    A class, because an `asynccontextmanager` costs a request 10 us more.
    """

    __slots__ = ("_driver", "_request")

    def __init__(self, driver: "Driver", request: Request) -> None:
        self._driver = driver
        self._request = request

    async def __aenter__(self) -> Grant:
        driver, request = self._driver, self._request
        future = driver.ask(request.id, lambda _, now: driver.shaper.arrive(request, now))
        return Grant(driver, await driver.wait_granted(request.id, future))

    async def __aexit__(self, *_: object) -> None:
        self._driver.leave(self._request.id)


class Driver:
    """Carries out the shaper's actions on futures, and keeps its timer.

    Args:
        record: called with each action and its time, for the metrics.
    """

    def __init__(self, shaper: Shaper, record: Callable[[float, Action], None]) -> None:
        self.shaper = shaper
        self._record = record
        self._loop = asyncio.get_running_loop()
        self.clock = self._loop.time
        self._waiting: dict[str, asyncio.Future[Action]] = {}
        self._granted: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: Callable[[], Exception] | None = None

    def slot(self, request: Request) -> Slot:
        """Wait for a slot in `async with`, which yields the Grant. Raises Rejected."""
        return Slot(self, request)

    def leave(self, request_id: str) -> None:
        """Free the slot of a request, unless a rejected or cancelled retry has freed it."""
        if request_id in self._granted:
            self._granted.remove(request_id)
            self.apply(self.shaper.finish(request_id, self.clock()))

    def ask(
        self, request_id: str, decide: Callable[[str, float], list[Action]]
    ) -> asyncio.Future[Action]:
        """Let the shaper decide about a request. The future gets the decision, now or later.

        If the shaper raises, the request keeps its slot if it had one, and does not wait.
        """
        granted = request_id in self._granted
        self._granted.discard(request_id)
        self._waiting[request_id] = future = self._loop.create_future()
        try:
            self.apply(decide(request_id, self.clock()))
        except BaseException:
            self._waiting.pop(request_id, None)
            if granted:
                self._granted.add(request_id)
            raise
        return future

    async def wait_granted(self, request_id: str, future: asyncio.Future[Action]) -> Send:
        if self._refusal is not None:
            self.end_waiting(self._refusal)  # also this request, unless it was sent at once
        try:
            action = await future
        except asyncio.CancelledError:
            # The decision may have raced the cancellation: give back the place or the slot.
            if self._waiting.pop(request_id, None):
                self.apply(self.shaper.cancel(request_id, self.clock()))
            else:
                self.leave(request_id)
            raise
        if isinstance(action, Reject):
            raise Rejected(action)
        return action

    def backend_up(
        self, name: str, kv_tokens: float | None = None, most_prefills: float = inf
    ) -> None:
        self.apply(self.shaper.backend_up(name, self.clock(), kv_tokens, most_prefills))

    def backend_down(self, name: str, keeps_cache: bool = False) -> None:
        self.apply(self.shaper.backend_down(name, self.clock(), keeps_cache))

    def change(self, change: Callable[[Shaper, float], list[Action]]) -> None:
        """Let an operator's change of the shaper take effect now."""
        self.apply(change(self.shaper, self.clock()))

    def end_waiting(self, refusal: Callable[[], Exception]) -> None:
        """Fail all waiting requests, and every later request that would wait, with `refusal()`."""
        self._refusal = refusal
        while self._waiting:
            request_id, future = self._waiting.popitem()
            # This may let other requests be sent, which are then no longer waiting.
            self.apply(self.shaper.cancel(request_id, self.clock()))
            if not future.cancelled():
                future.set_exception(refusal())

    def close(self) -> None:
        """Stop the timer. Running requests are finished by their own tasks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def apply(self, actions: list[Action]) -> None:
        """Carry out decisions of the shaper: wake the tasks of the requests concerned."""
        now = self.clock()
        for action in actions:
            self._record(now, action)
            if isinstance(action, Send):
                self._granted.add(action.request.id)
            future = self._waiting.pop(action.request.id)
            if not future.cancelled():  # a cancelled task runs soon, and gives its slot back
                future.set_result(action)
        self._rearm()

    def _rearm(self) -> None:
        if self._timer is not None:
            self.close()
        at = self.shaper.wake_at()
        if at < inf:
            self._timer = self._loop.call_at(at, self._on_timer, at)

    def _on_timer(self, at: float) -> None:
        # The loop may fire a little early: use at least the time that the shaper asked for.
        self.apply(self.shaper.wake(max(at, self.clock())))
