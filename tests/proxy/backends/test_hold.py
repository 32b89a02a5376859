"""Requests that are kept while no backend of their model is up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from fakes.faulty_backends import late
from stages.proxy_stage import (
    RawBackend,
    Stage,
    by_request,
    error_of,
    on_stage,
    settle,
    silent,
    stage,
    until,
)

PATIENT = [{"name": "chat", "up_to": 5000, "max_wait": "60s"}]
HOLD: dict[str, Any] = {"hold": {"max_requests": 3}}


async def status(on: Stage, model: str = "") -> int:
    body = {"prompt": "hello", "max_tokens": 3} | ({"model": model} if model else {})
    async with on.post(body) as response:
        await response.read()
        return int(response.status)


async def go_down(on: Stage, backend: RawBackend, name: str = "b0") -> None:
    backend.healthy = False
    await until(lambda: not on.proxy.backends.links[name].up)


def held(on: Stage) -> int:
    return on.proxy.app.held.count


@asynccontextmanager
async def with_its_server_gone(**keys: Any) -> AsyncIterator[tuple[Stage, int]]:
    """A proxy whose only server has just gone, which no probe has seen; and the server's port."""
    async with AsyncExitStack() as stack:
        async with RawBackend().running() as backend:
            on = await stack.enter_async_context(
                stage([backend.url], buckets=PATIENT, health={"interval": "30s"}, **keys, **HOLD)
            )
        yield on, int(backend.url.rpartition(":")[2])


async def test_they_are_served_once_one_is_up() -> None:
    async with on_stage(None, **HOLD) as (on, backends):
        (backend,) = backends
        await go_down(on, backend)
        tasks = [asyncio.create_task(status(on)) for _ in range(5)]
        await settle()
        assert held(on) == 3
        refused = [task.result() for task in tasks if task.done()]
        assert refused == [503, 503]  # beyond the limit: at once
        backend.healthy = True
        assert sorted(await asyncio.gather(*tasks)) == [200, 200, 200, 503, 503]
        assert held(on) == 0


async def test_the_wait_is_told() -> None:
    async with on_stage(None, buckets=PATIENT, **HOLD) as (on, backends):
        await go_down(on, backends[0])
        task = asyncio.ensure_future(on.post().__aenter__())
        await asyncio.sleep(1.5)
        backends[0].healthy = True
        response = await task
        assert response.status == 200
        assert 1_400 < float(response.headers["x-forebay-queue-ms"]) < 4_000


async def test_for_no_longer_than_they_would_queue() -> None:
    short = [{"name": "chat", "up_to": 5_000, "max_wait": 2.0}]
    async with on_stage(None, **HOLD, buckets=short) as (on, backends):
        await go_down(on, backends[0])
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with on.post() as response:
            assert response.status == 503
            assert (await error_of(response))["code"] == "no_backend_available"
            assert response.headers["retry-after"]
        assert 1.9 < loop.time() - began < 2.5
        began = loop.time()
        assert await on.status(headers={"x-request-timeout": "500ms"}) == 503
        assert 0.4 < loop.time() - began < 0.9
        assert held(on) == 0


async def test_a_client_that_leaves_gives_its_place_back() -> None:
    async with on_stage(None, **HOLD) as (on, backends):
        await go_down(on, backends[0])
        task = asyncio.create_task(status(on))
        await settle()
        assert held(on) == 1
        task.cancel()
        await until(lambda: held(on) == 0)


async def test_queued_requests_are_held_when_the_last_backend_goes_down() -> None:
    async with on_stage(None, slots=1, buckets=PATIENT, **HOLD) as (on, backends):
        (backend,) = backends
        stays = asyncio.Event()
        backend.serve, usual = late(stays, by_request), backend.serve
        first = asyncio.create_task(status(on))
        await settle()
        second = asyncio.create_task(status(on))
        await settle()
        assert len(backend.calls) == 1
        await go_down(on, backend)
        assert held(on) == 1
        backend.serve = usual
        backend.healthy = True
        stays.set()
        assert await second == 200
        assert await first == 200
        assert on.proxy.metrics.rejects.of == {}  # neither client was rejected


async def test_time_in_the_queue_counts_against_the_clients_timeout() -> None:
    async with on_stage(None, slots=1, buckets=PATIENT, **HOLD) as (on, backends):
        backends[0].serve = silent
        first = asyncio.create_task(status(on))
        await settle()
        loop = asyncio.get_running_loop()
        began = loop.time()
        headers = {"x-request-timeout": "4s"}
        second = asyncio.ensure_future(on.post(headers=headers).__aenter__())
        await asyncio.sleep(2.5)
        assert on.proxy.driver.shaper.queued("chat") == 1
        await go_down(on, backends[0])
        assert (await second).status == 503
        assert 3.5 < loop.time() - began < 4.5
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_each_waits_for_its_model() -> None:
    one, two = RawBackend(models={"one": {}}), RawBackend(models={"two": {}})
    async with on_stage(one, two, **HOLD) as (on, _):
        await go_down(on, two, "b1")
        task = asyncio.create_task(status(on, "two"))
        await settle()
        assert held(on) == 1
        assert await status(on, "one") == 200
        two.healthy = True
        assert await task == 200


async def test_a_proxy_that_stops_ends_them() -> None:
    async with on_stage(None, buckets=PATIENT, **HOLD) as (on, backends):
        await go_down(on, backends[0])

        async def code() -> str:
            async with on.post(headers={"x-request-timeout": "100s"}) as response:
                return str((await error_of(response))["code"])

        task = asyncio.create_task(code())
        await settle()
        assert held(on) == 1
        clock = asyncio.get_running_loop().time
        began = clock()
        assert await on.proxy.drain(60.0) == 0
        assert clock() - began < 1.0  # at once: no server may ever come
        assert await task == "draining"
        assert held(on) == 0


async def test_a_model_that_is_known_only_once_its_server_is_up() -> None:
    """All servers start together, and that of another model is first."""
    one = RawBackend(models={"one": {}}, healthy=False)
    two = RawBackend(models={"two": {}}, healthy=False)
    async with on_stage(one, two, wait_up=0, buckets=PATIENT, **HOLD) as (on, _):
        task = asyncio.create_task(status(on, "two"))
        await settle()
        assert held(on) == 1
        one.healthy = True
        await until(lambda: on.proxy.backends.links["b0"].up)
        assert await status(on, "one") == 200
        assert held(on) == 1  # nobody that is up names it, and one has told nothing yet
        two.healthy = True
        assert await task == 200
        assert [len(one.calls), len(two.calls)] == [1, 1]
        assert await status(on, "three") == 404  # all have told


async def test_a_server_that_never_came_is_not_waited_for() -> None:
    """A model that none names is then theirs to reject."""
    one = RawBackend(models={"one": {}})
    async with (
        one.running(),
        stage([one.url, "http://127.0.0.1:9"], wait_up=1, **HOLD) as on,
    ):
        await asyncio.sleep(601)
        began = asyncio.get_running_loop().time()
        assert await status(on, "new") == 200
        assert asyncio.get_running_loop().time() - began < 1


async def test_a_server_that_loads_the_model_meanwhile() -> None:
    one, two = RawBackend(models={"one": {}}), RawBackend(models={"two": {}})
    patient = [{"name": "chat", "up_to": 5000, "max_wait": "600s"}]
    async with on_stage(one, two, buckets=patient, **HOLD) as (on, _):
        await go_down(on, two, "b1")
        task = asyncio.create_task(status(on, "two"))
        await settle()
        one.models = {"one": {}, "two": {}}
        began = asyncio.get_running_loop().time()
        assert await task == 200
        assert asyncio.get_running_loop().time() - began < 60


async def test_a_server_that_refuses_connections_while_it_restarts() -> None:
    """Before a probe has seen that it is down."""
    async with AsyncExitStack() as stack:
        on, port = await stack.enter_async_context(with_its_server_gone())
        tasks = [asyncio.create_task(status(on)) for _ in range(3)]
        await settle()
        again = await stack.enter_async_context(RawBackend().running(port))
        assert await asyncio.gather(*tasks) == [200] * 3
        assert len(again.calls) == 3


async def test_a_refused_connection_uses_no_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "acme: key-of-acme-0123456789")

    async with AsyncExitStack() as stack:
        known = {"acme": {"tokens_per_s": 0.001, "burst_tokens": 1_500}}
        on, port = await stack.enter_async_context(
            with_its_server_gone(tenants={"keys": "env:KEYS", "known": known})
        )

        async def ask() -> int:
            key = {"authorization": "Bearer key-of-acme-0123456789"}
            return await on.status({"prompt": "word " * 900}, headers=key)

        task = asyncio.create_task(ask())
        await asyncio.sleep(3)
        await stack.enter_async_context(RawBackend().running(port))
        assert await task == 200


async def test_the_proxy_is_ready_while_it_keeps_requests() -> None:
    """Else nobody would send it any."""
    async with on_stage(None, **HOLD) as (on, backends):
        await go_down(on, backends[0])
        for url in (on.url + "/health", on.proxy.admin_url + "/readyz"):
            assert await on.status_of(url) == 200


async def test_a_tenant_gets_half_of_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "acme: key-of-acme-0123456789\nzeta: key-of-zeta-0123456789")

    keys: dict[str, Any] = {"tenants": {"keys": "env:KEYS"}, "hold": {"max_requests": 6}}
    async with on_stage(None, **keys) as (on, backends):
        await go_down(on, backends[0])

        async def ask(key: str) -> int:
            return await on.status(headers={"authorization": f"Bearer {key}"})

        tasks = [asyncio.create_task(ask("key-of-acme-0123456789")) for _ in range(8)]
        await settle()
        assert held(on) == 3
        other = asyncio.create_task(ask("key-of-zeta-0123456789"))
        await settle()
        assert held(on) == 4
        for task in (*tasks, other):
            task.cancel()
        await asyncio.gather(*tasks, other, return_exceptions=True)
        await settle()
        assert held(on) == 0
