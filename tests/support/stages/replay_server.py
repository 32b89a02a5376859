"""A tiny OpenAI-compatible server for the replayer's tests: it streams words, or misbehaves."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet
from aiohttp import web

from forebay.replay.clock.virtual_loop import run
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import start_engine
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.runner import Summary, replay
from forebay.replay.send.drain import Stop
from forebay.traces.ground.schema import TraceRequest

MODEL = "tiny"
Behaviour = Callable[["Server", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def event(body: Any) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else orjson.dumps(body)) + b"\n\n"


def text(word: str, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": word, "finish_reason": finish}], **more})


def usage(prompt: int, output: int, cached: int | None = None) -> bytes:
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return event({"choices": [], "usage": counts})


DONE = event(b"[DONE]")


async def stream(request: web.Request, **headers: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream", **headers})
    await response.prepare(request)
    return response


async def answer(
    server: "Server", request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """A well-behaved answer: first token after `first_s`, then a token every `gap_s`."""
    await server.thaw()
    await asyncio.sleep(server.first_s)
    response = await stream(request)
    tokens = body["max_tokens"]
    for number in range(tokens):
        if number:
            await asyncio.sleep(server.gap_s)
        await server.thaw()
        await response.write(text(" abc", "length" if number == tokens - 1 else None))
    prompt = body.get("prompt", "")
    await response.write(usage(len(prompt) // 4, tokens, 16) + DONE)
    return response


@dataclass
class Server:
    """`frozen` between two times of the loop: nothing is answered, as after SIGSTOP."""

    behaviour: Behaviour = answer
    first_s: float = 0.010
    gap_s: float = 0.005
    max_model_len: int | None = 131_072
    frozen: tuple[float, float] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    more_models: Sequence[dict[str, Any]] = ()
    url: str = ""

    async def thaw(self) -> None:
        now = asyncio.get_running_loop().time()
        if self.frozen is not None and self.frozen[0] <= now < self.frozen[1]:
            await asyncio.sleep(self.frozen[1] - now)

    async def post(self, request: web.Request) -> web.StreamResponse:
        self.arrived_s.append(asyncio.get_running_loop().time())
        raw = await request.read()
        body = orjson.loads(raw)
        self.raw.append(raw)
        self.bodies.append({**body, "path": request.path})
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return await self.behaviour(self, request, body)

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [model, *self.more_models]})


@asynccontextmanager
async def serve(server: Server | None = None, **settings: Any) -> AsyncIterator[Server]:
    """`server` on a free port of the loopback interface."""
    server = server or Server(**settings)
    app = web.Application(client_max_size=16 << 20)
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.post)
    app.router.add_post("/v1/chat/completions", server.post)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()


def rows(count: int, gap_s: float = 0.01, **more: Any) -> list[TraceRequest]:
    lengths = {"input_tokens": 32, "output_tokens": 4, **more}
    return [TraceRequest(f"r{at}", at * gap_s, **lengths) for at in range(count)]


def table(folder: Path) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = pyarrow.parquet.read_table(folder / "requests.parquet").to_pylist()
    return sorted(read, key=lambda row: int(row["id"][1:]))


def run_one(
    out: Path,
    trace: list[TraceRequest] | Path,
    server: Server | None = None,
    stop_at_s: tuple[float, ...] = (),
    **options: Any,
) -> tuple[Summary, Server]:
    """One replay against one server in virtual time. `stop_at_s`: when Ctrl-C is pressed."""

    async def main() -> tuple[Summary, Server]:
        stop = Stop()
        loop = asyncio.get_running_loop()
        async with serve(server) as up:
            for when in stop_at_s:
                loop.call_later(when, stop.request)
            plan = ReplayOptions(trace, [up.url], out, **{"quiet": True, **options})
            return await replay(plan, stop), up

    return run(main())


def on_engine(
    out: Path, trace: list[TraceRequest] | Path, *asked: dict[str, Any], **engine: Any
) -> list[Summary]:
    """Replays one after the other against one simulated engine, each in a folder of its number."""

    async def main() -> list[Summary]:
        config = EngineConfig(**{"model": "phi-3-mini", "gpu": "h200-nvl", **engine})
        async with start_engine(config) as up:
            plans = [
                ReplayOptions(trace, [up.url], out / str(number), **{"quiet": True, **options})
                for number, options in enumerate(asked)
            ]
            return [await replay(plan) for plan in plans]

    return run(main())
