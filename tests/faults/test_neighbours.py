"""Tenants beside each other: dear work of one tenant takes turns with the others."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fakes.tenant_keys import key_of, keys_of
from stages.proxy_stage import WHOLE, Call, Stage, answer, now, on_stage

Keys = dict[str, Any]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """The configuration of a proxy that knows two tenants."""
    return {"tenants": {"keys": keys_of(tmp_path, "good", "bad")}}


HELLO = [{"role": "user", "content": "hello"}]
DEAR: dict[str, dict[str, Any]] = {
    "50,000 keys": dict.fromkeys((f"k{number}" for number in range(50_000)), 1),
    "10,000 messages": {"messages": HELLO * 10_000},
    "9,000 parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 9_000}]
    },
}


async def ask(on: Stage, tenant: str, **fields: Any) -> int:
    """Ask for a chat, and return the status."""
    data = json.dumps({"model": tenant, "messages": HELLO, **fields}).encode()
    headers = key_of(tenant)
    return await on.status(data, path="/v1/chat/completions", headers=headers)


async def order_of(on: Stage, calls: list[Call], asks: list[Any]) -> list[str]:
    """Send requests at the same moment. Returns the tenants in the order of the backend."""
    before = len(calls)
    assert set(await asyncio.gather(*asks)) == {200}
    return [str(json.loads(call.body)["model"]) for call in calls[before:]]


@pytest.mark.parametrize("body", DEAR)
async def test_bodies_that_are_dear_to_parse_take_turns(body: str, keys: Keys) -> None:
    """Below 1 MiB they were parsed as they came, and all others waited for all of them."""
    async with on_stage(None, **keys) as (on, (backend,)):
        assert await ask(on, "bad", **DEAR[body]) == 200
        asks = [ask(on, "bad", **DEAR[body]) for _ in range(6)]
        order = await order_of(on, backend.calls, [*asks, *(ask(on, "good") for _ in range(3))])
        assert order.count("bad") == 6
        assert "good" not in order[6:]  # at most three were parsed before
        debts = on.proxy.app.turns.debts
        assert debts.expected_s("bad", 100_000, now()) > debts.expected_s("good", 100_000, now())


async def test_a_flood_of_small_requests_lets_others_pass(keys: Keys) -> None:
    """The requests of a tenant that floods began in the order in which they came."""
    async with on_stage(None, **keys) as (on, (backend,)):
        for tenant in ("good", "bad"):
            assert await ask(on, tenant) == 200
        on.proxy.app.turns.debts.charge("bad", 1.0, now())  # as after a second of it
        asks = [ask(on, "bad") for _ in range(60)]
        order = await order_of(on, backend.calls, [*asks, ask(on, "good")])
        assert order.index("good") < 30


async def test_requests_that_are_rejected_are_charged_to_their_address(keys: Keys) -> None:
    """Unknown paths and wrong keys cost nobody anything."""
    async with on_stage(None, **keys) as (on, _):
        debts = on.proxy.app.turns.debts
        for _ in range(20):
            assert await on.status_of(f"{on.url}/nothing") == 404
            assert await on.status(path="/v1/models", headers={"authorization": "Bearer x"}) >= 400
        assert debts.paid_at("127.0.0.1") > 0.0


@pytest.mark.parametrize("what", ["model", "path"])
async def test_a_flood_of_errors_comes_a_few_at_a_time(what: str, keys: Keys) -> None:
    """Errors were answered as they came, also those of a backend, so that a flood took the loop."""
    nope = answer(404, b'{"error":{"message":"no such model","code":404}}')

    async def serve(call: Call) -> None:
        await call.send(nope if b"nope" in call.body else answer(200, WHOLE))

    async with on_stage(serve, **keys) as (on, _):
        holder, path = ("bad", "chat/completions") if what == "model" else ("127.0.0.1", "nothing")
        ended = list[float]()

        async def fails() -> None:
            headers = key_of("bad")
            body = json.dumps({"model": "nope", "messages": HELLO}).encode()
            assert await on.status(body, path=f"/v1/{path}", headers=headers) == 404
            ended.append(now())

        assert await ask(on, "good") == 200
        await fails()
        on.proxy.app.turns.debts.charge(holder, 5.0, now())
        asks = [fails() for _ in range(10)]
        began = now()
        assert await asyncio.gather(ask(on, "good"), *asks)
        waits = sorted(at - began for at in ended[1:])
        assert len(set(waits)) >= 9  # each at a moment of its own
        assert waits[-1] < 5.0


async def test_scrapes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of metrics takes milliseconds, and scrapes were answered as they came."""
    async with on_stage(None) as (on, _):
        text, began = on.proxy.metrics.text, list[float]()

        def page() -> bytes:
            began.append(now())
            return text()

        monkeypatch.setattr(on.proxy.metrics, "text", page)
        scrapes = [on.status_of(f"{on.proxy.admin_url}/metrics") for _ in range(5)]
        assert await asyncio.gather(*scrapes) == [200] * 5
        assert len(set(began)) == 5  # each at a moment of its own
