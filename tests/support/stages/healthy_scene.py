"""Hours of healthy mixed traffic in virtual time, in which `forebay doctor` should find nothing.

Chats of sessions, short questions, documents and batch work of two tenants come at a rate that
follows the hours. As in any traffic, some clients leave, and some ask wrongly.
"""

import asyncio
import random
from contextlib import AsyncExitStack
from math import pi, sin
from pathlib import Path

from stages.incident_scenes import KEYS, SINCE_S, THRESHOLD, ask, fleet, scene_of
from stages.proxy_stage import Stage, stage

from forebay.proxy.diagnose.checks import examine
from forebay.proxy.diagnose.doctor.finding import Finding
from forebay.replay.clock.virtual_loop import run

LOOK_S = 30.0
RATE, SWING, PERIOD_S = 0.4, 0.9, 3_600.0  # requests/s on average, and how they vary
TENANTS = {name: {"authorization": f"Bearer key-of-{name}-0123456789"} for name in ("acme", "good")}


class Traffic:
    """The requests of healthy clients."""

    def __init__(self, on: Stage, seed: int) -> None:
        self._on = on
        self._random = random.Random(seed)
        self._lengths: dict[str, int] = {}  # words of each session so far
        self.sent = 0

    async def come(self, until: float) -> None:
        """Send requests until a time of the loop."""
        loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        while (now := loop.time()) < until:
            rate = RATE * (1.0 + SWING * sin(2 * pi * now / PERIOD_S))
            await asyncio.sleep(self._random.expovariate(rate))
            task = asyncio.create_task(self._one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            self.sent += 1
        await asyncio.gather(*tasks)

    async def _one(self) -> None:
        draw = self._random
        tenant, kind = draw.choice(list(TENANTS)), draw.random()
        headers = dict(TENANTS[tenant])
        body: dict[str, object] = {"max_tokens": draw.randint(1, 40)}
        name, words = f"{tenant} {draw.randrange(10**9)}", draw.randint(5, 300)
        if kind < 0.6:  # the next turn of a session, or a new session
            name = f"{tenant} session {draw.randrange(25)}"
            words = self._lengths.get(name, 200) + draw.randint(20, 400)
            self._lengths[name] = 200 if words > 8_000 else words
        elif kind < 0.63:
            words = draw.randint(10_000, 40_000)
        elif kind < 0.68:
            headers["x-forebay-class"], words = "batch", draw.randint(500, 4_000)
        wrong = draw.random()
        if wrong < 0.005:
            body["model"] = "tinny"
        elif wrong < 0.015:
            body["temperature"] = -1.0
        patience_s = draw.uniform(0.05, 3.0) if draw.random() < 0.02 else None
        try:
            async with asyncio.timeout(patience_s):
                await ask(self._on, words, name, headers=headers, body=body)
        except TimeoutError:
            pass  # its user has left


def found_in_health(seed: int, hours: float, keys: Path) -> tuple[int, list[tuple[float, Finding]]]:
    """Return the number of requests, and seconds and each finding of a look each half minute.

    Args:
        keys: where the keys of the tenants may be written.
    """
    keys.write_text(KEYS)
    found: list[tuple[float, Finding]] = []

    async def look(on: Stage) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            at = asyncio.get_running_loop().time()
            findings = examine((await scene_of(on)).recent())
            found.extend((at, one) for one in findings if one.severity != "info")

    async def main() -> int:
        async with AsyncExitStack() as stack:
            engines = await stack.enter_async_context(fleet(seed=seed))
            urls = [engine.url for engine in engines.engines]
            tenants = {"keys": str(keys)}
            on = await stack.enter_async_context(stage(urls, each=THRESHOLD, tenants=tenants))
            traffic, looking = Traffic(on, seed), asyncio.create_task(look(on))
            await traffic.come(asyncio.get_running_loop().time() + hours * 3_600.0)
            await asyncio.sleep(SINCE_S)
            looking.cancel()
            return traffic.sent

    return run(main()), found
