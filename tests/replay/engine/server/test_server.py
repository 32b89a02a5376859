"""The simulated server over real sockets, in virtual time."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import aiohttp
import orjson
import pytest

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.loop.faults import parse_fault
from forebay.replay.engine.server.server import RunningEngine, start_engine
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.sse import EventScanner, parse_event

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello world"}], "ignore_eos": True}


@asynccontextmanager
async def serving(
    fault: str | None = None, **options: Any
) -> AsyncIterator[tuple[RunningEngine, aiohttp.ClientSession]]:
    """A fresh server and a client."""
    config = replace(EngineConfig("llama-3-8b", seed=1), **options)
    chosen = parse_fault(fault) if fault else None
    async with (
        start_engine(config, fault=chosen) as engine,
        aiohttp.ClientSession(engine.url) as client,
    ):
        yield engine, client
        assert not engine.stepping.done()


async def ask(path: str, body: Any, **options: Any) -> tuple[int, Any]:
    """One request: status and parsed body."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    json = {"Content-Type": "application/json"}
    async with serving(**options) as (_, client), client.post(path, data=data, headers=json) as r:
        return r.status, orjson.loads(await r.read())


async def payloads(response: aiohttp.ClientResponse) -> list[bytes]:
    scanner = EventScanner()
    events: list[bytes] = []
    async for chunk in response.content.iter_any():
        events += scanner.feed(chunk)
    return events


async def stream(path: str, body: dict[str, Any], **options: Any) -> list[bytes]:
    sent = {**body, "stream": True}
    async with serving(**options) as (_, client), client.post(path, json=sent) as response:
        assert response.content_type == "text/event-stream"
        return await payloads(response)


async def test_equal_prompts_with_different_salts_do_not_hit() -> None:
    async with serving() as (_, client):
        cached = []
        for salt in (None, "red", "blue", "red", None):
            body = {"prompt": "x" * 4_000, "max_tokens": 1, "cache_salt": salt}
            async with client.post(TEXT, json=body) as response:
                usage = orjson.loads(await response.read())["usage"]
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, 0, 992, 992]
    assert (await ask(TEXT, {"prompt": "x", "cache_salt": ""}))[0] == 400


class TestAnswers:
    async def test_a_completion_of_token_ids(self) -> None:
        status, answer = await ask(
            TEXT, {"prompt": list(range(40)), "max_tokens": 2, "ignore_eos": True}
        )
        assert status == 200
        assert answer["usage"]["prompt_tokens"] == 40
        assert len(answer["choices"][0]["text"]) == 8

    async def test_a_model_that_may_stop_stops_with_a_silent_token(self) -> None:
        body = {"messages": HELLO["messages"], "max_tokens": 100_000}
        _, answer = await ask(CHAT, body)
        choice, usage = answer["choices"][0], answer["usage"]
        assert choice["finish_reason"] == "stop"
        assert len(choice["message"]["content"]) == 4 * (usage["completion_tokens"] - 1)
        events = await stream(CHAT, body)
        assert parse_event(events[-2]).finish_reason == "stop"
        assert not parse_event(events[-2]).has_output

    @pytest.mark.parametrize("told", [False, True])
    async def test_the_client_names_the_request(self, told: bool) -> None:
        body, name = {**HELLO, "max_tokens": 1}, {"X-Request-Id": "abc"}
        async with (
            serving(enable_request_id_headers=told) as (_, client),
            client.post(CHAT, json=body, headers=name) as response,
        ):
            assert (await response.json())["id"] == "chatcmpl-abc"
            assert response.headers.get("X-Request-Id") == ("abc" if told else None)

    @pytest.mark.parametrize(
        ("given", "kind"),
        [
            ("+-5", "int_parsing"), ("-", "int_parsing"), ("", "int_parsing"), ("٣", "int_parsing"),
            ("5 5", "int_parsing"), ("0x", "int_parsing"), ("9" * 4_301, "int_parsing_size"),
            ("+5", None), (" 05 ", None), ("0" * 5_000 + "5", None), ("9" * 4_300, None),
        ],
    )  # fmt: skip
    async def test_a_number_as_text(self, given: str, kind: str | None) -> None:
        """Numbers as text are read as pydantic does, which reads vLLM's bodies."""
        status, answer = await ask(
            TEXT, {"prompt": "x" * 40, "max_tokens": given}, max_model_len=64
        )
        assert status == (400 if kind else 200)
        assert kind is None or f"'type': '{kind}', " in answer["error"]["message"]

    async def test_output_is_clamped_to_the_context(self) -> None:
        _, answer = await ask(TEXT, {"prompt": "x" * 240, "max_tokens": 500}, max_model_len=64)
        assert answer["usage"]["total_tokens"] <= 64


class TestTime:
    async def test_tokens_come_when_the_model_says(self) -> None:
        async with serving() as (engine, client):
            clock = asyncio.get_running_loop().time
            start, times = clock(), []
            async with client.post(TEXT, json={"prompt": "x" * 4_000, "stream": True}) as response:
                async for _ in response.content.iter_any():
                    times.append(clock() - start)
            times, engine = times, engine
        server = engine.core.config.step_constants().server_times()
        outside_s = server.alone_s(1_000) + engine.core.timing.admit_s(1_000)
        assert times[0] == pytest.approx(outside_s + 0.0265, abs=0.001)
        gaps = [late - early for early, late in pairwise(times[1:15])]
        assert gaps == pytest.approx([0.005] * len(gaps), rel=0.15)
        out_s = server.answer_s + 1_000 * server.answer_token_s
        assert engine.metrics.ttft.total == pytest.approx(times[0] - out_s)
        assert engine.metrics.max_lag_s == pytest.approx(0, abs=1e-6)

    async def test_time_scale_divides_the_wait_and_not_the_metrics(self) -> None:
        async def timed(**options: Any) -> tuple[float, float]:
            async with serving(**options) as (engine, client):
                clock = asyncio.get_running_loop().time
                start = clock()
                async with client.post(CHAT, json={**HELLO, "max_tokens": 100}) as response:
                    await response.read()
                return clock() - start, engine.metrics.e2e.total

        wall, simulated = await timed()
        fast_wall, fast_simulated = await timed(time_scale=4.0)
        assert fast_wall == pytest.approx(wall / 4)
        assert fast_simulated == pytest.approx(simulated) == pytest.approx(wall, abs=0.002)


class TestCache:
    @pytest.mark.parametrize("caching", [True, False])
    async def test_a_second_question_on_a_document_hits_it(self, caching: bool) -> None:
        cached = []
        async with serving(enable_prefix_caching=caching) as (_, client):
            for question in ("Who?", "When?"):
                text = " abc" * 4_000 + question
                body = {**HELLO, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
                async with client.post(CHAT, json=body) as response:
                    usage = (await response.json())["usage"]
                    cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 4_000 * caching]


class TestErrors:
    @pytest.mark.parametrize(
        ("path", "body", "status", "kind", "param", "says"),
        [
            (CHAT, b"{nope}", 400, "Bad Request", "body.1", "Expecting property name"),
            (CHAT, b"", 400, "Bad Request", "body", "'type': 'missing', 'loc': 'body'"),
            (CHAT, b"\xff", 400, "Bad Request", "body.0", "JSON decode error"),
            (CHAT, [1], 400, "Bad Request", "body", "valid dictionary"),
            (CHAT, {"messages": "x"}, 400, "Bad Request", "body.messages", "valid list"),
            (
                *(TEXT, {"prompt": "x", "max_tokens": "many"}, 400, "Bad Request"),
                *("body.max_tokens", "'msg': 'Input should be a valid integer, unable to parse"),
            ),
            (
                *(TEXT, {"prompt": "x", "temperature": -3}, 400, "BadRequestError", "temperature"),
                "temperature must be non-negative, got -3.0. (parameter=temperature, value=-3.0)",
            ),
            (
                *(TEXT, {"prompt": "x", "stream_options": {}}, 400, "BadRequestError"),
                *("stream_options", "Stream options can only be defined when `stream=True`."),
            ),
            (
                *(TEXT, {"prompt": "x" * 5_000, "stream": True}, 400, "BadRequestError"),
                *("input_tokens", "at least 1025 input tokens"),
            ),
            (
                *(CHAT, {**HELLO, "min_tokens": 5, "max_tokens": 1}, 400, "BadRequestError", None),
                "min_tokens must be less than or equal to max_tokens=1, got 5.",
            ),
            (CHAT, {**HELLO, "n": 2}, 400, "BadRequestError", "n", "n must be 1 on the simulated"),
            (
                TEXT,
                {"prompt": ["x", "y"]},
                400,
                "BadRequestError",
                "prompt",
                "answers one prompt",
            ),
            (TEXT, {"prompt": []}, 400, "BadRequestError", None, "at least one prompt"),
            (TEXT, {"prompt": [""]}, 400, "BadRequestError", "prompt", "cannot be empty"),
            (TEXT, {"prompt": [-1]}, 400, "BadRequestError", "prompt", "out of vocabulary"),
            (TEXT, {"prompt": ""}, 400, "BadRequestError", "prompt", "cannot be empty"),
        ],
    )
    async def test_bodies_read_as_vllms(
        self, path: str, body: Any, status: int, kind: str, param: str | None, says: str
    ) -> None:
        code, answer = await ask(path, body, max_model_len=1_024)
        error = answer["error"]
        assert (code, error["type"], error["param"], error["code"]) == (status, kind, param, status)
        assert says in error["message"]

    async def test_unknown_fields_are_ignored_and_a_missing_model_is_the_default(self) -> None:
        assert (await ask(CHAT, {**HELLO, "max_tokens": 1, "no_such_field": 1}))[0] == 200

    async def test_queue_limit_of_requests(self) -> None:
        async with serving(max_num_queued_reqs=1) as (_, client):
            body = {**HELLO, "max_tokens": 500}
            first = asyncio.create_task(client.post(CHAT, json=body))
            await asyncio.sleep(0.1)
            async with client.post(CHAT, json={**body, "stream": True}) as response:
                answer = response.status, (await response.json())["error"]["message"]
            (await first).release()
            status, message = answer
        assert status == 503
        assert message.startswith("The engine is currently busy")

    async def test_a_prompt_is_backlog_until_its_first_token(self) -> None:
        async with serving(max_num_queued_tokens=4_000) as (_, client):
            body = {"prompt": "x" * 16_000, "max_tokens": 500, "ignore_eos": True}
            tasks, statuses = [], []
            for wait_s in (0.03, 0.5):
                tasks.append(asyncio.create_task(client.post(TEXT, json=body)))
                await asyncio.sleep(wait_s)
                async with client.post(TEXT, json={**body, "max_tokens": 1}) as response:
                    statuses.append(response.status)
                await asyncio.sleep(0.2)
            for task in tasks:
                (await task).release()
            assert statuses == [503, 200]

    async def test_a_503_can_come_inside_a_200(self) -> None:
        async with serving(max_num_queued_tokens=5_000) as (engine, client):
            body = {"prompt": "x" * 16_000, "stream": True}

            async def one() -> tuple[int, list[bytes]]:
                async with client.post(TEXT, json=body) as response:
                    return response.status, await payloads(response)

            answers = await asyncio.gather(*(one() for _ in range(4)))
            answers, rejections = answers, dict(engine.metrics.rejections)
        errors = [parse_event(events[0]).error for _, events in answers]
        assert [status for status, _ in answers] == [200] * 4
        assert sum(error is not None for error in errors) == 2
        assert rejections == {"max_num_queued_reqs": 0, "max_num_queued_tokens": 2}


class TestPages:
    async def test_the_small_ones(self) -> None:
        async with serving(served_model_name="mine") as (_, client):
            for path in ("/health", "/ping"):
                async with client.get(path) as r:
                    assert (r.status, await r.read()) == (200, b"")
            async with client.post("/tokenize", json={"prompt": "Hello you"}) as r:
                tokens = (await r.json())["tokens"]
                assert len(tokens) == 3
            async with client.post("/detokenize", json={"tokens": tokens}) as r:
                assert await r.json() == {"prompt": "Hello you"}
            async with client.post("/detokenize", json={"tokens": ["x"]}) as r:
                assert r.status == 400

    async def test_metrics_under_vllms_names(self) -> None:
        async with serving() as (_, client):
            for _ in range(2):
                prompt = "x" * 640
                async with client.post(TEXT, json={"prompt": prompt, "ignore_eos": True}) as r:
                    await r.read()
            async with client.get("/metrics") as r:
                lines = (await r.text()).splitlines()
        label = '{engine="0",model_name="llama-3-8b"}'
        for line in (
            f"vllm:num_requests_running{label} 0.0",
            f"vllm:num_requests_waiting{label} 0.0",
            f"vllm:kv_cache_usage_perc{label} 0.0",
            f"vllm:prefix_cache_queries_total{label} 320.0",
            f"vllm:prefix_cache_hits_total{label} 144.0",
            f"vllm:num_preemptions_total{label} 0.0",
            f"vllm:prompt_tokens_total{label} 320.0",
            f"vllm:generation_tokens_total{label} 32.0",
            f"vllm:time_to_first_token_seconds_count{label} 2.0",
            f"vllm:inter_token_latency_seconds_count{label} 30.0",
            f"vllm:e2e_request_latency_seconds_count{label} 2.0",
        ):
            assert line in lines
        success = 'vllm:request_success_total{engine="0",finished_reason='
        assert f'{success}"length",model_name="llama-3-8b"}} 2.0' in lines
        assert f'{success}"abort",model_name="llama-3-8b"}} 0.0' in lines
        buckets = [line for line in lines if line.startswith("vllm:time_to_first_token_seconds_b")]
        assert len(buckets) == 23
        assert buckets[-1].endswith(" 2.0")
        (config,) = [line for line in lines if line.startswith("vllm:cache_config_info{")]
        assert 'block_size="16"' in config
        assert 'num_gpu_blocks="54283"' in config


class TestLeaving:
    @pytest.mark.parametrize("streamed", [True, False])
    @pytest.mark.parametrize("wait_s", [0.001, 0.03, 0.5])
    async def test_a_client_that_leaves_frees_its_place(
        self, streamed: bool, wait_s: float
    ) -> None:
        async with serving() as (engine, client):
            body = {**HELLO, "max_tokens": 5_000, "stream": streamed}

            async def read() -> None:
                async with client.post(CHAT, json=body) as response:
                    await response.read()

            task = asyncio.create_task(read())
            await asyncio.sleep(wait_s)
            assert engine.core.has_work == (wait_s > 0.02)
            task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(0.05)
            assert (engine.core.running, engine.core.waiting) == (0, 0)
            assert engine.core.kv_usage == 0
            assert engine.generator.load == 0
            assert not any(engine.metrics.success.values())

    async def test_shutdown_ends_streams_with_abort(self) -> None:
        async with aiohttp.ClientSession() as client:
            async with start_engine(EngineConfig(seed=1)) as engine:
                body = {**HELLO, "max_tokens": 5_000, "stream": True}
                response = await client.post(engine.url + CHAT, json=body)
                await asyncio.sleep(0.5)
            events = await payloads(response)
        assert events[-1] == b"[DONE]"
        assert parse_event(events[-2]).finish_reason == "abort"

    async def test_a_slow_reader_gets_merged_tokens_and_all_of_them(self) -> None:
        async with serving() as (engine, _):
            body = orjson.dumps({**HELLO, "max_tokens": 60_000, "stream": True})
            head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            head = head % CHAT.encode() + b"Content-Length: %d\r\n\r\n" % len(body)
            loop = asyncio.get_running_loop()
            with socket.socket() as sock:
                sock.setblocking(False)
                await loop.sock_connect(sock, ("127.0.0.1", engine.port))
                await loop.sock_sendall(sock, head + body)
                await asyncio.sleep(200)  # simulated: by then about half of the tokens are made
                assert 20_000 < engine.core.generation_tokens < 40_000
                parts = [b""]
                while not parts[-1].endswith(b"0\r\n\r\n"):
                    parts.append(await loop.sock_recv(sock, 1 << 20))
                received = b"".join(parts)
            texts = received.split(b'"content":"')[1:]
            words = [len(text.split(b'"', 1)[0]) // 4 for text in texts]
            assert sum(words) == 60_000
            assert max(words) > 1
            assert b"data: [DONE]" in received


class TestFaults:
    async def test_health(self) -> None:
        async with serving(fault="unhealthy") as (engine, client):
            statuses = []
            for fault in (engine.generator.fault, None):
                engine.set_fault(fault)
                async with client.get("/health") as response:
                    statuses.append(response.status)
            assert statuses == [503, 200]

    @pytest.mark.parametrize("fault", ["reset", "half-chunk"])
    async def test_broken_connections(self, fault: str) -> None:
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
            await stream(CHAT, {**HELLO, "max_tokens": 9}, fault=fault)

    async def test_a_stall_lasts_until_the_client_leaves(self) -> None:
        async with serving(fault="stall") as (engine, client):
            body = {**HELLO, "max_tokens": 9, "stream": True}
            async with client.post(CHAT, json=body) as response:
                got = b""
                while got.count(b"data:") < 1 + 3:
                    got += await response.content.readany()
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(response.content.readany(), 1_000)
                response.close()
            await asyncio.sleep(0.05)
            assert engine.generator.load == 0

    @pytest.mark.parametrize("text", ["nope", "reset:x", "reset:-1", ""])
    def test_an_unknown_fault_lists_the_known_ones(self, text: str) -> None:
        with pytest.raises(InputError, match="NAME one of unhealthy, reject"):
            parse_fault(text)
