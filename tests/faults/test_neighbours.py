"""A good client beside abuse, at small scale and in virtual time: all its requests are served.

`make bench-neighbours` measures every scene in full, beside real processes.
"""

import asyncio
from typing import Any

import neighbour_backend
import pytest
from neighbour_scenes import SCENES
from neighbour_tenants import set_keys
from neighbours import GoodClient, nested
from proxy_stage import Call, RawBackend, stage

from forebay.replay.clock.virtual_loop import run

SECONDS = 1.5
# Those that never pause have no place in virtual time.
PACED = [
    "undisturbed",
    "undisturbed_engine",
    "requests_that_fail",
    "half_closes",
    "dense_requests",
    "slow_images",
    "slow_grammars",
    "odd_parts",
    "health_checks",
    "foreign_responses",
]


async def serve(call: Call) -> None:
    await neighbour_backend._answer(call.body, call.writer)


@pytest.mark.parametrize("name", PACED)
def test_a_good_client_is_served_beside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = SCENES[name]
    set_keys()

    async def main() -> None:
        monkeypatch.setattr(neighbour_backend, "_engine", neighbour_backend._Engine())
        async with (
            RawBackend(serve).running() as one,
            RawBackend(serve).running() as other,
            stage([one.url, other.url], **nested(scene.config)) as on,
        ):
            abuse: asyncio.Task[Any] = asyncio.ensure_future(scene.run(on.url))
            await asyncio.sleep(1.0)
            client = GoodClient(on.url, **scene.good)
            await client.run(SECONDS)
            abuse.cancel()
            await asyncio.gather(abuse, return_exceptions=True)
        assert client.sent >= 5
        assert client.statuses == {"good": client.sent}

    run(main())


def test_every_way_to_hurt_others_has_a_scene_or_a_test_of_its_own() -> None:
    elsewhere = {
        11: "test_a_worker_that_hangs_is_said_and_replaced",
        13: "test_client_slow.py",
        14: "test_a_port_whose_last_process_has_just_ended_can_be_held",
    }
    assert {scene.item for scene in SCENES.values()} | set(elsewhere) == set(range(22))
