"""A proxy in front of scripted backends, for tests: real sockets, virtual time."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from said import Said

from forebay.proxy.config.backends import MAX_CONCURRENCY
from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import load_config
from forebay.proxy.log_events import Say
from forebay.proxy.serve import Proxy, start_proxy
from forebay.proxy.share.exchange import Link
from forebay.proxy.telemetry.logs.tracing import Tracer

Serve = Callable[["Call"], Awaitable[None]]

SHARED_LOOP = {"loop_lag": "10s"}  # limits: of a proxy that shares its process with a test
EVENT = b'data: {"choices":[{"index":0,"text":" yes","finish_reason":null}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\nserver: uvicorn\r\nx-secret: 1\r\n\r\n"
)
WHOLE = json.dumps(
    {
        "id": "cmpl-1",
        "choices": [{"index": 0, "text": " yes", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8},
    }
).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer(status: int, body: bytes, *headers: str) -> bytes:
    """A whole response as bytes."""
    lines = [f"HTTP/1.1 {status} X", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


@dataclass(slots=True)
class Call:
    """One request as a raw backend got it."""

    head: str
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        self.writer.transport.abort()

    async def hung_up(self) -> None:
        """Until the other side has closed."""
        await self.reader.read()


async def whole(call: Call) -> None:
    await call.send(answer(200, WHOLE))


async def stream(call: Call) -> None:
    await call.send(STREAM_HEAD + chunk(EVENT) + chunk(EVENT) + chunk(USAGE) + chunk(DONE))
    await call.send(b"0\r\n\r\n")


async def by_request(call: Call) -> None:
    """Answer as a healthy backend does: a stream or a whole answer."""
    await (stream if b'"stream":true' in call.body.replace(b" ", b"") else whole)(call)


async def silent(call: Call) -> None:
    await call.hung_up()


@dataclass(slots=True)
class RawBackend:
    """A backend that answers with the bytes that `serve` sends.

    Attributes:
        healthy: the answer of /health. None: it accepts the connection and stays silent.
        pause_s: until it answers /health or /metrics.
        metrics: the answer of /metrics. None: silence, as above.
        openapi, version: the answers of /openapi.json and /version to the proxy itself. None: 404.
        tokenize: the answer of /tokenize to a body of the proxy itself. None: 404.
        models: entries of /v1/models for the proxy, by name. Empty: it has no such path.
        asleep: the answer of /is_sleeping. Asleep, it answers no other request. None: 404.
        key: each request without this key gets 401, and is counted in `keyless`. Not those that
            begin with one of `unlocked`.
        health: path and status of its health checks.
    """

    serve: Serve = by_request
    healthy: bool | None = True
    metrics: bytes | None = b""
    metrics_asked: int = 0
    health_asked: int = 0
    openapi: bytes | None = None
    version: bytes | None = None
    tokenize: Callable[[dict[str, Any]], bytes] | None = None
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    models_asked: int = 0
    pause_s: float = 0.0
    asleep: bool | None = None
    key: str = ""
    keyless: int = 0
    unlocked: tuple[str, ...] = ()
    health: tuple[str, int] = ("/health", 200)
    calls: list[Call] = field(default_factory=list)
    open: int = 0
    connections: int = 0
    url: str = ""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                text = head.decode()
                length = 0
                for line in text.split("\r\n"):
                    if line.lower().startswith("content-length:"):
                        length = int(line.split(":")[1])
                body = await reader.readexactly(length)
                while "\r\ntransfer-encoding: chunked\r\n" in text.lower():
                    size = int(await reader.readline(), 16)
                    body += (await reader.readexactly(size + 2))[:size]
                    if not size:
                        break
                carries = f"\r\nauthorization: bearer {self.key}\r\n" in text.lower()
                if self.key and not (carries or text.startswith(self.unlocked)):
                    self.keyless += 1
                    writer.write(answer(401, b"{}"))
                    continue
                if text.startswith("GET /is_sleeping "):
                    sleeps = json.dumps({"is_sleeping": self.asleep}).encode()
                    writer.write(answer(404 if self.asleep is None else 200, sleeps))
                    continue
                if text.startswith("GET /v1/models ") and "\r\nx-request-id:" not in text.lower():
                    self.models_asked += 1
                    page = {"data": [{"id": name} | self.models[name] for name in self.models]}
                    listing = answer(200, json.dumps(page).encode())
                    writer.write(listing if self.models else answer(404, b"{}"))
                    continue
                if text.startswith(("GET /openapi.json ", "GET /version ")) and (
                    "\r\nx-request-id:" not in text.lower()  # not a client's question
                ):
                    document = self.openapi if "openapi" in text else self.version
                    writer.write(answer(200 if document else 404, document or b"{}"))
                    continue
                if text.startswith("POST /tokenize ") and "\r\nx-request-id:" not in text.lower():
                    ids = self.tokenize(json.loads(body)) if self.tokenize else answer(404, b"{}")
                    writer.write(ids)
                    continue
                if text.startswith((f"GET {self.health[0]} ", "GET /metrics")):
                    size = text.startswith("GET /metrics")
                    self.metrics_asked += size
                    self.health_asked += not size
                    said = self.metrics if size else b""
                    if self.healthy is None or said is None:
                        await reader.read()
                        return
                    if self.pause_s:
                        await asyncio.sleep(self.pause_s)
                    writer.write(answer(self.health[1] if self.healthy else 503, said))
                    continue
                call = Call(text, body, reader, writer)
                self.calls.append(call)
                self.open += 1
                try:
                    await (silent if self.asleep else self.serve)(call)
                finally:
                    self.open -= 1
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # cancelled by `running` only, and then done
        finally:
            self._tasks.discard(task)
            self.connections -= 1
            writer.close()

    @asynccontextmanager
    async def running(
        self, port: int = 0, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator["RawBackend"]:
        server = await asyncio.start_server(self._connection, "127.0.0.1", port, ssl=tls)
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks)


@dataclass(slots=True)
class Stage:
    proxy: Proxy
    client: aiohttp.ClientSession
    said: Said

    @property
    def url(self) -> str:
        return self.proxy.url

    def post(self, body: Any = None, path: str = "/v1/completions", **options: Any) -> Any:
        """POST a completion. Use in `async with`."""
        body = {"prompt": "hello", "max_tokens": 3} if body is None else body
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        return self.client.post(self.url + path, data=data, headers=headers, **options)

    async def status(self, body: Any = None, path: str = "/v1/completions", **options: Any) -> int:
        """POST a completion, and return the status of the answer."""
        async with self.post(body, path, **options) as response:
            return int(response.status)

    async def read(self, body: Any = None, path: str = "/v1/completions", **options: Any) -> bytes:
        """POST a completion, and return the answer."""
        async with self.post(body, path, **options) as response:
            return bytes(await response.read())

    async def told(self, page: str) -> Any:
        """GET a page of JSON from the admin port."""
        return json.loads(await self.admin(page))

    async def status_of(self, url: str, **options: Any) -> int:
        """GET `url`, and return the status of the answer."""
        async with self.client.get(url, **options) as response:
            return response.status

    async def admin(self, target: str) -> str:
        """GET a path of the admin port, and return the text of the answer, which has status 200."""
        async with self.client.get(self.proxy.admin_url + target) as response:
            assert response.status == 200
            return await response.text()

    def assert_nothing_held(self) -> None:
        """Every slot, queue place and byte has been given back."""
        shaper = self.proxy.driver.shaper
        assert not list(shaper.waiting())
        for backend in shaper.backends.values():
            assert backend.idle, backend
            assert backend.kv.tokens == 0
            assert not backend.prefills
        assert self.proxy.app._budget.held == 0
        budget = self.proxy.app._attempts.budget
        assert (budget.active, budget.retrying) == (0, 0)
        assert not self.proxy.app._attempts._active
        assert not any(b.waiting for b in self.proxy.backends.health._backends.values())


@asynccontextmanager
async def stage(
    urls: list[str],
    *,
    wait_up: int | None = None,
    slots: int | Sequence[int] = MAX_CONCURRENCY,
    load: Callable[[], Config] | None = None,
    watch: Path | None = None,
    tracer: Tracer | None = None,
    say: Say | None = None,
    each: dict[str, Any] | None = None,
    links: Sequence[Link] = (),
    **keys: Any,
) -> AsyncIterator[Stage]:
    """A proxy in front of `urls`, once `wait_up` of them (default: all) are up.

    `slots`: number for each backend, or one number for all. `each`: more keys of every backend.
    """
    limits = [slots] * len(urls) if isinstance(slots, int) else slots
    config = load_config(
        None,
        {
            "listen": {"port": 0, "admin_port": 0},
            "backends": [
                {"name": f"b{i}", "url": url, "max_concurrency": limit, **(each or {})}
                for i, (url, limit) in enumerate(zip(urls, limits, strict=True))
            ],
            "debug_headers": True,
            "limits": SHARED_LOOP | keys.pop("limits", {}),
            **keys,
        },
        {},
    )
    said = Said()
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(
            start_proxy(config, say or said, load=load, watch=watch, tracer=tracer, links=links)
        )
        client = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        )
        needed = len(urls) if wait_up is None else wait_up
        while sum(u.up for u in proxy.backends.links.values()) < needed:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        yield Stage(proxy, client, said)


def note_a_chat(on: Stage) -> None:
    """A chat has arrived that no backend has received. From the second chat on, chats flow."""
    forecast = on.proxy.driver.shaper._state.forecast
    forecast.long_prefills.arrived("chat", "", asyncio.get_running_loop().time())


def now() -> float:
    """The time of the loop."""
    return asyncio.get_running_loop().time()


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(30):
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)


ONE_SLOT = {
    "slots": 1,
    "buckets": [{"name": "chat", "up_to": 5000, "max_queue": 2, "max_wait": "30s"}],
}


STREAMED = {"prompt": "hello", "max_tokens": 3, "stream": True}


@asynccontextmanager
async def on_stage(
    *serves: RawBackend | Serve | None, **keys: Any
) -> AsyncIterator[tuple[Stage, list[RawBackend]]]:
    """A proxy with one backend for each of `serves`. Afterwards all must be released."""
    async with AsyncExitStack() as stack:
        backends = [
            serve if isinstance(serve, RawBackend) else RawBackend(serve or by_request)
            for serve in serves
        ]
        for backend in backends:
            await stack.enter_async_context(backend.running())
        on = await stack.enter_async_context(stage([b.url for b in backends], **keys))
        yield on, backends
        await settle()
        on.assert_nothing_held()


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The error object, checked for its shape and the headers every answer has."""
    body = await response.json()
    typed = {"type"} if response.url.path.startswith("/v1/messages") else set()
    assert set(body) == {"error"} | typed
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    assert "127.0.0.1" not in body["error"]["message"]
    return dict(body["error"])


async def cut_off(answer: aiohttp.ClientResponse, seen: bytes = b"") -> bytes:
    """All of a stream, which must break."""
    with pytest.raises(aiohttp.ClientPayloadError):  # noqa: PT012
        while part := await answer.content.readany():
            seen += part
    return seen


async def until(true: Callable[[], bool]) -> None:
    """Wait for it in virtual time, for a minute of it."""
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
