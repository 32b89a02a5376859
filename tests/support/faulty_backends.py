"""Backends that break the protocol, refuse, stall or cut their streams."""

import asyncio
from gzip import compress

from proxy_stage import DONE, EVENT, STREAM_HEAD, USAGE, WHOLE, Call, Serve, answer, chunk


def faults() -> dict[str, Serve]:
    """Ways to fail before the client has been sent a byte."""

    async def reset(call: Call) -> None:
        call.reset()

    async def close(call: Call) -> None:
        call.writer.close()

    async def busy(call: Call) -> None:
        await call.send(answer(503, b'{"error":"busy"}'))

    async def limited(call: Call) -> None:
        await call.send(answer(429, b'{"error":"slow"}', "retry-after: 7"))

    async def broken(call: Call) -> None:
        await call.send(answer(500, b"oops"))

    async def busy_in_stream(call: Call) -> None:
        event = b'data: {"error":{"message":"busy","type":"x","param":null,"code":503}}\n\n'
        await call.send(STREAM_HEAD + chunk(event) + chunk(DONE) + b"0\r\n\r\n")

    async def no_event(call: Call) -> None:
        await call.send(STREAM_HEAD + b"0\r\n\r\n")

    async def half(call: Call) -> None:
        await call.send(STREAM_HEAD + chunk(EVENT[:10]))
        call.writer.close()

    async def nonsense(call: Call) -> None:
        await call.send(b"HTTP/1.1 banana\r\n\r\n")

    async def short(call: Call) -> None:
        await call.send(answer(200, WHOLE)[:-5])
        call.writer.close()

    async def aborted(call: Call) -> None:
        event = b'data: {"choices":[{"text":"","finish_reason":"abort"}]}\n\n'
        await call.send(STREAM_HEAD + chunk(event) + chunk(DONE) + b"0\r\n\r\n")

    return {f.__name__: f for f in (reset, close, busy, limited, broken, busy_in_stream, no_event,
                                    half, nonsense, short, aborted)}  # fmt: skip


def cuts() -> dict[str, Serve]:
    """Ways to fail after the first event."""
    begin = STREAM_HEAD + chunk(EVENT)

    async def reset(call: Call) -> None:
        await call.send(begin)
        await asyncio.sleep(0.1)
        call.reset()

    async def close(call: Call) -> None:
        await call.send(begin)
        await asyncio.sleep(0.1)
        call.writer.close()

    async def stall(call: Call) -> None:
        await call.send(begin)
        await call.hung_up()

    async def no_done(call: Call) -> None:
        await call.send(begin + b"0\r\n\r\n")

    async def bad_chunk(call: Call) -> None:
        await call.send(begin)
        await asyncio.sleep(0.1)
        await call.send(b"zz\r\nwhat\r\n")
        await call.hung_up()

    async def error_event(call: Call) -> None:
        event = b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'
        await call.send(begin + chunk(event) + chunk(DONE) + b"0\r\n\r\n")

    async def abort(call: Call) -> None:
        event = b'data: {"choices":[{"text":"","finish_reason":"abort"}]}\n\n'
        await call.send(begin + chunk(event) + chunk(USAGE) + chunk(DONE) + b"0\r\n\r\n")

    async def half_event(call: Call) -> None:
        await call.send(begin + chunk(b"data: {") + chunk(b'"choi'))
        await asyncio.sleep(0.1)
        call.writer.close()

    return {f.__name__: f for f in (reset, close, stall, no_done, bad_chunk, error_event, abort,
                                    half_event)}  # fmt: skip


async def fails(call: Call) -> None:
    await call.send(answer(500, b'{"error":"cannot schedule new futures after shutdown"}'))


async def busy(call: Call) -> None:
    await call.send(answer(503, b'{"error":"busy"}'))


def malformed() -> dict[str, Serve]:
    """Answers that are not HTTP, or that must not be passed on."""
    ok = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    framed = chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n"

    def sends(data: bytes) -> Serve:
        async def serve(call: Call) -> None:
            await call.send(data)
            await call.hung_up()

        return serve

    async def endless_field(call: Call) -> None:
        await call.send(STREAM_HEAD + chunk(b"event: "))
        for _ in range(100):
            await call.send(chunk(b"x" * (64 << 10)))

    async def endless_comments(call: Call) -> None:
        await call.send(STREAM_HEAD)
        for _ in range(100):
            await call.send(chunk(b": " + b"x" * (64 << 10) + b"\n\n"))

    return {
        "no status line": sends(b"SSH-2.0-OpenSSH\r\n\r\n"),
        "no status": sends(b"HTTP/1.1 banana\r\n\r\n"),
        "status 999999": sends(b"HTTP/1.1 999999 X\r\n\r\n"),
        "old": sends(b"HTTP/0.9 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + EVENT),
        "header of 128 KiB": sends(f"{ok}x: {'y' * (128 << 10)}\r\n\r\n".encode() + framed),
        "CL and TE": sends(
            f"{ok}content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n".encode() + framed
        ),
        "two CL": sends(f"{ok}content-length: 5\r\ncontent-length: 6\r\n\r\nhello".encode()),
        "NUL in a header": sends(f"{ok}x: a\0b\r\ntransfer-encoding: chunked\r\n\r\n".encode()),
        "CR in a header": sends(f"{ok}x: a\rb: c\r\ntransfer-encoding: chunked\r\n\r\n".encode()),
        "brotli": sends(
            f"{ok}content-encoding: br\r\ntransfer-encoding: chunked\r\n\r\n".encode() + framed
        ),
        "gzip that is none": sends(
            f"{ok}content-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n".encode() + framed
        ),
        "upgrade": sends(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n"),
        "redirect": sends(answer(307, b"", "location: http://127.0.0.1:9/")),
        "html": sends(answer(200, b"<html>").replace(b"application/json", b"text/html")),
        "whole for a stream": sends(answer(200, WHOLE)),
        "bad first chunk": sends(f"{ok}transfer-encoding: chunked\r\n\r\nzz\r\n".encode()),
        "field without end": endless_field,
        "comments without end": endless_comments,
        "error as a text": sends(STREAM_HEAD + chunk(b'data: {"error":"oh"}\n\n')),
    }


def malformed_whole() -> dict[str, Serve]:
    def sends(data: bytes, close: bool = False) -> Serve:
        async def serve(call: Call) -> None:
            await call.send(data)
            if close:
                call.writer.close()
            else:
                await call.hung_up()

        return serve

    stalled = answer(200, WHOLE)[:-5]
    return {
        "short body": sends(stalled, close=True),
        "stalled body": sends(stalled),
        "nothing": sends(answer(200, b"")),
        "html": sends(answer(200, b"<html>").replace(b"application/json", b"text/html")),
        "stream for a whole": sends(STREAM_HEAD + chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n"),
        "bad chunk": sends(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n"
        ),
        "brotli": sends(answer(200, WHOLE, "content-encoding: br")),
        "gzip that is none": sends(answer(200, WHOLE, "content-encoding: gzip")),
        "gzip that is cut": sends(answer(200, compress(WHOLE)[:-9], "content-encoding: gzip")),
        "gzip with more after it": sends(
            answer(200, compress(WHOLE) + b"x", "content-encoding: gzip")
        ),
    }
