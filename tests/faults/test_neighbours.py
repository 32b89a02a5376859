"""A good client beside abuse, in virtual time: all its requests are served."""

import asyncio
from typing import Any

import pytest
from neighbour_backend import Answers
from stages.neighbour_scenes import SCENES, GoodClient, set_keys
from stages.proxy_stage import Call, on_stage

SECONDS = 1.5


@pytest.mark.parametrize("name", SCENES)
async def test_a_good_client_is_served_beside(name: str) -> None:
    scene = SCENES[name]
    set_keys()

    answers = Answers()

    async def serve(call: Call) -> None:
        await answers.answer(call.body, call.writer)

    async with on_stage(serve, serve, **scene.config) as (on, _):
        abuse: asyncio.Task[Any] = asyncio.ensure_future(scene.run(on.url))
        await asyncio.sleep(1.0)
        client = GoodClient(on.url, **scene.good)
        await client.run(SECONDS)
        abuse.cancel()
        await asyncio.gather(abuse, return_exceptions=True)
    assert client.sent >= 5
    assert client.statuses == {"good": client.sent}
