"""Render requests to bytes before they are due, into a bounded queue ahead of the sender.

The send path makes no JSON and no text: each body is complete before its time. A long prompt is
rendered in slices of a fraction of a millisecond. The event loop gets a turn between two slices, so
that rendering the next document does not delay reading the tokens of running requests.
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
    """Render the JSON body of `request` in slices."""
    if endpoint == "chat":
        yield b'{"messages":[{"role":"user","content":'
    else:
        yield b'{"prompt":'
    if request.text is None and request.blocks is not None:
        yield b'"'  # block text is lower-case letters and spaces, which JSON need not escape
        yield from _prompt_slices(request, request.blocks, salt)
        yield b'"'
    else:
        yield orjson.dumps(prompt_text(request, salt))
    if endpoint == "chat":
        yield b"}]"
    tokens = max(1, request.output_tokens)  # servers do not accept 0
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
    """A request ready to send; `index` is its position in the schedule."""

    index: int
    request: TraceRequest
    body: bytes


class PreparedQueue:
    """Prepared requests between renderer and sender, bounded in number and bytes."""

    def __init__(self, most: int = MAX_AHEAD, most_bytes: int = MAX_AHEAD_BYTES) -> None:
        self._items: deque[PreparedRequest] = deque()
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._closed = False
        self._changed = asyncio.Event()
        self._filled = asyncio.Event()

    async def put(self, item: PreparedRequest) -> None:
        """Add `item`; waits while the queue is full (one item always fits)."""
        while self._items and (
            len(self._items) >= self._most or self._bytes + len(item.body) > self._most_bytes
        ):
            self._filled.set()
            await self._wait()
        self._items.append(item)
        self._bytes += len(item.body)
        self._changed.set()

    def close(self) -> None:
        """Mark the end: no more requests are put."""
        self._closed = True
        self._filled.set()
        self._changed.set()

    async def get(self) -> PreparedRequest | None:
        """Return the next request, None after the last."""
        while not self._items:
            if self._closed:
                return None
            await self._wait()
        item = self._items.popleft()
        self._bytes -= len(item.body)
        self._changed.set()
        return item

    async def wait_filled(self) -> None:
        """Wait until the queue was full once, or holds all requests."""
        await self._filled.wait()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


async def render(
    requests: Iterator[TraceRequest],
    count: int,
    prepared: PreparedQueue,
    *,
    model: str,
    endpoint: str,
    salt: str,
) -> None:
    """Put the first `count` of `requests` into `prepared`; the loop gets turns between slices."""
    try:
        for index in range(count):
            request = next(requests, None)
            if request is None:
                break
            slices = []
            for part in body_slices(request, model, endpoint, salt):
                slices.append(part)
                if len(part) > SLICE_TOKENS:
                    await asyncio.sleep(0)
            await prepared.put(PreparedRequest(index, request, b"".join(slices)))
            await asyncio.sleep(0)
    finally:
        prepared.close()
