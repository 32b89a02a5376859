"""Exchange state with the other proxies: publish ours ten times a second, and apply theirs.

Links carry the messages (`hub.py`, `redis_link.py`). The exchange never waits: a link that is down
drops messages. Then the proxy goes on alone, and logs that.
"""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from typing import Any, Protocol

from forebay.proxy.core.state.elsewhere import SILENT_S, ProxyReport
from forebay.proxy.driver import Driver
from forebay.proxy.log_events import LogEvent, Say, SparseLines
from forebay.proxy.share.wire import (
    MOST_NAME,
    BadMessage,
    Budgets,
    Message,
    Unsigned,
    decode,
    encode,
)
from forebay.traces.ground.event_loop import background

PERIOD_S = 0.1
FIRST_TURNS = 30  # without a connection since the start, this is said after 3 s
# Bounds for what others can make this proxy do: a message takes 40 us, and applying reports takes
# some microseconds for each proxy and backend.
MOST_PEERS = 64
MOST_MESSAGES = 4 * MOST_PEERS  # messages in one PERIOD_S; with two links each comes twice
TOLD_S = 5 * PERIOD_S  # a new proxy waits this long for the budgets that others know
APPLY_S = 0.02  # least interval of applying reports


class Link(Protocol):
    """One way to other proxies. A link that is down never raises."""

    @property
    def name(self) -> str: ...
    @property
    def connected(self) -> bool: ...
    @property
    def trouble(self) -> str:
        """Why the link is not connected, or "" if it is."""

    def send(self, data: bytes) -> None:
        """Send a message without waiting, or drop it."""

    def listen(self, heard: Callable[[bytes], None]) -> Any:
        """Return a context in which `heard` gets every message, perhaps also our own."""


class BudgetKeeper(Protocol):
    """The tokens that tenants have used of their budgets (`security/spending.py`)."""

    def windows(self, now: float) -> Budgets: ...
    def at_least(self, budgets: Budgets, now: float) -> None: ...


@dataclass(slots=True)
class PeerExchange:
    """This proxy's side of the exchange. `run` is for a task.

    Attributes:
        key: signs our messages, and messages without a MAC by it are dropped; b"" signs nothing.
        bad: messages that were dropped, unsigned messages too.
        budgets: the budgets of tenants, which proxies tell to a new proxy; None until it is set.
    """

    driver: Driver
    links: Sequence[Link]
    say: Say
    key: bytes = b""
    sender: str = field(default_factory=lambda: new_sender())
    published: int = 0
    published_bytes: int = 0
    received: int = 0
    bad: int = 0
    failed: int = 0
    budgets: BudgetKeeper | None = None
    alone_since: float | None = field(default_factory=time.time)
    _was_connected: bool = False
    _numbers: dict[str, int] = field(default_factory=dict)  # last message of each sender
    _heard: int = 0  # messages since the last turn
    _reports: dict[str, ProxyReport] = field(default_factory=dict)  # not applied yet
    _applied_at: float = -inf
    _timer: asyncio.TimerHandle | None = None
    _asks: bool = False
    _told: asyncio.Event = field(default_factory=asyncio.Event)
    _tells_until: float = -inf
    _lines: SparseLines = field(default_factory=SparseLines)

    async def run(self) -> None:
        """Publish our state, and forget silent proxies, every PERIOD_S until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            try:
                self.turn()
            except Exception as error:
                # Our own fault must not end this: the state of proxies that left must be forgotten.
                self.failed += 1
                if self.failed == 1:
                    line = f"share: internal error: {type(error).__name__}"
                    self.say(LogEvent.INTERNAL_ERROR, line)
            due = max(due + PERIOD_S, loop.time())  # after a late turn none is added
            await asyncio.sleep(due - loop.time())

    def turn(self) -> None:
        """Publish our state once, and forget proxies that are silent."""
        driver = self.driver
        self._heard = 0
        driver.apply(driver.shaper.peering.forget_silent(driver.clock()))
        senders = {*driver.shaper.peering.peers.names, *self._reports}
        for sender in [s for s in self._numbers if s not in senders]:
            del self._numbers[sender]
        self._log_links()
        now = driver.clock()
        report = driver.shaper.peering.report(now)
        tells = self.budgets is not None and now < self._tells_until
        budgets = self.budgets.windows(now) if self.budgets is not None and tells else None
        data = encode(Message(self.sender, self.published, report, budgets), self.key)
        self.published += 1
        for link in self.links:
            if link.connected:
                link.send(data)
                self.published_bytes += len(data)

    def heard(self, data: bytes) -> None:
        """Apply a message soon, unless it is bad, old, our own or one too many."""
        # Read it.
        self._heard += 1
        if self._heard > MOST_MESSAGES:
            self.bad += 1
            return
        try:
            message = decode(data, self.key)
        except BadMessage as bad:
            self.bad += 1
            if isinstance(bad, Unsigned):
                self._say_unsigned(bad)
            return
        # With two links a message may come twice, or an older one after a newer one.
        if message.sender == self.sender or self._numbers.get(message.sender, -1) >= message.number:
            return
        if message.sender not in self._numbers and len(self._numbers) >= MOST_PEERS:
            self.bad += 1
            return
        # Take it over.
        if message.sender not in self._numbers:
            self._tells_until = self.driver.clock() + SILENT_S
        self._numbers[message.sender] = message.number
        self.received += 1
        if self._asks and message.budgets is not None and self.budgets is not None:
            self.budgets.at_least(message.budgets, self.driver.clock())
            self._told.set()
        self._reports[message.sender] = message.report
        if self._timer is None:
            wait_s = self._applied_at + APPLY_S - self.driver.clock()
            if wait_s <= 0.0:
                self._apply()
            else:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._apply)

    def _say_unsigned(self, bad: Unsigned) -> None:
        if (more := self._lines.more("unsigned", self.driver.clock())) is not None:
            line = f"share: a message of another proxy was dropped ({bad}){more}"
            self.say(LogEvent.SHARE_UNSIGNED, line)

    def _apply(self) -> None:
        """Apply all reports that have arrived."""
        self._timer = None
        driver, reports = self.driver, self._reports
        self._reports, self._applied_at = {}, driver.clock()
        driver.apply(driver.shaper.peering.reported_together(reports, driver.clock()))

    async def wait_told(self) -> None:
        """Wait until another proxy has told the budgets of tenants, for TOLD_S at most.

        Later charges come with reports, so that no charge counts twice.
        """
        if not self.links:
            return
        self._asks = True
        with suppress(TimeoutError):
            async with asyncio.timeout(TOLD_S):
                await self._told.wait()
        self._asks = False

    def close(self) -> None:
        """Apply nothing from now on."""
        if self._timer is not None:
            self._timer.cancel()

    def status(self) -> dict[str, Any]:
        """Return the JSON of `/status`."""
        peers, now = self.driver.shaper.peering.peers, self.driver.clock()
        since = self.alone_since
        return {
            "mode": "+".join(link.name for link in self.links) or "off",
            "id": self.sender,
            "alone_since": None if since is None else _utc(since),
            "links": [
                {"name": link.name, "connected": link.connected, "trouble": link.trouble}
                for link in self.links
            ],
            "peers": [
                {"id": name, "heard_s_ago": round(max(0.0, now - peers.heard_at(name)), 3)}
                for name in peers.names
            ],
            "published": self.published,
            "published_bytes": self.published_bytes,
            "received": self.received,
            "bad_messages": self.bad,
            "internal_errors": self.failed,
        }

    def _log_links(self) -> None:
        connected = any(link.connected for link in self.links)
        never = self.published == FIRST_TURNS and not self._was_connected
        if connected and self.alone_since is not None:
            self.alone_since, self._was_connected = None, True
            self.say(LogEvent.SHARE_CONNECTED, "share: connected to the other proxies")
        elif not connected and (self.alone_since is None or never):
            self.alone_since = self.alone_since or time.time()
            trouble = "; ".join(f"{link.name}: {link.trouble}" for link in self.links)
            line = f"share: not connected, deciding alone ({trouble})"
            self.say(LogEvent.SHARE_LOST, line)


def new_sender() -> str:
    """Return a name that no other proxy has, nor this one after a restart."""
    return f"{socket.gethostname()[: MOST_NAME - 40]}-{os.getpid()}-{secrets.token_hex(4)}"


@asynccontextmanager
async def exchanging(
    driver: Driver, links: Sequence[Link], say: Say, key: bytes = b""
) -> AsyncIterator[PeerExchange]:
    """Run an exchange while the block runs. Without links it only has a status.

    Args:
        key: as in `PeerExchange`.
    """
    exchange = PeerExchange(driver, links, say, key)
    if not links:
        exchange.alone_since = None
        yield exchange
        return
    async with AsyncExitStack() as stack:
        for link in links:
            await stack.enter_async_context(link.listen(exchange.heard))
        stack.callback(exchange.close)
        await stack.enter_async_context(background(exchange.run()))
        yield exchange


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


assert PERIOD_S * 5 < SILENT_S  # a few lost messages do not make a proxy silent
