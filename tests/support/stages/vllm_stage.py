"""Requests to a real vLLM, directly and through the proxy, and the metrics the tests read."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from stages.engine_stage import Client
from stages.proxy_stage import WHOLE, RawBackend, Stage, cut_off, settle, stage

from forebay.traces.ground.schema import TraceRequest
from forebay.traces.text import prompt_text

LOOK_S = 0.05  # other processes give no sign


def words(name: str, tokens: int) -> str:
    """Text of `tokens` tokens that no other name's text shares."""
    return prompt_text(TraceRequest(name, 0.0, tokens, 1), "")


def body_of(text: str, *, chat: bool, output: int = 5) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    return {"model": "tiny", **prompt, "max_tokens": output, "ignore_eos": True}


async def running(client: Client, url: str) -> float:
    """Number of running requests, by the engine's metrics."""
    return await _told(client, url, "vllm:num_requests_running")


async def answered(client: Client, url: str) -> float:
    """Number of requests that ended well, by the engine's metrics."""
    return await _told(client, url, "vllm:request_success_total")


async def waits(client: Client, url: str, count: int) -> bool:
    """True if `count` requests wait in the engine, by its metrics."""
    return await _told(client, url, "vllm:num_requests_waiting{") == count


async def _told(client: Client, url: str, name: str) -> float:
    """The sum of a metric over its labels."""
    async with client.get(url + "/metrics") as response:
        text = await response.text()
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)


async def is_up(scene: Stage, name: str, up: bool = True) -> None:
    link = scene.proxy.backends.links[name]
    while link.up != up:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)


async def failures(scene: Stage) -> dict[str, float]:
    """Failures of the first backend by kind."""
    families = text_string_to_metric_families(await scene.admin("/metrics"))
    samples = [sample for family in families for sample in family.samples]
    return {
        sample.labels["kind"]: sample.value
        for sample in samples
        if sample.name == "forebay_upstream_errors_total" and sample.labels["backend"] == "b0"
    }


async def nothing_held(scene: Stage) -> None:
    """A client has all of a stream a moment before the slot is free."""
    while not all(backend.idle for backend in scene.proxy.driver.shaper.backends.values()):  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    await settle()
    scene.assert_nothing_held()


def payloads(data: bytes) -> list[Any]:
    """The events of a stream, without the mark of its end."""
    lines = [line[6:] for line in data.splitlines() if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def assert_said_to_be_cut(seen: bytes) -> None:
    """Assert: good events, then an error event, and nothing that looks like a normal end."""
    *good, last = payloads(seen)
    assert good
    assert all("error" not in event for event in good)
    assert last["error"]["code"] == "upstream_stream_error"
    assert b"[DONE]" not in seen
    assert b'"abort"' not in seen


@asynccontextmanager
async def ended_amid_answers(url: str, body: Any, end: Callable[[], None]) -> AsyncIterator[Stage]:
    """A proxy before a real server, "b0", and a healthy server of ours. `end` ends the former's
    engine while it streams one answer to `body` and computes another that is no stream.

    The stream was cut, the other request answered whole elsewhere, as are all later ones.
    """
    async with RawBackend(healthy=False).running() as other, \
            stage([url, other.url], wait_up=1) as scene:  # fmt: skip

        async def whole() -> tuple[int, str, bytes]:
            async with scene.post(body) as answer:
                where = answer.headers["x-forebay-backend"]
                return answer.status, where, await answer.read()

        async def both_run() -> bool:
            return await running(scene.client, url) == 2

        asking = asyncio.create_task(whole())
        async with scene.post({**body, "stream": True}) as answer:
            assert answer.status == 200
            seen = await answer.content.readany()
            await until(both_run)
            other.healthy = True
            await is_up(scene, "b1")
            end()
            seen = await cut_off(answer, seen)
        assert_said_to_be_cut(seen)
        assert await asking == (200, "b1", WHOLE)
        # The server of ours has no /tokenize, so it cannot go on with the stream.
        assert [json.loads(call.body) for call in other.calls] == [body]
        await is_up(scene, "b0", False)
        async with scene.post(body) as answer:
            assert (answer.status, await answer.read()) == (200, WHOLE)
        await nothing_held(scene)
        yield scene
