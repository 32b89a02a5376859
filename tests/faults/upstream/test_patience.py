"""Clients that give up after 20 s without a byte lose no turn: simulated engines, virtual time.

FOREBAY_TURNS=1000 plays more turns.
"""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from stages.proxy_stage import Stage, settle, stage

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import RunningEngine, start_engine

TURNS = int(os.environ.get("FOREBAY_TURNS", "80"))
PATIENCE_S = 20.0  # of Claude Code's watchdog
DOCUMENT_TOKENS, DOCUMENT_S = 120_000, 8.0  # and about its prefill: Llama-3-8B on H200
CHATS = 3  # to a document
CHUNK_TOKENS = 2_048  # so that chats pass documents


async def turn(on: Stage, number: int) -> tuple[str, bool]:
    """One turn: how it ended, and whether it had a token."""
    document = number % (CHATS + 1) == 0
    words = DOCUMENT_TOKENS * 4 // 5 if document else 500
    body = {
        "messages": [{"role": "user", "content": f"{number:05} " + "word " * words}],
        "max_tokens": 20,
        "stream": True,
    }
    heard, token = b"", False
    try:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(PATIENCE_S):
                asked = on.post(body, path="/v1/chat/completions")
                response = await stack.enter_async_context(asked)
            if response.status != 200:
                return str(response.status), False
            while not heard.endswith(b"data: [DONE]\n\n"):
                async with asyncio.timeout(PATIENCE_S):
                    piece = await response.content.readany()
                if not piece:
                    break
                heard = (heard + piece)[-4_000:]
                token = token or b'"content"' in piece
    except TimeoutError:
        return "silence", token
    except aiohttp.ClientError:
        return "cut", token
    if heard.endswith(b"data: [DONE]\n\n"):
        return "done", token
    return ("rejected" if b'"rate_limit_error"' in heard else "error"), token


async def turns(on: Stage, load: float) -> list[tuple[str, bool]]:
    """Turns at this share of what two engines take."""
    every_s = DOCUMENT_S / 2 / load / (CHATS + 1)
    tasks = []
    for number in range(TURNS):
        tasks.append(asyncio.create_task(turn(on, number)))
        await asyncio.sleep(every_s)
    return await asyncio.gather(*tasks)


@asynccontextmanager
async def on_engines(**keys: Any) -> AsyncIterator[tuple[Stage, list[RunningEngine]]]:
    """A proxy in front of two simulated engines."""
    async with AsyncExitStack() as stack:
        config = EngineConfig(seed=1, long_prefill_token_threshold=CHUNK_TOKENS)
        engines = [await stack.enter_async_context(start_engine(config)) for _ in range(2)]
        each = {"long_prefill_token_threshold": CHUNK_TOKENS}
        urls = [engine.url for engine in engines]
        on = await stack.enter_async_context(stage(urls, slots=64, each=each, **keys))
        yield on, engines
        await settle()


@pytest.mark.parametrize("heartbeats", [True, False])
async def test_no_turn_is_lost_to_silence_in_overload(heartbeats: bool) -> None:
    """No document waits as long as that, as its target is 15 s. A rejected turn has an answer."""
    async with on_engines(**({} if heartbeats else {"timeouts": {"keep_alive": "0s"}})) as (on, _):
        ends = Counter(end for end, _ in await turns(on, 1.5))
        assert ends["done"] > TURNS * 0.6
        assert ends["silence"] == 0, ends
        assert ends["done"] + ends["429"] + ends["rejected"] + ends["silence"] == TURNS, ends


async def test_an_engine_that_dies_before_the_first_token_costs_no_turn() -> None:
    """The other engine takes the remaining requests. A begun stream ends with an error event."""
    async with on_engines() as (on, engines):
        playing = asyncio.create_task(turns(on, 0.3))
        await asyncio.sleep(DOCUMENT_S * 5.5)
        engines[0].loop.die()
        ends = Counter(await playing)
        assert {end for end, token in ends if not token} == set(), ends
        assert ends["done", True] >= TURNS - 3
