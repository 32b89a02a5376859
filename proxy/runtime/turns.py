"""Share the event loop by processor time: who parses next, and who waits?

Each holder, a tenant or the address of a stranger, has a debt: the processor time that its requests
took, paid off at a share of what all took. Work that is expected to be long takes turns: one at a
time, the holder with the least debt first, and then none for some times as long as it took. A
holder whose debt is large takes turns with its short work, too, a few in each turn of the loop. All
other short work goes on at once.

How long a body takes is expected from its length. For holders whose bodies took long for their
length, the dearest of late counts: a MB of values takes ten times as long as a MB of text.
`Debts` and `Line` decide, without a clock. `LoopTurns` waits and measures.
"""

import asyncio
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from math import inf
from time import thread_time
from typing import Any, Final, Generic, TypeVar

from forebay.proxy.core.learn.decay import RECENT_S
from forebay.proxy.core.model import ENOUGH, INSTANT_S
from forebay.proxy.http1 import errors

SHORT_S: Final = 0.001
"""Processor time that holds up others for so little that it needs no pause. Doubled: a body that
is dear to parse may hold all streams up for twice as long, as often as it comes."""
TEXT_S_PER_BYTE: Final = SHORT_S / (1 << 20)  # of a body that is nearly all text
LEARNED_BYTES: Final = 64 << 10  # what takes long in a shorter body is no fault of its bytes
PAUSE: Final = 4.0
"""Pause after a long turn, as a multiple of the turn. Doubled: others are held up half as often,
and a tenant that sends nothing but large bodies gets half as many parsed."""
PAID_OFF: Final = 1.0 / 3.0  # of all processor time: a holder that uses less of it has no debt
IDLE: Final = 0.1  # of real time is paid off, too
AT_ONCE: Final = 4
"""Short work of heavy holders that begins in one turn of the loop. Doubled: others wait four times
as long. Halved: the requests of a heavy tenant take the proxy half as much time again, as one turn
of the loop has less to do for several."""
MOST_HOLDERS: Final = 4_096
MOST_WAIT_S: Final = 30.0

T = TypeVar("T")


class _Account:
    """The debt of a holder, and its dearest body of late.

    Attributes:
        paid_at: the processor time of all, since the start, at which the debt will be paid off.
    """

    __slots__ = ("dear_until", "paid_at", "s_per_byte")

    def __init__(self) -> None:
        self.paid_at = self.dear_until = -inf
        self.s_per_byte = 0.0


class Debts:
    """The processor time of each holder. The table is bounded: who was charged last stays."""

    def __init__(self) -> None:
        self._accounts = OrderedDict[str, _Account]()
        self._latest, self._changed_at = "", -inf
        self._charged = ""  # the holder that was charged last
        self._charged_s = 0.0

    def __len__(self) -> int:
        return len(self._accounts)

    def seen(self, holder: str, now: float) -> None:
        """Note that a holder has work."""
        if holder != self._latest:
            self._latest, self._changed_at = holder, now

    def alone(self, now: float) -> bool:
        """True if no second holder has had work for RECENT_S."""
        return now - self._changed_at > RECENT_S

    def expected_s(self, holder: str, size: int, now: float) -> float:
        """Return the processor time that a body of `size` bytes will probably take."""
        account = self._accounts.get(holder)
        if account is None or now >= account.dear_until:
            return size * TEXT_S_PER_BYTE
        return size * max(TEXT_S_PER_BYTE, account.s_per_byte)

    def charge(self, holder: str, spent_s: float, now: float, size: int = 0) -> None:
        """Charge processor time. If a body of `size` bytes took it, learn from it."""
        accounts = self._accounts
        account = accounts.get(holder)
        if account is None:
            account = accounts[holder] = _Account()
            if len(accounts) > MOST_HOLDERS:
                accounts.popitem(last=False)
        elif holder != self._charged:
            accounts.move_to_end(holder)
        self._charged = holder
        used_s = self._charged_s + IDLE * now
        before = account.paid_at
        paid_at = (before if before > used_s else used_s) + spent_s / PAID_OFF
        most = used_s + RECENT_S
        account.paid_at = paid_at if paid_at < most else most
        self._charged_s += spent_s
        if size and spent_s > SHORT_S:
            s_per_byte = spent_s / max(size, LEARNED_BYTES)
            if now >= account.dear_until or s_per_byte >= account.s_per_byte:
                account.s_per_byte, account.dear_until = s_per_byte, now + RECENT_S

    def paid_at(self, holder: str) -> float:
        """Return a number that orders holders by their debts at any time."""
        account = self._accounts.get(holder)
        return -inf if account is None else account.paid_at

    def heavy(self, holder: str, now: float) -> bool:
        """True if a holder has used much more than its share of the loop."""
        account = self._accounts.get(holder)
        if account is None:
            return False
        return account.paid_at > self._charged_s + IDLE * now + INSTANT_S / PAID_OFF


class Place:
    """The place of a piece of work in a line.

    Attributes:
        granted: called when its turn has come.
        left: the work does not wait any more.
        taken: its turn has come.
    """

    __slots__ = ("granted", "left", "taken")

    def __init__(self, granted: Callable[[], None]) -> None:
        self.granted = granted
        self.left = self.taken = False


class Line:
    """Work that waits for a turn, the holder with the least debt first."""

    def __init__(self, debts: Debts) -> None:
        self._debts = debts
        self._waiting: dict[str, deque[Place]] = {}
        self._holders: list[tuple[float, int, str]] = []  # a heap by debts, as of when they joined
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def wait(self, holder: str, granted: Callable[[], None]) -> Place:
        """Wait for a turn."""
        turn, turns = Place(granted), self._waiting.get(holder)
        if turns is None:
            turns = self._waiting[holder] = deque()
            self._join(holder, self._debts.paid_at(holder))
        turns.append(turn)
        return turn

    def next(self) -> Place | None:
        """Give a turn to the holder with the least debt. None without any."""
        while self._holders:
            joined_at, _, holder = heapq.heappop(self._holders)
            turns, paid_at = self._waiting[holder], self._debts.paid_at(holder)
            while turns and turns[0].left:
                turns.popleft()
            turn = turns.popleft() if turns and paid_at <= joined_at else None
            if turns:
                self._join(holder, paid_at)  # perhaps behind others: it may have been charged
            else:
                del self._waiting[holder]
            if turn is not None:
                turn.taken = True
                return turn
        return None

    def _join(self, holder: str, paid_at: float) -> None:
        self._count += 1
        heapq.heappush(self._holders, (paid_at, self._count, holder))


class TimedWork(Generic[T]):
    """Awaits a coroutine, and measures the processor time of its steps.

    Attributes:
        spent_s: so far. What runs between its steps does not count.
    """

    __slots__ = ("_cpu", "_work", "spent_s")

    def __init__(self, work: Coroutine[Any, Any, T], cpu: Callable[[], float]) -> None:
        self._work = work
        self._cpu = cpu
        self.spent_s = 0.0

    def __await__(self) -> Generator[Any, Any, T]:
        work, cpu = self._work, self._cpu
        fault: BaseException | None = None
        while True:
            began = cpu()
            try:
                waits_for = work.send(None) if fault is None else work.throw(fault)
            except StopIteration as done:
                value: T = done.value
                return value
            finally:
                self.spent_s += cpu() - began
            try:
                yield waits_for
                fault = None
            except BaseException as error:  # a cancellation, which is the work's to handle
                fault = error


class LoopTurns:
    """Lets work of holders run in turns on the running loop, and charges it.

    Args:
        cpu: returns the processor time of this thread so far, in seconds.
    """

    def __init__(self, cpu: Callable[[], float] = thread_time) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._cpu = cpu
        self.debts = Debts()
        self._long, self._short = Line(self.debts), Line(self.debts)
        self._long_taken = False  # by a long turn, or by the pause after it
        # Short work of heavy holders that has begun in this turn of the loop, or millisecond.
        self._begun, self._begun_at, self._beginning = 0, -inf, False
        self._rest_s = 0.0  # the recent mean of an answer's time that is not measured by itself
        self._answered_at = cpu()

    async def take(
        self, holder: str, size: int, work: Coroutine[Any, Any, T], *, long: bool = False
    ) -> T:
        """Run work when it is its turn. Raises ApiError 503 if that takes too long.

        Args:
            size: bytes that the work reads; 0 if its time says nothing about later work.
            long: it takes long regardless of its size.
        """
        debts, now = self.debts, self._clock()
        debts.seen(holder, now)
        long = long or debts.expected_s(holder, size, now) > SHORT_S
        if long or (debts.heavy(holder, now) and not debts.alone(now)):
            try:
                await (self._long_turn(holder) if long else self._short_turn(holder, now))
            except BaseException:
                work.close()
                raise
        measured = TimedWork(work, self._cpu)
        try:
            result = await measured
        finally:
            spent_s = measured.spent_s
            debts.charge(holder, spent_s, self._clock(), size)
            self._answered_at += spent_s
            if long:
                self._loop.call_later(PAUSE * spent_s, self._next_long)
        if long:
            await asyncio.sleep(0)  # what comes of it takes a while, too
        return result

    async def pace(self, holder: str, status: int, *, body_read: bool) -> None:
        """Let a holder with a large debt wait before it gets an error: it asks again at once.

        So a flood of 404, or of requests that are rejected without their body, leaves four fifths
        of the loop to other holders. Other errors wait for nothing.
        """
        if body_read and status != 404:
            return
        now = self._clock()
        self.debts.seen(holder, now)
        if self.debts.heavy(holder, now) and not self.debts.alone(now):
            with suppress(errors.ApiError):  # it has waited for long enough
                await self._long_turn(holder)
                self._loop.call_later(PAUSE * self._rest_s, self._next_long)

    def answered(self, holder: str) -> None:
        """Charge the rest of a request: the mean time that is not measured by itself."""
        now = self._cpu()
        self._rest_s += (now - self._answered_at - self._rest_s) / ENOUGH
        self._answered_at = now
        self.debts.charge(holder, self._rest_s, self._clock())

    async def _long_turn(self, holder: str) -> None:
        if self._long_taken:
            await self._wait(self._long, holder)
        self._long_taken = True

    async def _short_turn(self, holder: str, now: float) -> None:
        if now != self._begun_at:
            self._begun, self._begun_at = 0, now
        if self._begun < AT_ONCE and not self._short:
            self._begun += 1
            return
        if not self._beginning:
            self._beginning = True
            self._loop.call_soon(self._next_short)
        await self._wait(self._short, holder)

    async def _wait(self, line: Line, holder: str) -> None:
        future = self._loop.create_future()
        turn = line.wait(holder, partial(_grant, future))
        late = self._loop.call_later(MOST_WAIT_S, _give_up, future)
        try:
            await future
        except BaseException:
            turn.left = True
            if turn.taken and line is self._long:  # its turn came as its client left, or too late
                self._next_long()
            raise
        finally:
            late.cancel()

    def _next_long(self) -> None:
        turn = self._long.next()
        self._long_taken = turn is not None
        if turn is not None:
            turn.granted()

    def _next_short(self) -> None:
        self._begun, self._begun_at = 0, self._clock()
        while self._begun < AT_ONCE:
            turn = self._short.next()
            if turn is None:
                self._beginning = False
                return
            turn.granted()
            self._begun += 1
        self._loop.call_soon(self._next_short)


def _grant(future: asyncio.Future[None]) -> None:
    if not future.done():  # a cancelled task runs soon, and ends its turn
        future.set_result(None)


def _give_up(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_exception(errors.overloaded())
