"""A tenant that tries to learn another tenant's prompts from the timing of its own answers."""

import asyncio
import json
from contextlib import AsyncExitStack
from math import exp, fsum
from typing import Any

from stages.proxy_stage import settle, stage

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import start_engine

KEYS = "victim: key-of-victim, spy: key-of-spy"  # the environment variable KEYS


def ks_p(a: list[float], b: list[float]) -> float:
    """Two-sample Kolmogorov-Smirnov, asymptotic p (Numerical Recipes, section 14.3)."""
    points = sorted({*a, *b})
    gap = max(
        abs(sum(x <= point for x in a) / len(a) - sum(x <= point for x in b) / len(b))
        for point in points
    )
    n = (len(a) * len(b) / (len(a) + len(b))) ** 0.5
    at = (n + 0.12 + 0.11 / n) * gap
    if at < 0.3:
        return 1.0  # where the series below is slow; p is above 0.99999 there
    return min(1.0, 2 * fsum((-1) ** (j - 1) * exp(-2 * j * j * at * at) for j in range(1, 101)))


class Spy:
    """A tenant that asks, a tenant that measures, and one engine cache or two between them."""

    WORDS = 6_000  # about 8k tokens

    def __init__(self, isolate: bool, engines: int = 2) -> None:
        self.isolate = isolate
        self.engines = engines
        self.cached: dict[str, list[int]] = {"asked before": [], "new": [], "own": []}
        self.ttft_s: dict[str, list[float]] = {"asked before": [], "new": []}

    def prompt(self, number: int) -> str:
        return " ".join(f"w{(number * 7919 + i * 31) % 997}" for i in range(self.WORDS))

    async def ask(self, on: Any, key: str, prompt: str) -> tuple[float, int]:
        body = {
            "prompt": prompt,
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        clock = asyncio.get_running_loop().time
        start, first = clock(), 0.0
        async with on.post(body, headers={"authorization": f"Bearer {key}"}) as response:
            assert response.status == 200
            text = b""
            while part := await response.content.readany():
                first = first or clock() - start
                text += part
        usage = [json.loads(line[6:]) for line in text.split(b"\n\n") if b'"usage":{' in line]
        details = usage[-1]["usage"]["prompt_tokens_details"] or {}
        return first, int(details.get("cached_tokens") or 0)

    async def play(self, n: int) -> None:
        async with AsyncExitStack() as stack:
            urls = []
            for seed in range(self.engines):
                engine = EngineConfig(max_model_len=32_768, seed=seed)
                running = await stack.enter_async_context(start_engine(engine))
                urls.append(running.url)
            on = await stack.enter_async_context(
                stage(urls, tenants={"keys": "env:KEYS", "isolate_cache": self.isolate})
            )
            for i in range(n):
                await self.ask(on, "key-of-victim", self.prompt(2 * i))
                kinds = [("asked before", 2 * i), ("new", 2 * i + 1)]
                for kind, number in kinds if i % 2 else reversed(kinds):
                    ttft, cached = await self.ask(on, "key-of-spy", self.prompt(number))
                    self.ttft_s[kind].append(ttft)
                    self.cached[kind].append(cached)
            _, own = await self.ask(on, "key-of-victim", self.prompt(0))
            self.cached["own"].append(own)
            await settle()
            on.assert_nothing_held()
