"""Share the event loop by processor time: who parses next, and who waits?

Each holder, a tenant or the address of a stranger, has a debt: the processor time that its requests
took, paid off at a share of real time. Work that is expected to be long takes turns: one at a time,
the holder with the least debt first, and then none for some times as long as it took. A holder
whose debt is large takes turns with its short work, too, so that each turn of the loop begins one
of its requests. All other short work goes on at once.

How long a body takes is expected from its length. For holders whose bodies took long for their
length, the dearest of late counts: a MB of values takes ten times as long as a MB of text.
`Debts` and `Line` decide, without a clock. `LoopTurns` waits and measures.
"""

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import thread_time
from typing import Any, Final, Generic, TypeVar

from forebay.proxy.core.learn.decay import RECENT_S, Average
from forebay.proxy.core.model import INSTANT_S
from forebay.proxy.http1 import errors

SHORT_S: Final = 0.002
"""Processor time that holds up others for so little that it need not wait. Doubled: a body that
is dear to parse may hold all streams up for twice as long, as often as it comes."""
TEXT_S_PER_BYTE: Final = SHORT_S / (1 << 20)  # of a body that is nearly all text
LEARNED_BYTES: Final = 64 << 10  # what takes long in a shorter body is no fault of its bytes
PAUSE: Final = 4.0
"""Pause after a long turn, as a multiple of the turn. Doubled: others are held up half as often,
and a tenant that sends nothing but large bodies gets half as many parsed."""
PAID_OFF: Final = 1.0 / 3.0  # of real time: a holder that uses less of the loop has no debt
MOST_HOLDERS: Final = 4_096
MOST_WAIT_S: Final = 30.0

T = TypeVar("T")


class _Account:
    """The debt of a holder, as the time at which it is paid off, and its dearest body of late."""

    __slots__ = ("dear_until", "paid_at", "s_per_byte")

    def __init__(self) -> None:
        self.paid_at = self.dear_until = -inf
        self.s_per_byte = 0.0


class Debts:
    """The processor time of each holder. The table is bounded: who was charged last stays."""

    def __init__(self) -> None:
        self._accounts = OrderedDict[str, _Account]()
        self._latest, self._changed_at = "", -inf

    def __len__(self) -> int:
        return len(self._accounts)

    def seen(self, holder: str, now: float) -> None:
        """Note that a holder has work."""
        if holder != self._latest:
            self._latest, self._changed_at = holder, now

    def alone(self, now: float) -> bool:
        """True if no second holder had work lately."""
        return now - self._changed_at > RECENT_S

    def expected_s(self, holder: str, size: int, now: float) -> float:
        """Return the processor time that a body of `size` bytes will probably take."""
        account = self._accounts.get(holder)
        if account is None or now >= account.dear_until:
            return size * TEXT_S_PER_BYTE
        return size * max(TEXT_S_PER_BYTE, account.s_per_byte)

    def charge(self, holder: str, spent_s: float, now: float, size: int = 0) -> None:
        """Charge processor time, and learn from it if it was that of a body of `size` bytes."""
        account = self._accounts.get(holder)
        if account is None:
            account = self._accounts[holder] = _Account()
            if len(self._accounts) > MOST_HOLDERS:
                self._accounts.popitem(last=False)
        else:
            self._accounts.move_to_end(holder)
        paid_at = max(account.paid_at, now) + spent_s / PAID_OFF
        account.paid_at = min(paid_at, now + RECENT_S)
        if size and spent_s > SHORT_S:
            s_per_byte = spent_s / max(size, LEARNED_BYTES)
            if now >= account.dear_until or s_per_byte >= account.s_per_byte:
                account.s_per_byte, account.dear_until = s_per_byte, now + RECENT_S

    def paid_at(self, holder: str) -> float:
        """Return when a holder has no debt any more. This orders holders at any time."""
        account = self._accounts.get(holder)
        return -inf if account is None else account.paid_at

    def heavy(self, holder: str, now: float) -> bool:
        """True if a holder has used much more than its share of the loop."""
        return self.paid_at(holder) > now + INSTANT_S / PAID_OFF


@dataclass(order=True, slots=True)
class Turn:
    """The place of a piece of work in a line.

    Attributes:
        granted: called when it is its turn.
        left: the work does not wait any more.
        taken: its turn has come.
    """

    paid_at: float
    number: int
    holder: str = field(compare=False)
    granted: Callable[[], None] = field(compare=False)
    left: bool = field(default=False, compare=False)
    taken: bool = field(default=False, compare=False)


class Line:
    """Work of one kind that takes turns: one at a time, the holder with the least debt first.

    Attributes:
        taken: a turn has begun and has not ended.
        next_at: no turn begins before.
        armed: the beginning of the next turn is scheduled.
    """

    def __init__(self, debts: Debts) -> None:
        self._debts = debts
        self._waiting: list[Turn] = []
        self._count = 0
        self.taken = self.armed = False
        self.next_at = -inf

    @property
    def waits(self) -> bool:
        """True if a turn may begin at `next_at`."""
        return bool(self._waiting) and not self.taken

    def take(self, now: float) -> bool:
        """Take a turn at once. False if others have it, wait for it, or pause."""
        if self.taken or self._waiting or now < self.next_at:
            return False
        self.taken = True
        return True

    def wait(self, holder: str, granted: Callable[[], None]) -> Turn:
        """Wait for a turn."""
        self._count += 1
        turn = Turn(self._debts.paid_at(holder), self._count, holder, granted)
        heapq.heappush(self._waiting, turn)
        return turn

    def begin(self) -> Turn | None:
        """Give the turn to the holder with the least debt. None if nobody waits any more."""
        while self._waiting:
            turn = heapq.heappop(self._waiting)
            if turn.left:
                continue
            paid_at = self._debts.paid_at(turn.holder)
            if paid_at > turn.paid_at:  # it was charged while it waited
                turn.paid_at = paid_at
                heapq.heappush(self._waiting, turn)
                continue
            self.taken = turn.taken = True
            return turn
        return None

    def end(self, spent_s: float, now: float, *, pauses: bool) -> None:
        """End a turn that took so much processor time."""
        self.taken = False
        self.next_at = now + (PAUSE * spent_s if pauses else 0.0)


class Measured(Generic[T]):
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
        self._rest = Average(0.0)  # of an answer: all that is not measured by itself
        self._answered_at = cpu()

    async def take(
        self, holder: str, size: int, work: Coroutine[Any, Any, T], *, long: bool = False
    ) -> T:
        """Run work when it is its turn. Raises ApiError 503 if that takes too long.

        Args:
            size: bytes that the work reads; 0 if its time says nothing about later work.
            long: it takes long, whatever its size is.
        """
        debts, now = self.debts, self._clock()
        debts.seen(holder, now)
        long = long or debts.expected_s(holder, size, now) > SHORT_S
        line = self._long if long else self._short if debts.heavy(holder, now) else None
        if line is not None and not line.take(now):
            try:
                await self._wait(line, holder)
            except BaseException:
                work.close()
                raise
        measured = Measured(work, self._cpu)
        try:
            result = await measured
        finally:
            spent_s, now = measured.spent_s, self._clock()
            debts.charge(holder, spent_s, now, size)
            self._answered_at += spent_s
            if line is not None:
                self._end(line, spent_s, now)
        if long:
            await asyncio.sleep(0)  # what comes of it takes a while, too
        return result

    async def pace(self, holder: str) -> None:
        """Let a holder with a large debt wait for its turn before it gets an answer."""
        if self.debts.heavy(holder, self._clock()):
            await self.take(holder, 0, asyncio.sleep(0))

    def answered(self, holder: str) -> None:
        """Charge the rest of a request: the mean of what is not measured by itself."""
        now = self._cpu()
        self._rest.add(now - self._answered_at)
        self._answered_at = now
        self.debts.charge(holder, self._rest.value, self._clock())

    async def _wait(self, line: Line, holder: str) -> None:
        future = self._loop.create_future()
        turn = line.wait(holder, partial(_grant, future))
        self._arm(line)
        try:
            async with asyncio.timeout(MOST_WAIT_S):
                await future
        except BaseException as error:
            turn.left = True
            if turn.taken:  # its turn came as its client left, or too late
                self._end(line, 0.0, self._clock())
            if isinstance(error, TimeoutError):
                raise errors.overloaded() from None
            raise

    def _end(self, line: Line, spent_s: float, now: float) -> None:
        # Short work of a holder without others needs no pause: it holds up nobody.
        line.end(spent_s, now, pauses=line is self._long or not self.debts.alone(now))
        self._arm(line)

    def _arm(self, line: Line) -> None:
        """Begin the next turn in time, if one may begin."""
        if not line.waits or line.armed:
            return
        line.armed = True
        self._loop.call_at(line.next_at, self._begin, line)

    def _begin(self, line: Line) -> None:
        line.armed = False
        turn = line.begin()
        if turn is not None:
            turn.granted()


def _grant(future: asyncio.Future[None]) -> None:
    if not future.done():  # a cancelled task runs soon, and ends its turn
        future.set_result(None)
