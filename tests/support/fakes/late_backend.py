"""A backend whose first tokens are late by the name of the model: `slow:4` waits for 4 s.

    python tests/support/fakes/late_backend.py

It prints its URL, and serves until it is ended. Every answer is a stream of a few tokens.
"""

import asyncio
import json
import re
from contextlib import suppress

TOKEN_S = 0.005
TOKENS = 8
MODEL = re.compile(rb'"model"\s*:\s*"slow:(\d+)"')
LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str, usage: object = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice], "usage": usage}).encode() + b"\n\n"


async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = LENGTH.search(head)
            body = await reader.readexactly(int(length[1])) if length else b""
            if head.startswith(b"GET "):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                continue
            late = MODEL.search(body)
            await asyncio.sleep(int(late[1]) if late else 0)
            writer.write(STREAM_HEAD)
            for _ in range(TOKENS):
                await asyncio.sleep(TOKEN_S)
                writer.write(chunk(event(" word")))
            usage = {"prompt_tokens": len(body) // 4, "completion_tokens": TOKENS}
            writer.write(chunk(event("", usage)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            await writer.drain()
    writer.close()


async def main() -> None:
    server = await asyncio.start_server(connection, "127.0.0.1", 0, limit=1 << 20)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main())
