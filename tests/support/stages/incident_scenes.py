"""Eleven incidents, staged in front of simulated engines, mostly in virtual time.

Before an incident the same traffic runs without the fault for longer than the window of `forebay
doctor`, which then has nothing to say. Each scene returns what an operator reads afterwards.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from stages.proxy_stage import RawBackend, Stage, silent, stage

from forebay.proxy.admin.watch import EVERY_S
from forebay.proxy.diagnose.checks import examine
from forebay.proxy.diagnose.doctor.finding import Finding
from forebay.proxy.diagnose.scene import Scene, samples_of
from forebay.replay.clock.virtual_loop import run
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import RunningEngine, start_engine
from forebay.replay.engine.timing.api_server import ApiServer, ServerTimes

THRESHOLD = {"long_prefill_token_threshold": 2_048}
KEYS = "acme: key-of-acme-0123456789\ngood: key-of-good-0123456789\n"
ACME, GOOD = (
    {"authorization": f"Bearer key-of-{tenant}-0123456789"} for tenant in ("acme", "good")
)
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
    """Return all that `forebay doctor` reads, since the proxy's start."""
    before, facts = json.loads(await on.admin("/status")), json.loads(await on.admin("/backends"))
    now = samples_of(await on.admin("/metrics"))
    then = samples_of(await on.admin(f"/metrics?ago={SINCE_S:.0f}"))
    ended = json.loads(await on.admin(f"/requests?since_s={SINCE_S:.0f}"))["outcomes"]
    return Scene(json.loads(await on.admin("/status")), facts, now, before, then, outcomes=ended)


@dataclass(slots=True)
class Told:
    """What an operator reads after an incident.

    Attributes:
        findings: the lines of `forebay doctor --since 1m`.
        slowest: the reasons that `forebay explain --slowest 10 --since 1m` gives.
        rejected: the reasons of `forebay explain --rejected --since 1m`.
        explained: the checks whose findings `forebay explain` prints above its list.
        page: the checks whose findings the live page shows, half a minute later.
        events: seconds since the incident began, event and message of each line of the log.
        first: seconds since the incident began, and the first line of `forebay doctor` then.
    """

    findings: list[Finding]
    slowest: list[str]
    rejected: list[str]
    explained: list[str]
    page: list[str]
    events: list[tuple[float, str, str]]
    first: list[tuple[float, Finding]] = field(default_factory=list)

    @property
    def log(self) -> list[str]:
        """The messages of the log since the proxy started."""
        return [message for _, _, message in self.events]


async def told_by(on: Stage, began_at: float, look: bool = False) -> Told:
    """Ask the proxy. `look`: let its own checks run now, not at their next time."""

    async def listed(by: str) -> Any:
        return json.loads(await on.admin(f"/requests?by={by}&count=10&since_s={SINCE_S:.0f}"))

    findings = examine((await scene_of(on)).recent())
    slowest, rejected = await listed("slowest"), await listed("rejected")
    if look:
        await on.proxy.watch.look()
    else:
        await asyncio.sleep(EVERY_S)
    explained, page = await listed("slowest"), json.loads(await on.admin("/status"))
    events = json.loads(await on.admin("/history"))["events"]
    since_s = asyncio.get_running_loop().time() - began_at
    return Told(
        findings,
        [row["reason"] for row in slowest["requests"]],
        [row["reason"] for row in rejected["requests"]],
        [row["check"] for row in explained["findings"]],
        [row["check"] for row in page["findings"]],
        [(since_s - e["age_s"], e["event"], e["message"]) for e in reversed(events)],
    )


async def ask_doctor(on: Stage, first: list[tuple[float, Finding]]) -> None:
    """Note the first finding and its time, again and again."""
    while True:
        await asyncio.sleep(5.0)
        found = examine((await scene_of(on)).recent())
        first += [(asyncio.get_running_loop().time(), finding) for finding in found[:1]]


async def ask(on: Stage, words: int, name: object, **more: Any) -> int:
    body = {"prompt": f"{name} " + WORD * words, "max_tokens": 4, "stream": True,
            "stream_options": {"include_usage": True}, **more.pop("body", {})}  # fmt: skip
    async with on.post(body, **more) as response:
        await response.read()
        return int(response.status)


async def paced(count: int, gap_s: float, send: Callable[[int], Coroutine[Any, Any, Any]]) -> None:
    """Send the requests of each number, one number each `gap_s`, and wait for the answers."""
    tasks = []
    for number in range(count):
        tasks.append(asyncio.create_task(send(number)))
        await asyncio.sleep(gap_s)
    await asyncio.gather(*tasks)


async def chats(on: Stage, seconds: float, **more: Any) -> None:
    """Send a chat each half second. The sessions share a long beginning."""
    await paced(int(2 * seconds), 0.5, lambda n: ask(on, 1_500, f"session {n % 7}", **more))


async def anew(engines: Fleet, **changes: Any) -> float:
    """Replace an engine on its port. Returns the time at which `doctor` looks at later traffic."""
    port = await engines.stop(1)
    await engines.start(1, port, **changes)
    await asyncio.sleep(SINCE_S + 40.0)
    return asyncio.get_running_loop().time()


Incident = Callable[[Stage, Fleet], Awaitable[float | None]]
"""Plays an incident. Returns the time at which it began, if that was later than its call."""


def scene(tenants: bool = False, **changes: Any) -> Callable[[Incident], Callable[..., Told]]:
    """Make an incident a function that plays it and returns what is told of it.

    Args:
        tenants: requests need keys; the function takes the folder of their file.
        changes: of the engines' options.
    """
    return lambda incident: (
        lambda *folder: told_after(incident, keys_in(*folder) if tenants else None, **changes)
    )


def keys_in(folder: Path) -> Path:
    path = folder / "keys"
    path.write_text(KEYS)
    return path


def told_after(incident: Incident, keys: Path | None = None, **changes: Any) -> Told:
    """Return what is told of an incident that quiet traffic went before."""
    more: dict[str, Any] = {"tenants": {"keys": str(keys)}} if keys else {}
    headers = GOOD if keys else {}

    async def main() -> Told:
        async with (
            fleet(**changes) as engines,
            stage([one.url for one in engines.engines], each=THRESHOLD, **more) as on,
        ):
            await chats(on, 40.0, headers=headers)
            await asyncio.sleep(SINCE_S + 40.0)
            await chats(on, 10.0, headers=headers)
            if not changes:
                assert examine((await scene_of(on)).recent()) == []
            called_at = asyncio.get_running_loop().time()
            first: list[tuple[float, Finding]] = []
            asking = asyncio.create_task(ask_doctor(on, first))
            began_at = await incident(on, engines) or called_at
            asking.cancel()
            told = await told_by(on, began_at)
            told.first += [(at - began_at, finding) for at, finding in first]
            return told

    return run(main())


@scene()
async def died(on: Stage, engines: Fleet) -> None:
    """An engine is killed, and its port is closed."""
    await engines.stop(1)
    await chats(on, 30.0)


def hangs() -> Told:
    """An engine answers nothing any more, and its port is open."""

    async def main() -> Told:
        hanging = RawBackend()
        async with AsyncExitStack() as stack:
            engines = await stack.enter_async_context(fleet())
            await stack.enter_async_context(hanging.running())
            urls = [engines.engines[0].url, hanging.url]
            on = await stack.enter_async_context(stage(urls, each=THRESHOLD))
            await chats(on, 10.0)
            hanging.healthy, hanging.serve, hanging.metrics = None, silent, None
            began_at = asyncio.get_running_loop().time()
            tasks = asyncio.create_task(chats(on, 30.0))
            await asyncio.sleep(30.0)
            told = await told_by(on, began_at)
            await tasks
            return told

    return run(main())


@scene()
async def is_slow(on: Stage, engines: Fleet) -> float:
    """An engine runs at a quarter of its speed."""
    began_at = await anew(engines, time_scale=0.25)
    await chats(on, 60.0)
    for number in range(20):
        await asyncio.gather(*(ask(on, 6_000, f"{number}-{at}") for at in range(4)))
    return began_at


@scene()
async def restarted_cold(on: Stage, engines: Fleet) -> float:
    """An engine restarts within a second, and has lost its prefix cache."""
    tasks = asyncio.create_task(chats(on, 60.0))
    await asyncio.sleep(40.0)
    port = await engines.stop(0)
    began_at = asyncio.get_running_loop().time()
    await asyncio.sleep(1.0)
    await engines.start(0, port)
    await tasks
    await chats(on, 5.0)
    return began_at


@scene(tenants=True)
async def flood(on: Stage, engines: Fleet) -> None:
    """One tenant sends 900 requests at once."""
    evil = (ask(on, 2_500, number, headers=ACME) for number in range(900))
    await asyncio.gather(chats(on, 30.0, headers=GOOD), *evil)


@scene()
async def documents(on: Stage, engines: Fleet) -> None:
    """A stream of documents needs more prefill than there is."""
    long = paced(60, 1.5, lambda number: ask(on, 80_000, f"document {number}"))
    await asyncio.gather(chats(on, 90.0), long)


@scene(num_gpu_blocks_override=1_000, max_model_len=12_000)
async def small_kv_pool(on: Stage, engines: Fleet) -> None:
    """Answers need more KV cache than the engines have."""
    long = {"max_tokens": 1_000, "ignore_eos": True}
    await asyncio.gather(*(ask(on, 3_000, f"long {number}", body=long) for number in range(60)))


@scene(enable_prefix_caching=False)
async def prefix_caching_off(on: Stage, engines: Fleet) -> None:
    """The engines run without prefix caching."""
    await chats(on, 30.0)


def slow_tokenizer() -> Told:
    """The API servers need 5 s for a text of 100k tokens."""
    slow = ServerTimes(tokenize_token_s=50e-6)

    async def incident(on: Stage, engines: Fleet) -> None:
        for number in range(30):
            await asyncio.gather(*(ask(on, 4_000, f"{number}-{at}") for at in range(6)))

    with patch.object(EngineConfig, "api_server", lambda *_: ApiServer(slow)):
        return told_after(incident, seed=2)


@scene()
async def slow_clients(on: Stage, engines: Fleet) -> None:
    """Clients send 20 kB/s: a prompt of 100 kB takes 5 s, of which no server knows."""

    async def slow_client(number: int) -> None:
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

    for _ in range(3):
        await asyncio.gather(*(slow_client(number) for number in range(20)))


def short_of_cpu() -> Told:
    """Live: other work takes the event loop for 120 ms, again and again."""

    async def main() -> Told:
        backend = RawBackend(models={"m": {}}, version=b'{"version": "0.26.0"}')
        async with backend.running() as raw, stage([raw.url], each=THRESHOLD) as on:
            began_at = asyncio.get_running_loop().time()
            until = time.monotonic() + 4.0
            while time.monotonic() < until:
                await ask(on, 10, "x")
                time.sleep(0.12)  # noqa: ASYNC251
            return await told_by(on, began_at, look=True)

    return asyncio.run(main())
