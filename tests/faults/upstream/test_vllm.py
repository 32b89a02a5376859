"""A real vLLM that is full or shut down, as seen by clients behind the proxy.

One server for all; the last test ends it. Where the proxy needs another backend to turn to, a
scripted one will do: it shows what it was sent. No times: a test waits for what it wants to see,
and its timeout is the bound.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from stages.proxy_stage import DONE, EVENT, USAGE, WHOLE, RawBackend, stage
from stages.vllm_stage import body_of, failures, nothing_held, payloads, until, words
from vllm_server import ModelSize, Running, needed_vllm_python, vllm_process, write_model

pytestmark = [pytest.mark.timeout(400), pytest.mark.real_time]
SEATS = 3
STREAM = {"stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A vLLM that admits few requests, and lets them finish when it is stopped."""
    python, folder = needed_vllm_python(), tmp_path_factory.mktemp("vllm")
    write_model(folder / "model", ModelSize())
    flags = (
        "--max-model-len", "16384", "--max-num-queued-reqs", str(SEATS),
        "--shutdown-timeout", "120",
    )  # fmt: skip
    with vllm_process(python, folder / "model", folder / "vllm.log", *flags) as running:
        yield running


def several(name: str, prompts: int) -> dict[str, Any]:
    """A stream of several prompts at once.

    vLLM asks itself whether it has room for one when it decides on the status, and for each when
    it starts them, the 200 given: with more prompts than SEATS it always says 503 in a 200.
    """
    texts = [words(f"{name} {number}", 40) for number in range(prompts)]
    return {**body_of("", chat=False), **STREAM, "prompt": texts}


class TestFull:
    async def test_said_inside_a_200_it_is_the_status(self, server: Running) -> None:
        """Alone, it is a 503 with a time to come back; the server is not called dead."""
        async with stage([server.url]) as scene:
            body = several("alone", SEATS + 1)
            async with scene.client.post(server.url + "/v1/completions", json=body) as theirs:
                inside = await theirs.read()
                assert theirs.status == 200
            assert payloads(inside)[0]["error"]["code"] == 503  # this is what we protect from
            async with scene.post(body) as answer:
                assert (answer.status, answer.content_type) == (503, "application/json")
                assert (await answer.json())["error"] == payloads(inside)[0]["error"]
                assert answer.headers["retry-after"] == "1"
            async with scene.post(several("alone", 1)) as answer:
                assert answer.status == 200
                assert (await answer.read()).endswith(DONE)
            assert await failures(scene) == {"full": 1}
            assert not any("is down" in line for line in scene.said)
            await nothing_held(scene)

    async def test_said_inside_a_200_another_answers(self, server: Running) -> None:
        async with AsyncExitStack() as stack:
            other = await stack.enter_async_context(RawBackend().running())
            scene = await stack.enter_async_context(stage([server.url, other.url]))
            body = several("elsewhere", SEATS + 1)
            async with scene.post(body) as answer:
                assert answer.status == 200
                assert answer.headers["x-forebay-backend"] == "b1"
                assert await answer.read() == EVENT + EVENT + USAGE + DONE
            assert [json.loads(call.body) for call in other.calls] == [body]
            assert await failures(scene) == {"full": 1}
            await nothing_held(scene)

    @pytest.mark.parametrize("chat", [False, True])
    async def test_many_at_once_get_a_whole_stream_or_a_status(
        self, server: Running, chat: bool
    ) -> None:
        """Simultaneous requests mostly pass vLLM's first check, and are rejected at its second."""
        path = "/v1/chat/completions" if chat else "/v1/completions"

        async with stage([server.url]) as scene:

            async def ask(number: int) -> int:
                text = words(f"many {chat} {number}", 300)
                body = {**body_of(text, chat=chat, output=200), **STREAM}
                async with scene.post(body, path) as answer:
                    seen = await answer.read()
                    if answer.status == 200:
                        assert seen.endswith(DONE)
                        assert all("error" not in event for event in payloads(seen))
                    else:
                        assert "retry-after" in answer.headers
                        assert set(json.loads(seen)) == {"error"}
                    return int(answer.status)

            got = await asyncio.gather(*(ask(number) for number in range(16)))
            assert set(got) == {200, 503}
            await nothing_held(scene)


async def test_healthy_but_failing_is_put_out(server: Running) -> None:
    """While an answer finishes, vLLM answers 200 to /health and 500 to every new request."""
    url = server.url
    probe = body_of("x", chat=False)

    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(RawBackend().running())
        patient = {"timeout": "60s"}  # a busy machine is late: it is not to be down for that
        async with stage([url, other.url], health=patient) as scene:
            long = {**body_of("long", chat=False, output=15_000), **STREAM}

            async def refuses() -> bool:
                async with scene.client.post(url + "/v1/completions", json=probe) as answer:
                    return answer.status == 500

            async def ask(text: str) -> tuple[int, str, bytes]:
                async with scene.post(body_of(text, chat=False)) as answer:
                    where = answer.headers["x-forebay-backend"]
                    return answer.status, where, await answer.read()

            async with scene.client.post(url + "/v1/completions", json=long) as answer:
                await answer.content.readany()
                os.kill(server.pid, signal.SIGTERM)
                await until(refuses)
                rounds = 0
                while "backend b0 is ejected (3 failures in a row)" not in scene.said:
                    rounds += 1
                    texts = [words(f"{rounds} {number}", 40) for number in range(3)]
                    got = await asyncio.gather(*(ask(text) for text in texts))
                    assert got == [(200, "b1", WHOLE)] * 3
                async with scene.client.get(url + "/health") as health:
                    assert health.status == 200
                assert "5xx" in await failures(scene)
            await nothing_held(scene)
