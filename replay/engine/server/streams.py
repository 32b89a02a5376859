"""Sinks: what becomes of a request's tokens, streamed or collected.

A streamed token is written straight to the transport from the step loop, one write each, with no
task switch. When the client reads too slowly nothing is queued but a count: the words are a
function of the index, so what was held back is merged into one event later, as vLLM merges.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp.base_protocol import BaseProtocol

from forebay.replay.engine.loop import Unavailable
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.server.answers import DONE, AnswerText, Chunks
from forebay.replay.engine.server.api_errors import EngineApiError, unavailable

NEVER = 1 << 62
COMMENT = b": keep-alive\n\n"


class Collected:
    """Counts until the end; the answer is then written in one piece."""

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
    """Writes one event a token to a client.

    Attributes:
        done: resolves when the last event is due; `closing_events` has what is unwritten then.
        request: the engine's request, set before the first token.
        fault: called instead of writing once `fault_after` tokens are out.
    """

    __slots__ = (
        "_chat",
        "_chunks",
        "_frame_after",
        "_frame_before",
        "_framed",
        "_plain",
        "_protocol",
        "_sent",
        "_started",
        "_text",
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
        text: AnswerText,
        *,
        chat: bool,
        plain: bool,
        framed: bool,
    ) -> None:
        """`plain`: no usage in each chunk; `framed`: HTTP/1.1 chunked transfer coding."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.request: EngineRequest | None = None
        self.fault: Callable[[TokenStream], None] | None = None
        self.fault_after = NEVER
        self.closing_events = b""
        self.dead = False
        self._protocol = protocol
        self._chunks = chunks
        self._text = text
        self._word = text.generation.word
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
        """One more token; merged with later ones while the client is slow."""
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
        """The last tokens, why it ends, usage and [DONE]."""
        if produced > self.fault_after:
            self._fail()
        if self.dead:  # a fault decides when, and whether, the response ends
            return
        cached = self.request.cached_tokens if self.request else 0
        events = self._take(produced, reason)
        for event in (self._chunks.usage(produced, max(0, cached)), DONE):
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
        """An event that clients ignore, so that those between see the connection live."""
        if not self.dead and not self._protocol.writing_paused:
            self.write(self.frame(COMMENT))

    def frame(self, event: bytes) -> bytes:
        """`event` as the transfer coding wants it."""
        return b"%x\r\n%b\r\n" % (len(event), event) if self._framed and event else event

    def write(self, data: bytes) -> None:
        """Raw bytes, for faults and endings."""
        transport = self._protocol.transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    @property
    def produced(self) -> int:
        """Tokens sent so far."""
        return self._sent

    def transport(self) -> Any:
        return self._protocol.transport

    def next_event(self) -> bytes:
        """The next token's event, framed, without sending it."""
        return self._frame_before + self._word(self._sent) + self._frame_after

    def _take(self, produced: int, reason: str | None) -> bytes:
        """Everything not sent yet as one event, framed; the role delta first."""
        events = b""
        if self._chat and not self._started:
            events = self.frame(self._chunks.role())
        self._started = True
        text = self._text.between(self._sent, produced, reason)
        self._sent = produced
        if reason is None:
            return events + self.frame(self._chunks.tokens(text, produced))
        return events + self.frame(self._chunks.last(text, produced, reason))

    def _fail(self) -> None:
        fault, self.fault, self.fault_after = self.fault, None, NEVER
        if fault is not None:
            fault(self)
