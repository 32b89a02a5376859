"""Render requests to bytes before they are due, a bounded window ahead of the sender.

No JSON and no text is made on the send path: what is sent was whole before its time. A long
prompt is rendered in slices of a fraction of a millisecond with a turn of the loop between them,
so that making the next document does not delay the tokens of the present ones.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from forebay.traces.schema import TraceRequest
from forebay.traces.text import block_text, prompt_text

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
SLICE_TOKENS = 4096
MAX_AHEAD = 512
MAX_AHEAD_BYTES = 64 << 20


def body_slices(request: TraceRequest, model: str, endpoint: str, salt: str) -> Iterator[bytes]:
    """The JSON body of `request`, in pieces to be joined."""
    if endpoint == "chat":
        yield b'{"messages":[{"role":"user","content":'
    else:
        yield b'{"prompt":'
    if request.text is None and request.blocks is not None:
        yield b'"'  # block text is lower-case letters and spaces: JSON as it stands
        yield from _prompt_slices(request, request.blocks, salt)
        yield b'"'
    else:
        yield orjson.dumps(prompt_text(request, salt))
    if endpoint == "chat":
        yield b"}]"
    tokens = max(1, request.output_tokens)  # no server generates nothing
    tail = {
        "model": model,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    yield b"," + orjson.dumps(tail)[1:]


def _prompt_slices(request: TraceRequest, blocks: tuple[int, ...], salt: str) -> Iterator[bytes]:
    full = request.block_tokens
    step = max(1, SLICE_TOKENS // full)
    for start in range(0, len(blocks), step):
        yield b"".join(
            block_text(blocks[at], min(full, request.input_tokens - at * full), salt)
            for at in range(start, min(start + step, len(blocks)))
        )


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready to send; `index` is its place in the schedule."""

    index: int
    request: TraceRequest
    body: bytes


class PreparedQueue:
    """Prepared requests between the renderer and the sender, bounded by number and bytes."""

    def __init__(self, most: int = MAX_AHEAD, most_bytes: int = MAX_AHEAD_BYTES) -> None:
        self._items: deque[PreparedRequest] = deque()
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._closed = False
        self._changed = asyncio.Event()
        self._filled = asyncio.Event()

    async def put(self, item: PreparedRequest) -> None:
        """Add `item`; waits while the window is full (one item always fits)."""
        while self._items and (
            len(self._items) >= self._most or self._bytes + len(item.body) > self._most_bytes
        ):
            self._filled.set()
            await self._wait()
        self._items.append(item)
        self._bytes += len(item.body)
        self._changed.set()

    def close(self) -> None:
        """Nothing more will come."""
        self._closed = True
        self._filled.set()
        self._changed.set()

    async def get(self) -> PreparedRequest | None:
        """The next one, None after the last."""
        while not self._items:
            if self._closed:
                return None
            await self._wait()
        item = self._items.popleft()
        self._bytes -= len(item.body)
        self._changed.set()
        return item

    async def wait_filled(self) -> None:
        """Until the window has once been full, or everything is in it."""
        await self._filled.wait()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


async def render(
    requests: Iterator[TraceRequest],
    count: int,
    window: PreparedQueue,
    *,
    model: str,
    endpoint: str,
    salt: str,
) -> None:
    """Fill `window` with the first `count` of `requests`, yielding to the loop between slices."""
    try:
        for index in range(count):
            request = next(requests, None)
            if request is None:
                break
            pieces = []
            for piece in body_slices(request, model, endpoint, salt):
                pieces.append(piece)
                if len(piece) > SLICE_TOKENS:
                    await asyncio.sleep(0)
            await window.put(PreparedRequest(index, request, b"".join(pieces)))
            await asyncio.sleep(0)
    finally:
        window.close()
