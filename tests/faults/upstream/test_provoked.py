"""A client whose requests fail everywhere does not put backends out; a backend that fails does."""

import asyncio

import pytest
from fakes.faulty_backends import error_event, fails, resets, streams
from stages.proxy_stage import DONE, EVENT, Call, Serve, by_request, on_stage, until

POISON = {"prompt": "poison", "max_tokens": 3}


def on_poison(fault: Serve) -> Serve:
    async def serve(call: Call) -> None:
        await (fault if b"poison" in call.body else by_request)(call)

    return serve


said_in_a_stream = streams(error_event("no", 500), DONE)


@pytest.mark.parametrize(
    ("fault", "at_once"), [(fails, 1), (fails, 20), (resets, 1), (said_in_a_stream, 1)]
)
async def test_requests_that_fail_everywhere_put_nobody_out(fault: Serve, at_once: int) -> None:
    """Whether each is asked for twice, or there are too many for that; for five seconds."""
    serve = on_poison(fault)
    async with on_stage(serve, serve) as (on, _):
        stream = {**POISON, "stream": fault is said_in_a_stream}
        health = on.proxy.backends.health
        seen: set[str] = set()

        async def poison() -> None:
            for _ in range(50):
                async with on.post(stream) as response:
                    await response.read()
                    assert response.status >= 500
                seen.update(health.state(name) for name in ("b0", "b1"))
                await asyncio.sleep(0.1)

        await asyncio.gather(*(poison() for _ in range(at_once)))
        assert seen == {"up"}
        assert await on.status() == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_backend_that_fails_requests_that_another_serves_is_ejected(path: str) -> None:
    async with on_stage(fails, None) as (on, _):
        for _ in range(12):
            assert await on.status({"prompt": "x", "input": "x"}, path) == 200
        assert on.proxy.backends.health.state("b0") in ("ejected", "half_open")
        assert on.proxy.backends.health.state("b1") == "up"


async def test_a_backend_that_fails_while_no_other_can_be_asked_is_ejected_soon() -> None:
    """Too many fail at once for a retry of each: those count at the next health check."""
    slow = streams(b": heard\n\n", EVENT + DONE, every_s=20.0)
    async with on_stage(fails, slow) as (on, _):

        async def ask() -> None:
            await on.read({"prompt": "x", "stream": True})

        asking = [asyncio.create_task(ask()) for _ in range(30)]
        await until(lambda: on.proxy.backends.health.state("b0") == "ejected")
        await asyncio.gather(*asking)
