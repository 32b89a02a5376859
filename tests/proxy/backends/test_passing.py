"""Requests that pass no queue have limits, and count where the others do."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.tenant_keys import key_of, keys_of
from stages.proxy_stage import Call, Stage, answer, error_of, on_stage, settle

from forebay.proxy.backends.passing import ACTIVE_S, STEP_TOKENS, PassedOn

LONG = {"model": "m", "input": "x" * 4 * STEP_TOKENS}  # about a step of tokens


class Slow:
    """A server that answers when it is told to; it knows how many requests it had at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.goes_on = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if b"input" in call.body or "tokenize" in call.head:
                await self.goes_on.wait()
            await call.send(answer(200, b'{"choices": [{"text": "a", "finish_reason": "stop"}]}'))
        finally:
            self.now -= 1


async def ask(on: Stage, path: str, tenant: str = "", body: Any = LONG) -> int:
    headers = key_of(tenant) if tenant else {}
    async with on.post(body, path=path, headers=headers) as response:
        await response.read()
        return int(response.status)


async def shown(on: Stage) -> dict[str, Any]:
    async with on.client.get(on.proxy.admin_url + "/status") as response:
        (backend,) = json.loads(await response.read())["backends"]
        return dict(backend)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings"])
async def test_they_count_in_max_concurrency_and_in_flight(path: str) -> None:
    slow = Slow()

    async with on_stage(slow, slots=4) as (on, _):
        tasks = [asyncio.create_task(ask(on, path)) for _ in range(50)]
        await settle()
        assert (slow.now, (await shown(on))["in_flight"]) == (4, 4)
        # A request of a queue waits for their slots, too.
        body = {"prompt": "x", "max_tokens": 3}
        chat = asyncio.create_task(ask(on, "/v1/completions", body=body))
        await settle()
        assert slow.now == 4
        slow.goes_on.set()
        assert await asyncio.gather(*tasks, chat) == [200] * 51
        assert slow.most == 4
        assert (await shown(on))["in_flight"] == 0


async def test_a_tenant_leaves_room_for_another_that_is_there(tmp_path: Path) -> None:
    keys, slow = keys_of(tmp_path, "good", "evil"), Slow()
    async with on_stage(slow, tenants={"keys": keys}) as (on, _):
        chat = {"prompt": "x", "max_tokens": 3}
        assert await ask(on, "/v1/completions", "good", chat) == 200
        tasks = [asyncio.create_task(ask(on, "/v1/embeddings", "evil")) for _ in range(40)]
        await settle()
        assert slow.now == 1  # one step of the engine; 40 before
        assert await ask(on, "/v1/completions", "good", chat) == 200
        short = {"model": "m", "input": "x" * 40}
        tasks.append(asyncio.create_task(ask(on, "/v1/embeddings", "good", short)))
        await settle()
        assert slow.now == 2  # each tenant has its own step
        await asyncio.sleep(ACTIVE_S + 1)
        # `good` still has a request there, but sent none for a while: the rest may use the server.
        assert slow.now == 41
        slow.goes_on.set()
        assert await asyncio.gather(*tasks) == [200] * 41


async def test_short_ones_of_a_tenant_run_together(tmp_path: Path) -> None:
    keys, slow = keys_of(tmp_path, "good", "evil"), Slow()
    async with on_stage(slow, tenants={"keys": keys}) as (on, _):
        assert await ask(on, "/v1/completions", "good", {"prompt": "x"}) == 200
        body = {"model": "m", "input": "x" * 40}
        tasks = [asyncio.create_task(ask(on, "/v1/embeddings", "evil", body)) for _ in range(20)]
        await settle()
        assert slow.now == 8
        slow.goes_on.set()
        assert await asyncio.gather(*tasks) == [200] * 20


async def test_the_wait_for_a_slot_ends() -> None:
    slow = Slow()

    async with on_stage(slow, slots=1) as (on, _):
        on.proxy.backends.passed_on.patience_s = lambda: 2.0
        first = asyncio.create_task(ask(on, "/v1/embeddings"))
        await settle()
        leaver = asyncio.create_task(ask(on, "/v1/embeddings"))
        await settle()
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        await asyncio.sleep(1)
        async with on.post(LONG, path="/v1/embeddings") as response:
            assert response.status == 429
            assert (await error_of(response))["code"] == "queue_full"
            assert response.headers["retry-after"] == "1"
        last = asyncio.create_task(ask(on, "/v1/embeddings"))
        await settle()
        slow.goes_on.set()
        assert (await first, await last) == (200, 200)
        assert not any(here.waiting for here in on.proxy.backends.passed_on._here.values())
        assert not any(here.count for here in on.proxy.backends.passed_on._here.values())


async def test_a_drain_ends_those_that_wait() -> None:
    slow = Slow()

    async with on_stage(slow, slots=1) as (on, _):
        tasks = [asyncio.create_task(ask(on, "/v1/embeddings")) for _ in range(3)]
        await settle()
        assert await on.proxy.drain(0.2) == 3
        assert await asyncio.gather(*tasks) == [503] * 3


def test_tenants_that_have_left_are_forgotten() -> None:
    now = 0.0
    driver: Any = SimpleNamespace(clock=lambda: now)
    passed = PassedOn(driver, lambda: 1.0, lambda: 429)
    for number in range(1_000):
        now += 1.0
        passed.seen("b0", f"t{number}")
    assert len(passed._here["b0"].active) <= ACTIVE_S + 1
