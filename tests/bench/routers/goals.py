"""Broken streams and leaving clients, counted and timed against a proxy process.

    python tests/bench/routers/goals.py --faults 10000 --leaving 500

Backends break answers in five ways in mid-stream: each must reach the client as an error event and
broken framing, never as `[DONE]`. Clients leave while their request waits in the queue, is in
prefill, streams, or hangs: how long until the backend's connection is closed, or that it never had
one. Exit status 1 if a broken stream looked whole or a queued request was sent.
"""

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from time import perf_counter

import uvloop
from bench_proxy import running, serving
from load import chat
from mock_backend import MODELS, STREAM_HEAD, WHOLE, token, whole
from ports import free_ports

FAULTS = ("reset", "end of connection", "bad chunk", "no [DONE]", "stall")
AT_ONCE = 64
STATES = ("queued", "prefill", "streaming", "stalled")


class Backend:
    """A backend that reads from the request's `seed` which fault to show or state to stay in."""

    def __init__(self) -> None:
        self.mode = "whole"
        self.seen = 0
        self.came = asyncio.Event()
        self.closed: asyncio.Queue[float] = asyncio.Queue()
        self._faults = itertools.cycle(FAULTS)
        self.given: Counter[str] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(whole(MODELS))
                    continue
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                self.seen += 1
                self.came.set()
                if await self._answer(reader, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; True if the connection must be closed."""
        if self.mode == "whole":
            writer.write(whole(WHOLE))
            return False
        if self.mode in STATES:
            if self.mode in ("streaming", "stalled"):
                writer.write(STREAM_HEAD + token(0))
            ticks = asyncio.create_task(self._tick(writer)) if self.mode == "streaming" else None
            with suppress(ConnectionError):
                await reader.read()
            self.closed.put_nowait(perf_counter())
            if ticks:
                ticks.cancel()
            return True
        fault = next(self._faults)
        self.given[fault] += 1
        writer.write(STREAM_HEAD + token(0) + token(1))
        await asyncio.sleep(random.uniform(0.0, 0.02))
        if fault == "reset":
            writer.transport.abort()
        elif fault == "bad chunk":
            writer.write(b"ZZ\r\nno chunk\r\n")
            await reader.read()
        elif fault == "no [DONE]":
            writer.write(b"0\r\n\r\n")
            return False
        elif fault == "stall":
            await reader.read()
        return True

    async def _tick(self, writer: asyncio.StreamWriter) -> None:
        for number in itertools.count(1):
            await asyncio.sleep(0.02)
            if writer.is_closing():
                return
            writer.write(token(number))


async def broken_stream(port: int) -> str:
    """Break one stream; return what its client sees."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(chat(200, stream=(100, 1)))
    try:
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                return f"status {head[9:12].decode()}"
            data = await reader.read(-1)
    except (ConnectionError, asyncio.IncompleteReadError):
        return "reset"
    finally:
        writer.close()
    if b"[DONE]" in data or data.endswith(b"\r\n0\r\n\r\n"):
        return "LOOKS WHOLE"
    return "error event" if b"upstream_stream_error" in data else "cut without a word"


async def leave(port: int, backend: Backend, state: str, size: int) -> float | None:
    """Seconds until the backend sees that the client of one request has gone; None if never."""
    before = backend.seen
    backend.came.clear()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(chat(size, stream=(100, 1)))
    if state == "queued":
        await asyncio.sleep(0.03)
        writer.transport.abort()
        await asyncio.sleep(0.03)
        return None if backend.seen == before else float("inf")
    await backend.came.wait()
    await asyncio.sleep(random.uniform(0.005, 0.05))
    left_at = perf_counter()
    writer.transport.abort()
    return await asyncio.wait_for(backend.closed.get(), 30) - left_at


async def main(options: argparse.Namespace, folder: Path) -> int:
    backend = Backend()
    port, admin_port = free_ports(2)
    async with AsyncExitStack() as stack:
        server = await asyncio.start_server(backend.serve, "127.0.0.1", 0)
        stack.callback(server.close)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        config = folder / "forebay.yaml"
        config.write_text(
            f"backends: [{{url: {url!r}, max_concurrency: {AT_ONCE}}}]\n"
            "buckets: [{name: chat, up_to: 5000, max_wait: 20s}]\ntimeouts: {idle: 1s}\n"
        )
        command = [sys.executable, "-m", "forebay.proxy", "proxy", "--config", str(config),
                   "--port", str(port), "--admin-port", str(admin_port)]  # fmt: skip
        log = folder / "proxy.log"
        stack.enter_context(running(command, None, log))
        await serving(port, log)
        backend.mode = "fault"
        left, seen = iter(range(options.faults)), Counter[str]()

        async def worker() -> None:
            for _ in left:
                seen[await broken_stream(port)] += 1

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        print(f"{sum(seen.values()):,} faults: {dict(backend.given)}; clients saw {dict(seen)}")
        bad = seen["LOOKS WHOLE"] + seen["cut without a word"]
        for state in STATES[1:]:
            backend.mode = state
            took = sorted([await leave(port, backend, state, 200) or 0.0
                           for _ in range(options.leaving)])  # fmt: skip
            p50, p99 = (took[int(q * len(took))] * 1e3 for q in (0.5, 0.99))
            print(f"left in {state}: backend knows after p50 {p50:.1f} ms, p99 {p99:.1f} ms, "
                  f"longest {took[-1] * 1e3:.1f} ms of {len(took)}")  # fmt: skip
        backend.mode = "prefill"
        blockers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(AT_ONCE)]
        for _, writer in blockers:
            writer.write(chat(200, stream=(100, 1)))
        await asyncio.sleep(1.0)
        sent = [await leave(port, backend, "queued", 200) for _ in range(options.leaving)]
        dispatched = sum(s is not None for s in sent)
        print(f"left in the queue: {dispatched} of {len(sent)} were sent to the backend")
        for _, writer in blockers:
            writer.transport.abort()
    return int(bool(bad or dispatched))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=2_000)
    parser.add_argument("--leaving", type=int, default=200)
    with tempfile.TemporaryDirectory() as temporary:
        raise SystemExit(uvloop.run(main(parser.parse_args(), Path(temporary))))
