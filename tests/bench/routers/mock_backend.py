"""A backend that costs next to nothing: what a router adds is measured against it.

    python mock_backend.py PORT [PORT ...]

Answers every GET with a short JSON, every POST at once (or, with `"stream": true`, `max_tokens`
events, one every `seed` milliseconds, all at once for 0). One process serves all its ports.
"""

import asyncio
import json
import re
import sys
from typing import cast

import uvloop

STREAMS = re.compile(rb'"stream":\s*true')
NUMBERS = {name: re.compile(rb'"%s":\s*(\d+)' % name.encode()) for name in ("max_tokens", "seed")}
MODELS = json.dumps(
    {"object": "list", "data": [{"id": "mock", "object": "model", "max_model_len": 1 << 20}]}
).encode()
WHOLE = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "mock",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": " yes"},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 50, "completion_tokens": 1, "total_tokens": 51},
    }
).encode()


def whole(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def event(data: bytes) -> bytes:
    data = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def token(number: int) -> bytes:
    """About 190 bytes, as vLLM's; no two alike (one router ends streams that repeat)."""
    delta = b'{"index":0,"delta":{"content":" t%d"},"logprobs":null,"finish_reason":null}' % number
    return event(
        b'{"id":"chatcmpl-1234567890abcdef","object":"chat.completion.chunk","created":1,'
        b'"model":"mock","choices":[' + delta + b"]}"
    )


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
STREAM_TAIL = event(b"[DONE]") + b"0\r\n\r\n"


class Backend(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit
        self._data = bytearray()
        self._needed = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while self._data and len(self._data) >= self._needed:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._data[:end]).lower()
            size = end + 4
            if b"content-length:" in head:
                size += int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
            elif b"transfer-encoding:" in head:
                last = self._data.find(b"\r\n0\r\n\r\n", end)
                if last < 0:
                    return
                size = last + 7
            if len(self._data) < size:
                self._needed = size
                return
            self._needed, body = 0, bytes(self._data[end + 4 : size])
            del self._data[:size]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get"):
            self._transport.write(whole(MODELS))
        # Some routers write the body anew, with fields of their own around the prompt.
        elif not STREAMS.search(body[:4000]) and not STREAMS.search(body[-4000:]):
            self._transport.write(whole(WHOLE))
        else:
            number = {
                name: int(found[1]) if (found := pattern.search(body)) else 0
                for name, pattern in NUMBERS.items()
            }
            self._transport.write(STREAM_HEAD)
            self._next(0, number["max_tokens"], number["seed"] / 1e3)

    def _next(self, sent: int, tokens: int, interval_s: float) -> None:
        if self._transport.is_closing():
            return
        if not interval_s:
            self._transport.write(b"".join(map(token, range(tokens))) + STREAM_TAIL)
        elif sent < tokens:
            self._transport.write(token(sent))
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(interval_s, self._next, sent + 1, tokens, interval_s)
        else:
            self._transport.write(STREAM_TAIL)


async def serve(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(Backend, "127.0.0.1", port, backlog=4096)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    uvloop.run(serve([int(port) for port in sys.argv[1:]]))
