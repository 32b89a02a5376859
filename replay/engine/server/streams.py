"""Sinks of a request's tokens: write them to the client as a stream, or collect them.

The step loop writes each streamed token straight to the transport, without a task switch. For a
slow client only a count is kept: words are a function of their index. Tokens that were not written
are merged into one event later, as vLLM does.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp.base_protocol import BaseProtocol

from forebay.replay.engine.loop.core_loop import Unavailable
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.server.answers import DONE, Chunks, text_between
from forebay.replay.engine.server.api_errors import EngineApiError, unavailable
from forebay.replay.engine.tokenizer import Generation

NEVER = 1 << 62
COMMENT = b": keep-alive\n\n"


class Collected:
    """Counts tokens until the end. The handler then writes the whole answer."""

    __slots__ = ("done", "error", "produced", "reason")

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.produced = 0
        self.reason = ""
        self.error: EngineApiError | None = None

    def push(self, produced: int) -> None:
        pass

    def end(self, produced: int, reason: str) -> None:
        if not self.done.done():
            self.produced, self.reason = produced, reason
            self.done.set_result(None)

    def fail(self, why: Unavailable) -> None:
        if not self.done.done():
            self.error = unavailable(why)
            self.done.set_result(None)


class TokenStream:
    """Writes one event for each token to a client.

    Attributes:
        done: resolves when the last event is due. `closing_events` has the unwritten events then.
        dead: no more events are written, because a fault or an error has ended the stream.
        request: the engine's request, set before the first token.
        fault: called instead of writing once `fault_after` tokens are written.
    """

    __slots__ = (
        "_chat",
        "_chunks",
        "_frame_after",
        "_frame_before",
        "_framed",
        "_generation",
        "_plain",
        "_protocol",
        "_sent",
        "_started",
        "_word",
        "closing_events",
        "dead",
        "done",
        "fault",
        "fault_after",
        "request",
    )

    def __init__(
        self,
        protocol: BaseProtocol,
        chunks: Chunks,
        generation: Generation,
        *,
        chat: bool,
        plain: bool,
        framed: bool,
    ) -> None:
        """Create a stream.

        Args:
            plain: chunks have no usage.
            framed: use HTTP/1.1 chunked transfer coding.
        """
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.request: EngineRequest | None = None
        self.fault: Callable[[TokenStream], None] | None = None
        self.fault_after = NEVER
        self.closing_events = b""
        self.dead = False
        self._protocol = protocol
        self._chunks = chunks
        self._generation = generation
        self._word = generation.word
        self._chat = chat
        self._plain = plain
        self._framed = framed
        self._sent = 0
        self._started = False
        # Every plain event has the same length: frame it once.
        event = (chunks.before, chunks.after + b"}\n\n")
        size = len(event[0]) + len(self._word(0)) + len(event[1])
        self._frame_before = b"%x\r\n%b" % (size, event[0]) if framed else event[0]
        self._frame_after = event[1] + b"\r\n" if framed else event[1]

    def push(self, produced: int) -> None:
        """Write one more token, or leave it for a later event if the client is slow."""
        if produced > self.fault_after:
            self._fail()
        if self.dead or self._protocol.writing_paused:
            return
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            return
        if self._plain and self._started and produced == self._sent + 1:
            transport.write(self._frame_before + self._word(self._sent) + self._frame_after)
            self._sent = produced
        else:
            transport.write(self._take(produced, None))

    def end(self, produced: int, reason: str) -> None:
        """End with the last tokens, the finish reason, usage and [DONE]."""
        if produced > self.fault_after:
            self._fail()
        if self.dead:  # a fault decides if and when the response ends
            return
        cached = self.request.cached_tokens if self.request else 0
        events = self._take(produced, reason)
        for event in (self._chunks.usage(produced, max(0, cached)), self._chunks.done):
            events += self.frame(event)
        self.closing_events = events
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, why: Unavailable) -> None:
        """End with an error inside the 200, then [DONE]."""
        if self.dead or self.done.done():
            return
        self.dead = True
        self.closing_events = self.frame(unavailable(why).event()) + self.frame(DONE)
        self.done.set_result(None)

    def comment(self) -> None:
        """Write an event that clients ignore, so that proxies see a live connection."""
        if not self.dead and not self._protocol.writing_paused:
            self.write(self.frame(COMMENT))

    def frame(self, event: bytes) -> bytes:
        """Return `event` in the transfer coding of the response."""
        return b"%x\r\n%b\r\n" % (len(event), event) if self._framed and event else event

    def write(self, data: bytes) -> None:
        """Write raw bytes, for faults and endings."""
        transport = self._protocol.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    @property
    def produced(self) -> int:
        """Return the number of tokens sent so far."""
        return self._sent

    def transport(self) -> Any:
        return self._protocol.transport

    def next_event(self) -> bytes:
        """Return the next token's event, framed, without sending it."""
        return self._frame_before + self._word(self._sent) + self._frame_after

    def _take(self, produced: int, reason: str | None) -> bytes:
        """Return all unsent tokens as one event, framed, after the role delta if it is unsent."""
        events = b""
        if self._chat and not self._started:
            events = self.frame(self._chunks.role())
        self._started = True
        text = text_between(self._generation, self._sent, produced, reason)
        self._sent = produced
        if reason is None:
            return events + self.frame(self._chunks.tokens(text, produced))
        return events + self.frame(self._chunks.last(text, produced, reason))

    def _fail(self) -> None:
        fault, self.fault, self.fault_after = self.fault, None, NEVER
        if fault is not None:
            fault(self)
