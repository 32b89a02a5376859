"""Tell the other proxies ten times a second what we have under way, and hear it from them.

How messages travel is a link's business (`hub.py`, `redis_link.py`). An exchange waits for nobody:
a link that is down drops what it is given, and the proxy goes on alone and says so.
"""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from forebay.proxy.core.state.elsewhere import NEWS_S
from forebay.proxy.driver import Driver
from forebay.proxy.share.wire import MOST_NAME, BadMessage, Message, decode, encode

PERIOD_S = 0.1


class Link(Protocol):
    """One way to the others; a context, which never raises for a link that is down."""

    @property
    def name(self) -> str: ...
    @property
    def connected(self) -> bool: ...
    @property
    def trouble(self) -> str:
        """Why it is not connected; empty if it is."""

    def send(self, data: bytes) -> None:
        """Hand a message over; never waits, drops it if it must."""

    def listen(self, heard: Callable[[bytes], None]) -> Any:
        """A context within which `heard` gets every message of anybody, perhaps our own."""


@dataclass(slots=True)
class PeerExchange:
    """Our side of the exchange; `run` it in a task."""

    driver: Driver
    links: Sequence[Link]
    say: Callable[[str], None]
    sender: str = field(default_factory=lambda: new_sender())
    published: int = 0
    published_bytes: int = 0
    received: int = 0
    bad: int = 0
    failed: int = 0
    alone_since: float | None = field(default_factory=time.time)
    _numbers: dict[str, int] = field(default_factory=dict)  # last heard of each sender

    async def run(self) -> None:
        """Publish and forget the silent, ten times a second, until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            try:
                self.turn()
            except Exception as error:
                # A fault of ours here must not leave the books of those who have gone for good.
                self.failed += 1
                if self.failed == 1:
                    self.say(f"share: internal error: {type(error).__name__}")
            due = max(due + PERIOD_S, loop.time())  # a late turn is not made up for
            await asyncio.sleep(due - loop.time())

    def turn(self) -> None:
        """Say what we have, forget whom we have not heard."""
        driver = self.driver
        driver.apply(driver.shaper.forget_silent(driver.now))
        for sender in [s for s in self._numbers if s not in driver.shaper.peers.names]:
            del self._numbers[sender]
        self._mind_links()
        data = encode(Message(self.sender, self.published, driver.shaper.books(driver.now)))
        self.published += 1
        for link in self.links:
            if link.connected:
                link.send(data)
                self.published_bytes += len(data)

    def heard(self, data: bytes) -> None:
        """A message from anybody. What is bad, our own or old is no news."""
        try:
            message = decode(data)
        except BadMessage:
            self.bad += 1
            return
        # By two links the same message may come twice, or an older one after a newer.
        if message.sender == self.sender or self._numbers.get(message.sender, -1) >= message.number:
            return
        self._numbers[message.sender] = message.number
        self.received += 1
        driver = self.driver
        driver.apply(driver.shaper.others(message.sender, message.books, driver.now))

    def status(self) -> dict[str, Any]:
        """What `/status` says about it."""
        peers, now = self.driver.shaper.peers, self.driver.now
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

    def _mind_links(self) -> None:
        connected = any(link.connected for link in self.links)
        if connected and self.alone_since is not None:
            self.alone_since = None
            self.say("share: in touch with the other proxies' exchange")
        elif not connected and self.alone_since is None:
            self.alone_since = time.time()
            trouble = "; ".join(f"{link.name}: {link.trouble}" for link in self.links)
            self.say(f"share: alone from here on ({trouble})")


def new_sender() -> str:
    """A name no other proxy has, nor this one after a restart."""
    return f"{socket.gethostname()[: MOST_NAME - 40]}-{os.getpid()}-{secrets.token_hex(4)}"


@asynccontextmanager
async def exchanging(
    driver: Driver, links: Sequence[Link], say: Callable[[str], None]
) -> AsyncIterator[PeerExchange]:
    """An exchange that runs while the block does; without links it only has a status."""
    exchange = PeerExchange(driver, links, say)
    if not links:
        exchange.alone_since = None
        yield exchange
        return
    async with AsyncExitStack() as stack:
        for link in links:
            await stack.enter_async_context(link.listen(exchange.heard))
        task = asyncio.create_task(exchange.run())
        try:
            yield exchange
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


assert PERIOD_S * 5 < NEWS_S  # a few lost messages are no farewell
