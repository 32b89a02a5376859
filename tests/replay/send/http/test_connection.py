"""The load generator's connections and its shortcut for plain events."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from forebay.replay.clock.clock import Clock
from forebay.replay.clock.virtual_loop import run
from forebay.replay.send.http.answer_reader import AnswerReader
from forebay.replay.send.http.client import Client
from forebay.replay.send.http.connection import KEEP_ALIVE_S, ConnectionPool, HttpConnection
from forebay.replay.send.http.exchange import ClientExchange, ProgressWatch
from forebay.replay.send.http.framing import MAX_LINE_BYTES

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WORD = b'data: {"choices":[{"index":0,"text":" cat","finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


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


def answers(data: bytes) -> Serve:
    """Answer one request, and close the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(data)
        await writer.drain()

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
    assert [(one.outcome, one.reason) for one in found] == [("failed", "stream_error")] * 2
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


@pytest.mark.parametrize(
    ("body", "reason", "opened"),
    [
        (b"%x;name=value\r\n%b\r\n0\r\n\r\n", None, 1),
        (b"%x\r\n%b\r\n0\r\nx-trailer: 1\r\n\r\n", None, 1),
        (b"%x\r\n%b\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n", None, 2),  # more than one answer
        (b"%xg\r\n%b\r\n0\r\n\r\n", "malformed", 2),
        (b"-%x\r\n%b\r\n0\r\n\r\n", "malformed", 2),
        (b"%x\r\n%b+\r\n0\r\n\r\n", "malformed", 2),  # longer than it says
        (b"%x\r\n%b\r\n" + b"f" * (MAX_LINE_BYTES + 1), "malformed", 2),
    ],
)
def test_the_framing_of_chunks(body: bytes, reason: str | None, opened: int) -> None:
    events = WORD + DONE if reason is None else WORD
    framed = body % (len(events), events)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                await request(reader)
                writer.write(STREAM + b"transfer-encoding: chunked\r\n\r\n" + framed)

    found, connections = asked(serve, requests=2)
    assert [one.reason for one in found] == [reason] * 2
    assert connections == opened


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    (exchange,), _ = asked(answers(STREAM + b"\r\n" + WORD + DONE))
    assert exchange.outcome == "ok"


def test_what_is_no_http() -> None:
    (exchange,), _ = asked(answers(b"SSH-2.0-hello\r\n\r\n"))
    assert exchange.reason == "malformed"


def test_a_long_error_is_read_up_to_a_limit() -> None:
    body = b'{"error":{"code":"queue_full"}}' + b" " * (1 << 20)
    head = b"HTTP/1.1 429 Too Many\r\ncontent-type: application/json\r\nretry-after: 3\r\n"
    (exchange,), _ = asked(answers(head + b"content-length: %d\r\n\r\n" % len(body) + body))
    assert (exchange.outcome, exchange.reason) == ("rejected", "queue_full")
    assert exchange.retry_after_s == 3.0
    assert exchange.reject_latency_s is not None


def read_in_cuts(answer: bytes, cuts: list[int], quick: bool) -> tuple[ClientExchange, int]:
    """Feed an answer to a connection in pieces; returns its exchange, and how many fit a form.

    Quick: all pieces are read after the last one, and tokens are known by their form. The clock
    has one second for each read.
    """
    known = 0
    reads: list[int] = []
    clock = cast(Clock, SimpleNamespace(now=lambda: float(len(reads)), scale=1.0))

    class Reader(AnswerReader):
        def _read(self, data: bytes) -> None:
            nonlocal known
            known -= 1
            super()._read(data)
            if not quick:
                self._learned = self._forms = None

    exchange = ClientExchange("x", 0.0)
    watch = cast(ProgressWatch, SimpleNamespace(finish=lambda: None))
    head = STREAM + b"transfer-encoding: chunked\r\n\r\n" if quick else b""
    pool = cast(
        ConnectionPool,
        SimpleNamespace(put=lambda *_: None, known_head=head, spare=SimpleNamespace(wanted=())),
    )
    transport = cast(
        asyncio.Transport,
        SimpleNamespace(
            writelines=lambda _: None,
            abort=lambda: None,
            is_closing=lambda: False,
            get_extra_info=lambda _: None,
        ),
    )
    connection = HttpConnection(clock, pool, ("h", 1, False))
    connection.connection_made(transport)
    reader = Reader(exchange, clock, watch, False, lambda _: None)
    reader.send(connection, b"", [b""])
    for start, end in pairwise([0, *cuts, len(answer)]):
        reads.append(end)
        if exchange.done_s is None:
            known += 1
            connection.data_received(answer[start:end])
            if not quick:
                reader.read()
    exchange.settle()
    return exchange, known


TEXTS = st.text(alphabet='ab"\\\nä{}:,', max_size=3)
SPLITS = st.sampled_from(["whole", "at any byte", "two in one chunk", "one in two chunks"])


@given(st.lists(st.tuples(TEXTS, SPLITS), min_size=1, max_size=12), st.randoms())
def test_the_shortcut_for_tokens_changes_nothing(
    events: list[tuple[str, str]], random: Random
) -> None:
    answer = STREAM + b"transfer-encoding: chunked\r\n\r\n"
    cuts = [len(answer)]
    for text, split in events:
        event = WORD.replace(b" cat", orjson.dumps(text)[1:-1])
        bodies = [event + WORD] if split == "two in one chunk" else [event]
        if split == "one in two chunks":
            at = random.randrange(1, len(event))
            bodies = [event[:at], event[at:]]
        for body in bodies:
            if split == "at any byte":
                cuts.append(len(answer) + random.randrange(1, len(body)))
            answer += b"%x\r\n%b\r\n" % (len(body), body)
            cuts.append(len(answer))
    answer += b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE)
    quick, _ = read_in_cuts(answer, cuts, True)
    slow, _ = read_in_cuts(answer, cuts, False)
    assert quick.outcome == slow.outcome == "ok"
    assert quick.events.at_s == slow.events.at_s
    assert quick.done_s == slow.done_s


def test_the_shortcut_takes_the_tokens_of_a_stream() -> None:
    answer = STREAM + b"transfer-encoding: chunked\r\n\r\n"
    cuts = []
    for text in (b" cat", b" a", b"\\n", b" a longer text", b"", b" cat"):
        event = WORD.replace(b" cat", text)
        answer += b"%x\r\n%b\r\n" % (len(event), event)
        cuts.append(len(answer))
    answer += b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE)
    exchange, taken = read_in_cuts(answer, cuts, True)
    assert (taken, exchange.outcome) == (4, "ok")  # not the first, nor the one without text
    assert list(exchange.events.at_s) == [1.0, 2.0, 3.0, 4.0, 6.0]


def test_the_shortcut_waits_for_the_end_of_a_chunk() -> None:
    """The bytes after the cut look like a chunk of one token, but are the rest of another one."""
    chunk = b"%x\r\n%b\r\n" % (len(WORD), WORD)
    first = STREAM + b"transfer-encoding: chunked\r\n\r\n" + chunk + chunk
    larger = b": ping\n\n" + chunk + b"\n\n"
    cut = b"%x\r\n: ping\n\n" % len(larger)
    rest = b"\n\n\r\n%b%x\r\n%b\r\n0\r\n\r\n" % (chunk, len(DONE), DONE)
    cuts = [len(first) - len(chunk), len(first), len(first + cut), len(first + cut + chunk)]
    exchange, taken = read_in_cuts(first + cut + chunk + rest, cuts, True)
    assert (taken, exchange.outcome) == (1, "ok")
    assert list(exchange.events.at_s) == [1.0, 2.0, 4.0, 5.0]
