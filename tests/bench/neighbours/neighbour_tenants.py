"""Scenes of tenants that share engines fairly, or try not to: importing this adds them to SCENES.

The good client is tenant `good`, the abuse is tenant `bad` of equal weight. `busy` is no abuse: an
equal tenant that sends more than the engines can compute. What it costs the good tenant is what a
fair share costs, the measure for the scenes in which `bad` asks for more than its share. Nor is
`within_quota`: its tenant asks for more than its quota and burst, and each answer tells its usage.
Nor is `busy_streams`: 64 streams of an equal tenant, together 12,800 tokens a second.
"""

import asyncio
import json
import os
import signal
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from neighbour_scenes import MIB, POST, PROXY_PID, SCENES, Abuse, Scene, again, connection

KEYS = {name: f"key-of-{name}-0123456789abcdef" for name in ("good", "bad")}
KEYS_ENVIRONMENT = "NEIGHBOUR_KEYS"
TENANTS = {"tenants.keys": f"env:{KEYS_ENVIRONMENT}"}
WORK: dict[str, Any] = {"model": "work:8"}  # what the engines compute
DOCUMENT = [{"role": "user", "content": "word " * 80_000}]  # 100,000 tokens
COMPLETIONS = POST.replace(b"chat/", b"")


def set_keys() -> None:
    """Put the keys where the proxy's configuration looks for them."""
    os.environ[KEYS_ENVIRONMENT] = "\n".join(f"{name}: {key}" for name, key in KEYS.items())


def add(
    name: str, item: int, run: Abuse, good: dict[str, Any] | None = None, **config: Any
) -> None:
    keys = {key.replace("__", "."): value for key, value in config.items()}
    proxy = {key: keys.pop(key) for key in ("servers", "workers", "deaf") if key in keys}
    SCENES[name] = Scene(item, run, TENANTS | keys, good or {}, **proxy)


def asking(
    clients: int,
    pause_s: float,
    head: bytes = b"",
    post: bytes = POST,
    apart_s: float = 0.0,
    **fields: Any,
) -> Abuse:
    """Return a scene of `clients` clients of tenant `bad`, each with one request at a time."""
    chat = {"messages": [{"role": "user", "content": "hello"}]} if post is POST else {}
    body = json.dumps({**chat, **fields}).encode()
    key = b"Authorization: Bearer %b\r\n" % KEYS["bad"].encode()
    data = post + key + head + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body

    async def one(url: str) -> None:
        async with connection(url) as (reader, writer):
            writer.write(data)
            while await reader.read(MIB):
                pass

    async def run(url: str) -> None:
        await again(clients, lambda: one(url), pause_s, apart_s)

    return run


def document(tokens: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "text" * tokens}]


async def nothing(_: str) -> None:
    await asyncio.Event().wait()


async def health_checks(url: str) -> None:
    """260 connections ask for /health every 60 s, each before it is idle for too long."""

    async def one() -> None:
        async with connection(url) as (reader, writer):
            while True:
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                if not await reader.read(4096):
                    return
                await asyncio.sleep(5.0)

    await again(260, one)


async def odd_parts(url: str) -> None:
    """Content parts whose type is an object."""
    body = json.dumps({"model": "good", "messages": [{"role": "user", "content": [{"type": {}}]}]})
    key = b"Authorization: Bearer %b\r\n" % KEYS["bad"].encode()

    async def one() -> None:
        async with connection(url) as (reader, writer):
            writer.write(POST + key + b"Content-Length: %d\r\n\r\n" % len(body) + body.encode())
            await reader.readuntil(b"\r\n\r\n")

    await again(4, one, 0.02)


async def signals(_: str) -> None:
    """SIGUSR1 to the parent and each worker, 20 times a second."""
    parent = int(os.environ[PROXY_PID])
    children = Path(f"/proc/{parent}/task/{parent}/children")
    while True:
        workers = map(int, children.read_text("utf-8").split())  # noqa: ASYNC240
        for process in (parent, *workers):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGUSR1)
        await asyncio.sleep(0.05)


async def foreign_responses(url: str) -> None:
    """Four clients of `bad` read, cancel and go on from responses that are not theirs."""
    key = b"Host: x\r\nAuthorization: Bearer %b\r\n" % KEYS["bad"].encode()
    numbers = count()

    async def one() -> None:
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
                writer.write(b"%b HTTP/1.1\r\n%b%b\r\n\r\n%b" % (head, key, length, data))
                await reader.readuntil(b"\r\n\r\n")

    await again(4, one, 0.02)


STREAM: dict[str, Any] = {"stream": True}
BUSY: dict[str, Any] = {**WORK, **STREAM, "messages": document(2_000)}
POOL: dict[str, Any] = {"affinity__kv_tokens": 200_000}

add("undisturbed_engine", 0, nothing, WORK)
add("undisturbed_workers", 0, nothing, workers=2)
add("undisturbed_documents", 0, nothing, {"messages": DOCUMENT})
add("busy", 0, asking(64, 0.0, **BUSY), WORK)
QUOTA: dict[str, Any] = {"tenants__known": {"bad": {"tokens_per_s": 1000}}}
add(
    "within_quota", 0, asking(16, 0.0, stream_options={"include_usage": True}, **BUSY), WORK,
    **QUOTA,
)  # fmt: skip
add("slow_name", 1, nothing, backends=[{"name": "slow", "url": "http://slow.test:9"}])
add("classes", 2, asking(64, 0.0, b"x-forebay-class: interactive\r\n", **BUSY), WORK)
add("priorities", 2, asking(64, 0.0, priority=-1, **BUSY), WORK)
SCENES["dense_requests"] = Scene(  # of strangers, who share one estimate
    3, asking(4, 0.02, model="dense", messages=document(75)), good={"messages": DOCUMENT}
)
add("large_n", 4, asking(4, 0.1, n=128, max_tokens=8192, **WORK, **STREAM), WORK, **POOL)
add("busy_streams", 0, asking(64, 0.1, model="work:100", **STREAM), WORK, **POOL)
add(
    "large_max_tokens", 4, asking(64, 0.1, model="work:100", max_tokens=32_000, **STREAM), WORK,
    **POOL,
)  # fmt: skip
add(
    "batches", 6, asking(4, 0.1, post=COMPLETIONS, model="work:16", prompt=["hello"] * 4_900),
    WORK,
)  # fmt: skip
add("slow_images", 9, asking(
    100, 0.1, apart_s=0.1, model="slow:10", **STREAM,
    messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
))  # fmt: skip
add("slow_grammars", 9, asking(
    100, 0.1, apart_s=0.1, model="slow:10", response_format={"type": "json_object"}, **STREAM,
))  # fmt: skip
add("text_without_usage", 10, asking(16, 0.0, **BUSY), WORK, **QUOTA)
add("health_checks", 12, health_checks, limits__connections=200)
add("odd_parts", 15, odd_parts)
EMBEDDINGS = POST.replace(b"chat/completions", b"embeddings")
add("embeddings_flood", 17, asking(
    64, 0.0, post=EMBEDDINGS, model="work:1", input="text" * 2_000,
), WORK)  # fmt: skip
add("servers_200", 18, nothing, servers=198)
add("servers_1000", 18, nothing, servers=998)
add("output_that_nobody_reads", 19, asking(16, 0.02, model="good", **STREAM), deaf=True)
add("signals_to_parent_and_workers", 20, signals, workers=2)
add("foreign_responses", 21, foreign_responses)
