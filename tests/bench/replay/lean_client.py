"""Send a fixed load with as little as Python allows: the yardstick of `forebay replay`.

Bare protocols on uvloop, bodies joined beforehand, absolute timerfd pacing, one time stamp a read,
events counted by their bytes. No TLS, failures, trace, summary or files.

    python lean_client.py --port P --rate R --count N --prompt-tokens T --output-tokens K
"""

import argparse
import asyncio
import ctypes
import json
import os
import time
from array import array
from itertools import accumulate
from random import Random
from typing import Any, cast

import uvloop


class Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Timer(ctypes.Structure):
    _fields_ = (("interval", Timespec), ("first", Timespec))


class Connection(asyncio.Protocol):
    """One connection; counts the events of one answer at a time, with their times."""

    def __init__(self, load: "Load") -> None:
        self.load = load
        self.due_s = self.first_s = 0.0
        self.events = array("d")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, due_s: float, pieces: tuple[bytes, ...]) -> None:
        self.due_s, self.first_s, self.events = due_s, 0.0, array("d")
        self.load.lags.append(time.monotonic() - due_s)
        self.transport.writelines(pieces)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        for _ in range(data.count(b'"text":"')):
            self.events.append(now)
        if not self.first_s and self.events:
            self.first_s = now
        if data.endswith(b"0\r\n\r\n"):
            self.load.ended(self)


def due_times(rate: float, count: int, poisson: bool) -> list[float]:
    """Return when each request is due, in seconds; the gaps of `poisson` have seed 1."""
    random = Random(1)
    gaps = (random.expovariate(rate) if poisson else 1 / rate for _ in range(count - 1))
    return [0.0, *accumulate(gaps)]


class Load:
    """The whole load: a schedule of equal gaps, a pool, and what was measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.loop = asyncio.get_running_loop()
        self.idle: list[Connection] = []
        self.lags, self.ttft_s = array("d"), array("d")
        self.tokens, self.left = 0, options.count
        self.over = asyncio.Event()
        self.connecting: set[asyncio.Task[None]] = set()
        words = b" cat" * options.prompt_tokens
        tail = b'","model":"m","max_tokens":%d,"stream":true}' % options.output_tokens
        self.document, self.tail = b'{"prompt":"' + words, tail
        self.head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\naccept: text/event-stream\r\n"
        )

    def ended(self, connection: Connection) -> None:
        self.ttft_s.append(connection.first_s - connection.due_s)
        self.tokens += len(connection.events)
        self.idle.append(connection)
        self.left -= 1
        if not self.left:
            self.over.set()

    def pieces(self, number: int) -> tuple[bytes, ...]:
        question = b" question %d" % number
        size = len(self.document) + len(question) + len(self.tail)
        head = b"%bx-request-id: %d\r\ncontent-length: %d\r\n\r\n" % (self.head, number, size)
        return head, self.document, question, self.tail

    async def run(self) -> None:
        ready: list[tuple[bytes, ...]] = [self.pieces(at) for at in range(self.options.count)]
        libc: Any = ctypes.CDLL(None)
        descriptor = libc.timerfd_create(1, os.O_NONBLOCK)
        fired: list[asyncio.Future[None]] = []

        def fire() -> None:
            os.read(descriptor, 8)
            fired.pop().set_result(None)

        self.loop.add_reader(descriptor, fire)
        schedule = due_times(self.options.rate, self.options.count, self.options.poisson)
        start = time.monotonic() + 0.1
        for at, pieces in enumerate(ready):
            due = start + schedule[at]
            if time.monotonic() < due:
                fired.append(self.loop.create_future())
                timer = Timer(Timespec(0, 0), Timespec(int(due), int(due % 1 * 1e9) + 1))
                libc.timerfd_settime(descriptor, 1, ctypes.byref(timer), None)
                await fired[-1]
            else:
                await asyncio.sleep(0)
            if self.idle:
                self.idle.pop().send(due, pieces)
            else:
                task = asyncio.ensure_future(self.connect(due, pieces))
                self.connecting.add(task)
                task.add_done_callback(self.connecting.discard)
        await self.over.wait()

    async def connect(self, due: float, pieces: tuple[bytes, ...]) -> None:
        _, connection = await self.loop.create_connection(
            lambda: Connection(self), "127.0.0.1", self.options.port
        )
        connection.send(due, pieces)


async def main(options: argparse.Namespace) -> None:
    load = Load(options)
    await load.run()
    ttft, lags = sorted(load.ttft_s), sorted(load.lags)
    at = int(0.99 * (len(ttft) - 1))
    print(json.dumps({"tokens": load.tokens, "ttft_p50_s": ttft[len(ttft) // 2],
                      "ttft_p99_s": ttft[at], "lag_p99_s": lags[at]}))  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("port", int), ("rate", float), ("count", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--poisson", action="store_true")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=8)
    uvloop.run(main(parser.parse_args()))
