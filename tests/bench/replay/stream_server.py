"""Answer completions with a stream of words, and record when each request arrived.

The first word comes 10 ms after the request, the others every `--gap` seconds, each in a write of
its own. Arrival is the moment when the first byte of a request was read.

    python stream_server.py --port P --arrivals FILE
"""

import argparse
import asyncio
import re
import signal
import time
from pathlib import Path
from typing import cast

import uvloop

TOKENS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
FIRST_S = 0.010


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
WORD = {
    False: chunk(
        b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":'
        b'[{"index":0,"text":" cat","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
    ),
    True: chunk(
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
        b'"choices":[{"index":0,"delta":{"content":" cat"},"logprobs":null,'
        b'"finish_reason":null}]}\n\n'
    ),
}
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":1000000}]}'


class Answering(asyncio.Protocol):
    """One connection."""

    def __init__(self, arrivals: list[float], gap_s: float) -> None:
        self.arrivals, self.gap_s = arrivals, gap_s
        self.parts: list[bytes] = []
        self.missing = 0
        self.head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self.parts:
            self.at = time.monotonic()
            self.head, _, rest = data.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)", self.head)
            self.missing = (int(length[1]) if length else 0) - len(rest)
            self.parts = [rest]
        else:
            self.parts.append(data)
            self.missing -= len(data)
        if self.missing <= 0:
            self.request(b"".join(self.parts[:1] + self.parts[-2:]))
            self.parts = []

    def request(self, ends: bytes) -> None:
        if self.head.startswith(b"GET"):
            path = self.head.split(b"\r\n")[0]
            known = b"/models" in path or b"/health" in path
            found = b"200 OK" if known else b"404 Not Found"
            self.transport.write(
                b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (found, len(MODELS), MODELS)
            )
            return
        self.arrivals.append(self.at)
        tokens = TOKENS.search(ends)
        chat = b"/chat/" in self.head.split(b"\r\n")[0]
        count = int(tokens[1]) if tokens else 16
        asyncio.get_running_loop().call_later(FIRST_S, self.word, chat, count, count, True)

    def word(self, chat: bool, left: int, count: int, first: bool) -> None:
        data = (HEAD if first else b"") + WORD[chat]
        if left == 1:
            usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":%d}}\n\n'
            data += chunk(usage % count + b"data: [DONE]\n\n") + b"0\r\n\r\n"
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(self.gap_s, self.word, chat, left - 1, count, False)
        if not self.transport.is_closing():
            self.transport.write(data)


async def main(options: argparse.Namespace) -> None:
    arrivals: list[float] = []
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    server = await loop.create_server(
        lambda: Answering(arrivals, options.gap), "127.0.0.1", options.port, backlog=4096
    )
    async with server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await stop.wait()
    options.arrivals.write_text("".join(f"{at:.9f}\n" for at in arrivals))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--gap", type=float, default=0.005)
    parser.add_argument("--arrivals", type=Path, required=True)
    uvloop.run(main(parser.parse_args()))
