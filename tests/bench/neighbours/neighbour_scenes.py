"""Ways in which one client may hurt all others: each scene abuses a proxy until it is cancelled.

A scene gets the URL of a proxy in front of `neighbour_backend.py` and needs no key. `PROXY_PID` is
the environment variable with the number of the proxy's process. `SCENES` has
all of them by name; `config` holds what a scene's proxy needs beyond the defaults.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

Abuse = Callable[[str], Awaitable[None]]
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MIB = 1 << 20
PROXY_PID = "NEIGHBOUR_PROXY_PID"


@dataclass(frozen=True)
class Scene:
    """One abuse.

    Attributes:
        item: number of the row in the catalogue of ways to hurt others.
        run: abuses the proxy at a URL until cancelled.
        config: keys of the proxy's configuration, by their dotted names.
        good: fields of the good client's requests, if not those of a short chat.
        servers: further backends.
        workers: processes of the proxy besides their parent.
        deaf: nobody reads the proxy's standard output.
    """

    item: int
    run: Abuse
    config: dict[str, Any] = field(default_factory=dict)
    good: dict[str, Any] = field(default_factory=dict)
    servers: int = 0
    workers: int = 0
    deaf: bool = False


SCENES: dict[str, Scene] = {}


def scene(item: int, **config: Any) -> Callable[[Abuse], Abuse]:
    """Register a function as the scene of its name; `__` in a key stands for a dot."""

    def register(run: Abuse) -> Abuse:
        keys = {key.replace("__", "."): value for key, value in config.items()}
        SCENES[getattr(run, "__name__", "")] = Scene(item, run, keys)
        return run

    return register


@asynccontextmanager
async def connection(
    url: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection to the proxy; the end of the block aborts it."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def again(
    count: int, one: Callable[[], Awaitable[None]], pause_s: float = 0.05, apart_s: float = 0.0
) -> None:
    """Run `one` in `count` tasks, again and again, whatever comes of it, until cancelled.

    The tasks begin `apart_s` after each other.
    """

    async def forever(number: int) -> None:
        await asyncio.sleep(number * apart_s)
        while True:
            with suppress(OSError, asyncio.IncompleteReadError, EOFError):
                await one()
            await asyncio.sleep(pause_s)

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(forever(number))


def request(model: str, *, length: int | None = None, **fields: Any) -> bytes:
    """Return a chat request as bytes; `length` states another length than the body has."""
    chat = {"model": model, "messages": [{"role": "user", "content": "hello"}], **fields}
    body = json.dumps(chat).encode()
    return POST + b"Content-Length: %d\r\n\r\n%b" % (length or len(body), body)


def upload(url: str, size: int, *, stall: bool = True) -> Callable[[], Awaitable[None]]:
    """Return a function that sends all but the last byte of a body of `size`, then nothing."""

    async def one() -> None:
        async with connection(url) as (reader, writer):
            writer.write(POST + b"Content-Length: %d\r\n\r\n" % size)
            left = size - stall
            answering = asyncio.ensure_future(reader.read(1))
            try:
                while left and not answering.done():
                    piece = min(left, 256 << 10)
                    writer.write(b"x" * piece)
                    left -= piece
                    await writer.drain()
                await answering
            finally:
                answering.cancel()

    return one


@scene(0)
async def undisturbed(_: str) -> None:
    """Nothing at all: the good tenant alone."""
    await asyncio.Event().wait()


@scene(5)
async def uploads_that_never_end(url: str) -> None:
    """Sixteen uploads of 16 MiB that stop before their last byte."""
    await again(17, upload(url, 16 * MIB))


@scene(5)
async def uploads_in_chunks_that_never_end(url: str) -> None:
    """The same without a stated length."""

    async def one() -> None:
        async with connection(url) as (reader, writer):
            writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(255):
                writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                await writer.drain()
            await reader.read(1)

    await again(17, one)


@scene(5)
async def slow_uploads(url: str) -> None:
    """200 uploads of 16 MiB, each at 120 KB/s."""

    async def one() -> None:
        async with connection(url) as (reader, writer):
            writer.write(POST + b"Content-Length: %d\r\n\r\n" % (16 * MIB))
            answering = asyncio.ensure_future(reader.read(1))
            while not answering.done():
                writer.write(b"x" * 12_000)
                await writer.drain()
                await asyncio.sleep(0.1)

    await again(200, one)


@scene(7)
async def big_answers_not_read(url: str) -> None:
    """Thirty clients ask for answers of 59 MiB and read nothing of them."""

    async def one() -> None:
        async with connection(url) as (_, writer):
            writer.write(request(f"whole:{59 * MIB}"))
            await asyncio.sleep(3600)

    await again(30, one)


@scene(7)
async def big_answers_read(url: str) -> None:
    """Three clients ask for answers of 59 MiB, one after another, and read them."""

    async def one() -> None:
        async with connection(url) as (reader, writer):
            writer.write(request(f"whole:{59 * MIB}", n=1))
            left = 59 * MIB
            while left > 0 and (data := await reader.read(MIB)):
                left -= len(data)

    await again(3, one)


@scene(7)
async def big_events(url: str) -> None:
    """Twenty clients ask for streams whose first event has 100 MB."""

    async def one() -> None:
        async with connection(url) as (reader, writer):
            writer.write(request("event:100000000", stream=True))
            while await reader.read(MIB):
                pass

    await again(20, one)


@scene(8)
async def one_byte_chunks(url: str) -> None:
    """Two connections send a body in chunks of one byte, as fast as they are taken."""
    many = b"1\r\nx\r\n" * 20_000

    async def one() -> None:
        async with connection(url) as (reader, writer):
            writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n")
            answering = asyncio.ensure_future(reader.read(1))
            while not answering.done():
                writer.write(many)
                await writer.drain()

    await again(2, one, 0.0)


@scene(8)
async def bodies_after_a_rejection(url: str) -> None:
    """Two connections send one-byte chunks to a path that does not exist, and go on after it."""
    many = b"1\r\nx\r\n" * 20_000

    async def one() -> None:
        async with connection(url) as (_, writer):
            writer.write(b"POST /no HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            while not writer.transport.is_closing():
                writer.write(many)
                await writer.drain()

    await again(2, one, 0.0)


@scene(8)
async def pipelined_errors(url: str) -> None:
    """Two connections pipeline requests that are answered with a 404."""
    many = b"GET /no HTTP/1.1\r\nHost: x\r\n\r\n" * 500

    async def one() -> None:
        async with connection(url) as (reader, writer):

            async def read() -> None:
                while await reader.read(MIB):
                    pass

            reading = asyncio.ensure_future(read())
            while not reading.done():
                writer.write(many)
                await writer.drain()

    await again(2, one, 0.0)


@scene(16)
async def requests_that_fail(url: str) -> None:
    """Requests of one client at which every backend answers 500."""

    async def one() -> None:
        async with connection(url) as (reader, writer):
            writer.write(request("error"))
            await reader.readuntil(b"\r\n\r\n")

    await again(4, one, 0.02)


@scene(16)
async def escaped_quotes(url: str) -> None:
    """Two clients send bodies of 15.7 MB of escaped quotes."""
    body = b'{"model":"good","messages":[{"role":"user","content":"' + b'\\"' * 7_850_000 + b'"}]}'

    async def one() -> None:
        async with connection(url) as (reader, writer):
            writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            await reader.readuntil(b"\r\n\r\n")

    await again(2, one)


@scene(16)
async def large_bodies(url: str) -> None:
    """Sixteen clients send whole prompts of 16 MB each, at which the backend is silent."""
    text = b"word " * 3_000_000
    body = b'{"model":"silent","prompt":"' + text + b'"}'
    post = POST.replace(b"chat/", b"")

    async def one() -> None:
        async with connection(url) as (reader, writer):
            writer.write(post + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            await reader.readuntil(b"\r\n\r\n")

    await again(16, one)


@scene(16)
async def half_closes(url: str) -> None:
    """Clients that close their side after the request, by the hundred."""

    async def one() -> None:
        async with connection(url) as (reader, writer):
            writer.write(request("good", stream=True))
            writer.write_eof()
            await reader.read()

    await again(20, one)
