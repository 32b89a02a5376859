"""Damaged framing of client requests, judged by the bytes that the backend receives.

The oracle is differential: whatever the bytes were, the backend has received nothing, or one
request framed by us, whose answer the client got.
"""

import asyncio
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutants import CHUNKED, CHUNKS, NEXT, mutant
from stages.proxy_stage import DONE, Stage, chunk
from stages.raw_client import (
    BODY,
    CLOSE,
    GOOD,
    HOST,
    LAST,
    LENGTH,
    POST,
    Oracle,
    Response,
    ask,
    before_oracle,
    raw,
    responses,
)

from forebay.replay.clock.virtual_loop import run

MUTANTS = int(os.environ.get("FOREBAY_MUTANTS", "400"))
A_TIME = 20  # mutants before one proxy


async def judged(on: Stage, oracle: Oracle, *parts: bytes) -> list[Response]:
    """The answers to these bytes, and the verdict on what arrived behind the proxy."""
    before = len(oracle.requests)
    got = await raw(on, *parts, pause_s=0.01)  # each part a segment of its own
    answers = responses(got) if b"HTTP/1.1 100 " not in got else responses(got)[1:]
    passed = [r.headers["x-request-id"].lower() for r in oracle.requests[before:]]
    answered = [r.headers["x-request-id"] for r in answers if r.status == 200]
    assert passed == [id_ for id_ in answered if id_ in passed]  # no request without its answer
    assert not oracle.dirty
    for answer in answers:
        if answer.status >= 400:
            assert answer.error
    return answers


async def refused(*cases: tuple[str | bytes, bytes, tuple[int, ...]]) -> None:
    """Assert that all get one JSON error and a closed connection, and no backend sees them.

    A case is a name, the bytes of a request, and the statuses that it may get.
    """
    async with before_oracle() as (on, oracle):
        for name, data, statuses in cases:
            (answer,) = await judged(on, oracle, data)
            assert answer.status in statuses, name
            assert answer.closes, name
            assert answer.error["type"] == "invalid_request_error", name
            assert not oracle.requests, name


BAD_HEADERS = {
    "cl-te": LENGTH + CHUNKED,
    "te-cl": CHUNKED + LENGTH,
    "cl-cl": LENGTH + b"Content-Length: 3\r\n",
    "cl-cl-equal": LENGTH + LENGTH,
    "cl-list": b"Content-Length: 33, 33\r\n",
    "cl-plus": b"Content-Length: +33\r\n",
    "cl-minus": b"Content-Length: -1\r\n",
    "cl-hex": b"Content-Length: 0x21\r\n",
    "cl-underscore": b"Content-Length: 3_3\r\n",
    "cl-exponent": b"Content-Length: 3e1\r\n",
    "cl-empty": b"Content-Length: \r\n",
    "cl-space-inside": b"Content-Length: 3 3\r\n",
    "cl-huge": b"Content-Length: 99999999999999999999999\r\n",
    "cl-not-ascii": b"Content-Length: \xef\xbc\x93\xef\xbc\x93\r\n",
    "cl-space-colon": b"Content-Length : 33\r\n",
    "te-te": CHUNKED + CHUNKED,
    "te-te-identity": CHUNKED + b"Transfer-Encoding: identity\r\n",
    "te-space-colon": b"Transfer-Encoding : chunked\r\n",
    "te-tab-colon": b"Transfer-Encoding\t: chunked\r\n",
    "te-nul": b"Transfer-Encoding: chunked\x00\r\n",
    "te-cr": b"Transfer-Encoding: chunked\r\r\n",
    "te-bare-cr": b"X: y\rTransfer-Encoding: chunked\r\n",
    "te-bare-lf": b"X: y\nTransfer-Encoding: chunked\r\n" + LENGTH,
    "obs-fold": b"Transfer-Encoding:\r\n chunked\r\n" + LENGTH,
    "obs-fold-tab": b"X: y\r\n\tz\r\n" + LENGTH,
    "fold-first": b" X: y\r\n" + LENGTH,
    "no-colon": b"Transfer-Encoding chunked\r\n" + LENGTH,
    "empty-name": b": y\r\n" + LENGTH,
    "space-in-name": b"bad name: y\r\n" + LENGTH,
    "name-nul": b"X\x00: y\r\n" + LENGTH,
    "name-not-ascii": b"X\xe9: y\r\n" + LENGTH,
    "name-bracket": b"X[]: y\r\n" + LENGTH,
    "value-nul": b"X: a\x00b\r\n" + LENGTH,
    "value-cr": b"X: a\rb\r\n" + LENGTH,
    "two-hosts": b"Host: y\r\n" + LENGTH,
    "two-keys": b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n" + LENGTH,
    "key-not-ascii": b"Authorization: Bearer \xff\r\n" + LENGTH,
    "trace-control": b"traceparent: a\x01b\r\n" + LENGTH,
    "old-websocket": b"Sec-WebSocket-Key1: 1\r\n" + LENGTH,
}


async def test_headers_that_are_refused() -> None:
    rest = b"\r\n" + BODY + NEXT
    old_chunks = b"POST /v1/completions HTTP/1.0\r\n" + CHUNKED + b"\r\n" + CHUNKS
    await refused(
        *((name, POST + HOST + bad + rest, (400,)) for name, bad in BAD_HEADERS.items()),
        ("no host", POST + LENGTH + b"\r\n" + BODY, (400,)),
        ("chunks in HTTP/1.0", old_chunks, (400,)),
    )


ODD_CODINGS = (
    b"xchunked", b"chunked, chunked", b"chunked, identity", b"identity",
    b"identity, chunked", b"chunked;q=1", b'"chunked"', b"chunk", b"chunked,", b",chunked",
    b"\x0bchunked", b"x\tchunked", b"chunked\x7f", b"\xffchunked", b"cow", b"",
)  # fmt: skip


async def test_a_transfer_coding_other_than_chunked() -> None:
    head, rest = POST + HOST + b"Transfer-Encoding: ", b"\r\n\r\n" + CHUNKS + NEXT
    await refused(
        *((odd, head + odd + rest, (400, 501)) for odd in ODD_CODINGS),
        ("known", head + b"gzip, chunked" + rest, (501,)),
    )


REQUEST_LINES = {
    "http-0.9": (b"POST /v1/completions HTTP/0.9\r\n", 505),
    "http-1.2": (b"POST /v1/completions HTTP/1.2\r\n", 400),
    "http-2.0": (b"POST /v1/completions HTTP/2.0\r\n", 505),
    "http-3.0": (b"POST /v1/completions HTTP/3.0\r\n", 400),
    "no-version": (b"POST /v1/completions\r\n", 505),
    "lower-case": (b"POST /v1/completions http/1.1\r\n", 400),
    "version-junk": (b"POST /v1/completions HTTP/1.1x\r\n", 400),
    "version-11": (b"POST /v1/completions HTTP/11\r\n", 400),
    "preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "space-in-target": (b"POST /v1/comp letions HTTP/1.1\r\n", 400),
    "tabs": (b"POST\t/v1/completions\tHTTP/1.1\r\n", 400),
    "nul": (b"POST /v1/completions\x00 HTTP/1.1\r\n", 400),
    "cr": (b"POST /v1/completions\r HTTP/1.1\r\n", 400),
    "bare-lf": (b"POST /v1/completions HTTP/1.1\n", 400),
    "unknown-method": (b"PLEASE /v1/completions HTTP/1.1\r\n", 400),
    "lower-method": (b"post /v1/completions HTTP/1.1\r\n", 400),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n", 400),
    "no-target": (b"POST HTTP/1.1\r\n", 400),
    "at-host": (b"POST @evil/v1/completions HTTP/1.1\r\n", 400),
    "absolute": (b"POST http://x/v1/completions HTTP/1.1\r\n", 400),
    "absolute-other": (b"POST http://127.0.0.1:1/v1/completions HTTP/1.1\r\n", 400),
    "absolute-odd": (b"POST a://b HTTP/1.1\r\n", 400),
    "asterisk": (b"POST * HTTP/1.1\r\n", 400),
    "connect": (b"CONNECT x:443 HTTP/1.1\r\n", 405),
    "fragment": (b"POST /v1/completions#x HTTP/1.1\r\n", 400),
    "not-ascii": (b"POST /v1/completions?\xe9 HTTP/1.1\r\n", 400),
}


async def test_request_lines_that_are_refused() -> None:
    rest = HOST + LENGTH + b"\r\n" + BODY
    lines = REQUEST_LINES.items()
    await refused(*((name, line + rest, (status,)) for name, (line, status) in lines))


BAD_CHUNKS = {
    "size-junk": b"zz\r\n" + BODY + b"\r\n0\r\n\r\n",
    "size-minus": b"-1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "size-plus": b"+21\r\n" + BODY + b"\r\n0\r\n\r\n",
    "size-0x": b"0x21\r\n" + BODY + b"\r\n0\r\n\r\n",
    "size-space": b" 21\r\n" + BODY + b"\r\n0\r\n\r\n",
    "size-space-after": b"21 \r\n" + BODY + b"\r\n0\r\n\r\n",
    "size-overflow": b"10000000000000021\r\n" + BODY + b"\r\n0\r\n\r\n",
    "size-empty": b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "size-lf": b"21\n" + BODY + b"\r\n0\r\n\r\n",
    "size-cr": b"21\r" + BODY + b"\r\n0\r\n\r\n",
    "data-short": b"30\r\n" + BODY + b"\r\n0\r\n\r\n" + NEXT,
    "data-long": b"3\r\n" + BODY + b"\r\n0\r\n\r\n",
    "data-lf": b"21\r\n" + BODY + b"\n0\r\n\r\n",
    "data-no-end": b"21\r\n" + BODY + b"0\r\n\r\n",
    "last-lf": b"21\r\n" + BODY + b"\r\n0\n\n",
    "second-bad": chunk(BODY[:9]) + b"zz\r\n",
    "extension-cr": b"21;a\rb\r\n" + BODY + b"\r\n0\r\n\r\n",
    "extension-lf": b"21;a\nb\r\n" + BODY + b"\r\n0\r\n\r\n",
    "extension-nul": b"21;a\x00b\r\n" + BODY + b"\r\n0\r\n\r\n",
    "trailer-bad": chunk(BODY) + b"0\r\nbad trailer\r\n\r\n",
    "trailer-length": chunk(BODY) + b"0\r\nContent-Length: 9\r\n\r\n",
    "trailer-many": chunk(BODY) + b"0\r\n" + b"a: b\r\n" * 200 + b"\r\n",
}


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("name", BAD_CHUNKS)
async def test_bad_chunks_are_refused_at_once(name: str, segments: int) -> None:
    """At once also when the handler waits for the body already: no waiting for a timeout."""
    async with before_oracle() as (on, oracle):
        head = POST + HOST + CHUNKED + b"\r\n"
        began = asyncio.get_running_loop().time()
        parts = (head + BAD_CHUNKS[name],) if segments == 1 else (head, BAD_CHUNKS[name])
        answer = await ask(on, *parts, pause_s=0.5)
        took_s = asyncio.get_running_loop().time() - began
        assert answer.error["code"] in ("bad_http", "headers_too_large", "request_timeout")
        assert answer.closes
        assert not oracle.requests
        if name == "data-short":  # its last chunk may be on its way
            assert answer.status in (400, 408)
        else:
            assert answer.status in (400, 431)
            assert took_s < 5


GOOD_CHUNKS = {
    "plain": CHUNKS,
    "by-byte": b"".join(chunk(bytes([b])) for b in BODY) + b"0\r\n\r\n",
    "upper-hex": b"21\r\n" + BODY + b"\r\n000\r\n\r\n",
    "leading-zeros": b"000021\r\n" + BODY + b"\r\n0\r\n\r\n",
    "extension": b"21;name=value\r\n" + BODY + b"\r\n0;x\r\n\r\n",
    "trailer": chunk(BODY) + b"0\r\nX-Trailer: y\r\nHost: z\r\n\r\n",
}


@pytest.mark.parametrize("name", GOOD_CHUNKS)
async def test_good_chunks_are_framed_anew(name: str) -> None:
    async with before_oracle() as (on, oracle):
        answer = await ask(on, POST + HOST + CLOSE + CHUNKED + b"\r\n" + GOOD_CHUNKS[name])
        assert answer.status == 200
        (got,) = oracle.requests
        assert got.body == BODY
        assert got.headers["content-length"] == str(len(BODY))
        assert set(got.headers) == {"host", "accept-encoding", "content-length", "x-request-id"}


def smuggling() -> dict[str, bytes]:
    """Ways to spell Transfer-Encoding that some servers see and others do not."""
    odd = (0x01, 0x04, 0x08, 0x09, 0x0A, 0x0B, 0x0C, 0x0D, 0x1F, 0x20, 0x7F, 0xA0, 0xFF)
    found: dict[str, bytes] = {}
    for code in odd:
        c = bytes([code])
        for place, line in {
            "before-name": c + b"Transfer-Encoding: chunked",
            "in-name": b"Transfer" + c + b"Encoding: chunked",
            "after-name": b"Transfer-Encoding" + c + b": chunked",
            "before-value": b"Transfer-Encoding:" + c + b"chunked",
            "after-value": b"Transfer-Encoding: chunked" + c,
            "own-line": b"X: y\r\n" + c + b"\r\nTransfer-Encoding: chunked",
            "line-end": b"X: y" + c + b"Transfer-Encoding: chunked",
            "cr-line-end": b"X: y\r" + c + b"Transfer-Encoding: chunked",
        }.items():
            found[f"{place}-{code:02x}"] = line
    return found | {
        "case": b"tRANSFER-eNCODING: cHUNKED",
        "underscore": b"Transfer_Encoding: chunked",
        "escaped": b"Transfer%2dEncoding: chunked",
        "connection": b"Connection: Transfer-Encoding\r\nTransfer-Encoding: chunked",
        "connection-cl": b"Connection: Content-Length\r\nTransfer-Encoding: chunked",
        "content-encoding": b"Content-Encoding: chunked",
        "te": b"TE: chunked",
        "upgrade": b"Connection: Upgrade\r\nUpgrade: websocket\r\nTransfer-Encoding: chunked",
        "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAAA",
        "quoted": b'Transfer-Encoding: "chunked"',
        "utf-8-dash": "Transfer‐Encoding: chunked".encode(),
        "twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: cow",
        "twice-reversed": b"Transfer-Encoding: cow\r\nTransfer-Encoding: chunked",
        "empty-then": b"Transfer-Encoding:\r\nTransfer-Encoding: chunked",
        "no-space": b"Transfer-Encoding:chunked",
        "many-spaces": b"Transfer-Encoding:" + b" " * 50 + b"chunked",
    }


def shapes(line: bytes) -> dict[str, bytes]:
    """One spelling, where the two lengths lead to different ends of the request."""
    te = line + b"\r\n"
    inside = CHUNKS + NEXT
    whole = b"Content-Length: %d\r\n" % len(inside)
    part = b"Content-Length: %d\r\n" % len(CHUNKS[:4])
    return {
        "cl-te": POST + HOST + whole + te + b"\r\n" + inside,
        "te-cl": POST + HOST + te + part + b"\r\n" + inside,
        "te-only": POST + HOST + te + b"\r\n" + inside,
        "json-cl": POST + HOST + LENGTH + te + b"\r\n" + BODY + NEXT,
    }


@pytest.mark.parametrize("shape", ["cl-te", "te-cl", "te-only", "json-cl"])
async def test_smuggling(shape: str) -> None:
    """Every spelling: the backend and the client agree about what was a request."""
    async with before_oracle() as (on, oracle):
        for name, line in smuggling().items():
            answers = await judged(on, oracle, shapes(line)[shape])
            assert answers, name
            if shape in ("cl-te", "te-cl") and name in ("case", "no-space", "many-spaces"):
                assert [a.status for a in answers] == [400], name
            for request in oracle.requests:
                assert request.body in (BODY, b""), name  # never another end than ours


def test_the_list_is_long_enough() -> None:
    assert len(smuggling()) > 115


async def test_a_smuggled_request_stays_a_body() -> None:
    inner = b'{"prompt":"0\\r\\n\\r\\nGET /v1/models HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"}'
    raw_inner = b'{"prompt": "x"}\r\n\r\n'

    async with before_oracle() as (on, oracle):
        for body in (inner, raw_inner):
            head = POST + HOST + CLOSE + CHUNKED + b"\r\n"
            assert (await ask(on, head + chunk(body) + b"0\r\n\r\n")).status == 200
            assert oracle.requests[-1].body == body
        # The measured hole: what a chunk holds, taken for the end of the chunks.
        smuggled = b"0\r\n\r\n" + NEXT
        answer = await ask(on, POST + HOST + CLOSE + CHUNKED + b"\r\n" + chunk(smuggled) + CHUNKS)
        assert answer.error["code"] == "invalid_json"
        assert len(oracle.requests) == 2


class TestPipelining:
    async def test_answers_come_in_order(self) -> None:
        async with before_oracle() as (on, oracle):
            ids, data = [b"first", b"second", b"third"], b""
            for id_ in ids:  # the second one streams
                body = b'{"prompt":"x","stream":true}' if id_ == b"second" else BODY
                data += POST + HOST + b"Content-Length: %d\r\n" % len(body)
                data += b"x-request-id: " + id_ + b"\r\n\r\n" + body
            answers = await judged(on, oracle, data + LAST)
            assert [a.status for a in answers] == [200] * 4
            assert [a.headers["x-request-id"].encode() for a in answers][:3] == ids
            assert [a.body.endswith(DONE) for a in answers] == [False, True, False, False]

    async def test_forty_at_once(self) -> None:
        async with before_oracle() as (on, oracle):
            answers = await judged(on, oracle, GOOD * 40 + LAST)
            assert [a.status for a in answers] == [200] * 41

    @pytest.mark.parametrize("junk", [b"junk\r\n\r\n", b"\x00", b"0\r\n\r\n", b"}" + GOOD])
    @pytest.mark.parametrize("together", [True, False])
    async def test_junk_after_a_request(self, junk: bytes, together: bool) -> None:
        """In one segment the parser drops both; else the request is answered, then the junk."""
        async with before_oracle() as (on, oracle):
            parts = (GOOD + junk,) if together else (GOOD, junk)
            answers = await judged(on, oracle, *parts)
            assert [a.status for a in answers] == ([400] if together else [200, 400])
            assert answers[-1].closes
            assert len(oracle.requests) == len(answers) - 1

    async def test_nothing_is_answered_after_the_last(self) -> None:
        async with before_oracle() as (on, oracle):
            (answer,) = await judged(on, oracle, LAST, GOOD)
            assert answer.status == 200
            assert len(oracle.requests) == 1


@st.composite
def mutants(draw: st.DrawFn) -> list[bytes]:
    return mutant(lambda n: draw(st.integers(0, n - 1)))


@settings(
    max_examples=max(1, MUTANTS // A_TIME),
    derandomize=MUTANTS <= 400,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(mutants(), min_size=A_TIME, max_size=A_TIME))
def test_mutants(batch: list[list[bytes]]) -> None:
    """Goal 16: whatever the damage, no dirty and no extra request arrives at the backend."""

    async def main() -> None:
        async with before_oracle() as (on, oracle):
            for parts in batch:
                await judged(on, oracle, *parts)

    run(main())
