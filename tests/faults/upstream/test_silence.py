"""A client that waits for its first token hears something, and another server may still answer."""

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest
from fakes.faulty_backends import in_turn, late, resets, sends, streams
from stages.proxy_stage import (
    DONE,
    EVENT,
    ONE_SLOT,
    SHARED_LOOP,
    STREAM_HEAD,
    STREAMED,
    USAGE,
    Call,
    RawBackend,
    Serve,
    Stage,
    answer,
    chunk,
    now,
    on_stage,
    settle,
    silent,
    stage,
    stream,
    until,
)

from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import load_config
from forebay.traces.ground.sse import MAX_EVENT_BYTES

COMMENT = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
GOOD = EVENT + EVENT + USAGE + DONE
OFF: dict[str, Any] = {"timeouts": {"keep_alive": "0s"}}
OFTEN: dict[str, Any] = {"timeouts": {"keep_alive": "2s"}}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": STREAMED,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hello", "stream": True},
    "/v1/messages": CHAT | {"max_tokens": 3},
}
CREATED = b'event: response.created\ndata: {"type":"response.created","response":{}}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"type":"x","delta":" yes"}\n\n'
COMPLETED = b'event: response.completed\ndata: {"type":"response.completed","response":{}}\n\n'


async def heard(
    on: Stage, path: str = "/v1/completions", body: Any = None
) -> tuple[int, bytes, float]:
    """Return status, body, and the longest time in seconds without a byte."""
    last, longest, got = now(), 0.0, b""
    async with on.post(body or ASKED[path], path) as response:
        longest, last = now() - last, now()
        async for part in response.content.iter_any():
            longest, last = max(longest, now() - last), now()
            got += part
        return response.status, got, longest


def error_in(body: bytes, before: bytes, typed: bool = False) -> dict[str, Any]:
    """The error of the only event behind heartbeats."""
    rest = body
    while rest.startswith(before):
        rest = rest.removeprefix(before)
    assert rest != body
    rest = rest.removeprefix(b"event: error\n" if typed else b"")
    assert rest.startswith(b"data: ")
    assert rest.endswith(b"\n\n")
    said = orjson.loads(rest[6:])
    assert said.get("type") == ("error" if typed else None)
    return dict(said["error"])


def after(seconds: float, said: bytes) -> Serve:
    """Begin a stream at once, and say something in it after so many seconds."""

    async def serve(call: Call) -> None:
        await call.send(STREAM_HEAD)
        await asyncio.sleep(seconds)
        await call.send(chunk(said) + b"0\r\n\r\n")

    return serve


async def comments_then_dies(call: Call) -> None:
    await call.send(STREAM_HEAD + chunk(COMMENT))
    await asyncio.sleep(3)
    call.reset()


class TestOfTheServer:
    @pytest.mark.parametrize("passed_on", [True, False])
    async def test_comments_are_passed_on_as_they_come_or_kept(self, passed_on: bool) -> None:
        async with on_stage(
            streams(*[COMMENT] * 6, GOOD, every_s=1), **({} if passed_on else OFF)
        ) as (on, _):
            status, body, longest = await heard(on)
            assert (status, body) == (200, COMMENT * 6 + GOOD)
            assert longest <= 1.5 if passed_on else longest > 5

    async def test_pings_are_passed_on_and_openings_kept(self) -> None:
        opened = CREATED + COMMENT
        end = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
        start = b'event: message_start\ndata: {"type":"message_start"}\n\n'
        pings = streams(PING, start + end, every_s=5)
        opens = streams(opened, DELTA + COMPLETED, every_s=5)
        async with on_stage(in_turn(pings, opens)) as (on, _):
            for path, heartbeat, whole in [
                ("/v1/messages", PING, PING + start + end),
                ("/v1/responses", COMMENT, COMMENT + CREATED + DELTA + COMPLETED),
            ]:
                async with on.post(ASKED[path], path) as response:
                    began = now()
                    assert await response.content.readany() == heartbeat
                    assert now() - began < 1
                    rest = await response.read()
                    assert heartbeat + rest == whole

    async def test_a_backend_that_dies_behind_heartbeats_is_replaced(self) -> None:
        async with on_stage(comments_then_dies, stream) as (on, backends):
            assert (await heard(on))[:2] == (200, COMMENT + GOOD)
            assert [len(b.calls) for b in backends] == [1, 1]

    async def test_comments_are_no_output(self) -> None:
        for_long = streams(*[COMMENT] * 60, every_s=1)
        async with on_stage(for_long, timeouts={"first_token": "10s"}) as (on, _):
            began = now()
            status, body, longest = await heard(on)
            assert status == 200
            assert error_in(body, COMMENT)["code"] == "upstream_timeout"
            assert now() - began < 11
            assert longest <= 1.5
            counted = 'forebay_upstream_errors_total{backend="b0",kind="only_heartbeats"} 1.0'
            assert counted in on.proxy.metrics.text().decode()

    async def test_a_client_that_does_not_read_gets_few_of_them(self) -> None:
        """What it leaves does not fill the memory, nor count as the server's failure."""
        many = b": " + b"x" * (1 << 20) + b"\n\n"
        async with on_stage(streams(*[many] * 3, GOOD, every_s=1)) as (on, _):
            assert 3 * len(many) < MAX_EVENT_BYTES
            async with on.post(STREAMED) as response:
                await asyncio.sleep(5)
                assert (await response.read()).endswith(GOOD)


class TestOfForebay:
    @pytest.mark.parametrize("path", ASKED)
    async def test_a_silent_server(self, path: str) -> None:
        beat = PING if path == "/v1/messages" else COMMENT
        ends = {
            "/v1/responses": DELTA + COMPLETED,
            "/v1/messages": b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
        }
        end = ends.get(path, GOOD)

        async with on_stage(after(40, end)) as (on, _):
            status, body, longest = await heard(on, path)
            assert (status, body) == (200, beat * 2 + end)
            assert longest <= 16

    async def test_waiting_in_the_queue(self) -> None:
        async with on_stage(after(9, GOOD), **ONE_SLOT, **OFTEN) as (on, backends):
            first = asyncio.create_task(heard(on))
            await until(lambda: backends[0].open == 1)
            status, body, longest = await heard(on)
            assert status == 200
            assert body == COMMENT * body.count(COMMENT) + GOOD
            assert body.count(COMMENT) >= 6
            assert longest <= 3
            await first

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
    async def test_a_rejection_behind_them_is_an_error_event(self, path: str) -> None:
        typed = path == "/v1/messages"

        buckets = [{"name": "chat", "up_to": 5000, "max_queue": 2, "max_wait": "9s"}]
        async with on_stage(silent, **(ONE_SLOT | {"buckets": buckets}), **OFTEN) as (on, backends):
            holder = asyncio.create_task(heard(on))
            await until(lambda: backends[0].open == 1)
            status, body, _ = await heard(on, path)
            assert status == 200
            error = error_in(body, PING if typed else COMMENT, typed)
            assert error["code"] == "deadline_unattainable"
            holder.cancel()

    @pytest.mark.parametrize(
        ("said", "error"),
        [
            (answer(400, b'{"error":{"message":"no","code":1}}'), {"message": "no", "code": 1}),
            (answer(400, b'{"message":"no"}'), {"message": "no"}),
            (answer(400, b"oops"), None),
            (answer(400, b'{"error":{"message":"' + b"x" * 300_000 + b'"}}'), None),
        ],
        ids=["as it is", "of old", "no JSON", "too large"],
    )
    async def test_a_servers_error_behind_them_is_an_event(self, said: bytes, error: Any) -> None:
        async with on_stage(late(5, sends(said, end="keep")), **OFTEN) as (on, _):
            status, body, _ = await heard(on)
            got = error_in(body, COMMENT)
            assert status == 200
            assert got["code"] == "upstream_error" if error is None else got == error

    @pytest.mark.parametrize("comment", [b"", COMMENT])
    async def test_the_client_leaves(self, comment: bytes) -> None:
        serve = sends(STREAM_HEAD + (chunk(comment) if comment else b""))

        async with on_stage(serve, **OFTEN) as (on, backends):
            async with on.post(STREAMED) as response:
                assert await response.content.readany() == COMMENT
                response.close()
            await settle()
            await asyncio.sleep(5)
            assert backends[0].open == 0
            assert not on.proxy.app._watchdog.beating

    async def test_a_byte_order_mark_behind_them_is_left_out(self) -> None:
        async with on_stage(after(5, b"\xef\xbb\xbf" + GOOD), **OFTEN) as (on, _):
            assert (await heard(on))[1] == COMMENT * 2 + GOOD

    async def test_a_drain_behind_them(self) -> None:
        async with on_stage(silent, **OFTEN) as (on, _):
            asking = asyncio.create_task(heard(on))
            await asyncio.sleep(5)
            on.proxy.app.end_all()
            assert error_in((await asking)[1], COMMENT)["code"] == "draining"

    async def test_a_reload_behind_them(self) -> None:
        """The request keeps its heartbeats, and goes to the server that has come."""

        old, new = RawBackend(late(9, resets)), RawBackend(stream)
        loaded: list[Config] = []
        async with (
            old.running(),
            new.running(),
            stage([old.url], load=lambda: loaded[0], **OFTEN) as on,
        ):
            asking = asyncio.create_task(heard(on))
            await asyncio.sleep(3)
            both = [{"name": "b0", "url": old.url}, {"name": "b1", "url": new.url}]
            listen = {"port": 0, "admin_port": 0}
            keys = {"listen": listen, "backends": both, "debug_headers": True, **OFF}
            loaded.append(load_config(None, keys | {"limits": SHARED_LOOP}, {}))
            await on.proxy.reloader.reload()
            assert (await asking)[:2] == (200, COMMENT * 4 + GOOD)
            assert len(new.calls) == 1
            assert (await heard(on))[1] == GOOD
            await settle()
            on.assert_nothing_held()

    async def test_http_1_0(self) -> None:
        async with on_stage(after(5, GOOD), **OFTEN) as (on, _):
            client = aiohttp.ClientSession(version=aiohttp.HttpVersion10)
            async with client, client.post(on.url + "/v1/completions", json=STREAMED) as response:
                assert await response.read() == COMMENT * 2 + GOOD


class TestOff:
    """Status and bytes are those of the server, after its first event."""

    async def test_a_failure_has_its_status(self) -> None:
        async with on_stage(comments_then_dies, **OFF) as (on, _):
            assert (await heard(on))[0] == 502
