"""One request to a fresh simulated server, in virtual time: its answer and events."""

from typing import Any

import aiohttp
import orjson

from forebay.replay.clock.virtual_loop import run
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.options import ServerOptions
from forebay.replay.engine.server.server import start_engine


def ask(path: str, body: dict[str, Any], **options: Any) -> tuple[int, bytes]:
    async def main() -> tuple[int, bytes]:
        server = ServerOptions(**{"enable_prompt_tokens_details": True, **options})
        async with (
            start_engine(EngineConfig("llama-3-8b", seed=1), options=server) as engine,
            aiohttp.ClientSession(engine.url) as client,
            client.post(path, json=body) as response,
        ):
            return response.status, await response.read()

    return run(main())


def told_events(
    path: str, body: dict[str, Any], **options: Any
) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream: name and data of each."""
    _, data = ask(path, {**body, "stream": True}, **options)
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        events.append((name.removeprefix("event: "), orjson.loads(line.removeprefix("data: "))))
    return events
