"""The load generator's connections and its shortcut for plain events."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from yarl import URL

from forebay.replay.answer import is_one_token
from forebay.replay.client import Client
from forebay.replay.clock import Clock
from forebay.replay.connection import KEEP_ALIVE_S
from forebay.replay.exchange import ClientExchange
from forebay.replay.sim.clock import run

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WORD = b'data: {"choices":[{"index":0,"text":" cat","finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@pytest.mark.parametrize(
    ("chunk", "plain"),
    [
        (WORD, True),
        (b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n', True),
        (b'data: {"choices":[{"delta":{"content":"x"}}],"usage":null}\n\n', True),
        (WORD + WORD, False),
        (WORD[:-1], False),
        (WORD.replace(b" cat", b""), False),  # no output
        (b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n', False),
        (b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n', False),
        (b'data: {"choices":[{"text":"x"}],"usage":{"completion_tokens":1}}\n\n', False),
        (b'data: {"error":{"message":"text"}}\n\n', False),
        (DONE, False),
        (b'data: {"choices":[{"text":"x","finish_reason":"abort"}]}\n\n', False),
        (b": ping\n\n", False),
        (b'data: {"choices":[{"text":"a \\"text\\":\\"b"}]}\n\n', True),
        (b'data: {"choices":[{"text":"say \\":\\"\\""}]}\n\n', True),
    ],
)
def test_a_plain_event_is_known_by_its_bytes(chunk: bytes, plain: bool) -> None:
    assert is_one_token(chunk) is plain


def asked(
    serve: Serve, requests: int = 1, pause_s: float = 0.0
) -> tuple[list[ClientExchange], int]:
    """Send requests one after another; returns their exchanges and the connections opened."""
    opened = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    async def main() -> list[ClientExchange]:
        found = []
        async with await asyncio.start_server(accept, "127.0.0.1", 0, family=socket.AF_INET) as up:
            port = up.sockets[0].getsockname()[1]
            url = URL(f"http://127.0.0.1:{port}/v1/completions")
            async with Client(Clock(), first_token_timeout_s=5, stall_timeout_s=5) as client:
                for number in range(requests):
                    exchange = ClientExchange(f"x{number}", 0.0)
                    await client.send(url, b"{}", exchange, client.watch())
                    found.append(exchange)
                    await asyncio.sleep(pause_s)
        return found

    return run(main()), opened


async def request(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(2)


def keeps_alive(body: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                await request(reader)
            except asyncio.IncompleteReadError:
                return
            writer.write(STREAM + b"content-length: %d\r\n\r\n" % len(body) + body)

    return serve


def test_a_connection_is_used_again() -> None:
    found, opened = asked(keeps_alive(WORD + DONE), requests=3)
    assert [one.outcome for one in found] == ["ok"] * 3
    assert opened == 1


def test_a_connection_that_was_idle_for_long_is_not() -> None:
    found, opened = asked(keeps_alive(WORD + DONE), requests=2, pause_s=KEEP_ALIVE_S + 0.1)
    assert [one.outcome for one in found] == ["ok"] * 2
    assert opened == 2


def test_a_failed_stream_closes_its_connection() -> None:
    error = b'data: {"error":{"message":"gone","code":503}}\n\n'
    found, opened = asked(keeps_alive(WORD + error + WORD), requests=2)
    assert [(one.outcome, one.reason) for one in found] == [("failed", "5xx")] * 2
    assert opened == 2


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_an_answer_may_be_cut_anywhere(size: int) -> None:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(WORD), WORD) for _ in range(3))
    framed += b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE)
    answer = (
        b"HTTP/1.1 100 Continue\r\n\r\n" + STREAM + b"transfer-encoding: chunked\r\n\r\n" + framed
    )

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        for at in range(0, len(answer), size):
            writer.write(answer[at : at + size])
            await writer.drain()
            await asyncio.sleep(0.001)

    (exchange,), _ = asked(serve)
    assert (exchange.outcome, exchange.status) == ("ok", 200)
    assert len(exchange.events.at_s) == 3
    assert list(exchange.events.tokens) == [1, 1, 1]


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(STREAM + b"\r\n" + WORD + DONE)
        await writer.drain()

    (exchange,), _ = asked(serve)
    assert exchange.outcome == "ok"


def test_a_long_error_is_read_up_to_a_limit() -> None:
    body = b'{"error":{"code":"queue_full"}}' + b" " * (1 << 20)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        head = b"HTTP/1.1 429 Too Many\r\ncontent-type: application/json\r\nretry-after: 3\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    (exchange,), _ = asked(serve)
    assert (exchange.outcome, exchange.reason) == ("rejected", "queue_full")
    assert exchange.retry_after_s == 3.0
    assert exchange.reject_latency_s is not None
