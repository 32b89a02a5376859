"""The simulated server starts, stays silent, drains and dies."""

import asyncio
import json
import subprocess
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
import wire
from stages.engine_stage import COMMAND, HELLO, Client, chat, completion, get, on_server

from forebay.replay.clock.virtual_loop import run
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.loop.faults import FAULTS, fault_help
from forebay.replay.engine.server.options import ServerOptions
from forebay.replay.engine.server.server import KEEP_ALIVE_S, start_engine
from forebay.traces.ground.errors import InputError

COMMENT = b": keep-alive\n\n"


def stopping(
    scene: Callable[[str, Client, Callable[[], float]], Coroutine[Any, Any, Any]],
    shutdown_timeout: int,
) -> Any:
    """`scene` beside a server that gets SIGTERM at one second; its clock counts from then."""

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        async with Client() as client, AsyncExitStack() as stack:
            config = EngineConfig(served_model_name="tiny")
            engine = await stack.enter_async_context(
                start_engine(config, options=ServerOptions(shutdown_timeout=shutdown_timeout))
            )
            running = asyncio.create_task(scene(engine.url, client, lambda: loop.time() - 1.0))
            await asyncio.sleep(1.0 - loop.time())
            await stack.aclose()
            return await running

    return run(main())


def at(url: str, question: wire.Question) -> wire.Question:
    return wire.Question(question.method, url + question.path, question.headers, question.body)


def body_of(max_tokens: int) -> dict[str, Any]:
    return {**HELLO, "max_tokens": max_tokens}


class TestShutdownTimeout:
    def test_running_requests_finish_and_new_ones_are_refused(self) -> None:
        async def scene(url: str, client: Client, after: Callable[[], float]) -> list[wire.Answer]:
            usage = {"stream": True, "stream_options": {"include_usage": True}}
            asked = [completion(body_of(400)), completion({**body_of(400), **usage})]
            waiting = [asyncio.create_task(wire.ask(client, at(url, one))) for one in asked]
            await asyncio.sleep(0.1 - after())
            late = [
                await wire.ask(client, at(url, completion({"prompt": "x"}))),
                await wire.ask(client, at(url, chat("x", **usage))),
                await wire.ask(client, at(url, get("/health"))),
            ]
            answers = [*late, *await asyncio.gather(*waiting)]
            assert after() < 4  # 400 tokens: it does not wait out the rest of the time
            return answers

        refused, refused_stream, health, whole, streamed = stopping(scene, shutdown_timeout=60)
        for answer in (refused, refused_stream):
            assert answer.status == "500 Internal Server Error"
            assert json.loads(answer.body)["error"] == {
                "message": "cannot schedule new futures after shutdown",
                "type": "InternalServerError",
                "param": None,
                "code": 500,
            }
        assert health.status == "200 OK"
        assert json.loads(whole.body)["choices"][0]["finish_reason"] == "length"
        assert streamed.body.count(b'"finish_reason":"length"') == 1

    def test_who_is_not_done_in_time_is_aborted(self) -> None:
        async def scene(url: str, client: Client, after: Callable[[], float]) -> bytes:
            answer = await wire.ask(client, at(url, completion(body_of(50_000))))
            assert 2 <= after() < 3
            return answer.body

        assert b'"finish_reason":"abort"' in stopping(scene, shutdown_timeout=2)

    def test_an_idle_server_leaves_at_once(self) -> None:
        async def scene(url: str, client: Client, after: Callable[[], float]) -> float:
            while True:
                try:
                    await wire.ask(client, at(url, get("/health")))
                except aiohttp.ClientConnectorError:
                    return after()
                await asyncio.sleep(0.1)

        assert stopping(scene, shutdown_timeout=60) < 2

    def test_negative_seconds_and_empty_keys_are_refused(self) -> None:
        with pytest.raises(InputError, match="--shutdown-timeout -1: give seconds"):
            ServerOptions(shutdown_timeout=-1)
        with pytest.raises(InputError, match="--sse-keep-alive-interval -1: give seconds"):
            ServerOptions(sse_keep_alive_interval=-1)
        with pytest.raises(InputError, match="--api-key: an empty key"):
            ServerOptions(api_key=["secret", ""])


class TestKeepAlive:
    async def test_idle_connections_are_closed_after_five_seconds(self) -> None:
        async with on_server() as (engine, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
            clock = asyncio.get_running_loop().time
            start = clock()
            await reader.read()  # to the end of the connection
            writer.close()
            assert clock() - start == pytest.approx(KEEP_ALIVE_S, abs=1.1)

    async def test_comments_fill_the_silence_of_a_long_prefill(self) -> None:
        """About 8 s of prefill: a comment every 2 s, and none between tokens that come."""
        question = completion({"prompt": "x" * 400_000, "stream": True, "max_tokens": 50})
        for interval, scale in ((2, 1.0), (2, 10.0), (1, 1.0), (0, 1.0)):
            settings = {"max_model_len": 131_072, "time_scale": scale}
            options = ServerOptions(sse_keep_alive_interval=interval)
            async with on_server(None, options, **settings) as (engine, client):
                body = (await wire.ask(client, question)).body
                ttft_s = engine.metrics.ttft.total
            silent = body.partition(b"data: ")[0]
            assert silent == COMMENT * (int(ttft_s / interval) if interval else 0)
            assert body.count(COMMENT) == silent.count(COMMENT)
            assert not interval or silent

    async def test_comments_come_while_a_request_waits_in_the_queue(self) -> None:
        options = ServerOptions(sse_keep_alive_interval=1)
        async with on_server(options=options, max_num_seqs=1) as (_, client):
            first = asyncio.create_task(wire.ask(client, completion(body_of(1_000))))
            await asyncio.sleep(0.5)
            second = await wire.ask(client, completion({**body_of(5), "stream": True}))
            assert (await first).body.startswith(b"{")  # an answer in one piece has no place
            before, *events = second.body.split(b"data: ")
        assert before.count(COMMENT) >= 4
        assert len(events) == 6
        assert not any(COMMENT in event for event in events)

    async def test_a_stalled_stream_is_silent_all_the_same(self) -> None:
        async with (
            on_server("stall", ServerOptions(sse_keep_alive_interval=1)) as (_, client),
            client.post("/v1/completions", json={**HELLO, "stream": True}) as response,
        ):
            got = b""
            while got.count(b"data:") < 3:
                got += await response.content.readany()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(response.content.readany(), 100)
            response.close()


class TestLoad:
    @pytest.mark.parametrize(("tracking", "says"), [(True, 1), (False, 0)])
    async def test_load_counts_when_asked_to(self, tracking: bool, says: int) -> None:
        options = ServerOptions(enable_server_load_tracking=tracking)
        async with on_server(options=options) as (_, client):
            running = asyncio.create_task(wire.ask(client, completion(body_of(5_000))))
            await asyncio.sleep(0.5)
            answer = await wire.ask(client, get("/load"))
            running.cancel()
            assert json.loads(answer.body) == {"server_load": says}


class TestDeath:
    async def test_the_stream_that_was_to_end_dies_too(self) -> None:
        async with on_server("engine-dead:2") as (_, client):
            body = (await wire.ask(client, completion({**body_of(3), "stream": True}))).body
        assert b'"finish_reason":"length"' not in body
        assert b'"code": 500' in body
        assert body.endswith(b"data: [DONE]\n\n")

    async def test_a_kept_connection_gets_errors(self) -> None:
        async with on_server("engine-dead") as (_, client):
            await wire.ask(client, completion({**body_of(9), "stream": True}))
            asked = [get("/health"), completion({"prompt": "x"})]
            assert [(await wire.ask(client, one)).status for one in asked] == [
                "503 Service Unavailable",
                "500 Internal Server Error",
            ]

    def test_the_command_exits_1(self) -> None:
        words = [*COMMAND, "--model", "llama-3-8b", "--port", "0", "--fault", "engine-dead:0"]
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0]

            async def kill() -> bytes:
                async with Client(url) as client:
                    question = chat("Hello", model="llama-3-8b", stream=True)
                    return (await wire.ask(client, question)).body

            try:
                assert b'"code": 500' in asyncio.run(kill())
                _, says = process.communicate(timeout=60)
            finally:
                process.kill()
        assert process.returncode == 1
        assert says == "forebay engine: the engine died, as --fault engine-dead asks\n"


def test_help_names_every_fault_and_option() -> None:
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=60)
    for fault in FAULTS.values():
        assert fault.name in done.stdout
        assert fault.text in fault_help()
