"""Everything a backend does wrong, over real sockets (docs/reference/faults.md, in its order)."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
import pytest
from fakes.faulty_backends import (
    ABORT,
    answers,
    busy,
    cuts,
    error_event,
    fails,
    faults,
    in_turn,
    late,
    malformed,
    malformed_whole,
    resets,
    sends,
    streams,
)
from stages.proxy_stage import (
    DONE,
    EVENT,
    ONE_SLOT,
    STREAM_HEAD,
    STREAMED,
    USAGE,
    WHOLE,
    Call,
    RawBackend,
    Serve,
    Stage,
    answer,
    by_request,
    chunk,
    cut_off,
    error_of,
    now,
    on_stage,
    settle,
    silent,
    stage,
    stream,
    until,
    whole,
)

from forebay.proxy.http1.client.backend_errors import ConnectFault
from forebay.proxy.http1.client.client import Origin, read_all
from forebay.proxy.http1.client.connection import UpstreamResponse
from forebay.proxy.relay.timeouts import StalledUpstream
from forebay.traces.ground.sse import MAX_EVENT_BYTES

GOOD = EVENT + EVENT + USAGE + DONE
AHEAD: dict[str, Any] = {"admission": {"dispatch_ahead": "60s"}}


async def ask(on: Stage, body: Any = STREAMED, path: str = "/v1/completions") -> tuple[int, bytes]:
    async with on.post(body, path) as response:
        return response.status, await response.read()


def at_once(
    on: Stage, count: int, body: Any = STREAMED, path: str = "/v1/completions"
) -> "list[asyncio.Task[tuple[int, bytes]]]":
    return [asyncio.create_task(ask(on, body, path)) for _ in range(count)]


async def all_at_the_first(
    on: Stage, backends: list[RawBackend], count: int, path: str = "/v1/completions"
) -> "list[asyncio.Task[tuple[int, bytes]]]":
    """Put `count` requests in flight at the first backend. Then the second is well again."""
    first, second = backends
    second.healthy = False
    await asyncio.sleep(3)
    tasks = at_once(on, count, path=path)
    await asyncio.sleep(0.1)
    assert first.open == count
    second.healthy = True
    await asyncio.sleep(2)
    return tasks


@asynccontextmanager
async def with_dead(dead: int, alive: int) -> AsyncIterator[Stage]:
    """A proxy of which the first `dead` backends were up and now refuse connections."""
    async with AsyncExitStack() as stack:
        gone, living = AsyncExitStack(), [RawBackend() for _ in range(alive)]
        dying = [RawBackend() for _ in range(dead)]
        for backend in dying:
            await gone.enter_async_context(backend.running())
        for backend in living:
            await stack.enter_async_context(backend.running())
        on = await stack.enter_async_context(stage([b.url for b in dying + living]))
        await gone.aclose()
        yield on
        await settle()
        on.assert_nothing_held()


class TestRefused:
    async def test_another_answers_at_once_and_nobody_sees_it(self) -> None:
        """Requests that never reached a backend count neither as attempts nor as retries."""
        async with with_dead(dead=2, alive=1) as on:
            began = now()
            answers = await asyncio.gather(*at_once(on, 40))
            assert {status for status, _ in answers} == {200}
            assert now() - began < 1
            assert any("is down (refuses connections)" in line for line in on.said)

    async def test_all_refuse(self) -> None:
        async with with_dead(dead=2, alive=0) as on:
            began = now()
            for _ in range(5):
                async with on.post(STREAMED) as response:
                    assert response.status == 503
                    assert int(response.headers["retry-after"]) >= 1
                    assert (await error_of(response))["code"] == "no_backend_available"
            assert now() - began < 1

    async def test_a_backend_is_used_again_within_two_seconds_of_coming_back(self) -> None:
        async with AsyncExitStack() as stack:
            backend = RawBackend()
            async with backend.running():
                port = int(backend.url.rsplit(":", 1)[1])
                on = await stack.enter_async_context(stage([backend.url]))
            assert (await ask(on))[0] == 503
            await asyncio.sleep(20)
            await stack.enter_async_context(backend.running(port))
            await asyncio.sleep(2)
            assert await ask(on) == (200, GOOD)


class TestHangs:
    """The backend accepts connections and sends nothing, not even for /health."""

    async def test_requests_without_a_first_byte_go_elsewhere(self) -> None:
        """Few at a time: the share of retries holds, and all get their answer."""
        at_b1, most = 0, 0

        async def slowly(call: Call) -> None:
            nonlocal at_b1, most
            at_b1 += 1
            most = max(most, at_b1)
            await asyncio.sleep(0.2)
            at_b1 -= 1
            await stream(call)

        async with on_stage(silent, slowly, **AHEAD) as (on, backends):
            tasks = await all_at_the_first(on, backends, 8)
            backends[0].healthy = None
            began = now()
            assert await asyncio.gather(*tasks) == [(200, GOOD)] * 8
            assert now() - began < 12
            assert most == 3
            await settle()
            assert backends[0].open == 0

    async def test_a_request_that_was_retried_already_is_in_nobodys_way(self) -> None:
        """A request that was retried once has to stay; requests behind it go elsewhere."""
        begun = asyncio.Event()

        async with on_stage(
            late(begun, resets),
            silent,
            stream,
            **AHEAD,
            timeouts={"first_token": "60s", "keep_alive": "0s"},
        ) as (on, backends):
            first, hung, other = backends
            up = {name: link for name, link in on.proxy.backends.links.items()}
            hung.healthy = other.healthy = False
            await until(lambda: not (up["b1"].up or up["b2"].up))
            (spent,) = at_once(on, 1)
            await until(lambda: first.open == 1)
            hung.healthy = True
            await until(lambda: up["b1"].up)
            begun.set()
            await until(lambda: hung.open == 1)
            first.healthy = False
            await until(lambda: not up["b0"].up)
            tasks = at_once(on, 3)
            await until(lambda: hung.open == 4)
            other.healthy = True
            await until(lambda: up["b2"].up)
            hung.healthy = None
            assert await asyncio.gather(*tasks) == [(200, GOOD)] * 3
            assert not spent.done()
            assert (await spent)[0] == 504

    async def test_with_nobody_else_it_is_a_timeout(self) -> None:
        async with on_stage(silent, timeouts={"first_token": "10s"}) as (on, backends):
            (task,) = at_once(on, 1)
            await asyncio.sleep(0.1)
            backends[0].healthy = None
            status, body = await task
            assert (status, orjson.loads(body)["error"]["code"]) == (504, "upstream_timeout")
            assert (await ask(on))[0] == 503  # by now it is known
            await settle()
            assert backends[0].open == 0

    async def test_a_late_health_of_one_that_answers_is_no_hang(self) -> None:
        async with on_stage(streams(*[EVENT] * 20, DONE, every_s=0.5)) as (on, backends):
            (task,) = at_once(on, 1)
            await asyncio.sleep(0.1)
            backends[0].healthy = None
            assert (await task)[0] == 200
            assert not any("is down" in line for line in on.said)

    async def test_a_backend_that_never_connects(self) -> None:
        """The backend's accept queue is full, or packets are lost: the connect time-out."""
        async with on_stage(stream, stream) as (on, _):
            real = on.proxy.backends.open

            async def opened(method: str, link: Any, *rest: Any) -> UpstreamResponse:
                if link.name == "b0":
                    await asyncio.sleep(2)
                    raise ConnectFault
                return await real(method, link, *rest)

            on.proxy.backends.open = opened  # type: ignore[method-assign,assignment]
            for _ in range(4):
                assert await ask(on) == (200, GOOD)


class TestLost:
    async def test_all_in_flight_on_one_that_dies_are_answered(self) -> None:
        """Killed with many in prefill: the share of retries is not for these."""
        dead = asyncio.Event()

        async with on_stage(late(dead, resets), stream, **AHEAD) as (on, backends):
            tasks = at_once(on, 40)
            await asyncio.sleep(0.2)
            assert backends[0].open > 5
            dead.set()
            assert {status for status, _ in await asyncio.gather(*tasks)} == {200}

    @pytest.mark.parametrize("body", [STREAMED, {"prompt": "x"}], ids=["stream", "whole"])
    async def test_the_race_with_a_kept_connection(self, body: dict[str, Any]) -> None:
        """The only backend closes each connection on its second request."""
        seen: set[asyncio.StreamWriter] = set()

        async def once(call: Call) -> None:
            if call.writer in seen:
                call.reset()
            else:
                seen.add(call.writer)
                await by_request(call)

        async with on_stage(once) as (on, backends):
            for _ in range(6):
                assert (await ask(on, body))[0] == 200
            assert len(backends[0].calls) > 6  # it did happen

    async def test_a_poisonous_request_is_not_passed_around(self) -> None:
        dies = late(2, resets)

        async with on_stage(dies, dies, dies) as (on, backends):
            assert (await ask(on))[0] == 502
            assert sum(len(b.calls) for b in backends) == 2


class TestFull:
    @pytest.mark.parametrize("how", ["busy", "busy_in_stream"])
    async def test_a_full_backend_is_left_alone_for_a_moment_and_never_called_dead(
        self, how: str
    ) -> None:
        async with on_stage(faults()[how], stream) as (on, backends):
            for _ in range(6):
                assert await ask(on) == (200, GOOD)
            assert len(backends[0].calls) == 1
            for _ in range(12):
                await asyncio.sleep(6)
                assert await ask(on) == (200, GOOD)
            assert len(backends[0].calls) > 6
            assert not any("is down" in line for line in on.said)

    async def test_other_paths_leave_it_alone_too(self) -> None:
        async with on_stage(busy, embeds) as (on, backends):
            assert await ask_embeddings(on) == await ask_embeddings(on) == 200
            asked = len(backends[0].calls)
            assert asked in (1, 2)  # it was asked first, or second; then the other one answered
            for _ in range(4):
                assert await ask_embeddings(on) == 200
            assert len(backends[0].calls) == asked

    async def test_newcomers_wait_for_the_only_one(self) -> None:
        async with on_stage(in_turn(busy, stream, stream)) as (on, _):
            async with on.post(STREAMED) as response:
                assert response.status == 503
                assert await response.read() == b'{"error":"busy"}'
                assert response.headers["retry-after"] == "1"  # it gave none
            assert await asyncio.gather(*at_once(on, 2)) == [(200, GOOD)] * 2


class TestServerErrors:
    async def test_healthy_but_failing_is_put_out_and_tried_again(self) -> None:
        """vLLM with --shutdown-timeout: /health is 200 and every new request gets a 500."""
        async with on_stage(fails, stream) as (on, backends):
            for _ in range(20):
                assert await ask(on) == (200, GOOD)
            assert len(backends[0].calls) == 3
            assert any("b0 is ejected (3 failures in a row)" in line for line in on.said)
            for _ in range(10):
                await asyncio.sleep(0.3)
                assert await ask(on) == (200, GOOD)
            assert 4 <= len(backends[0].calls) <= 6  # trials
            backends[0].serve = stream
            await asyncio.sleep(31)
            for _ in range(4):
                assert await ask(on) == (200, GOOD)
            assert sum("b0 is up" in line for line in on.said) == 2  # at the start, and again
            assert on.proxy.backends.health.state("b0") == "up"

    async def test_the_last_one_is_used_however_bad(self) -> None:
        async with on_stage(fails) as (on, backends):
            for _ in range(10):
                status, body = await ask(on)
                assert (status, b"cannot schedule" in body) == (500, True)
            assert len(backends[0].calls) == 10

    async def test_retries_are_a_share_of_all(self) -> None:
        """Everyone fails at one instant: three are tried again, the others get the 500."""
        together = asyncio.Event()

        async with on_stage(late(together, fails), late(5, stream), **AHEAD) as (on, backends):
            tasks = await all_at_the_first(on, backends, 12)
            together.set()
            answers = [status for status, _ in await asyncio.gather(*tasks)]
            assert sorted(answers) == [200] * 3 + [500] * 9

    @pytest.mark.parametrize("says", ["500", "event", "abort", "500 to embeddings"])
    async def test_an_engine_that_fails_everyone_as_it_dies_costs_nobody(self, says: str) -> None:
        """vLLM answers all requests itself when its engine has died, and is not well from then."""
        dies = asyncio.Event()
        said = {"event": error_event("EngineCore encountered an issue.", 500), "abort": ABORT}
        serve = streams(said[says], DONE) if says in said else fails
        async with on_stage(late(dies, serve), by_request, **AHEAD) as (on, backends):
            path = "/v1/embeddings" if says == "500 to embeddings" else "/v1/completions"
            tasks = await all_at_the_first(on, backends, 12, path)
            backends[0].healthy = False
            dies.set()
            assert await asyncio.gather(*tasks) == [(200, GOOD)] * 12

    async def test_a_retry_for_which_the_others_have_no_room_is_told_to_come_back(self) -> None:
        """Not the 500 of the one that failed: another could serve it a moment later."""
        fail = asyncio.Event()
        fails_the_first = in_turn(late(fail, fails), stream, stream)
        async with on_stage(fails_the_first, late(20, stream), **ONE_SLOT) as (on, _):
            tasks = at_once(on, 2)  # one at each backend
            await asyncio.sleep(0.1)
            queued = at_once(on, 2)  # as many as may wait
            await asyncio.sleep(0.1)
            fail.set()
            answers = [status for status, _ in await asyncio.gather(*tasks)]
            assert sorted(answers) == [200, 429]
            assert [status for status, _ in await asyncio.gather(*queued)] == [200, 200]

    async def test_gray_failure_is_drained_and_comes_back(self) -> None:
        async with on_stage(late(3.0, stream), late(0.05, stream), **AHEAD) as (on, backends):
            cost = {name: b.cost for name, b in on.proxy.driver.shaper.backends.items()}
            for _ in range(12):
                await asyncio.gather(*at_once(on, 6))
                for model in cost.values():  # frozen: else the prediction follows, which is right
                    model.scale = (1.0, 1.0, 1.0)
            assert any("b0 is ejected (first tokens" in line for line in on.said)
            backends[0].serve = late(0.05, stream)
            await asyncio.sleep(31)
            for _ in range(6):
                await asyncio.gather(*at_once(on, 6))
            assert on.proxy.backends.health.state("b0") == "up"


def unreadable() -> dict[str, bytes]:
    """Whole answers that a strict reader of JSON refuses."""
    usage = b'"usage":{"prompt_tokens":7,"completion_tokens":1.0}}'
    return {
        "NaN": answer(200, b'{"choices":[{"text":"y","logprob":NaN}],' + usage),
        "-Infinity": answer(200, b'{"choices":[{"text":"y","logprob":-Infinity}],' + usage),
        "byte order mark": answer(200, b"\xef\xbb\xbf{" + usage),
        "text/json": answer(200, b"{" + usage).replace(b"application/json", b"text/json"),
        "no type": answer(200, b"{" + usage).replace(b"content-type: application/json\r\n", b""),
        "no JSON": answer(200, b"{oops"),
        "no object": answer(200, b"[]"),
    }


class TestMalformed:
    @pytest.mark.parametrize("how", malformed())
    async def test_is_502_alone(self, how: str) -> None:
        async with on_stage(
            malformed()[how], timeouts={"first_token": "9s", "keep_alive": "0s"}
        ) as (on, backends):
            async with on.post(STREAMED) as response:
                assert response.status == 502
                assert response.content_type == "application/json"
                if how != "error as a text":
                    assert (await error_of(response))["code"] == "upstream_error"
            await asyncio.sleep(4)  # a connection whose framing was whole may be kept for 3 s
            assert backends[0].open == 0

    @pytest.mark.parametrize("how", malformed() | faults())
    async def test_another_answers(self, how: str) -> None:
        serve = (malformed() | faults())[how]
        async with on_stage(serve, stream, timeouts={"keep_alive": "0s"}) as (on, backends):
            assert await ask(on) == (200, GOOD)
            assert [len(b.calls) for b in backends] == [1, 1]

    @pytest.mark.parametrize("how", malformed_whole())
    async def test_whole_answers(self, how: str) -> None:
        serve, timeouts = malformed_whole()[how], {"idle": "3s"}
        async with on_stage(serve, timeouts=timeouts) as (on, backends):
            async with on.post() as response:
                assert response.status == (504 if how == "stalled body" else 502)
                code = "upstream_timeout" if how == "stalled body" else "upstream_error"
                assert (await error_of(response))["code"] == code
            await asyncio.sleep(4)
            assert backends[0].open == 0
        async with on_stage(serve, whole, timeouts=timeouts) as (on, _):
            assert await ask(on, {"prompt": "x"}) == (200, WHOLE)

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
    @pytest.mark.parametrize("how", unreadable())
    async def test_an_answer_that_cannot_be_parsed_is_passed_on_once(
        self, how: str, path: str
    ) -> None:
        said = unreadable()[how]

        serve = sends(said, end="keep")

        async with on_stage(serve, serve) as (on, backends):
            used: list[int] = []
            learn = on.proxy.app._estimate
            learn.learn = lambda _, tokens, *more: used.append(tokens)  # type: ignore[method-assign]
            body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "max_tokens": 3}
            for _ in range(4):  # a failure would put the server out
                async with on.post(body, path=path) as response:
                    assert response.status == 200
                    assert await response.read() == said.partition(b"\r\n\r\n")[2]
            assert sum(len(backend.calls) for backend in backends) == 4
            read = b"oops" not in said and b"[]" not in said
            assert used == [7] * 4 * read
            assert all(on.proxy.backends.health.state(name) == "up" for name in ("b0", "b1"))

    @pytest.mark.parametrize("body", [WHOLE, b"", b"{}", b"plain"])
    @pytest.mark.parametrize("streams", [True, "true", 1, "on"])
    async def test_a_whole_answer_to_a_stream_is_passed_on(self, streams: Any, body: bytes) -> None:
        """One server computes it, and nothing is learned from it but what it used."""
        serve = answers(200, body)
        async with on_stage(serve, serve) as (on, backends):
            learnt = on.proxy.driver.shaper.backends["b0"].cost.observations
            for _ in range(4):
                async with on.post({"prompt": "hello", "stream": streams}) as response:
                    assert (response.status, await response.read()) == (200, body)
                    assert response.content_type == "application/json"
            assert sum(len(backend.calls) for backend in backends) == 4
            for backend in on.proxy.driver.shaper.backends.values():
                assert backend.cost.observations == learnt
            assert [line for line in on.said if "malformed" in line] == [
                "backend b0 sent a malformed answer: it has another content type than was asked for"
            ]

    @pytest.mark.parametrize(
        "said", [answer(200, b""), STREAM_HEAD + chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n"]
    )
    async def test_an_unexpected_answer_to_a_whole_request_is_passed_on(self, said: bytes) -> None:
        serve = sends(said, end="keep")
        async with on_stage(serve, serve) as (on, backends):
            async with on.post() as response:
                expected = EVENT + DONE if b"event-stream" in said else b""
                assert (response.status, await response.read()) == (200, expected)
            assert sum(len(backend.calls) for backend in backends) == 1

    async def test_a_whole_answer_behind_heartbeats_is_an_event(self) -> None:
        serve = late(5.0, answers(200, b'{"choices":\n[]}'))
        async with on_stage(serve, serve, timeouts={"keep_alive": "2s"}) as (on, backends):
            async with on.post(STREAMED) as response:
                got = await response.read()
                assert got.replace(b": keep-alive\n\n", b"") == b'data: {"choices":\ndata: []}\n\n'
            assert sum(len(backend.calls) for backend in backends) == 1

    @pytest.mark.parametrize(
        "event", [b'{"choices":[{"text":" y","logprob":NaN}]}', b"{oops", b"[1]", b'{"usage"']
    )
    async def test_events_that_cannot_be_parsed_are_passed_on(self, event: bytes) -> None:
        """The first event, and one in the middle."""
        said = b"data: " + event + b"\n\n"

        serve = streams(said, EVENT, said, DONE)

        async with on_stage(serve, serve) as (on, backends):
            assert await ask(on) == (200, said + EVENT + said + DONE)
            assert sum(len(backend.calls) for backend in backends) == 1

    @pytest.mark.parametrize("coding", ["gzip", "X-GZIP", "deflate"])
    async def test_a_compressed_answer_is_passed_on_plain(self, coding: str) -> None:
        header = f"content-encoding: {coding}"
        bits = zlib.MAX_WBITS + (0 if coding == "deflate" else 16)

        async def compressing(call: Call) -> None:
            assert "accept-encoding: identity\r\n" in call.head.lower()
            packer = zlib.compressobj(wbits=bits)
            if b"stream" not in call.body:
                await call.send(answer(200, packer.compress(WHOLE) + packer.flush(), header))
                return
            await call.send(STREAM_HEAD.replace(b"\r\n\r\n", f"\r\n{header}\r\n\r\n".encode()))
            for event in (EVENT, EVENT, USAGE, DONE):
                data = packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH)
                await call.send(chunk(data[:7]) + chunk(data[7:]))
            await call.send(chunk(packer.flush()) + b"0\r\n\r\n")

        async with on_stage(compressing) as (on, _):
            for body, plain in ((STREAMED, GOOD), ({"prompt": "x"}, WHOLE)):
                async with on.post(body) as response:
                    assert (response.status, await response.read()) == (200, plain)
                    assert "content-encoding" not in response.headers
            assert not any("is down" in line for line in on.said)

    async def test_informational_answers_are_skipped(self) -> None:
        async def early(call: Call) -> None:
            await call.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            await call.send(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
            await stream(call)

        async with on_stage(early) as (on, _), on.post(STREAMED) as response:
            assert (response.status, await response.read()) == (200, GOOD)
            assert "link" not in response.headers

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422])
    @pytest.mark.parametrize("body", [STREAMED, {"prompt": "x"}], ids=["stream", "whole"])
    async def test_client_errors_pass_unchanged(self, status: int, body: dict[str, Any]) -> None:
        said = b'{ "error":"Unauthorized" }'

        refuse = answers(status, said, "x-should-retry: false")

        async with on_stage(refuse, refuse) as (on, backends):
            for _ in range(5):
                async with on.post(body) as response:
                    assert (response.status, await response.read()) == (status, said)
                    assert response.headers["x-should-retry"] == "false"
            assert sum(len(b.calls) for b in backends) == 5
            assert not any("is down" in line for line in on.said)

    async def test_other_paths_are_bounded_and_tried_twice_too(self) -> None:
        async with on_stage(resets, answers(200, b'{"data":[]}')) as (on, _):
            for _ in range(4):
                async with on.client.get(on.url + "/v1/models") as response:
                    assert (response.status, await response.read()) == (200, b'{"data":[]}')

    async def test_a_first_event_that_just_fits_is_passed_on(self) -> None:
        event = b'data: {"x":"' + b"x" * (MAX_EVENT_BYTES - 15) + b'"}\n\n'
        assert len(event) > MAX_EVENT_BYTES

        async with on_stage(streams(event, DONE)) as (on, _):
            assert await ask(on) == (200, event + DONE)

    @pytest.mark.parametrize("end", [b"\n\n", b""], ids=["many", "one"])
    @pytest.mark.parametrize("keep_alive", [True, False])
    async def test_comments_without_end_are_the_backends_fault(
        self, end: bytes, keep_alive: bool
    ) -> None:
        async def comments(call: Call) -> None:
            await call.send(STREAM_HEAD)
            while True:
                await call.send(chunk(b": " + b"x" * (64 << 10) + end))

        timeouts = {"keep_alive": "15s" if keep_alive else "0s"}
        async with on_stage(comments, stream, timeouts=timeouts) as (on, backends):
            for _ in range(6):
                status, body = await ask(on)
                assert (status, body[-len(GOOD) :]) == (200, GOOD)
                assert body == GOOD or (keep_alive and end)
            assert len(backends[0].calls) == 3
            assert on.proxy.backends.health.state("b0") == "ejected"


UNSHAPED = {"model": "m", "input": "hello", "stream": True}
CREATED = (
    b'event: response.created\ndata: {"type":"response.created","response":{"error":null}}\n\n'
)
DELTA = b'event: response.output_text.delta\ndata: {"delta":" yes"}\n\n'
COMPLETED = (
    b'event: response.completed\ndata: {"type":"response.completed","response":{"error":null,'
    b'"usage":{"input_tokens":7}}}\n\n'
)

embeds = answers(200, b'{"data":[]}')
begins_a_response = streams(CREATED, COMPLETED)


class TestOtherPathsTellOfHealth:
    """Answers on paths that are not shaped count for health, good ones and bad ones."""

    @pytest.mark.parametrize("good", [embeds, begins_a_response], ids=["whole", "stream"])
    async def test_failures_that_are_not_in_a_row_put_nobody_out(self, good: Serve) -> None:
        async with on_stage(in_turn(fails, fails, good, fails, fails, good)) as (on, _):
            for status in [500, 500, 200, 500, 500, 200]:
                async with on.post(UNSHAPED, "/v1/embeddings") as response:
                    assert (response.status, bool(await response.read())) == (status, True)
                assert on.proxy.backends.health.state("b0") == "up"

    async def test_a_pattern_of_paths_loads_no_backend_more_than_another(self) -> None:
        async with on_stage(embeds, embeds) as (on, backends):
            for _ in range(10):
                for path in ("/v1/embeddings", "/tokenize"):
                    assert await on.status(UNSHAPED, path) == 200
            assert [len(backend.calls) for backend in backends] == [10, 10]
            paths = [call.head.split()[1] for call in backends[0].calls]
            assert paths.count("/v1/embeddings") == 5

    async def test_a_good_answer_ends_a_trial(self) -> None:
        async with on_stage(in_turn(fails, fails, fails, embeds)) as (on, _):
            health = on.proxy.backends.health
            for _ in range(3):
                assert await on.status(UNSHAPED, "/v1/embeddings") == 500
            await until(lambda: health.state("b0") == "ejected")
            await until(lambda: health.state("b0") == "half_open")
            assert await on.status(UNSHAPED, "/v1/embeddings") == 200
            assert health.state("b0") == "up"

    @pytest.mark.parametrize("path", ["/v1/models", "/tokenize?x=1"])
    async def test_an_answer_without_the_engine_proves_nothing(self, path: str) -> None:
        async with on_stage(in_turn(fails, embeds, fails, embeds, fails, embeds)) as (on, _):
            for _ in range(3):
                assert (await ask(on))[0] == 500
                method = "GET" if path == "/v1/models" else "POST"
                async with on.client.request(method, on.url + path) as response:
                    assert response.status == 200
            await until(lambda: on.proxy.backends.health.state("b0") == "ejected")

    async def test_a_client_that_leaves_proves_nothing(self) -> None:
        async with on_stage(in_turn(fails, fails, silent, fails)) as (on, _):
            for leaves in [False, False, True, False]:
                asking = asyncio.create_task(ask_embeddings(on))
                await settle()
                if leaves:
                    asking.cancel()
                    await settle()
                else:
                    assert await asking == 500
            await until(lambda: on.proxy.backends.health.state("b0") == "ejected")


async def ask_embeddings(on: Stage) -> int:
    async with on.post(UNSHAPED, "/v1/embeddings") as response:
        await response.read()
        return int(response.status)


class TestOtherStreams:
    """Streams of paths that are not shaped, which need not end with [DONE]."""

    async def test_events_pass_as_they_come(self) -> None:
        """For longer than a first token may take, and not after all has come."""
        serve = streams(CREATED, *[DELTA] * 10, COMPLETED, every_s=1)
        async with on_stage(serve, timeouts={"first_token": "3s"}) as (on, _):
            began, got = now(), b""
            async with on.post(UNSHAPED, "/v1/embeddings") as response:
                assert response.status == 200
                assert response.headers["server"] == "forebay"
                assert response.headers["x-request-id"]
                assert "x-secret" not in response.headers
                assert await response.content.readany() == CREATED
                assert now() - began < 0.5
                got = await response.read()
            assert got == DELTA * 10 + COMPLETED

    async def test_another_answers_before_the_first_event(self) -> None:
        async with on_stage(streams(end="reset"), streams(CREATED, COMPLETED)) as (on, _):
            for _ in range(2):
                assert await on.read(UNSHAPED, "/v1/embeddings") == CREATED + COMPLETED


class TestMidStream:
    @pytest.mark.parametrize(
        ("path", "how"),
        [
            *(("/v1/completions", how) for how in cuts()),
            *(("/v1/embeddings", how) for how in ("reset", "half an event", "stall", "bad chunk")),
        ],
    )
    async def test_ends_with_an_error_event_and_broken_framing(self, path: str, how: str) -> None:
        serve = cuts()[how]
        async with on_stage(serve, serve, timeouts={"idle": "3s"}) as (on, backends):
            async with on.post(STREAMED, path) as response:
                assert response.status == 200
                got = await cut_off(response)
            last = got.split(b"\n\n")[-2]
            error = orjson.loads(last.removeprefix(b"data: "))["error"]
            assert error["code"] == "upstream_stream_error"
            assert b"[DONE]" not in got
            on.assert_nothing_held()
            await asyncio.sleep(4)
            assert [b.open for b in backends] == [0, 0]
            # The other has no /tokenize, so it cannot go on.
            assert sum(len(b.calls) for b in backends) == 1

    @pytest.mark.parametrize("after", ["stall", "reset", "close", "bad chunk", "more", "flood"])
    async def test_nothing_after_done_spoils_it(self, after: str) -> None:
        done = STREAM_HEAD + chunk(EVENT) + chunk(DONE)
        serves = {
            "stall": sends(done),
            "reset": sends(done, end="reset"),
            "close": sends(done, end="close"),
            "bad chunk": sends(done, b"zz\r\n"),  # in one read with the rest, it is a 502
            "more": sends(done + chunk(EVENT) + b"0\r\n\r\n"),
            "flood": sends(done, *[chunk(EVENT * 100)] * 100),
        }
        async with on_stage(serves[after]) as (on, backends):
            began = now()
            assert await ask(on) == (200, EVENT + DONE)
            assert now() - began < 1
            await asyncio.sleep(2)
            assert backends[0].open == 0

    async def test_merged_deltas_and_keep_alive_comments(self) -> None:
        """A comment is no first token; several events in a chunk are several events."""
        comments = [b": keep-alive\n\n"] * 5
        said = streams(*comments, EVENT * 4 + USAGE + DONE, every_s=1)
        async with on_stage(said) as (on, _):
            status, body = await ask(on)
            assert (status, body) == (200, b": keep-alive\n\n" * 5 + EVENT * 4 + USAGE + DONE)
            text = await on.admin("/metrics")
            assert 'time_to_first_token_seconds_bucket{bucket="chat",le="4.0"} 0.0' in text

    @pytest.mark.parametrize(
        "usage",
        [
            {"prompt_tokens": -7, "completion_tokens": 3},
            {"prompt_tokens": 7, "completion_tokens": 3,
             "prompt_tokens_details": {"cached_tokens": -1}},
            {"prompt_tokens": 7, "completion_tokens": 3,
             "prompt_tokens_details": {"cached_tokens": 9}},
            {"prompt_tokens": 7, "completion_tokens": "x", "prompt_tokens_details": [1]},
        ],
    )  # fmt: skip
    async def test_usage_that_makes_no_sense_harms_nobody(self, usage: dict[str, Any]) -> None:
        event = b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n"

        async with on_stage(streams(EVENT, event, DONE)) as (on, _):
            assert await ask(on) == (200, EVENT + event + DONE)


class TestFlapping:
    async def test_clients_see_next_to_nothing(self) -> None:
        """One of two fails for a second in every three, another way each time."""
        ways = [fails, busy, stream]

        async def flaps(call: Call) -> None:
            phase = now() % 3
            if phase < 1:
                await ways[int(now() // 3) % 3](call)
            elif phase < 2:
                call.reset()
            else:
                await stream(call)

        async with on_stage(flaps, stream) as (on, backends):
            statuses = []
            for _ in range(300):
                statuses.append((await ask(on))[0])
                await asyncio.sleep(0.1)
            assert statuses.count(200) == 300
            assert len(backends[0].calls) < 100  # it is let in rarely


async def test_an_answer_that_has_ended_cannot_be_failed() -> None:
    """The connection of the ended answer serves another request by then."""

    async def in_two_parts(call: Call) -> None:
        data = answer(200, WHOLE)
        await call.send(data[:-9])
        await given_on.wait()
        await call.send(data[-9:])

    given_on = asyncio.Event()
    async with RawBackend(in_two_parts).running() as backend:
        origin = Origin(backend.url, 2.0)
        given_on.set()
        first = await origin.ask("POST", "/v1/completions", {}, b"{}")
        assert await read_all(first, 1 << 20) == WHOLE
        given_on.clear()
        second = await origin.ask("POST", "/v1/completions", {}, b"{}")
        assert backend.connections == 1
        first.fail(StalledUpstream("the proxy is shutting down"))
        given_on.set()
        assert await read_all(second, 1 << 20) == WHOLE
        origin.close()


class TestDrain:
    async def test_open_streams_are_ended_with_an_error_event(self) -> None:
        """Streams, prefills and whole answers, when the patience is over."""

        async def begin(call: Call) -> None:
            if len(call.body) > 60:  # the padded one gets its first event
                await call.send(STREAM_HEAD + chunk(EVENT))
            await call.hung_up()

        async with on_stage(begin, **AHEAD) as (on, backends):
            streaming = await on.post({**STREAMED, "user": "x" * 60}).__aenter__()
            (prefill,) = at_once(on, 1)
            (entire,) = at_once(on, 1, {"prompt": "x"})
            await asyncio.sleep(0.2)
            assert backends[0].open == 3
            drained = asyncio.create_task(on.proxy.drain(2))
            got = await cut_off(streaming)
            streaming.close()
            assert b"upstream_stream_error" in got
            for task in (prefill, entire):
                status, body = await task
                assert (status, orjson.loads(body)["error"]["code"]) == (503, "draining")
            assert await drained == 3
            await settle()
            assert backends[0].open == 0
            assert not on.proxy.app.active
