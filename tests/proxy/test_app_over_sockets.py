"""The proxy over real sockets: what clients see, whatever the backend does."""

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest
from fakes.faulty_backends import answers, faults, late, streams
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
    answer,
    chunk,
    error_of,
    on_stage,
    settle,
    silent,
    stage,
    stream,
    whole,
)

from forebay.traces.ground.hlog import read_hlog


def tells_its_way(response: aiohttp.ClientResponse) -> None:
    """The headers of a request that had been sent to a backend."""
    assert response.headers["x-forebay-bucket"] == "chat"
    assert float(response.headers["x-forebay-queue-ms"]) >= 0
    assert response.headers["x-forebay-backend"] == "b0"
    assert float(response.headers["x-forebay-predicted-ms"]) >= 0


class TestPassing:
    async def test_body_and_stream_are_untouched(self) -> None:
        body = b'{ "prompt":"h\\u00e9llo",  "stream" : true, "max_tokens":3, "unknown": [1.0]}'

        async with on_stage(None) as (on, backends):
            async with on.post(body) as response:
                assert response.status == 200
                assert await response.read() == EVENT + EVENT + USAGE + DONE
                assert response.content_type == "text/event-stream"
                assert response.headers["x-forebay-bucket"] == "chat"
                assert float(response.headers["x-forebay-queue-ms"]) >= 0
                assert response.headers["x-forebay-backend"] == "b0"
                assert "x-secret" not in response.headers
                assert response.headers["server"] == "forebay"
            assert backends[0].calls[0].body == body

    async def test_comments_and_odd_cuts_pass(self) -> None:
        async def in_pieces(call: Call) -> None:
            await call.send(STREAM_HEAD)
            for byte in b": keep-alive\n\n" + EVENT + DONE:
                await call.send(chunk(bytes([byte])))
            await call.send(b"0\r\n\r\n")

        async with on_stage(in_pieces) as (on, _), on.post(STREAMED) as response:
            assert await response.read() == b": keep-alive\n\n" + EVENT + DONE

    async def test_usage_teaches_bytes_a_token(self) -> None:
        async with on_stage(None) as (on, _):
            before = on.proxy.app._estimate.bytes_per_token
            async with on.post({"prompt": "x" * 700, "max_tokens": 3}):
                pass
            assert on.proxy.app._estimate.bytes_per_token > before  # 100 bytes a token, clamped


class TestBadRequests:
    async def test_a_prompt_beyond_every_bucket(self) -> None:
        async with (
            on_stage(None) as (on, _),
            on.post({"prompt": [7] * 150_000}) as response,
        ):
            assert response.status == 400
            error = await error_of(response)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


async def test_equal_ids_at_one_time_differ_at_the_server() -> None:
    """vLLM up to 0.11 mixes up two requests of one id."""
    together = asyncio.Event()

    async with on_stage(late(together, whole)) as (on, backends):

        async def ask(path: str) -> str:
            async with on.post(path=path, headers={"x-request-id": "same"}) as response:
                await response.read()
                return str(response.headers["x-request-id"])

        paths = ["/v1/completions", "/v1/completions", "/v1/embeddings"]
        tasks = [asyncio.create_task(ask(path)) for path in paths]
        await settle()
        together.set()
        assert await asyncio.gather(*tasks) == ["same"] * 3
        assert await ask("/v1/completions") == "same"
        ids = [re.findall(r"(?i)x-request-id: (\S+)", call.head)[0] for call in backends[0].calls]
        assert len(set(ids[:3])) == 3
        assert ids[3] == "same"
        assert not len(on.proxy.app._telemetry.ids)


class TestBeforeTheFirstByte:
    @pytest.mark.parametrize(
        ("fault", "status"),
        [("reset", 502), ("close", 502), ("busy", 503), ("limited", 429), ("broken", 500),
         ("busy_in_stream", 503), ("no_event", 502), ("nonsense", 502)],
    )  # fmt: skip
    async def test_alone_it_fails_in_the_right_way(self, fault: str, status: int) -> None:
        async with on_stage(faults()[fault]) as (on, _), on.post(STREAMED) as response:
            assert response.status == status
            assert response.headers["x-request-id"]
            if fault == "limited":
                assert response.headers["retry-after"] == "7"
            if status == 502:
                assert (await error_of(response))["code"] == "upstream_error"

    async def test_an_answer_aborted_by_shutdown_is_asked_for_again(self) -> None:
        async def aborted(call: Call) -> None:
            body = b'{"choices":[{"index":0,"text":" ","finish_reason":"abort"}]}'
            await call.send(answer(200, body))

        async with on_stage(aborted, whole) as (on, _), on.post() as response:
            assert await response.read() == WHOLE

    async def test_no_first_byte_is_a_timeout_and_not_retried(self) -> None:
        async with on_stage(silent, stream, timeouts={"first_token": "5s"}) as (on, backends):
            async with on.post(STREAMED) as response:
                assert response.status == 504
                assert (await error_of(response))["code"] == "upstream_timeout"
                tells_its_way(response)
            await settle()
            assert [len(b.calls) for b in backends] == [1, 0]
            assert backends[0].open == 0  # it was hung up on

    async def test_where_it_was_sent_is_told_to_debuggers_only(self) -> None:
        away = answers(302, b"", "location: http://127.0.0.1:1/")

        async with on_stage(away, debug_headers=False) as (on, _), on.post() as response:
            assert response.headers["x-forebay-queue-ms"]
            assert "x-forebay-backend" not in response.headers
            assert "x-forebay-predicted-ms" not in response.headers


class TestClientsThatLeave:
    @pytest.mark.parametrize("turns", range(0, 60, 3))
    @pytest.mark.parametrize("serve", ["stream", "retry", "whole"])
    async def test_at_every_turn_of_the_loop(self, turns: int, serve: str) -> None:
        """A request that is cancelled at any stage releases everything."""
        first = {"stream": stream, "retry": faults()["busy"], "whole": whole}[serve]

        async with on_stage(first, stream) as (on, _):

            async def ask() -> None:
                await on.read({"prompt": "x"} if serve == "whole" else STREAMED)

            task = asyncio.create_task(ask())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await settle()


class TestLoad:
    async def test_a_full_queue_is_refused_at_once(self) -> None:
        async with on_stage(silent, **ONE_SLOT) as (on, backends):

            async def ask() -> None:
                await on.read(STREAMED)

            tasks = [asyncio.create_task(ask()) for _ in range(3)]
            await asyncio.sleep(0.2)
            async with on.post(STREAMED) as response:
                assert response.status == 429
                assert int(response.headers["retry-after"]) >= 1
                assert int(response.headers["retry-after-ms"]) >= 1000
                error = await error_of(response)
                assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
                assert response.headers["x-forebay-bucket"] == "chat"
            assert len(backends[0].calls) == 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def test_a_client_with_less_patience(self) -> None:
        async with on_stage(silent, **ONE_SLOT) as (on, _):
            first = asyncio.create_task(on.post(STREAMED).__aenter__())
            await asyncio.sleep(0.1)
            async with on.post(STREAMED, headers={"x-request-timeout": "0.001"}) as response:
                assert response.status == 429
                assert (await error_of(response))["code"] == "deadline_unattainable"
            assert await on.status(STREAMED, headers={"x-request-timeout": "soon"}) == 400
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)


class TestLife:
    async def test_a_backend_that_comes_up_late(self) -> None:
        late = RawBackend()
        async with late.running():
            port = int(late.url.rsplit(":", 1)[1])
        async with stage([late.url], wait_up=0) as on:
            await asyncio.sleep(2)
            assert sum("is unreachable" in line for line in on.said) == 1
            async with on.post() as response:
                assert response.status == 503
                assert response.headers["retry-after"]
                assert (await error_of(response))["code"] == "no_backend_available"
            for path, status in (("/readyz", 503), ("/healthz", 200)):
                assert await on.status_of(on.proxy.admin_url + path) == status
            async with late.running(port):
                await asyncio.sleep(2)
                assert await on.status() == 200
                assert await on.status_of(on.proxy.admin_url + "/readyz") == 200
            assert any("b0 is up" in line for line in on.said)

    async def test_draining_lets_streams_run_out(self) -> None:
        async with on_stage(streams(EVENT, DONE, every_s=5)) as (on, _):
            async with on.post(STREAMED) as response:
                drained = asyncio.create_task(on.proxy.drain(30))
                await asyncio.sleep(1)
                async with on.post() as refused:
                    assert refused.status == 503
                    assert (await error_of(refused))["code"] == "draining"
                assert await on.status_of(on.url + "/health") == 503
                assert await response.read() == EVENT + DONE
            assert await drained == 0

    async def test_the_histogram_log_of_ttft(self, tmp_path: Path) -> None:
        path = tmp_path / "ttft.hlog"

        async with on_stage(None, metrics={"hlog": str(path)}) as (on, _):
            for _ in range(3):
                await on.read(STREAMED)
                await asyncio.sleep(1)
        intervals = read_hlog(path)["ttft.chat"]
        assert sum(i.histogram.get_total_count() for i in intervals) == 3

    async def test_admin_pages(self) -> None:
        async with on_stage(None) as (on, _):
            assert await on.status() == 200
            admin = on.proxy.admin_url
            async with on.client.get(admin + "/status") as response:
                status = await response.json()
                assert status["ready"] is True
                assert status["backends"][0]["name"] == "b0"
                assert status["backends"][0]["in_flight"] == 0
            async with on.client.get(admin + "/metrics") as response:
                text = await response.text()
                assert 'forebay_responses_total{bucket="chat",status="200"} 1.0' in text
                assert 'forebay_backend_up{backend="b0"} 1.0' in text
            async with on.client.get(admin + "/") as response:
                assert "forebay" in await response.text()
            async with on.client.get(admin + "/v1/models") as response:
                assert response.status == 404
                assert (await error_of(response))["code"] == "not_found"
            for path in ("/healthz", "/readyz", "/metrics", "/status", "/", "/none"):
                async with on.client.get(admin + path, headers={"x-request-id": "a1"}) as response:
                    assert response.headers["x-request-id"] == "a1"
                    assert response.headers["server"] == "forebay"
            for method, path, allow in (
                ("GET", "/drain", "POST"),
                ("DELETE", "/status", "GET"),
                ("POST", "/healthz", "GET, HEAD"),
            ):
                async with on.client.request(method, admin + path) as response:
                    assert (response.status, response.headers["allow"]) == (405, allow)
                    assert (await error_of(response))["code"] == "method_not_allowed"
            assert not on.proxy.stop.is_set()
            async with on.client.post(admin + "/drain") as response:
                assert response.status == 202
            assert on.proxy.stop.is_set()
