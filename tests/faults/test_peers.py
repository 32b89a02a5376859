"""Other proxies that are too many, or invented: what they can make this one do is bounded."""

import asyncio

import pytest
from said import Said
from stages.proxy_stage import on_stage

from forebay.proxy.core.peers import Peering
from forebay.proxy.core.state.elsewhere import SILENT_S, BackendReport, ProxyReport, TenantUse
from forebay.proxy.share.exchange import (
    APPLY_S,
    FIRST_TURNS,
    MOST_MESSAGES,
    MOST_PEERS,
    PERIOD_S,
    PeerExchange,
)
from forebay.proxy.share.wire import Message, encode


def message(sender: int, number: int) -> bytes:
    report = ProxyReport({"b0": BackendReport(backlog_s=0.01, running=1)})
    return encode(Message(f"proxy{sender}", number, report))


async def gone(exchange: PeerExchange) -> None:
    """Wait until all other proxies are forgotten, with the work that they have."""
    await asyncio.sleep(2 * SILENT_S)
    exchange.turn()


async def test_four_hundred_proxies_take_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sends ten messages a second, for two seconds."""
    settled, settle = 0, Peering.settle

    def counted(self: Peering, now: float) -> list[object]:
        nonlocal settled
        settled += 1
        return settle(self, now)  # type: ignore[return-value]

    monkeypatch.setattr(Peering, "settle", counted)

    async with on_stage(None) as (on, _):
        exchange = PeerExchange(on.proxy.driver, [], Said())
        peers = on.proxy.driver.shaper.peering.peers
        turns = round(2 / PERIOD_S)
        for number in range(turns):
            exchange.turn()
            for sender in range(400):
                exchange.heard(message(sender, number))
                if not sender % 100:
                    await asyncio.sleep(PERIOD_S / 4)
        assert len(peers) == MOST_PEERS
        assert exchange.received == turns * MOST_PEERS
        assert exchange.bad == turns * (400 - MOST_PEERS)
        assert settled <= 2 / APPLY_S
        await gone(exchange)


async def test_a_few_proxies_are_heard_at_once() -> None:
    async with on_stage(None) as (on, _):
        exchange = PeerExchange(on.proxy.driver, [], Said())
        peers = on.proxy.driver.shaper.peering.peers
        exchange.heard(message(1, 0))
        assert peers.names == ["proxy1"]
        exchange.heard(message(2, 0))
        exchange.heard(message(1, 1))
        await asyncio.sleep(2 * APPLY_S)
        assert peers.names == ["proxy1", "proxy2"]
        assert exchange.received == 3
        await gone(exchange)


async def test_a_stranger_on_the_channel_is_counted_and_dropped() -> None:
    """The message charges a tenant, fills a backend and is repeated for two seconds."""
    async with on_stage(None) as (on, _):
        said, key = Said(), b"k" * 32
        exchange = PeerExchange(on.proxy.driver, [], said, key)
        peers = on.proxy.driver.shaper.peering.peers
        for number in range(20):
            use = {"good": TenantUse(charged=1e9 * number)}
            forged = ProxyReport({"b0": BackendReport(running=900_000)}, use)
            exchange.heard(encode(Message("evil", number, forged)))
            await asyncio.sleep(PERIOD_S)
        assert (len(peers), exchange.received, exchange.bad) == (0, 0, 20)
        assert said == ["share: a message of another proxy was dropped (no MAC, or of another key)"]
        assert await on.status() == 200
        exchange.heard(encode(Message("friend", 0, ProxyReport({})), key))
        assert peers.names == ["friend"]
        await gone(exchange)


class DeadLink:
    """A server that cannot be reached."""

    name, trouble, connected = "redis", "ConnectionError", False

    def send(self, data: bytes) -> None:
        raise AssertionError

    def listen(self, heard: object) -> None:
        raise AssertionError


async def test_a_server_that_was_never_reached_is_said_once() -> None:
    async with on_stage(None) as (on, _):
        link, said = DeadLink(), Said()
        exchange = PeerExchange(on.proxy.driver, [link], said)
        for _ in range(FIRST_TURNS):
            exchange.turn()
        assert said == []
        for _ in range(3):
            exchange.turn()
        assert said == ["share: not connected, deciding alone (redis: ConnectionError)"]
        link.connected = True
        link.send = lambda data: None  # type: ignore[method-assign]
        exchange.turn()
        assert said[1:] == ["share: connected to the other proxies"]


async def test_a_flood_is_not_even_decoded() -> None:
    async with on_stage(None) as (on, _):
        exchange = PeerExchange(on.proxy.driver, [], Said())
        for number in range(2 * MOST_MESSAGES):
            exchange.heard(message(1, number))
        assert exchange.received == MOST_MESSAGES
        exchange.turn()
        exchange.heard(message(1, 3 * MOST_MESSAGES))
        assert exchange.received == MOST_MESSAGES + 1
        await gone(exchange)
