"""What the tests of a real vLLM that fails look at: the proxy before it, and a broken stream."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from proxy_stage import Stage, settle

LOOK_S = 0.05  # other processes give no sign


async def until(wanted: Callable[[], Awaitable[bool]]) -> None:
    while not await wanted():  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)


async def is_up(scene: Stage, name: str, wanted: bool = True) -> None:
    upstream = scene.proxy.backends.upstreams[name]
    while upstream.up != wanted:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)


async def failures(scene: Stage) -> dict[str, float]:
    """How often the first backend failed, by kind."""
    async with scene.client.get(f"{scene.proxy.admin_url}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    samples = [one for family in families for one in family.samples]
    return {
        one.labels["kind"]: one.value
        for one in samples
        if one.name == "forebay_upstream_errors_total" and one.labels["backend"] == "b0"
    }


async def nothing_held(scene: Stage) -> None:
    """A client has all of a stream a moment before the slot is free."""
    while not all(one.idle for one in scene.proxy.driver.shaper.backends.values()):  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    await settle()
    scene.assert_nothing_held()


def payloads(data: bytes) -> list[Any]:
    """The events of a stream; the mark of its end is left out."""
    lines = [line[6:] for line in data.splitlines() if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


async def cut_off(answer: aiohttp.ClientResponse, seen: bytes = b"") -> bytes:
    """All of a stream, which must break."""
    with pytest.raises(aiohttp.ClientPayloadError):  # noqa: PT012
        while part := await answer.content.readany():
            seen += part
    return seen


def assert_said_to_be_cut(seen: bytes) -> None:
    """Good events, then one that says so, and nothing that looks like an end."""
    *good, last = payloads(seen)
    assert good
    assert all("error" not in event for event in good)
    assert last["error"]["code"] == "upstream_stream_error"
    assert b"[DONE]" not in seen
    assert b'"abort"' not in seen
