"""Inject faults of a backend, to test the proxy in front of it.

A fault is a name and a number of tokens after which a stream fails. Each row of the table describes
one. A server has at most one fault, and a test may change it between requests.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from forebay.replay.engine.loop.core_loop import Unavailable
from forebay.traces.ground.errors import InputError


class BreakableStream(Protocol):
    """The parts of the API server's token stream that faults use."""

    dead: bool
    done: asyncio.Future[None]

    @property
    def produced(self) -> int: ...
    def end(self, produced: int, reason: str) -> None: ...
    def fail(self, why: Unavailable) -> None: ...
    def next_event(self) -> bytes: ...
    def transport(self) -> Any: ...
    def write(self, data: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of failure.

    Attributes:
        name: its name in the table.
        text: its effect, for --help.
        tokens: a stream fails instead of sending the token after this many.
        on_stream: makes a stream fail. None leaves streams alone.
        health: status of /health, None for healthy.
        reject: every generation request is answered 503 before the first byte.
        kills_engine: the first stream with `tokens` tokens kills the engine.
    """

    name: str
    text: str
    tokens: int = 0
    on_stream: Callable[[BreakableStream], None] | None = None
    health: int | None = None
    reject: bool = False
    kills_engine: bool = False

    @property
    def breaks_streams(self) -> bool:
        """Return True if the fault happens after a number of tokens."""
        return self.on_stream is not None or self.kills_engine


def parse_fault(text: str) -> Fault:
    """Parse NAME or NAME:TOKENS (InputError: another form or name, with the known names)."""
    name, colon, tokens = text.partition(":")
    fault = FAULTS.get(name)
    if fault is None or (colon and not tokens.isdecimal()):
        raise InputError(
            f"--fault {text}: give NAME or NAME:TOKENS, NAME one of {', '.join(FAULTS)}"
        )
    return replace(fault, tokens=int(tokens)) if colon else fault


def fault_help() -> str:
    """List all faults and their effects, for --help."""
    return "\n".join(
        f"  {fault.name + (f':{fault.tokens}' if fault.breaks_streams else ''):<14}{fault.text}"
        for fault in FAULTS.values()
    )


def _error_event(stream: BreakableStream) -> None:
    """Fail like vLLM's second admission check: an error inside a 200, then [DONE]."""
    stream.fail(Unavailable.BACKLOG_FULL)


def _reset(stream: BreakableStream) -> None:
    """Reset the connection, like a crashed process or a cut network."""
    stream.dead = True
    transport = stream.transport()
    if transport is None:
        return
    if sock := transport.get_extra_info("socket"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _stall(stream: BreakableStream) -> None:
    """Keep silent on an open connection until the client gives up."""
    stream.dead = True


def _truncate(stream: BreakableStream) -> None:
    """Let the handler return and end the response properly, but without [DONE]."""
    stream.dead = True
    if not stream.done.done():
        stream.done.set_result(None)


def _half_chunk(stream: BreakableStream) -> None:
    """Send half an event, then close the connection."""
    event = stream.next_event()
    stream.write(event[: len(event) // 2])
    stream.dead = True
    if transport := stream.transport():
        transport.close()


def _abort(stream: BreakableStream) -> None:
    """End like vLLM on SIGTERM: finish_reason "abort", usage and [DONE], like a normal answer."""
    stream.end(stream.produced, "abort")
    stream.dead = True


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("unhealthy", "/health answers 503", health=503),
        Fault("reject", "generation answers 503, as with full queues", reject=True),
        Fault("stream-503", "a 503 inside a 200 stream, then [DONE]", 0, _error_event),
        Fault("abort", 'finish_reason "abort", usage, [DONE]: what SIGTERM does', 3, _abort),
        Fault("engine-dead", "500 in all streams and answers; exits 1", 3, kills_engine=True),
        Fault("reset", "the connection is reset", 3, _reset),
        Fault("stall", "silence on an open connection", 3, _stall),
        Fault("truncate", "a clean end without [DONE]", 3, _truncate),
        Fault("half-chunk", "half an event, then the connection closes", 3, _half_chunk),
    )
}
