"""A backend like vLLM beside abuse: the name of the model says what it answers.

    python tests/support/neighbour_backend.py

It prints its URL, and serves until it is ended. Models: `good` (8 tokens, 5 ms apart), `error`
(always a 500), `slow:SECONDS` (a good answer after that time), `dense` (each byte is a token),
`work:TOKENS` (so many tokens from an engine that all such requests share: it prefills one prompt
after the other).
"""

import asyncio
import json
import re
from contextlib import suppress

import uvloop

TOKEN_S = 0.005
TOKENS = 8
BYTES_PER_S = 160_000  # the prefill of the engine: 40,000 tokens/s
MODEL = re.compile(rb'"model"\s*:\s*"([a-z]+)(?::(\d+))?"')
STREAM = re.compile(rb'"stream"\s*:\s*true')
LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
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


def _whole(status: int, answer: object) -> bytes:
    body = json.dumps(answer).encode()
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


class Answers:
    """What the models answer. Their engine serves first come, first served."""

    def __init__(self) -> None:
        self._prefilling = asyncio.Lock()

    async def answer(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        match = MODEL.search(body)
        kind, size = (match[1].decode(), int(match[2] or 0)) if match else ("good", 0)
        if kind == "error":
            writer.write(_whole(500, {"error": {"message": "no", "code": 500}}))
            return
        if kind == "slow":
            await asyncio.sleep(size)
        elif kind == "work":
            async with self._prefilling:
                await asyncio.sleep(len(body) / BYTES_PER_S)
        usage = {
            "prompt_tokens": len(body) if kind == "dense" else len(body) // 4,
            "completion_tokens": 8,
        }
        if not STREAM.search(body):
            choice = {"index": 0, "message": {"content": "x" * 100}, "finish_reason": "length"}
            writer.write(_whole(200, {"id": "c", "choices": [choice], "usage": usage}))
            return
        writer.write(STREAM_HEAD)
        for _ in range(size if kind == "work" else TOKENS):
            await asyncio.sleep(TOKEN_S)
            writer.write(_chunk(_event(" word")))
        last = _chunk(_event("", json.dumps(usage))) + _chunk(b"data: [DONE]\n\n")
        writer.write(last + b"0\r\n\r\n")
        await writer.drain()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # RuntimeError: uvloop writes to no client that has left.
        with suppress(asyncio.IncompleteReadError, ConnectionError, RuntimeError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = LENGTH.search(head)
                body = await reader.readexactly(int(length[1])) if length else b""
                if head.startswith(b"GET "):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                else:
                    await self.answer(body, writer)
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(Answers().connection, "127.0.0.1", 0, limit=1 << 20)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        uvloop.run(main())
