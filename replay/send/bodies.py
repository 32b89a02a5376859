"""Render requests to bytes before they are due, into a bounded queue ahead of the sender.

The send path makes no JSON and no text: each body is complete before its time. A long prompt is
rendered in slices of a fraction of a millisecond. The event loop gets a turn after each new
slice, so that rendering the next document does not delay reading the tokens of running requests.
Text that prompts share is made once and stored once: a body is a list of pieces.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson

from forebay.replay.clock.spare_time import SpareTime
from forebay.replay.plan.options import PATHS
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.text import block_text, prompt_text, run_text, texts_made

SLICE_TOKENS = 4096
JOINED_BYTES = 32 << 10  # a smaller body is one piece
ROWS_A_TURN = 4
MAX_AHEAD = 16_384  # a short run is rendered before it begins
REFILL = 128  # rows made together: few rows at a time are slow
MAX_AHEAD_BYTES = 64 << 20
# Members of a body that the replay sets itself. The trace's `parameters` cannot change them.
_OWN = frozenset(
    {"messages", "prompt", "model", "stream", "stream_options", "tools"}
    | {"max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos"}
)


@dataclass(frozen=True, slots=True)
class RequestStyle:
    """Settings that turn the rows of a trace into HTTP requests.

    Attributes:
        model: the model to ask for.
        own_models: True if a row that names a model asks for its own model.
        endpoint: endpoint of rows without messages. Messages always go to the chat endpoint.
        salt: seed of the text of prompts that are made from block ids.
        lengths: "exact": each answer has the trace's number of tokens. "free": the model ends it,
            within the trace's own limit.
        keys: API key of each tenant. Other tenants use the client's own key.
        scale: seconds of the run in one wall second.
    """

    model: str
    endpoint: str = "completions"
    salt: str = ""
    own_models: bool = False
    lengths: str = "exact"
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    scale: float = 1.0

    def path(self, request: TraceRequest) -> str:
        return PATHS["chat" if request.messages is not None else self.endpoint]

    def headers(self, request: TraceRequest) -> dict[str, str]:
        """Return the headers that only this request has."""
        headers = {}
        if request.service_class is not None:
            headers["x-forebay-class"] = request.service_class
        if request.deadline_s is not None:
            headers["x-request-timeout"] = f"{request.deadline_s / self.scale:.3f}"
        if (key := self.keys.get(request.tenant or "")) is not None:
            headers["authorization"] = f"Bearer {key}"
        if not request.stream:
            headers["accept"] = "application/json"
        return headers

    def tail(self, request: TraceRequest) -> dict[str, Any]:
        """Return the members of the body after the prompt."""
        parameters = request.parameters or {}
        tail = {key: value for key, value in parameters.items() if key not in _OWN}
        if request.tools is not None:
            tail["tools"] = list(request.tools)
        own = request.model if self.own_models else None
        tail["model"] = own or self.model
        tokens = max(1, request.output_tokens)  # servers do not accept 0
        if self.lengths == "exact":
            tail |= {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
        else:
            limits = [parameters.get(name) for name in ("max_completion_tokens", "max_tokens")]
            tail["max_tokens"] = next((limit for limit in limits if type(limit) is int), tokens)
        tail["stream"] = request.stream
        if request.stream:
            tail["stream_options"] = {"include_usage": True}
        return tail


def body_slices(
    request: TraceRequest, style: RequestStyle, prompt: bytes | None = None
) -> Iterator[bytes]:
    """Render the JSON body of `request` in slices. `prompt` replaces its own text."""
    chat = style.path(request) == PATHS["chat"]
    if request.messages is not None:
        yield b'{"messages":' + orjson.dumps(list(request.messages))
    else:
        yield b'{"messages":[{"role":"user","content":' if chat else b'{"prompt":'
        yield from _prompt(request, style.salt, prompt)
        if chat:
            yield b"}]"
    if request.parameters is None and request.tools is None and not style.own_models:
        yield _plain_tail(style.model, style.lengths, request.output_tokens, request.stream)
    else:
        yield _json_tail(request, style)


def _json_tail(request: TraceRequest, style: RequestStyle) -> bytes:
    return b"," + orjson.dumps(style.tail(request))[1:]


@lru_cache(maxsize=4096)
def _plain_tail(model: str, lengths: str, output_tokens: int, stream: bool) -> bytes:
    """Make the tail of a row without members of its own. Most rows have an equal tail."""
    row = TraceRequest("", 0.0, 1, output_tokens, stream=stream)
    return _json_tail(row, RequestStyle(model, lengths=lengths))


def _prompt(request: TraceRequest, salt: str, prompt: bytes | None) -> Iterator[bytes]:
    if prompt is not None:
        yield orjson.dumps(prompt.decode())
    elif request.text is None and request.blocks is not None:
        yield b'"'  # block text is lower-case letters and spaces, which JSON need not escape
        yield from _prompt_slices(request, request.blocks, salt)
        yield b'"'
    else:
        yield orjson.dumps(prompt_text(request, salt))


def _prompt_slices(request: TraceRequest, blocks: tuple[int, ...], salt: str) -> Iterator[bytes]:
    full = request.block_tokens
    step = max(1, SLICE_TOKENS // full)
    start, last = 0, len(blocks) - 1  # the last block may be partial
    while start + step <= last:
        if full <= SLICE_TOKENS:
            yield run_text(blocks[start : start + step], full, salt)
        else:
            yield block_text(blocks[start], full, salt)
        start += step
    parts = [block_text(block, full, salt) for block in blocks[start:last]]
    if blocks:
        parts.append(block_text(blocks[last], min(full, request.input_tokens - last * full), salt))
    yield b"".join(parts)


@dataclass(slots=True)
class PreparedRequest:
    """A request ready to send, with its `index` in the schedule and the `size` of its body."""

    index: int
    request: TraceRequest
    body: Sequence[bytes]
    size: int
    path: str = PATHS["completions"]
    headers: Mapping[str, str] = field(default_factory=dict)


async def prepare(
    index: int, request: TraceRequest, style: RequestStyle, prompt: bytes | None = None
) -> PreparedRequest:
    """Render one request. The loop gets a turn after each new slice of a long prompt."""
    pieces = []
    size, texts = 0, texts_made()
    for piece in body_slices(request, style, prompt):
        pieces.append(piece)
        size += len(piece)
        if len(piece) > SLICE_TOKENS and texts_made() != texts:
            await asyncio.sleep(0)
            texts = texts_made()
    if size < JOINED_BYTES:
        pieces = [b"".join(pieces)]
    return PreparedRequest(
        index, request, pieces, size, style.path(request), style.headers(request)
    )


class PreparedQueue:
    """Prepared requests between renderer and sender, bounded in number and bytes."""

    def __init__(self, most: int = MAX_AHEAD, most_bytes: int = MAX_AHEAD_BYTES) -> None:
        self._items: deque[PreparedRequest] = deque()
        self._most = most
        self._refill_at = max(0, most - REFILL)
        self._most_bytes = most_bytes
        self._bytes = 0
        self._closed = False
        self._added = asyncio.Event()
        self._drained = asyncio.Event()
        self._filled = asyncio.Event()

    async def put(self, item: PreparedRequest) -> None:
        """Add `item`. A full queue first waits for room for many items (one item always fits)."""
        if self._items and (
            len(self._items) >= self._most or self._bytes + item.size > self._most_bytes
        ):
            self._filled.set()
            while self._items and (
                len(self._items) > self._refill_at
                or self._bytes + item.size > self._most_bytes // 2
            ):
                self._drained.clear()
                await self._drained.wait()
        self._items.append(item)
        self._bytes += item.size
        self._added.set()

    def close(self) -> None:
        """Mark the end: no more requests are put."""
        self._closed = True
        self._filled.set()
        self._added.set()

    async def get(self) -> PreparedRequest | None:
        """Return the next request, or None after the last."""
        while not self._items:
            if self._closed:
                return None
            self._added.clear()
            await self._added.wait()
        item = self._items.popleft()
        self._bytes -= item.size
        if len(self._items) <= self._refill_at and self._bytes <= self._most_bytes // 2:
            self._drained.set()
        return item

    @property
    def plenty(self) -> bool:
        """True if the queue is so full that rendering need not be quick."""
        return len(self._items) > self._most // 4 or self._bytes > self._most_bytes // 4

    async def wait_filled(self) -> None:
        """Wait until the queue was full once, or has all requests."""
        await self._filled.wait()


async def render(
    requests: Iterator[TraceRequest],
    count: int,
    prepared: PreparedQueue,
    style: RequestStyle,
    spare: SpareTime,
) -> None:
    """Put the first `count` of `requests` into `prepared`, with turns of the loop between them."""
    try:
        for index in range(count):
            request = next(requests, None)
            if request is None:
                break
            job = await prepare(index, request, style)
            await prepared.put(job)
            if index % ROWS_A_TURN == 0 or job.size > JOINED_BYTES:
                await (spare.turn() if prepared.plenty else asyncio.sleep(0))
    finally:
        prepared.close()
