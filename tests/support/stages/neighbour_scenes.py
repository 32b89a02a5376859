"""Ways in which one client may hurt all others, and a good client beside them.

A scene abuses a proxy in front of `neighbour_backend.py` until it is cancelled. `SCENES` has all of
them by name. The good client is tenant `good`, the abuse is tenant `bad` of equal weight.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import aiohttp

Abuse = Callable[[str], Awaitable[None]]
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
EVERY_S, PATIENCE_S = 0.025, 30.0  # of the good client
KEYS = {name: f"key-of-{name}-0123456789abcdef" for name in ("good", "bad")}
KEYS_ENVIRONMENT = "NEIGHBOUR_KEYS"
BAD_KEY = b"Authorization: Bearer %b\r\n" % KEYS["bad"].encode()
DOCUMENT = [{"role": "user", "content": "word " * 80_000}]  # 100,000 tokens


@dataclass(frozen=True)
class Scene:
    """One abuse.

    Attributes:
        run: abuses the proxy at a URL until cancelled.
        limits: section of the proxy's configuration.
        tenants: True if the proxy knows the keys of `good` and `bad`.
        good: fields of the good client's requests that differ from a short chat.
    """

    run: Abuse
    limits: dict[str, Any] = field(default_factory=dict)
    tenants: bool = True
    good: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        keys = {"tenants": {"keys": f"env:{KEYS_ENVIRONMENT}"}} if self.tenants else {}
        return {**keys, "limits": self.limits}


def set_keys() -> None:
    """Put the keys where the proxy's configuration looks for them."""
    os.environ[KEYS_ENVIRONMENT] = "\n".join(f"{name}: {key}" for name, key in KEYS.items())


@asynccontextmanager
async def connection(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection to the proxy. The end of the block aborts it."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def repeat(
    clients: int, act: Callable[[], Awaitable[None]], pause_s: float, apart_s: float = 0.0
) -> None:
    """Run `act` in `clients` tasks again and again, whether it succeeds or not, until cancelled.

    The tasks begin `apart_s` after each other.
    """

    async def forever(number: int) -> None:
        await asyncio.sleep(number * apart_s)
        while True:
            with suppress(OSError, asyncio.IncompleteReadError, EOFError):
                await act()
            await asyncio.sleep(pause_s)

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(forever(number))


def asking(
    clients: int, pause_s: float, *, key: bytes = BAD_KEY, apart_s: float = 0.0, **fields: Any
) -> Abuse:
    """Return a scene of `clients` clients with one chat at a time each, read to its end."""
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], **fields}).encode()
    data = POST + key + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body

    async def act(url: str) -> None:
        async with connection(url) as (reader, writer):
            writer.write(data)
            await reader.read()

    async def run(url: str) -> None:
        await repeat(clients, lambda: act(url), pause_s, apart_s)

    return run


async def nothing(_: str) -> None:
    await asyncio.Event().wait()


async def half_closes(url: str) -> None:
    """Twenty clients that close their side after the request, by the hundred."""
    body = b'{"model":"good","messages":[{"role":"user","content":"hello"}],"stream":true}'

    async def act() -> None:
        async with connection(url) as (reader, writer):
            writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            writer.write_eof()
            await reader.read()

    await repeat(20, act, 0.05)


async def health_checks(url: str) -> None:
    """260 connections ask for /health every 5 s, each before it is idle for too long."""

    async def act() -> None:
        async with connection(url) as (reader, writer):
            while True:
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                if not await reader.read(4096):
                    return
                await asyncio.sleep(5.0)

    await repeat(260, act, 0.05)


async def foreign_responses(url: str) -> None:
    """Four clients of `bad` read, cancel and go on from responses that are not theirs."""
    numbers = count()

    async def act() -> None:
        name = b"resp_%016x" % next(numbers)
        body = b'{"model":"good","input":"hello","previous_response_id":"%b"}' % name
        heads = (
            (b"GET /v1/responses/%b" % name, b""),
            (b"POST /v1/responses/%b/cancel" % name, b""),
            (b"POST /v1/responses", body),
        )
        async with connection(url) as (reader, writer):
            for head, data in heads:
                length = b"Content-Type: application/json\r\nContent-Length: %d" % len(data)
                writer.write(
                    b"%b HTTP/1.1\r\nHost: x\r\n%b%b\r\n\r\n%b" % (head, BAD_KEY, length, data)
                )
                await reader.readuntil(b"\r\n\r\n")

    await repeat(4, act, 0.02)


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
SLOW: dict[str, Any] = {"model": "slow:10", "stream": True, "apart_s": 0.1}
SCENES = {
    "undisturbed": Scene(nothing, tenants=False),
    "undisturbed_engine": Scene(nothing, good={"model": "work:8"}),
    "requests_that_fail": Scene(asking(4, 0.02, key=b"", model="error"), tenants=False),
    "half_closes": Scene(half_closes, tenants=False),
    "dense_requests": Scene(  # strangers, who share an estimate
        asking(
            4, 0.02, key=b"", model="dense",
            messages=[{"role": "user", "content": "text" * 75}],
        ),
        tenants=False, good={"messages": DOCUMENT},
    ),
    "slow_images": Scene(asking(100, 0.1, messages=IMAGE, **SLOW)),
    "slow_grammars": Scene(asking(100, 0.1, response_format={"type": "json_object"}, **SLOW)),
    "odd_parts": Scene(
        asking(4, 0.02, model="good", messages=[{"role": "user", "content": [{"type": {}}]}])
    ),
    "health_checks": Scene(health_checks, limits={"connections": 200}),
    "foreign_responses": Scene(foreign_responses),
}  # fmt: skip


class GoodClient:
    """Starts a stream every EVERY_S, and counts the outcomes."""

    def __init__(self, url: str, **fields: Any) -> None:
        self.url = f"{url}/v1/chat/completions"
        self.statuses: Counter[str] = Counter()
        self.sent = 0
        chat = {"model": "good", "messages": [{"role": "user", "content": "hello"}]}
        self.body = json.dumps({**chat, **fields, "stream": True}).encode()
        # Documents come as fast as the engines can compute them.
        self.every_s = max(EVERY_S, len(self.body) / 2e6)

    async def run(self, seconds: float) -> None:
        """Start streams for so long, and wait for all."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            due = asyncio.get_running_loop().time()
            for _ in range(round(seconds / self.every_s)):
                group.create_task(self._ask(session))
                due += self.every_s
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        self.sent += 1
        headers = {
            "content-type": "application/json", "authorization": f"Bearer {KEYS['good']}",
        }  # fmt: skip
        try:
            async with session.post(self.url, data=self.body, headers=headers) as answer:
                whole = await answer.read()
                good = answer.status == 200 and whole.endswith(b"data: [DONE]\n\n")
                self.statuses["good" if good else str(answer.status)] += 1
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self.statuses[type(error).__name__] += 1
