"""Send KV events over ZeroMQ as vLLM 0.32 does: a PUB socket, and a ROUTER socket for replays.

A batch is [topic, sequence number (8 bytes, big-endian), msgpack [time, events, rank]]. Nothing
here waits for a subscriber: PUB drops batches for a slow one, and the replay buffer is bounded.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import ModuleType
from typing import Any

from forebay.replay.engine.kv_events import FLAG, KvEventsConfig
from forebay.traces.ground.errors import InputError

END = (-1).to_bytes(8, "big", signed=True)  # sequence number of the end of a replay
LINGER_MS = 500  # time for the last batches to leave at shutdown
SLICE = 64  # batches replayed before the event loop gets a turn


@asynccontextmanager
async def open_publisher(config: KvEventsConfig, rank: int = 0) -> AsyncIterator["KvPublisher"]:
    """Open the publisher of a data-parallel rank for the time of the block.

    Raises InputError without pyzmq or msgspec, or for an address that cannot be used.
    """
    publisher = KvPublisher(config.of_rank(rank), rank)
    replaying = asyncio.create_task(publisher.serve_replays(), name="KV event replay")
    try:
        yield publisher
    finally:
        replaying.cancel()
        with suppress(asyncio.CancelledError):
            await replaying
        await publisher.close()


class KvPublisher:
    """The two sockets of one engine, used on the event loop's thread only."""

    def __init__(self, config: KvEventsConfig, rank: int) -> None:
        self._rank = rank
        self._zmq, msgspec = _modules()
        self._encode = msgspec.msgpack.Encoder().encode
        self._topic = config.topic.encode()
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._sent = 0
        self._readable = asyncio.Event()
        self._context = self._zmq.Context()
        self._replay: Any = None  # pyzmq is imported late, so its types are not known here
        try:
            self._pub = self._context.socket(self._zmq.PUB)
            self._pub.set_hwm(config.hwm)
            self._attach(self._pub, "endpoint", config.endpoint, _binds(config.endpoint))
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(self._zmq.ROUTER)
                # A ROUTER drops messages beyond its high-water mark: let a whole replay fit.
                self._replay.set_hwm(config.buffer_steps + 1)
                self._attach(self._replay, "replay_endpoint", config.replay_endpoint, True)
        except InputError:
            self._context.destroy(linger=0)
            raise

    def publish(self, events: list[dict[str, Any]]) -> None:
        """Send one step's events, without waiting."""
        number = self._sent.to_bytes(8, "big")
        self._sent += 1
        payload = self._encode([time.time(), events, self._rank])
        self._buffer.append((number, payload))
        self._pub.send_multipart((self._topic, number, payload), flags=self._zmq.NOBLOCK)

    async def serve_replays(self) -> None:
        """Answer ["", first sequence number] with the buffered batches from there on."""
        if self._replay is None:
            return
        loop = asyncio.get_running_loop()
        # ZeroMQ's descriptor signals an event, not data: read until there is no more.
        loop.add_reader(self._replay.FD, self._readable.set)
        try:
            self._readable.set()
            while True:
                await self._readable.wait()
                self._readable.clear()
                while (frames := self._receive()) is not None:
                    if len(frames) == 3:  # anything else gets no answer from vLLM either
                        await self._answer(frames[0], int.from_bytes(frames[2], "big"))
        finally:
            loop.remove_reader(self._replay.FD)

    async def close(self) -> None:
        """Give the last batches a moment to leave, then drop them."""
        for sock in (self._pub, self._replay):
            if sock is not None:
                sock.close(linger=LINGER_MS)
        await asyncio.to_thread(self._context.term)

    def _receive(self) -> list[bytes] | None:
        try:
            frames: list[bytes] = self._replay.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return None
        return frames

    async def _answer(self, client: bytes, first: int) -> None:
        batches = [entry for entry in self._buffer if int.from_bytes(entry[0], "big") >= first]
        for index, (number, payload) in enumerate(batches, 1):
            self._replay.send_multipart(
                (client, b"", self._topic, number, payload), flags=self._zmq.NOBLOCK
            )
            if not index % SLICE:
                await asyncio.sleep(0)
        self._replay.send_multipart((client, b"", b"", END, b""), flags=self._zmq.NOBLOCK)

    def _attach(self, sock: Any, name: str, address: str, bind: bool) -> None:
        try:
            (sock.bind if bind else sock.connect)(address)
        except self._zmq.ZMQError as error:
            verb = "bind" if bind else "connect"
            raise InputError(f"{FLAG} {name} {address}: cannot {verb}: {error.strerror}") from None


def _binds(endpoint: str) -> bool:
    """Apply vLLM's rule: bind wildcards and local names, connect to anything else."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _modules() -> tuple[ModuleType, ModuleType]:
    """Import pyzmq and msgspec, which only this option needs."""
    try:
        import msgspec
        import zmq
    except ImportError as error:
        raise InputError(
            f"{FLAG} needs {error.name}, which is not installed: pip install 'forebay[kv-events]'"
        ) from None
    return zmq, msgspec
