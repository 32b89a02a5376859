"""Too much of anything: bytes of bodies and heads, header fields, connections."""

import asyncio
import os
import resource
from contextlib import AsyncExitStack

import pytest
from stages.proxy_stage import chunk, on_stage, settle, silent
from stages.raw_client import (
    BODY,
    CLOSE,
    GOOD,
    HOST,
    LENGTH,
    POST,
    ask,
    before_oracle,
    connected,
    post,
    raw,
    responses,
)

from forebay.proxy.config.schema import Config
from forebay.proxy.http1.server.client_body import AHEAD_BYTES

CHUNKED = b"Transfer-Encoding: chunked\r\n"
STRANGER = {"local_addr": ("127.0.0.2", 0)}
ANY_LENGTH = [{"name": "any", "up_to": 100_000_000}]


class TestBodies:
    @pytest.mark.parametrize(
        "data",
        [
            b"Content-Length: 4097\r\n\r\n",
            b"Expect: 100-continue\r\nContent-Length: 4097\r\n\r\n",
            CHUNKED + b"\r\n" + chunk(b"x" * 1024) * 5,
        ],
        ids=["stated", "expect", "chunks"],
    )
    async def test_too_large_is_said_before_it_is_read(self, data: bytes) -> None:
        async with before_oracle(limits={"body": 4096}) as (on, _):
            answer = await ask(on, POST + HOST + data)
            assert (answer.status, answer.error["code"]) == (413, "request_too_large")
            assert answer.closes

    @pytest.mark.parametrize("size", [1 << 20, 8 << 20])
    @pytest.mark.parametrize("chunked", [False, True])
    async def test_large_prompts_are_taken(self, size: int, chunked: bool) -> None:
        body = b'{"max_tokens":1,"prompt":"' + b"x" * size + b'"}'
        if chunked:
            parts = [chunk(body[i : i + 65536]) for i in range(0, len(body), 65536)]
            data = POST + HOST + CLOSE + CHUNKED + b"\r\n" + b"".join(parts) + b"0\r\n\r\n"
        else:
            data = post(body=body)

        async with before_oracle(buckets=ANY_LENGTH) as (on, oracle):
            assert (await ask(on, data)).status == 200
            assert oracle.requests[0].body == body

    @pytest.mark.parametrize("stated", [True, False])
    async def test_room_is_held_before_bytes_are_read(self, stated: bool) -> None:
        async with before_oracle(limits={"queue_bytes": 1125}) as (on, _):
            async with connected(on) as (_, writer):
                if stated:  # not one byte of it has come
                    writer.write(POST + HOST + b"Content-Length: 900\r\n\r\n")
                else:
                    writer.write(POST + HOST + CHUNKED + b"\r\n" + chunk(b"x" * 900))
                await settle()
                assert on.proxy.app._budget.held == 900
                answer = await ask(on, POST + HOST + b"Content-Length: 101\r\n\r\n")
                assert (answer.status, answer.error["code"]) == (429, "queue_full")
                assert answer.headers["retry-after"] == "1"
                assert answer.closes
                grown = POST + HOST + CHUNKED + b"\r\n" + chunk(b"x" * 50) + chunk(b"x" * 51)
                assert (await ask(on, grown)).status == 429
                assert (await ask(on, post())).status == 200
                assert on.proxy.app._budget.held == 900
            await settle()
            assert on.proxy.app._budget.held == 0

    async def test_a_large_stated_length_without_a_body_keeps_nobody_out(self) -> None:
        async with (
            before_oracle(limits={"queue_bytes": "4MiB"}) as (on, _),
            AsyncExitStack() as stack,
        ):
            for _ in range(8):
                _, writer = await stack.enter_async_context(connected(on))
                writer.write(POST + HOST + b"Content-Length: 1000000\r\n\r\n")
            await settle()
            assert on.proxy.app._budget.held == 8 * AHEAD_BYTES
            assert (await ask(on, post())).status == 200

    async def test_a_body_for_which_there_is_no_room_any_more(self) -> None:
        """Two bodies together exceed the memory limit: one is rejected, the other served."""

        def body(size: int) -> bytes:
            return b'{"max_tokens":1,"prompt":"' + b"x" * (size - 28) + b'"}'

        def head(size: int) -> bytes:
            return POST + HOST + CLOSE + b"Content-Length: %d\r\n\r\n" % size

        async with (
            before_oracle(limits={"queue_bytes": 300_000}, buckets=ANY_LENGTH) as (on, _),
            connected(on) as (one, to_one),
            connected(on) as (other, to_other),
        ):
            to_one.write(head(150_000))
            to_other.write(head(130_000) + body(130_000)[:70_000])
            await settle()
            assert on.proxy.app._budget.held == AHEAD_BYTES + 130_000
            to_one.write(body(150_000)[:100_000])
            (refused,) = responses(await one.read())
            assert (refused.status, refused.error["code"]) == (429, "queue_full")
            assert refused.closes
            to_other.write(body(130_000)[70_000:])
            (served,) = responses(await other.read())
            assert served.status == 200

    async def test_no_room_has_the_status_of_any_refusal(self) -> None:
        async with before_oracle(limits={"queue_bytes": 1000}, reject_status=503) as (on, _):
            answer = await ask(on, POST + HOST + b"Content-Length: 1001\r\n\r\n")
            assert (answer.status, answer.error["code"]) == (503, "queue_full")
            on.proxy.app.reconfigure(Config(reject_status=429))
            on.proxy.app._budget.limit = 1000
            assert (await ask(on, POST + HOST + b"Content-Length: 1001\r\n\r\n")).status == 429

    async def test_room_is_held_until_the_answer(self) -> None:
        limits = {"queue_bytes": 40}
        async with (
            on_stage(silent, limits=limits) as (on, _),
            connected(on) as (_, writer),
        ):
            writer.write(GOOD)
            await settle()
            assert on.proxy.app._budget.held == len(BODY)
            assert (await ask(on, GOOD)).status == 429


class TestExpect:
    HEAD = POST + HOST + CLOSE + b"Expect: 100-continue\r\n"

    async def test_continue_comes_when_only_the_bytes_are_wanting(self) -> None:
        async with before_oracle() as (on, _):
            got = await raw(on, self.HEAD + LENGTH + b"\r\n", BODY, pause_s=1)
            assert [r.status for r in responses(got)] == [100, 200]
            assert got.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")

    @pytest.mark.parametrize(
        ("path", "header", "status"),
        [
            (b"/v1/completions", b"Content-Length: 4097", 413),
            (b"/v1/completions", b"Content-Length: 101", 429),
            (b"/v1/completions", b"Content-Encoding: compress\r\nContent-Length: 5", 415),
            (b"/sleep", b"Content-Length: 5", 404),
            (b"/health", b"Content-Length: 5", 405),
        ],
    )
    async def test_a_refused_body_is_not_asked_for(
        self, path: bytes, header: bytes, status: int
    ) -> None:
        """And the connection ends: the client may send its next request instead of this body."""
        async with before_oracle(limits={"body": 4096, "queue_bytes": 100}) as (on, oracle):
            head = self.HEAD.replace(b"/v1/completions", path).replace(CLOSE, b"")
            answer = await ask(on, head + header + b"\r\n\r\n", GOOD, pause_s=0.1)
            assert answer.status == status
            assert answer.error
            assert answer.closes
            assert not oracle.requests

    async def test_anything_else(self) -> None:
        async with before_oracle() as (on, _):
            for path in (b"/v1/completions", b"/v1/models", b"/health"):
                answer = await ask(on, post(b"Expect: miracles", path=path))
                assert answer.status == 417
                assert answer.error
                assert answer.closes

    async def test_http_1_0_knows_no_continue(self) -> None:
        async with before_oracle() as (on, _):
            answer = await ask(on, post(b"Expect: 100-continue").replace(b"1.1", b"1.0"))
            assert answer.status == 200


class TestHeads:
    @pytest.mark.parametrize(
        "headers",
        [
            b"X: " + b"y" * 20_000 + b"\r\n",
            b"X" * 20_000 + b": y\r\n",
            b"X: " + b"y" * 20_000,  # and it does not end
            b"".join(b"X%d: %s\r\n" % (i, b"y" * 1000) for i in range(17)),
            b"".join(b"X%d: y\r\n" % i for i in range(129)),
            b"".join(b"X%d: %s\r\n" % (i, b"y" * 900) for i in range(40)),  # never complete
        ],
        ids=["value", "name", "endless", "together", "number", "incomplete"],
    )
    async def test_too_much_of_them(self, headers: bytes) -> None:
        async with before_oracle() as (on, oracle):
            end = b"" if headers.endswith(b"y") or len(headers) > 36_000 else b"\r\n" + BODY
            parts = [headers[i : i + 1000] for i in range(0, len(headers), 1000)]
            answer = await ask(on, POST + HOST + LENGTH, *parts, end)
            assert (answer.status, answer.error["code"]) == (431, "headers_too_large")
            assert answer.closes
            assert not oracle.requests

    async def test_as_many_as_allowed(self) -> None:
        async with before_oracle() as (on, _):
            headers = [b"X%d: %s" % (i, b"y" * 120) for i in range(115)]
            assert (await ask(on, post(*headers))).status == 200

    async def test_the_bound_is_configured(self) -> None:
        async with before_oracle(limits={"header": "1KiB"}) as (on, _):
            assert (await ask(on, post(b"X: " + b"y" * 1000))).status == 431
            assert (await ask(on, post(b"X: " + b"y" * 500))).status == 200

    @pytest.mark.parametrize("size", [8_200, 70_000])
    async def test_a_long_target(self, size: int) -> None:
        async with before_oracle() as (on, _):
            target = b"/v1/models?" + b"x" * size
            answer = await ask(on, b"GET " + target + b" HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n")
            assert (answer.status, answer.error["code"]) == (414, "uri_too_long")
            assert answer.closes


async def ended(reader: asyncio.StreamReader) -> bool:
    """Whether the proxy has closed; drops what it has sent."""
    try:
        async with asyncio.timeout(0.01):
            await reader.read()
    except TimeoutError:
        return False
    return True


class TestConnections:
    async def test_a_connection_too_many_is_told_so(self) -> None:
        async with before_oracle(limits={"connections": 2}) as (on, _):
            async with connected(on) as (_, one), connected(on) as (_, two):
                one.write(POST + HOST + LENGTH + b"\r\n{")
                two.write(POST + HOST + LENGTH + b"\r\n{")
                await settle()
                answer = await ask(on, b"")
                assert (answer.status, answer.error["code"]) == (503, "too_many_connections")
                assert answer.closes
                assert answer.headers["retry-after"] == "1"
            await settle()
            assert (await ask(on, post())).status == 200

    @pytest.mark.parametrize("sent", [b"", b"G", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
    async def test_idle_ones_of_a_stranger_keep_nobody_out(self, sent: bytes) -> None:
        """The stranger's own longest idle connection makes room, and nobody else's."""
        async with before_oracle(
            limits={"connections": 4}, timeouts={"client_headers": "1000s"}
        ) as (on, _):
            strangers: list[asyncio.StreamReader] = []
            async with connected(on) as (good_reader, good), AsyncExitStack() as stack:
                for _ in range(20):
                    reader, writer = await stack.enter_async_context(connected(on, **STRANGER))
                    writer.write(sent)
                    await settle()
                    strangers.append(reader)
                    good.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert b"200 OK" in await good_reader.readuntil(b"\r\n\r\n")
                    assert (await ask(on, post())).status == 200
                gone = [await ended(reader) for reader in strangers]
                # Three fit beside the good client's connection; its second, in `ask`, takes one.
                assert gone == [True] * 18 + [False] * 2
                assert on.proxy.listeners[0][1].open_connections == 3

    async def test_a_connection_that_asks_is_never_closed_for_another(self) -> None:
        async with (
            before_oracle(limits={"connections": 4}) as (on, _),
            connected(on) as (_, idle),
            AsyncExitStack() as stack,
        ):
            for at in range(4):
                reader, writer = await stack.enter_async_context(connected(on, **STRANGER))
                writer.write(POST + HOST + LENGTH + b"\r\n{")
                await settle()
                # Nobody who has more connections takes one from somebody who has fewer.
                assert await ended(reader) == (at == 3)
            assert not idle.is_closing()
            assert on.proxy.listeners[0][1].open_connections == 4

    async def test_the_longest_idle_goes_first_and_all_are_forgotten(self) -> None:
        async with before_oracle(limits={"connections": 2}) as (on, _):
            health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
            async with connected(on) as (first, one), connected(on) as (second, two):
                for reader, writer in ((second, two), (first, one)):
                    writer.write(health)
                    await reader.readuntil(b"\r\n\r\n")
                assert (await ask(on, post())).status == 200
                await settle()
                assert (await ended(first), await ended(second)) == (False, True)
            await settle()
            idle = on.proxy.listeners[0][1].idle
            assert not idle._open
            assert not idle._idle

    def test_auto_is_half_of_the_descriptors(self) -> None:
        assert Config().max_connections() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] / 2

    async def test_none_is_left_open(self) -> None:
        """Two hundred clients that misbehave in turn: the descriptors come back."""
        async with before_oracle() as (on, oracle):

            def descriptors() -> int:
                """Less both ends of those that are kept for the backend."""
                return len(os.listdir("/proc/self/fd")) - 2 * oracle.connections

            before = descriptors()
            bad = (b"", b"P", b"junk\r\n\r\n", POST + HOST + LENGTH + b"\r\n{", GOOD)
            await asyncio.gather(*(raw(on, bad[i % len(bad)]) for i in range(200)))
            await settle()
            assert descriptors() == before
