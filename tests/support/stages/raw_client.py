"""Clients that write bytes, and a backend that knows exactly which bytes a clean request has."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from stages.proxy_stage import (
    DONE,
    EVENT,
    STREAM_HEAD,
    STREAMED,
    WHOLE,
    Stage,
    answer,
    chunk,
    settle,
    stage,
)

BODY = b'{"prompt":"hello","max_tokens":3}'
HOST = b"Host: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CLOSE = b"Connection: close\r\n"
GOOD = POST + HOST + LENGTH + b"\r\n" + BODY
LAST = POST + HOST + LENGTH + CLOSE + b"\r\n" + BODY  # and no request after it
KEYS = {"message", "type", "param", "code"}

_HEAD = re.compile(
    rb"(GET|POST) (/[!-~]*) HTTP/1\.1\r\n((?:[A-Za-z-]+: [\t -~]*\r\n)+)\r\n", re.DOTALL
)
_ALLOWED = {"host", "accept-encoding", "content-length", "content-type", "accept", "authorization",
            "traceparent", "tracestate", "x-request-id", "x-session-id"}  # fmt: skip
_PROBES = ("/health", "/is_sleeping", "/metrics", "/v1/models")

STREAM = STREAM_HEAD + chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n"


@dataclass(slots=True)
class Received:
    """One clean request."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class Oracle:
    """A backend that answers clean requests and keeps everything else that it was sent in `dirty`.

    Clean: one spelling of the request line, header lines of allowed names, each once, a body of
    exactly Content-Length bytes, nothing after it before it was answered.
    """

    requests: list[Received] = field(default_factory=list)
    dirty: list[bytes] = field(default_factory=list)
    url: str = ""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def connections(self) -> int:
        return len(self._tasks)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        data = b""
        try:
            while more := await reader.read(1 << 20):
                data += more
                head = _HEAD.match(data)
                if head is None:
                    if b"\r\n\r\n" in data or len(data) > 64 << 10:
                        self.dirty.append(data)
                        return
                    continue
                lines = [line.split(": ", 1) for line in head[3].decode().splitlines()]
                headers = {name.lower(): value for name, value in lines}
                length = int(headers.get("content-length", "0"))
                body = data[head.end() :]
                if len(headers) < len(lines) or set(headers) - _ALLOWED or len(body) > length:
                    self.dirty.append(data)
                    return
                if len(body) < length:
                    continue
                data = b""
                target = head[2].decode()
                if target not in _PROBES or "x-request-id" in headers:
                    self.requests.append(Received(head[1].decode(), target, headers, body))
                writer.write(STREAM if b'"stream":true' in body else answer(200, WHOLE))
        except (ConnectionError, asyncio.CancelledError):
            pass  # cancelled by `running` only, and then done
        finally:
            if data and data not in self.dirty:
                self.dirty.append(data)
            self._tasks.discard(task)
            writer.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Oracle"]:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks)


@asynccontextmanager
async def before_oracle(**keys: Any) -> AsyncIterator[tuple[Stage, Oracle]]:
    """A proxy before an oracle. Afterwards all is released and nothing dirty has arrived."""
    keys.setdefault("timeouts", {"client_headers": "10s", "client_body": "10s"})
    keys.setdefault("health", {"interval": "1000s"})  # time jumps: no need to probe on the way
    async with AsyncExitStack() as stack:
        oracle = await stack.enter_async_context(Oracle().running())
        on = await stack.enter_async_context(stage([oracle.url], **keys))
        yield on, oracle
        await settle()
        on.assert_nothing_held()
        assert not oracle.dirty
        assert not any("internal error" in line for line in on.said)


@asynccontextmanager
async def connected(
    on: Stage, **options: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = on.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), **options)
    try:
        yield reader, writer
    finally:
        writer.close()


class _Wire(asyncio.Protocol):
    """Keeps the received bytes even when the connection is reset, unlike a StreamReader."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.lost = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.got += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(None)


async def raw(on: Stage, *parts: bytes, pause_s: float = 0.0, patience_s: float = 1e6) -> bytes:
    """The whole answer to these bytes on one connection, until the proxy closes it."""
    host, port = on.url.removeprefix("http://").split(":")
    transport, wire = await asyncio.get_running_loop().create_connection(_Wire, host, int(port))
    try:
        for i, part in enumerate(parts):
            if i:
                await asyncio.sleep(pause_s)
            if not transport.is_closing():
                transport.write(part)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(wire.lost), patience_s)
    finally:
        transport.close()
    return bytes(wire.got)


@dataclass(slots=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes
    version: str = "1.1"

    @property
    def error(self) -> dict[str, Any]:
        """The error object, checked for its shape and for the fields of every answer."""
        assert self.headers["content-type"].startswith("application/json")
        assert self.headers["x-request-id"]
        assert self.headers["server"] == "forebay"
        fields = json.loads(self.body)
        assert set(fields) == {"error"}
        assert set(fields["error"]) == KEYS
        return dict(fields["error"])

    @property
    def closes(self) -> bool:
        said = self.headers.get("connection", "")
        return said == "close" or (self.version == "1.0" and said != "keep-alive")


def responses(data: bytes, *methods: str) -> list[Response]:
    """Whole responses in turn, and nothing else. `methods`: methods of their requests."""
    parsed: list[Response] = []
    while data:
        head, end, data = data.partition(b"\r\n\r\n")
        assert end, head
        first, *lines = head.decode().split("\r\n")
        version, status = first.removeprefix("HTTP/").split(" ")[:2]
        headers = dict(line.lower().split(": ", 1) for line in lines)
        method = methods[len(parsed)] if len(parsed) < len(methods) else ""
        if int(status) < 200 or int(status) == 204 or method == "HEAD":
            body = b""
        elif headers.get("transfer-encoding") == "chunked":
            body, data = _dechunked(data)
        elif "content-length" in headers:
            length = int(headers["content-length"])
            body, data = data[:length], data[length:]
            assert len(body) == length
        else:
            body, data = data, b""
        parsed.append(Response(int(status), headers, body, version))
    return parsed


def _dechunked(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        body, data = body + data[:length], data[length:]
        assert data.startswith(b"\r\n")
        data = data[2:]
        if not length:
            return body, data


async def ask(on: Stage, *parts: bytes, pause_s: float = 0.0) -> Response:
    """The one answer to these bytes, after which the proxy has closed."""
    (response,) = responses(await raw(on, *parts, pause_s=pause_s))
    return response


def post(*headers: bytes, body: bytes = BODY, path: bytes = b"/v1/completions") -> bytes:
    """A request after which the connection is to be closed."""
    lines = b"".join(header + b"\r\n" for header in headers)
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST " + path + b" HTTP/1.1\r\n" + HOST + CLOSE + length + lines + b"\r\n" + body


class Raw:
    """A client on a bare socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, on: Stage, receives: int | None = None) -> "Raw":
        """`receives`: the size of its socket's buffer, for a client that will not read."""
        host, port = on.url.removeprefix("http://").split(":")
        sock = socket.socket()
        if receives:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        return cls(*await asyncio.open_connection(sock=sock))

    def post(
        self,
        body: Any = STREAMED,
        *headers: str,
        sent: int | None = None,
        path: str = "/v1/completions",
    ) -> None:
        data = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(data)}"]
        head = "\r\n".join([*lines, *headers, "", ""]).encode()
        self.writer.write(head + data[:sent])

    def leave(self, how: str) -> None:
        if how == "reset":
            self.writer.transport.abort()
        elif how == "half":
            self.writer.write_eof()  # it could still read: taken for gone all the same
            asyncio.get_running_loop().call_later(0.06, self.writer.close)  # after `settle`
        else:
            self.writer.close()


async def little_room(on: Stage) -> None:
    """The kernel buffers next to nothing for the open connections, so bytes stay with us."""
    await settle()
    for connection in on.proxy.listeners[0][1].connections:
        assert connection.transport is not None
        wire = connection.transport.get_extra_info("socket")
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
