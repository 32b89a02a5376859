"""A simulated server or engine core to put questions to."""

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import wire

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.kv_events import KvEvents
from forebay.replay.engine.loop.faults import parse_fault
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.server.options import ServerOptions
from forebay.replay.engine.server.server import RunningEngine, start_engine
from forebay.replay.engine.tokenizer import Generation, OutputBlocks, Prompt

Client = aiohttp.ClientSession
HELLO = {"prompt": "Hello", "max_tokens": 5_000, "ignore_eos": True}
Event = dict[str, Any]
Json = Mapping[str, object]


class Cache:
    """An engine whose cache is watched, one request after the other."""

    def __init__(self, blocks: int) -> None:
        room = (blocks - 1) * 32
        config = EngineConfig(block_size=32, num_gpu_blocks_override=blocks, max_model_len=room)
        self.core = EngineCore(config)
        self.events = self.core.pool.observer = KvEvents(32)
        self._asked = 0

    def ask(self, prompt: Prompt, output: int = 1, salt: str | None = None) -> list[Event]:
        content = OutputBlocks(prompt, Generation(prompt), 32, salt)
        hashes = prompt.block_hashes(32, salt)
        self._asked += 1
        name = str(self._asked)
        self.core.add(
            EngineRequest(name, prompt.tokens, output, hashes, extend=content, content=content)
        )
        while self.core.has_work:
            self.core.step(0.0)
        return self.events.take()


@asynccontextmanager
async def on_server(
    fault: str | None = None, options: ServerOptions | None = None, **engine: Any
) -> AsyncIterator[tuple[RunningEngine, Client]]:
    """A server set up as the recorded server was, and its client."""
    settings = {"max_model_len": 16_384, "block_size": 32, "enable_request_id_headers": True}
    config = EngineConfig(served_model_name="tiny", seed=1, **{**settings, **engine})
    chosen = parse_fault(fault) if fault else None
    tracking = options or ServerOptions(
        enable_server_load_tracking=True, enable_prompt_tokens_details=True
    )
    async with (
        start_engine(config, fault=chosen, options=tracking) as server,
        Client(server.url) as client,
    ):
        yield server, client


def post(path: str, body: Json, **headers: str) -> wire.Question:
    data = json.dumps(body).encode()
    return wire.Question("POST", path, {"Content-Type": "application/json", **headers}, data)


def completion(body: Json, **headers: str) -> wire.Question:
    return post("/v1/completions", {"model": "tiny", **body}, **headers)


def chat(text: str, **more: Any) -> wire.Question:
    return post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more})


def get(path: str) -> wire.Question:
    return wire.Question("GET", path, {}, None)


COMMAND = [sys.executable, "-m", "forebay.proxy", "engine"]
