"""Eleven staged incidents: the cause is the first line of `forebay doctor --since 1m`.

Each is played in front of simulated engines, mostly in virtual time. Before it the same traffic
runs without the fault for longer than that, and then `doctor` has nothing to say.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from proxy_stage import RawBackend, Stage, silent, stage

from forebay.proxy.diagnose.checks import examine
from forebay.proxy.diagnose.doctor.finding import Finding
from forebay.proxy.diagnose.scene import Scene, samples_of
from forebay.replay.clock.virtual_loop import run
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import RunningEngine, start_engine
from forebay.replay.engine.timing.api_server import ApiServer, ServerTimes

THRESHOLD = {"long_prefill_token_threshold": 2_048}
WORD = "word "  # about 1.25 tokens by the first estimate of a proxy
SINCE_S = 60.0


@dataclass(slots=True)
class Fleet:
    """Two engines on ports of their own, so that one can be replaced."""

    changes: dict[str, Any] = field(default_factory=dict)
    engines: list[RunningEngine] = field(default_factory=list)
    stacks: list[AsyncExitStack] = field(default_factory=list)

    async def start(self, number: int, port: int = 0, **changes: Any) -> None:
        keys = {"seed": 1, "served_model_name": "tiny", **THRESHOLD, **self.changes, **changes}
        stack = AsyncExitStack()
        engine = await stack.enter_async_context(start_engine(EngineConfig(**keys), port=port))
        self.engines[number : number + 1] = [engine]
        self.stacks[number : number + 1] = [stack]

    async def stop(self, number: int) -> int:
        port = int(self.engines[number].url.rpartition(":")[2])
        await self.stacks[number].aclose()
        return port


@asynccontextmanager
async def fleet(**changes: Any) -> AsyncIterator[Fleet]:
    made = Fleet(changes)
    try:
        await made.start(0)
        await made.start(1)
        yield made
    finally:
        for stack in made.stacks:
            await stack.aclose()


async def scene_of(on: Stage) -> Scene:
    async def get(target: str) -> str:
        async with on.client.get(on.proxy.admin_url + target) as response:
            return str(await response.text())

    before, facts = json.loads(await get("/status")), json.loads(await get("/backends"))
    now = samples_of(await get("/metrics"))
    then = samples_of(await get(f"/metrics?ago={SINCE_S:.0f}"))
    return Scene(json.loads(await get("/status")), facts, now, before, then).recent()


@dataclass(slots=True)
class Told:
    """What an operator reads after an incident.

    Attributes:
        findings: the lines of `forebay doctor --since 1m`.
        slowest: the reasons that `forebay explain --slowest 10 --since 1m` gives.
        rejected: those of `forebay explain --rejected --since 1m`.
        log: the lines of the log since the proxy started.
    """

    findings: list[Finding]
    slowest: list[str]
    rejected: list[str]
    log: list[str]


async def told_by(on: Stage) -> Told:
    async def reasons(by: str) -> list[str]:
        query = f"/requests?by={by}&count=10&since_s={SINCE_S:.0f}"
        async with on.client.get(on.proxy.admin_url + query) as response:
            return [row["reason"] for row in json.loads(await response.text())["requests"]]

    findings = examine(await scene_of(on))
    return Told(findings, await reasons("slowest"), await reasons("rejected"), list(on.said))


async def ask(on: Stage, words: int, name: object, **more: Any) -> int:
    body = {"prompt": f"{name} " + WORD * words, "max_tokens": 4, "stream": True,
            "stream_options": {"include_usage": True}, **more.pop("body", {})}  # fmt: skip
    async with on.post(body, **more) as response:
        await response.read()
        return int(response.status)


async def chats(on: Stage, seconds: float, **more: Any) -> None:
    """Send a chat each half second; the sessions share a long beginning."""
    tasks = []
    for number in range(int(2 * seconds)):
        tasks.append(asyncio.create_task(ask(on, 1_500, f"session {number % 7}", **more)))
        await asyncio.sleep(0.5)
    await asyncio.gather(*tasks)


Incident = Callable[[Stage, Fleet], Awaitable[None]]


def told_after(incident: Incident, *, keys: Path | None = None, **changes: Any) -> Told:
    """Return what is told of an incident that quiet traffic went before."""
    more: dict[str, Any] = {"tenants": {"keys": str(keys)}} if keys else {}
    headers = {"authorization": "Bearer key-of-good-0123456789"} if keys else {}

    async def main() -> Told:
        async with (
            fleet(**changes) as engines,
            stage([one.url for one in engines.engines], each=THRESHOLD, **more) as on,
        ):
            await chats(on, 40.0, headers=headers)
            await asyncio.sleep(SINCE_S + 40.0)
            await chats(on, 10.0, headers=headers)
            if not changes:
                assert examine(await scene_of(on)) == []
            await incident(on, engines)
            return await told_by(on)

    return run(main())


def assert_first(told: Told, check: str, *words: str) -> None:
    found = told.findings
    assert found, "nothing was found"
    assert found[0].check == check, found
    for word in words:
        assert word in found[0].text, found[0].text
    assert found[0].remedy


def assert_named(told: Told, *, explain: str = "", log: str = "") -> None:
    """The cause also stands in what `explain` lists, and in the log."""
    assert any(explain in reason for reason in (*told.slowest, *told.rejected)), told
    assert any(log in line for line in told.log), told.log


def test_an_engine_that_has_died() -> None:
    async def incident(on: Stage, engines: Fleet) -> None:
        await engines.stop(1)
        await chats(on, 30.0)

    told = told_after(incident)
    assert_first(told, "backends take work", "b1 has been down", "connection")
    assert_named(told, explain="b1 failed; sent again to b0", log="b1 is down (no connection)")


def test_an_engine_that_hangs() -> None:
    async def main() -> Told:
        hanging = RawBackend()
        async with AsyncExitStack() as stack:
            engines = await stack.enter_async_context(fleet())
            await stack.enter_async_context(hanging.running())
            urls = [engines.engines[0].url, hanging.url]
            on = await stack.enter_async_context(stage(urls, each=THRESHOLD))
            await chats(on, 10.0)
            hanging.healthy, hanging.serve, hanging.metrics = None, silent, None
            tasks = asyncio.create_task(chats(on, 30.0))
            await asyncio.sleep(30.0)
            told = await told_by(on)
            await tasks
            return told

    told = run(main())
    assert_first(told, "backends take work", "b1 has been down")
    assert told.findings[0].remedy.startswith("restart it if it hangs")
    assert_named(told, explain="b1 failed; sent again to b0", log="b1 is down (no health answer")


def test_an_engine_that_is_slow() -> None:
    async def incident(on: Stage, engines: Fleet) -> None:
        port = await engines.stop(1)
        await engines.start(1, port, time_scale=0.25)
        await asyncio.sleep(SINCE_S + 40.0)
        await chats(on, 60.0)
        for number in range(20):
            await asyncio.gather(*(ask(on, 6_000, f"{number}-{at}") for at in range(4)))

    told = told_after(incident)
    assert_first(told, "speed of backends", "b1 needs", "as long as b0")
    assert any("b1 is ejected (first tokens" in line for line in told.log), told.log


def test_an_engine_that_has_restarted_cold() -> None:
    async def incident(on: Stage, engines: Fleet) -> None:
        tasks = asyncio.create_task(chats(on, 60.0))
        await asyncio.sleep(40.0)
        port = await engines.stop(0)
        await asyncio.sleep(1.0)
        await engines.start(0, port)
        await tasks
        await chats(on, 5.0)

    told = told_after(incident)
    assert_first(told, "restarts", "b0 has restarted", "cache is cold")
    assert_named(told, explain="b0 failed; sent again to b1")


def test_a_flood_of_one_tenant(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme: key-of-acme-0123456789\ngood: key-of-good-0123456789\n")

    async def incident(on: Stage, engines: Fleet) -> None:
        good = asyncio.create_task(
            chats(on, 30.0, headers={"authorization": "Bearer key-of-good-0123456789"})
        )
        evil = [
            asyncio.create_task(
                ask(on, 2_500, number, headers={"authorization": "Bearer key-of-acme-0123456789"})
            )
            for number in range(900)
        ]
        await asyncio.gather(good, *evil)

    told = told_after(incident, keys=keys)
    assert_first(told, "tenants", "tenant acme sent", "100% of the rejections")
    assert "tenants.known.acme.tokens_per_s" in told.findings[0].remedy
    share = "its tenant used its share of the queue"
    assert_named(told, explain=share, log="the first one of tenant acme")


def test_a_stream_of_long_documents() -> None:
    async def incident(on: Stage, engines: Fleet) -> None:
        short = asyncio.create_task(chats(on, 90.0))
        long = []
        for number in range(60):
            long.append(asyncio.create_task(ask(on, 80_000, f"document {number}")))
            await asyncio.sleep(1.5)
        await asyncio.gather(short, *long)

    told = told_after(incident)
    assert_first(told, "long documents", "bucket document", "more were rejected")
    assert_named(
        told,
        explain="the limit of bucket document",
        log="rejected: deadline_unattainable in bucket document",
    )


def test_a_kv_pool_that_is_too_small() -> None:
    async def incident(on: Stage, engines: Fleet) -> None:
        long = {"max_tokens": 1_000, "ignore_eos": True}
        await asyncio.gather(*(ask(on, 3_000, f"long {number}", body=long) for number in range(60)))

    told = told_after(incident, num_gpu_blocks_override=1_000, max_model_len=12_000)
    assert_first(told, "room for KV cache", "s for room in the KV cache", "has 16,000 tokens")
    assert_named(told, explain="its limit because the KV cache had no room for it")


def test_prefix_caching_is_off() -> None:
    async def incident(on: Stage, engines: Fleet) -> None:
        await chats(on, 30.0)

    told = told_after(incident, enable_prefix_caching=False)
    assert_first(told, "prefix caching", "b0 runs without prefix caching")
    assert_named(told, explain="tokens, 0 cached", log="prefix caching is off")


def test_a_tokenizer_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = ServerTimes(tokenize_token_s=50e-6)  # 5 s for a text of 100k tokens
    monkeypatch.setattr(EngineConfig, "api_server", lambda *_: ApiServer(slow))

    async def incident(on: Stage, engines: Fleet) -> None:
        for number in range(30):
            await asyncio.gather(*(ask(on, 4_000, f"{number}-{at}") for at in range(6)))

    told = told_after(incident, seed=2)
    assert_first(told, "tokenizers", "first tokens of b", "the rest is its API server")


def test_clients_with_a_slow_network() -> None:
    """They send 20 kB/s: a prompt of 100 kB takes 5 s, of which no server knows."""

    async def slow_client(on: Stage, number: int) -> None:
        body = json.dumps({"prompt": f"{number} " + WORD * 4_000, "max_tokens": 4}).encode()

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 5_000):
                yield body[start : start + 5_000]
                await asyncio.sleep(0.25)

        headers = {"content-type": "application/json"}
        url = on.url + "/v1/completions"
        async with on.client.post(url, data=pieces(), headers=headers) as response:
            assert response.status == 200
            await response.read()

    async def incident(on: Stage, engines: Fleet) -> None:
        for _ in range(3):
            await asyncio.gather(*(slow_client(on, number) for number in range(20)))

    assert_first(told_after(incident), "network of clients", "s to send their prompts")


def test_clients_that_take_their_answers_slowly() -> None:
    found = examine(
        Scene(
            {"ready": True, "backends": [], "shedding_classes": 0, "capture": None, "usage": None,
             "share": {"links": []}, "config": {"needs_restart": [], "last_reload": ""},
             "unserved_names": {}},
            [],
            samples_of(
                'forebay_client_wait_seconds_total{direction="download"} 90.0\n'
                "forebay_time_to_first_token_seconds_count 40.0\n"
                "forebay_time_to_first_token_seconds_sum 10.0\n"
                "forebay_backend_request_duration_seconds_sum 100.0\n"
            ),
        )
    )  # fmt: skip
    assert any("slow to take their answers for 90 s, 90%" in one.text for one in found)


def test_a_proxy_that_is_short_of_cpu() -> None:
    """Live: another thread of work takes the loop for 120 ms, again and again."""

    async def main() -> Told:
        backend = RawBackend(models={"m": {}}, version=b'{"version": "0.26.0"}')
        async with backend.running() as raw, stage([raw.url], each=THRESHOLD) as on:
            until = time.monotonic() + 4.0
            while time.monotonic() < until:
                await ask(on, 10, "x")
                time.sleep(0.12)  # noqa: ASYNC251
            return await told_by(on)

    told = asyncio.run(main())
    assert_first(told, "event loop and memory", "event loop was late by more than 20 ms")
