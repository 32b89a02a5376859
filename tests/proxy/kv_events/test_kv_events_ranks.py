"""KV events of a server with two data-parallel ranks: each lane knows the cache of its rank."""

import asyncio
import json
import socket
from contextlib import AsyncExitStack
from dataclasses import asdict

import aiohttp
import pytest
from ports import free_ports
from stages.proxy_stage import Stage, stage

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.kv_events import KvEventsConfig
from forebay.replay.engine.server.options import ServerOptions
from forebay.replay.engine.server.server import start_engine

RANKS = 2
DOCUMENTS = [
    " ".join(str(10**6 * number + word) for word in range(1_500)) for number in range(1, 5)
]


async def start_server(stack: AsyncExitStack, base: int) -> str:
    """Start a server whose ranks publish where vLLM's do; returns its URL."""
    # Slow engines: a cached prompt is faster by more than a busy machine takes.
    config = EngineConfig(seed=1, time_scale=0.1, max_model_len=8_192)
    events = KvEventsConfig(True, endpoint=f"tcp://*:{base}", topic="kv")
    options = ServerOptions(
        kv_events_config=json.dumps(asdict(events)),
        server_dev_mode=True,
        data_parallel_size=RANKS,
        enable_prompt_tokens_details=True,
    )
    engine = await stack.enter_async_context(start_engine(config, options=options))
    return engine.url


async def ask(on: Stage, document: str, question: str) -> tuple[str, int]:
    """Ask about a document; returns the lane, and the cached tokens that its engine reports."""
    body = {"prompt": f"{document} {question}", "max_tokens": 4, "ignore_eos": True}
    async with on.post(body) as response:
        assert response.status == 200, await response.text()
        usage = (await response.json())["usage"]
        lane = response.headers["x-forebay-backend"]
    return lane, int(usage["prompt_tokens_details"]["cached_tokens"])


def consecutive_ports() -> int:
    """Return the first of two free ports in a row."""
    for port in free_ports(100):
        try:
            with socket.create_server(("", port + 1)):
                return port
        except OSError:
            continue
    raise AssertionError("no two free ports in a row")


@pytest.mark.real_time
async def test_each_lane_follows_its_rank() -> None:
    base = consecutive_ports()
    async with asyncio.timeout(120), AsyncExitStack() as stack:
        url = await start_server(stack, base)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        keys = {"data_parallel": RANKS, "kv_events": f"tcp://127.0.0.1:{base}"}
        health = {"timeout": "30s", "interval": "100ms"}
        on = await stack.enter_async_context(stage([url], each=keys, wait_up=RANKS, health=health))
        await asyncio.sleep(1)  # until the subscriptions are made
        core = on.proxy.driver.shaper.backends
        # So each rank has published from an empty cache on.
        async with client.post(url + "/reset_prefix_cache") as response:
            assert response.status == 200
        first = await asyncio.gather(*(ask(on, document, "first") for document in DOCUMENTS))
        home = {document: lane for document, (lane, _) in zip(DOCUMENTS, first, strict=True)}
        while {lane.cache.mode for lane in core.values()} != {"exact"}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # a busy machine publishes late
        for question in ("second", "third"):
            for document in DOCUMENTS:
                await asyncio.sleep(0.5)  # the events of the last one come
                lane, cached = await ask(on, document, question)
                assert (lane, cached > 200) == (home[document], True)
        assert set(home.values()) == {"b0-rank0", "b0-rank1"}
        assert {lane.cache.mode for lane in core.values()} == {"exact"}
