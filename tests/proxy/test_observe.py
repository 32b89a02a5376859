"""A proxy in mode observe: requests pass at once, and metrics tell what it would have done."""

import json
from typing import Any

from stages.proxy_stage import Stage, on_stage, settle, silent, until

LONG = {"prompt": "word " * 60_000, "max_tokens": 3}


async def test_long_prompts_pass_at_once_and_are_counted() -> None:
    async with on_stage(silent, silent, mode="observe") as (on, backends):
        import asyncio

        tasks = [asyncio.create_task(read(on, i)) for i in range(12)]
        await until(lambda: [len(backend.calls) for backend in backends] == [6, 6])
        for call in (call for backend in backends for call in backend.calls):
            assert json.loads(call.body)["max_tokens"] == 3  # no part of a prompt
        assert (await on.told("/status"))["mode"] == "observe"
        lines = on.proxy.metrics.text().decode().splitlines()
        counted = {
            line.split('rule="')[1].split('"')[0]: float(line.split()[-1])
            for line in lines
            if line.startswith("forebay_observed_total")
        }
        assert counted.pop("starts") == 2
        assert counted.keys() <= {"max_wait", "target"}  # those that would wait are not counted yet
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_reload_begins_to_shape() -> None:
    async with on_stage(silent, silent, mode="observe") as (on, backends):
        import asyncio

        def load() -> Any:
            return on.proxy.reloader.config.model_copy(update={"mode": "shape"})

        on.proxy.reloader._load = load
        assert await on.proxy.reloader.reload() == "applied"
        tasks = [asyncio.create_task(read(on, i)) for i in range(12)]
        await settle()
        assert sum(len(backend.calls) for backend in backends) == 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read(on: Stage, number: int) -> None:
    await on.read(LONG | {"prompt": f"{number} {LONG['prompt']}"})
