"""Backends that break the protocol, refuse, stall or cut their streams."""

import asyncio
from gzip import compress
from typing import Literal

from stages.proxy_stage import DONE, EVENT, STREAM_HEAD, USAGE, WHOLE, Call, Serve, answer, chunk

END = b"0\r\n\r\n"
ABORT = b'data: {"choices":[{"text":"","finish_reason":"abort"}]}\n\n'


End = Literal["keep", "stay", "close", "reset"]
"""What becomes of the connection after an answer. `stay` answers no other request on it."""


def sends(*parts: bytes, end: End = "stay") -> Serve:
    """Send `parts`, each a moment after the one before it."""

    async def serve(call: Call) -> None:
        for number, part in enumerate(parts):
            if number:
                await asyncio.sleep(0.1)
            await call.send(part)
        await _ended(call, end)

    return serve


def answers(status: int, body: bytes, *headers: str) -> Serve:
    """Send a whole answer."""
    return sends(answer(status, body, *headers), end="keep")


def streams(*events: bytes, every_s: float = 0.0, end: End = "keep") -> Serve:
    """Stream `events`, each a chunk and so many seconds after the one before it."""

    async def serve(call: Call) -> None:
        data = STREAM_HEAD
        for number, event in enumerate(events):
            if number and every_s:
                await call.send(data)
                await asyncio.sleep(every_s)
                data = b""
            data += chunk(event)
        await call.send(data + (END if end == "keep" else b""))
        await _ended(call, end)

    return serve


async def _ended(call: Call, end: End) -> None:
    match end:
        case "close":
            call.writer.close()
        case "reset":
            call.reset()
        case "stay":
            await call.hung_up()


async def resets(call: Call) -> None:
    call.reset()


def late(until: float | asyncio.Event, serve: Serve) -> Serve:
    """Do as `serve`, so many seconds later or once the event is set."""

    async def serves(call: Call) -> None:
        await (until.wait() if isinstance(until, asyncio.Event) else asyncio.sleep(until))
        await serve(call)

    return serves


def in_turn(*serves: Serve) -> Serve:
    """Each request meets the next of `serves`."""
    left = iter(serves)

    async def serves_next(call: Call) -> None:
        await next(left)(call)

    return serves_next


fails = answers(500, b'{"error":"cannot schedule new futures after shutdown"}')
busy = answers(503, b'{"error":"busy"}')


def error_event(message: str, code: int) -> bytes:
    said = f'"message":"{message}","type":"x","param":null,"code":{code}'
    return b'data: {"error":{%s}}\n\n' % said.encode()


def faults() -> dict[str, Serve]:
    """Ways to fail before the client has been sent a byte."""
    return {
        "reset": resets,
        "close": sends(end="close"),
        "busy": busy,
        "limited": answers(429, b'{"error":"slow"}', "retry-after: 7"),
        "broken": answers(500, b"oops"),
        "busy_in_stream": streams(error_event("busy", 503), DONE),
        "no_event": streams(),
        "half": streams(EVENT[:10], end="close"),
        "nonsense": sends(b"HTTP/1.1 banana\r\n\r\n", end="keep"),
        "short": sends(answer(200, WHOLE)[:-5], end="close"),
        "aborted": streams(ABORT, DONE),
    }


def cuts(begin: bytes = STREAM_HEAD + chunk(EVENT)) -> dict[str, Serve]:
    """Ways to fail after the first event, `begin`."""
    end = chunk(DONE) + END
    return {
        "reset": sends(begin, b"", end="reset"),
        "close": sends(begin, b"", end="close"),
        "engine dead": sends(begin, chunk(error_event("EngineCore", 500)) + end),
        "error as a text": sends(begin, chunk(b'data: {"error":"oh"}\n\n') + end),
        "error as an object": sends(
            begin, chunk(b'data: {"object":"error","message":"oh"}\n\n') + end
        ),
        "abort": sends(begin, chunk(ABORT) + chunk(USAGE) + end),
        "no [DONE]": sends(begin, END),
        "half an event": sends(begin, chunk(EVENT[:9]) + END),
        "half an event, then a close": sends(begin, chunk(b"data: {"), end="close"),
        "bad chunk": sends(begin, b"zz\r\n"),
        "stall": sends(begin),
        "comments, then a stall": sends(begin, chunk(b": keep-alive\n\n")),
        "event without end": sends(begin, chunk(b"data: ") + chunk(b"x" * (5 << 20))),
    }


def malformed() -> dict[str, Serve]:
    """Answers that are not HTTP, or that must not be passed on."""
    ok = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    framed = chunk(EVENT) + chunk(DONE) + END
    chunked = f"{ok}transfer-encoding: chunked\r\n"
    endless = STREAM_HEAD + chunk(b"event: ") + chunk(b"x" * (64 << 10)) * 100
    comments = b": " + b"x" * (64 << 10) + b"\n\n"
    return {
        "no status line": sends(b"SSH-2.0-OpenSSH\r\n\r\n"),
        "no status": sends(b"HTTP/1.1 banana\r\n\r\n"),
        "status 999999": sends(b"HTTP/1.1 999999 X\r\n\r\n"),
        "old": sends(b"HTTP/0.9 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + EVENT),
        "header of 128 KiB": sends(f"{ok}x: {'y' * (128 << 10)}\r\n\r\n".encode() + framed),
        "CL and TE": sends(f"{chunked}content-length: 5\r\n\r\n".encode() + framed),
        "two CL": sends(f"{ok}content-length: 5\r\ncontent-length: 6\r\n\r\nhello".encode()),
        "NUL in a header": sends(f"{chunked}x: a\0b\r\n\r\n".encode()),
        "CR in a header": sends(f"{chunked}x: a\rb: c\r\n\r\n".encode()),
        "brotli": sends(f"{chunked}content-encoding: br\r\n\r\n".encode() + framed),
        "gzip that is none": sends(f"{chunked}content-encoding: gzip\r\n\r\n".encode() + framed),
        "upgrade": sends(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n"),
        "redirect": sends(answer(307, b"", "location: http://127.0.0.1:9/")),
        "html": sends(answer(200, b"<html>").replace(b"application/json", b"text/html")),
        "bad first chunk": sends(f"{chunked}\r\nzz\r\n".encode()),
        "field without end": sends(endless, end="keep"),
        "comments without end": sends(STREAM_HEAD + chunk(comments) * 100, end="keep"),
        "error as a text": streams(b'data: {"error":"oh"}\n\n', end="stay"),
    }


def malformed_whole() -> dict[str, Serve]:
    stalled = answer(200, WHOLE)[:-5]
    return {
        "short body": sends(stalled, end="close"),
        "stalled body": sends(stalled),
        "html": sends(answer(200, b"<html>").replace(b"application/json", b"text/html")),
        "bad chunk": sends(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n"
        ),
        "brotli": sends(answer(200, WHOLE, "content-encoding: br")),
        "gzip that is none": sends(answer(200, WHOLE, "content-encoding: gzip")),
        "gzip that is cut": sends(answer(200, compress(WHOLE)[:-9], "content-encoding: gzip")),
        "gzip and more": sends(answer(200, compress(WHOLE) + b"x", "content-encoding: gzip")),
    }
