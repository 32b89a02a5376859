"""Each limit of the proxy that ends a response names itself, to the client and in the log."""

import asyncio
import gzip
from typing import Any

import aiohttp
import orjson
import pytest
from fakes.faulty_backends import END, answers, late, sends, streams
from stages.proxy_stage import (
    DONE,
    EVENT,
    STREAM_HEAD,
    STREAMED,
    RawBackend,
    Stage,
    answer,
    chunk,
    cut_off,
    error_of,
    now,
    on_stage,
    settle,
    silent,
)

LARGE = b'data: {"choices":[{"text":"' + b"y" * 200_000 + b'"}]}\n\n'
SMALL_EVENTS: dict[str, Any] = {"limits": {"event": 100_000}}
EVENT_TEXT = "An event of the response is larger than 100000 bytes (limits.event)."
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": STREAMED,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/embeddings": {"input": "x", "stream": True},
}


async def cut(on: Stage, path: str = "/v1/completions") -> tuple[bytes, str]:
    """Return the bytes of a stream before the error event that ends it, and its message."""
    async with on.post(PATHS[path], path) as response:
        assert response.status == 200
        got = await cut_off(response)
    before, _, last = got.rstrip().rpartition(b"data: ")
    error = orjson.loads(last)["error"]
    assert error["code"] == "upstream_stream_error"
    return before.removesuffix(b"event: error\n"), error["message"]


def limits_said(on: Stage) -> list[str]:
    return [line for line in on.said if "ended by this proxy" in line]


@pytest.mark.parametrize("path", PATHS)
async def test_a_large_event_in_the_middle(path: str) -> None:
    async with on_stage(streams(EVENT, LARGE, DONE, end="stay"), **SMALL_EVENTS) as (on, _):
        for _ in range(3):
            assert await cut(on, path) == (EVENT, EVENT_TEXT)
        line = f"a response of backend b0 was ended by this proxy: {EVENT_TEXT}"
        assert limits_said(on) == [line]
        await asyncio.sleep(61)
        await cut(on, path)
        assert limits_said(on)[1:] == [f"{line} (2 more since the last such line)"]


async def test_the_last_event() -> None:
    serve = sends(STREAM_HEAD + chunk(EVENT), chunk(LARGE[:-2]))
    async with on_stage(serve, **SMALL_EVENTS) as (on, _):
        assert await cut(on) == (EVENT, EVENT_TEXT)


@pytest.mark.parametrize("ends", [True, False], ids=["whole", "without end"])
@pytest.mark.parametrize("path", PATHS)
async def test_the_first_event(path: str, ends: bool) -> None:
    """For example `echo` with `logprobs`: another backend would send an event as large."""
    heard = STREAM_HEAD + chunk(b": keep-alive\n\n")
    serve = sends(heard, chunk(LARGE) + END if ends else chunk(LARGE[:-2]))
    keys: dict[str, Any] = {**SMALL_EVENTS, "timeouts": {"keep_alive": "0s"}}
    async with on_stage(serve, serve, **keys) as (on, backends):
        for asked in range(1, 5):
            async with on.post(PATHS[path], path) as response:
                assert response.status == 502
                assert (await error_of(response))["message"] == EVENT_TEXT
                assert response.headers["x-should-retry"] == "false"
            await settle()
            assert [b.open for b in backends] == [0, 0]
            assert sum(len(b.calls) for b in backends) == asked
        health = on.proxy.backends.health
        assert [health.state(name) for name in ("b0", "b1")] == ["up", "up"]
        assert 'kind="too_large"' in on.proxy.metrics.text().decode()
        assert len(limits_said(on)) == 1  # a minute


@pytest.mark.parametrize("first", [False, True])
async def test_memory_for_an_event(first: bool) -> None:
    huge = b"data: " + b"y" * (3 << 20)
    serve = sends(STREAM_HEAD + (b"" if first else chunk(EVENT)), chunk(huge))
    async with on_stage(serve, limits={"queue_bytes": 1 << 20, "body": 1 << 20}) as (on, _):
        if first:
            async with on.post(STREAMED) as response:
                assert response.status == 502
                text = (await error_of(response))["message"]
        else:
            before, text = await cut(on)
            assert before == EVENT
        assert text.startswith("No memory is left for an event of ")
        assert text.endswith(" bytes of the response (limits.queue_bytes).")
        assert len(limits_said(on)) == 1
        assert on.proxy.app._budget.held == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("framing", ["announced", "chunked", "endless", "gzip"])
async def test_a_large_answer(path: str, framing: str) -> None:
    text = "The response is larger than 100000 bytes (limits.answer)."
    body = b'{"x":"' + b"y" * 200_000 + b'"}'
    chunked = STREAM_HEAD.replace(b"text/event-stream; charset=utf-8", b"application/json")
    serve = {
        "announced": sends(answer(200, body)[:200]),
        "chunked": sends(chunked + chunk(body) + END),
        "endless": sends(chunked + chunk(body)),
        "gzip": answers(200, gzip.compress(bytes(64 << 20)), "content-encoding: gzip"),
    }[framing]
    asked = {"prompt": "x", "input": "x"}
    async with on_stage(serve, serve, limits={"answer": 100_000}) as (on, backends):
        async with on.post(asked, path) as response:
            assert response.status == 502
            assert (await error_of(response))["message"] == text
            assert response.headers["x-should-retry"] == "false"
        await settle()
        assert [b.open for b in backends] == [0, 0]
        assert limits_said(on)[0].endswith(text)
        assert sum(len(backend.calls) for backend in backends) == 1  # it would be as large there


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_an_answer_that_grows_too_large_while_it_is_sent_on(path: str) -> None:
    """The client sees a cut: its status was sent. The log has the reason."""
    head = STREAM_HEAD.replace(b"text/event-stream; charset=utf-8", b"application/json")
    serve = sends(head + chunk(b"y" * 400_000), chunk(b"y" * 400_000) + END)
    async with on_stage(serve, limits={"answer": 500_000}) as (on, _):
        async with on.post({"prompt": "x", "input": "x"}, path) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        assert limits_said(on)[0].endswith("larger than 500000 bytes (limits.answer).")
        page = on.proxy.metrics.text().decode()
        assert 'forebay_upstream_errors_total{backend="b0",kind="own_limit"} 1.0' in page


@pytest.mark.parametrize(
    ("body", "path", "limits", "text"),
    [
        (STREAMED, "/v1/completions", (9, 20), "9 s (timeouts.first_token)."),
        ({"prompt": "x"}, "/v1/completions", (9, 20), "20 s (timeouts.answer)."),
        ({"prompt": "x"}, "/v1/completions", (2, None), "10 s (timeouts.answer)."),  # 5 x 2 s
        ({"input": "x"}, "/v1/embeddings", (9, 20), "9 s (timeouts.first_token)."),
    ],
)
async def test_no_answer_in_time(
    body: dict[str, Any], path: str, limits: tuple[int, int | None], text: str
) -> None:
    """An answer that is no stream shows only its end, so it has a limit of its own."""
    first_token, answer = limits
    times = {"first_token": f"{first_token}s"} | ({"answer": f"{answer}s"} if answer else {})
    async with on_stage(silent, timeouts={**times, "keep_alive": "0s"}) as (on, _):
        began = now()
        async with on.post(body, path) as response:
            assert response.status == 504
            error = await error_of(response)
        assert now() - began == pytest.approx(float(text.partition(" ")[0]), abs=1)
        assert error["message"] == f"The backend did not respond within {text}"
        assert limits_said(on)[0].endswith(text)


class TestSilence:
    """A stream that is silent after its first event, as while vLLM parses a tool call."""

    @pytest.mark.parametrize("path", PATHS)
    async def test_a_healthy_server_may_be_silent_for_long(self, path: str) -> None:
        """The client hears heartbeats meanwhile, as before the first event."""
        end = EVENT + DONE
        if path == "/v1/messages":
            end = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
        async with on_stage(streams(EVENT, end, every_s=65.0)) as (on, _):
            got, longest, last = b"", 0.0, now()
            async with on.post(PATHS[path], path) as response:
                async for part in response.content.iter_any():
                    longest, last = max(longest, now() - last), now()
                    got += part
            ping = b'event: ping\ndata: {"type": "ping"}\n\n'
            heartbeat = ping if path == "/v1/messages" else b": keep-alive\n\n"
            assert got.replace(heartbeat, b"") == EVENT + end
            if path != "/v1/embeddings":
                assert got.count(heartbeat) == 4
                assert longest < 16

    async def test_without_keep_alive_nothing_is_added(self) -> None:
        serve = streams(EVENT, DONE, every_s=65.0)
        keys: dict[str, Any] = {"timeouts": {"keep_alive": "0s"}}
        async with on_stage(serve, **keys) as (on, _), on.post(STREAMED) as response:
            assert await response.read() == EVENT + DONE

    async def test_half_an_event_is_not_broken_by_a_heartbeat(self) -> None:
        """Nor is a chunk. The client has been sent whole events only."""
        begin, rest = chunk(EVENT + EVENT[:9]), chunk(EVENT[9:] + DONE) + END
        serve = sends(STREAM_HEAD + begin, *[b""] * 20, rest)  # 0.1 s apart
        keys: dict[str, Any] = {"timeouts": {"keep_alive": "0.5s"}}
        async with on_stage(serve, **keys) as (on, _), on.post(STREAMED) as response:
            got = await response.read()
        assert b"yes" in got.partition(b": keep-alive\n\n")[2]
        assert got.replace(b": keep-alive\n\n", b"") == EVENT + EVENT + DONE

    async def test_it_ends_at_ten_times_the_limit(self) -> None:
        serve = sends(STREAM_HEAD + chunk(EVENT))
        async with on_stage(serve, timeouts={"idle": "4s", "keep_alive": "0s"}) as (on, _):
            began = now()
            text = "No output for 40 s (ten times timeouts.idle)."
            assert await cut(on) == (EVENT, text)
            assert 40 < now() - began < 41
            assert limits_said(on)[0].endswith(text)

    async def test_at_a_server_that_hangs_it_ends_at_the_limit(self) -> None:
        server = RawBackend(serve=sends(STREAM_HEAD + chunk(EVENT)))
        async with on_stage(server, timeouts={"idle": "8s", "keep_alive": "0s"}) as (on, _):
            began = now()
            waiting = asyncio.create_task(cut(on))
            await asyncio.sleep(1)
            server.healthy = None
            text = "No output for 8 s (timeouts.idle, as its health checks fail)."
            assert await waiting == (EVENT, text)
            assert now() - began < 9.5

    async def test_the_body_of_a_whole_answer(self) -> None:
        server = RawBackend(serve=sends(answer(200, b'{"x": 1}')[:-3]))
        async with on_stage(server, timeouts={"idle": "4s"}) as (on, _):
            async with on.post() as response:
                assert response.status == 504
                text = "No output for 40 s (ten times timeouts.idle)."
                assert (await error_of(response))["message"] == text
            assert limits_said(on)[0].endswith(text)

    async def test_a_drain_names_itself(self) -> None:
        async with on_stage(sends(STREAM_HEAD + chunk(EVENT))) as (on, _):
            waiting = asyncio.create_task(cut(on))
            await asyncio.sleep(1)
            await on.proxy.drain(2)
            assert await waiting == (EVENT, "The proxy is shutting down (timeouts.drain).")


async def test_an_answer_in_time_says_nothing() -> None:
    async with on_stage(late(5.0, streams(EVENT, DONE))) as (on, _):
        assert await on.status(STREAMED) == 200
        assert limits_said(on) == []
