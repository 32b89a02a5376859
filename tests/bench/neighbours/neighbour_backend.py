"""A backend like vLLM for measurements beside abuse: what it answers is in the name of the model.

    python tests/bench/neighbours/neighbour_backend.py [PORTS]

It prints the URL of each of its ports, and serves until it is ended. Models: `good` (8 tokens, 5 ms
apart), `whole:BYTES` (one answer of that length), `event:BYTES` (a stream with one event of that
length), `usage:BYTES` (a `usage` whose prompt_tokens is a number of that many digits), `error`
(always a 500), `silent` (no answer at all), `slow:SECONDS` (a good answer after that time, whatever
keeps it), `dense` (each byte is a token), `work:TOKENS` (so many tokens from an engine that all
such requests share: it prefills one prompt after the other and has 64 sequences).
"""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import uvloop

TOKEN_S = 0.005
TOKENS = 8
PIECE_BYTES, LOOK_BYTES = 256 << 10, 4096
BYTES_PER_S, SEQUENCES = 160_000, 64  # of the engine: 40,000 tokens/s of prefill
_MODEL = re.compile(rb'"model"\s*:\s*"([a-z]+)(?::(\d+))?"')
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(text: str, usage: str = "null") -> bytes:
    return (
        f'data: {{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":'
        f'[{{"index":0,"delta":{{"content":"{text}"}},"finish_reason":null}}],"usage":{usage}}}\n\n'
    ).encode()


def _whole(size: int, prompt_tokens: str = "7") -> Iterator[bytes]:
    """Yield a whole answer of about `size` bytes in pieces."""
    begin = b'{"id":"c","object":"chat.completion","choices":[{"index":0,"message":{"content":"'
    end = (
        f'"}},"finish_reason":"length"}}],"usage":{{"prompt_tokens":{prompt_tokens},'
        '"completion_tokens":1,"total_tokens":8}}'
    ).encode()
    text = max(1, size - len(begin) - len(end))
    yield (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(begin) + text + len(end), begin)
    )
    while text:
        piece = min(text, PIECE_BYTES)
        text -= piece
        yield b"x" * piece
    yield end


class _Engine:
    """Serves first come, first served, as vLLM does."""

    def __init__(self) -> None:
        self._prefilling = asyncio.Lock()
        self._places = asyncio.Semaphore(SEQUENCES)

    async def tokens(self, body: bytes, tokens: int) -> AsyncIterator[None]:
        """Prefill the prompts, then yield at each token of the last sequences."""
        fields = json.loads(body)
        prompt = fields.get("prompt")
        sequences = (fields.get("n") or 1) * (len(prompt) if isinstance(prompt, list) else 1)
        async with self._prefilling:
            await asyncio.sleep(len(body) / BYTES_PER_S)
        while sequences > 0:
            now = min(sequences, SEQUENCES // 4)  # so that others come in between
            sequences -= now
            for _ in range(now):
                await self._places.acquire()
            try:
                for _ in range(tokens):
                    await asyncio.sleep(TOKEN_S)
                    if not sequences:
                        yield
            finally:
                for _ in range(now):
                    self._places.release()


_engine = _Engine()


_writing = asyncio.Lock()


async def _write(writer: asyncio.StreamWriter, piece: bytes) -> None:
    """Write one piece in each turn of the event loop, so that large answers delay no small one."""
    if len(piece) < PIECE_BYTES:
        writer.write(piece)
    else:
        async with _writing:
            writer.write(piece)
            await asyncio.sleep(0)
    await writer.drain()


async def _answer(body: bytes, writer: asyncio.StreamWriter) -> None:
    ends = body[:LOOK_BYTES] + body[-LOOK_BYTES:]  # a search of all takes long in a large body
    found = _MODEL.search(ends)
    kind, size = (found[1].decode(), int(found[2] or 0)) if found else ("good", 0)
    if kind == "slow":
        await asyncio.sleep(size)
    if kind == "silent":
        await asyncio.sleep(3600)
    if kind == "error":
        text = json.dumps({"error": {"message": "no", "code": 500}}).encode()
        head = b"HTTP/1.1 500 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(text) + text)
        return
    if kind in ("whole", "usage") or not _STREAM.search(ends):
        if kind == "work":
            async for _ in _engine.tokens(body, size):
                pass
        digits = {"usage": "9" * size, "dense": str(len(body))}.get(kind, str(len(body) // 4))
        for piece in _whole(size if kind == "whole" else 200, digits):
            await _write(writer, piece)
        return
    writer.write(STREAM_HEAD)
    if kind == "event":
        left = size
        writer.write(_chunk(b'data: {"choices":[{"index":0,"delta":{"content":"'))
        while left > 0:
            await _write(writer, _chunk(b"x" * min(left, PIECE_BYTES)))
            left -= PIECE_BYTES
        writer.write(_chunk(b'"},"finish_reason":null}]}\n\n'))
    if kind == "work":
        async for _ in _engine.tokens(body, size):
            writer.write(_chunk(_event(" word")))
    else:
        for _ in range(TOKENS):
            await asyncio.sleep(TOKEN_S)
            writer.write(_chunk(_event(" word")))
    usage = json.dumps({"prompt_tokens": len(body) // 4, "completion_tokens": 8})
    writer.write(_chunk(_event("", usage)) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    await writer.drain()


async def _connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # RuntimeError: uvloop writes to no client that has left.
    with suppress(asyncio.IncompleteReadError, ConnectionError, RuntimeError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            body = await reader.readexactly(int(length[1])) if length else b""
            if head.startswith(b"GET "):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            else:
                await _answer(body, writer)
    writer.close()


async def main(ports: int) -> None:
    for _ in range(ports):
        server = await asyncio.start_server(_connection, "127.0.0.1", 0, limit=1 << 20)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        _servers.append(server)
    await asyncio.Event().wait()


_servers: list[asyncio.Server] = []


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        uvloop.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
