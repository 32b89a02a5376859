"""A client of `mode: observe` gets what the server answers, and the server what the client sends.

Every question is asked twice, with the same bytes: of the server, and of the proxy before it. What
may differ is named here, and in the table of docs/reference/http.md.
"""

import asyncio
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.tenant_keys import key_of, keys_of
from paths import ROOT
from ports import free_ports
from stages.proxy_stage import (
    DONE,
    EVENT,
    STREAM_HEAD,
    USAGE,
    WHOLE,
    Call,
    RawBackend,
    answer,
    chunk,
    on_stage,
    settle,
    stage,
    until,
)
from stages.raw_client import raw

Answer = Sequence[bytes | float]
"""Bytes to send, and seconds to wait between them. Afterwards the server closes."""

PASSED_ON = {"content-type", "accept", "authorization", "traceparent", "x-request-id"}
PASSED_BACK = {"content-type", "retry-after", "cache-control", "x-should-retry"}
OURS = {"x-request-id", "server", "date", "connection", "content-length", "transfer-encoding",
        "x-forebay-bucket", "x-forebay-queue-ms", "x-forebay-backend", "x-forebay-predicted-ms",
        }  # fmt: skip
"""Headers of an answer that a proxy sets itself, and those that only Forebay has."""
PAGE = (ROOT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Seen:
    """What a client got. `whole`: its framing had an end."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool


@dataclass(frozen=True)
class Got:
    """What the server got."""

    line: str
    headers: dict[str, str]
    body: bytes


def head_of(text: str) -> tuple[str, dict[str, str]]:
    first, *lines = text.strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return first, headers


def seen(data: bytes) -> Seen:
    """Read an answer that may end anywhere. Interim answers do not count."""
    head, _, data = data.partition(b"\r\n\r\n")
    if not head:
        return Seen(0, {}, b"", whole=False)
    first, headers = head_of(head.decode())
    status = int(first.split()[1])
    if status < 200:
        return seen(data)
    if headers.get("transfer-encoding") != "chunked":
        whole = len(data) == int(headers["content-length"])
        return Seen(status, headers, data, whole)
    body, whole = b"", False
    while not whole and b"\r\n" in data:
        size, _, data = data.partition(b"\r\n")
        body += data[: int(size, 16)]
        data, whole = data[int(size, 16) + 2 :], size == b"0"
    return Seen(status, headers, body, whole)


def post(body: bytes, *headers: str, path: str = "/v1/chat/completions") -> list[bytes]:
    length = f"content-length: {len(body)}"
    return [request("POST", path, length, "content-type: application/json", *headers) + body]


def request(method: str, path: str, *headers: str) -> bytes:
    own = ("host: x", "connection: close", "user-agent: test/1", "x-request-id: case")
    return "\r\n".join((f"{method} {path} HTTP/1.1", *own, *headers, "", "")).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode()


def events(*pieces: bytes | float, end: bytes = b"0\r\n\r\n") -> list[bytes | float]:
    return [STREAM_HEAD, *(p if isinstance(p, float) else chunk(p) for p in pieces), end]


STREAMED = post(chat(stream=True))
OK = [answer(200, WHOLE)]
ERROR = b'{"error": {"message": "The model `x` does not exist.", "code": 404}}'
ERROR_EVENT = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'
ABORT = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n'
ABORTED = b'{"choices": [{"index": 0, "message": {}, "finish_reason": "abort"}]}'
HTML = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 4\r\n\r\n<p>x"
OPENED = b'event: response.created\ndata: {"type":"response.created","response":{"id":"r"}}\n\n'
WHOLE_STREAM = STREAM_HEAD + chunk(EVENT) + chunk(USAGE) + chunk(DONE) + b"0\r\n\r\n"

SAME: dict[str, tuple[list[bytes], Answer]] = {
    # What a client sends.
    "a chat": (post(chat(model="m", max_tokens=3, unknown=[1.0])), OK),
    "spaces and escapes": (post(b'{ "messages" : [{"role":"user","content":"\\u00e9"} ] }'), OK),
    "a completion": (post(b'{"prompt": "x"}', path="/v1/completions"), OK),
    "embeddings": (post(b'{"input": "x"}', path="/v1/embeddings"), OK),
    "embeddings, no JSON": (post(b"{", path="/v1/embeddings"), [answer(400, ERROR)]),
    "a question for models": ([request("GET", "/v1/models")], OK),
    "a query": (post(chat(), path="/v1/chat/completions?api-version=1"), OK),
    "a key of the server": (post(chat(), "authorization: Bearer k"), [answer(401, ERROR)]),
    "an unknown model": (post(chat(model="nobody")), [answer(404, ERROR)]),
    "a prompt that is too long": (post(chat(x="word " * 300_000)), [answer(400, ERROR)]),
    "no JSON": (post(b"model=x"), [answer(400, ERROR)]),
    "half of a character": (post(b'{"prompt": "\\ud800"}'), OK),
    "an empty body": (post(b""), [answer(422, ERROR)]),
    "a list": (post(b"[1]"), [answer(422, ERROR)]),
    "wrong types": (post(chat(stream=[], max_tokens={})), [answer(422, ERROR)]),
    "a key twice": (post(b'{"stream": false, "messages": [], "stream": true}'), [WHOLE_STREAM]),
    "too many items": (post(chat(x=[[]] * 700_000)), OK),
    "an unknown class": (post(chat(), "x-forebay-class: first"), OK),
    "an odd timeout": (post(chat(), "x-request-timeout: soon"), OK),
    "a timeout that is too short": (post(chat(), "x-request-timeout: 1ms"), [0.1, *OK]),
    "in the background": (post(b'{"input": "x", "background": true}', path="/v1/responses"), OK),
    "a body in chunks": (
        [request("POST", "/v1/completions", "transfer-encoding: chunked"),
         chunk(b'{"prompt":'), chunk(b'"hello"}') + b"0\r\n\r\n"],
        OK,
    ),
    "a body that waits for 100": (
        [request("POST", "/v1/completions", "expect: 100-continue", "content-length: 15"),
         b'{"prompt": "x"}'],
        OK,
    ),
    # What a server answers.
    "a stream": (STREAMED, [WHOLE_STREAM]),
    "a stream, byte by byte": (STREAMED, [bytes([b]) for b in WHOLE_STREAM]),
    "a stream, cut at odd places": (
        STREAMED, events(EVENT[:9], EVENT[9:] + EVENT[:-1], b"\n", USAGE + DONE[:3], DONE[3:])
    ),
    "CRLF, fields and comments": (
        STREAMED, events(b": hello\r\n\r\n", b"retry: 5\r\nid: 1\r\ndata: {}\r\n\r\n", EVENT, DONE)
    ),
    "a long silence": (STREAMED, events(EVENT, 50.0, EVENT, DONE)),
    "a stream without [DONE]": (STREAMED, events(EVENT, EVENT)),
    "a stream that stops in an event": (STREAMED, events(EVENT, EVENT[:20])),
    "more after [DONE]": (STREAMED, events(EVENT, DONE, EVENT, b"garbage")),
    "[DONE] alone": (STREAMED, events(DONE)),
    "no events": (STREAMED, events(b"words\n", b"and \x00\xff bytes")),
    "a very large event": (STREAMED, events(b"data: ", *[b"x" * 600_000] * 10, b"\n\n", DONE)),
    "an empty stream": (STREAMED, events()),
    "an error as the first event": (STREAMED, events(ERROR_EVENT, DONE)),
    "an error in the middle": (STREAMED, events(EVENT, ERROR_EVENT, EVENT, DONE)),
    "an abort": (STREAMED, events(EVENT, ABORT, DONE)),
    "opening events": (
        post(b'{"input": "x", "stream": true}', path="/v1/responses"), events(OPENED, 1.0, OPENED)
    ),
    "a stream that was not asked for": (post(chat()), [WHOLE_STREAM]),
    "a whole answer to a request for a stream": (STREAMED, OK),
    "a server that dies in a stream": (STREAMED, events(EVENT, EVENT[:30], end=b"")),
    "a server that dies after [DONE]": (STREAMED, events(EVENT, DONE, end=b"")),
    **{
        f"a {status}": (post(chat()), [answer(status, ERROR, "x-should-retry: false")])
        for status in (400, 401, 404, 422, 429, 500, 502, 503)
    },
    "a wait": (post(chat()), [answer(429, ERROR, "retry-after: 7")]),
    "a long error": (post(chat()), [answer(500, b'"%b"' % (b"x" * 400_000))]),
    "a private answer": (post(chat()), [answer(200, WHOLE, "cache-control: no-store")]),
    "an answer that is no JSON": (post(chat()), [answer(200, b"words")]),
    "an empty answer": (post(chat()), [answer(200, b"")]),
    "a page": (post(chat()), [HTML]),
    "an aborted answer": (post(chat()), [answer(200, ABORTED)]),
    "a large answer": (post(chat()), [answer(200, b'"%b"' % (b"x" * 700_000))]),
    "a large aborted answer": (post(chat()), [answer(200, ABORTED + b" " * 700_000)]),
}  # fmt: skip


class Asked:
    """A server with one answer, and what it was asked."""

    def __init__(self, script: Answer) -> None:
        self._script = script
        self.backend = RawBackend(self._serve)

    async def _serve(self, call: Call) -> None:
        for part in self._script:
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                await call.send(part)
        call.writer.close()

    def got(self) -> list[Got]:
        """Return the requests since the last look."""
        calls = [Got(*head_of(call.head), call.body) for call in self.backend.calls]
        self.backend.calls.clear()
        return calls


async def both(
    parts: Sequence[bytes], script: Answer, **keys: Any
) -> tuple[tuple[Seen, list[Got]], tuple[Seen, list[Got]]]:
    """Ask the server, and the proxy before it. Return what both sides saw, direct and through."""
    asked = Asked(script)
    async with on_stage(asked.backend, **{"mode": "observe", **keys}) as (on, _):
        server: Any = SimpleNamespace(url=asked.backend.url)
        straight = seen(await raw(server, *parts, pause_s=0.01)), asked.got()
        through = seen(await raw(on, *parts, pause_s=0.01)), asked.got()
        await settle()
        assert not any("internal error" in line for line in on.said)
    return straight, through


@pytest.mark.parametrize("name", SAME)
async def test_a_request_and_its_answer_pass_as_they_are(name: str) -> None:
    (direct, (sent,)), (through, (passed,)) = await both(*SAME[name])
    assert (through.status, through.body, through.whole) == (
        direct.status, direct.body, direct.whole,
    )  # fmt: skip
    assert {k: v for k, v in through.headers.items() if k not in OURS} == {
        k: v for k, v in direct.headers.items() if k in PASSED_BACK
    }
    assert (passed.line, passed.body) == (sent.line, sent.body)
    assert {k: v for k, v in passed.headers.items() if k in PASSED_ON} == {
        k: v for k, v in sent.headers.items() if k in PASSED_ON
    }


async def test_the_same_stream_is_judged_in_mode_shape() -> None:
    """So the cases above would show it."""
    _, (through, _) = await both(*SAME["an error in the middle"], mode="shape")
    assert b"out of memory" not in through.body
    assert not through.whole


def listed(row: str) -> None:
    """The difference has a row in the table of the documentation."""
    assert f"\n| {row}" in PAGE, row


GZIP, LENGTH = "content-encoding: gzip", "content-length: 1"
UTF_16 = chat().decode().encode("utf-16")
GZIPPED = gzip.compress(WHOLE)
REFUSED = 200, 400
SHORT = "a server that ends before its answer"


@pytest.mark.parametrize(
    ("row", "parts", "script", "statuses"),
    [
        ("a path that is not on the list", [request("GET", "/sleep")], OK, (200, 404)),
        ("`HEAD`", [request("HEAD", "/v1/models")], OK, (200, 200)),
        ("`GET` with a body", [request("GET", "/v1/models", LENGTH) + b"x"], OK, REFUSED),
        ("a compressed body", post(gzip.compress(chat()), GZIP), OK, (200, 200)),
        ("a body in UTF-16", post(UTF_16), OK, (200, 200)),
        ("a compressed answer", post(chat()), [answer(200, GZIPPED, GZIP)], (200, 200)),
        ("a redirect", post(chat()), [answer(307, b"", "location: /x")], (307, 502)),
        (SHORT, post(chat()), [answer(200, WHOLE)[:-5]], (200, 502)),
        (SHORT, post(chat()), [], (0, 502)),
        ("HTTP that can be read in two ways", post(chat(), "content-length: 3"), OK, REFUSED),
    ],
)  # fmt: skip
async def test_differences_are_listed(
    row: str, parts: list[bytes], script: Answer, statuses: tuple[int, int]
) -> None:
    listed(row)
    (direct, _), (through, _) = await both(parts, script)
    assert (direct.status, through.status) == statuses


async def test_a_server_that_refuses_the_connection() -> None:
    listed("a server that refuses")
    (port,) = free_ports(1)
    async with stage([f"http://127.0.0.1:{port}"], wait_up=0, mode="observe") as on:
        assert seen(await raw(on, *post(chat()))).status == 503


async def test_nothing_waits_for_a_slot() -> None:
    """The server has one slot, and gets three requests of each kind at once."""
    asked = Asked([1.0, *OK])
    async with on_stage(asked.backend, slots=1, mode="observe") as (on, _):
        tasks = [
            asyncio.create_task(raw(on, *post(b'{"prompt": "x"}', path=path)))
            for path in ("/v1/completions", "/v1/embeddings") * 3
        ]
        await settle()
        assert len(asked.backend.calls) == len(tasks)
        await asyncio.gather(*tasks)


async def test_no_heartbeat_is_added_and_no_other_server_goes_on() -> None:
    """Before the first token, and after a server has stopped in the middle."""
    silent = Asked([STREAM_HEAD, 100.0, chunk(EVENT), chunk(EVENT[:20])])
    second = Asked([WHOLE_STREAM])
    async with on_stage(silent.backend, second.backend, mode="observe") as (on, _):
        first = asyncio.create_task(raw(on, *STREAMED))
        await settle()
        if not silent.backend.calls:  # it went to the other one
            await first
            first = asyncio.create_task(raw(on, *STREAMED))
        got = seen(await first)
        assert (got.body, got.whole) == (EVENT + EVENT[:20], False)


PATHS = ("/v1/chat/completions", "/v1/embeddings")


async def test_the_servers_judge_a_model_that_none_of_them_names() -> None:
    """They have different models, so `mode: shape` would answer for them."""
    servers = [Asked([answer(404, ERROR)]).backend for _ in range(2)]
    for server, name in zip(servers, ("a", "b"), strict=True):
        server.models = {name: {}}
    async with on_stage(*servers, mode="observe") as (on, _):
        await until(lambda: all(link.models for link in on.proxy.backends.links.values()))
        for path in PATHS:
            for body in (chat(model="c"), b"{"):
                got = seen(await raw(on, *post(body, path=path)))
                assert (got.status, got.body) == (404, ERROR)
        assert {call.body for server in servers for call in server.calls} == {chat(model="c"), b"{"}


async def test_what_is_checked_for_a_tenant_is_read(tmp_path: Path) -> None:
    listed("keys (`tenants`)")
    asked = Asked(OK)
    tenants = {"keys": keys_of(tmp_path, "acme")}
    async with on_stage(asked.backend, mode="observe", tenants=tenants) as (on, _):
        key = f"authorization: {key_of('acme')['authorization']}"
        for body, headers, status in (
            (chat(), ("authorization: Bearer wrong",), 401),
            (b"{", (key,), 400),
            (chat(), (key,), 200),
        ):
            for path in PATHS:
                assert seen(await raw(on, *post(body, *headers, path=path))).status == status
        assert len(asked.backend.calls) == len(PATHS)
