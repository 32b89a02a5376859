"""Incidents in which a healthy server is easily blamed, staged as in `incident_scenes`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from stages.incident_scenes import ACME, GOOD, SINCE_S, Fleet, anew, ask, chats, paced, scene
from stages.proxy_stage import Stage

IDLE_S = 1.2  # after which the balancer closes a connection on which nothing is sent


@scene(tenants=True)
async def unknown_model(on: Stage, engines: Fleet) -> None:
    """One tenant asks 70 times for a model that nobody serves, by a typing error."""
    good = asyncio.create_task(chats(on, 45.0, headers=GOOD))
    for number in range(70):
        wrong = await ask(on, 300, number, headers=ACME, body={"model": "lama-3-8b"})
        assert wrong == 404
        await asyncio.sleep(0.5)
    await good


@scene(tenants=True)
async def impatient_clients(on: Stage, engines: Fleet) -> None:
    """The clients of one tenant give up after 0.6 s: all its documents, and many of its chats."""

    async def hasty(words: int, name: str) -> None:
        try:
            async with asyncio.timeout(0.6):
                await ask(on, words, name, headers=ACME)
        except TimeoutError:
            pass

    async def both(number: int) -> None:
        await asyncio.gather(hasty(30_000, f"document {number}"), hasty(1_500, f"chat {number}"))

    await asyncio.gather(chats(on, 45.0, headers=GOOD), paced(44, 1.0, both))


@scene()
async def cold_cache(on: Stage, engines: Fleet) -> None:
    """An engine loses its prefix cache every 2 s."""

    async def lose() -> None:
        while True:
            await asyncio.sleep(2.0)
            engines.engines[1].loop.forget_all()

    losing = asyncio.create_task(lose())
    await chats(on, 60.0)
    losing.cancel()


@scene()
async def short_chats(on: Stage, engines: Fleet) -> None:
    """Nothing is wrong: chats of 20 to 40 words for 90 s."""
    await paced(180, 0.5, lambda n: ask(on, 20 + (n * 37) % 20, f"user {n % 11}"))


@scene()
async def avoided_server(on: Stage, engines: Fleet) -> float:
    """An engine at a quarter of its speed gets nothing more after its first answers."""
    began_at = await anew(engines, time_scale=0.25)
    await paced(240, 0.4, lambda number: ask(on, 1_500, number))
    return began_at


@scene()
async def without_its_flag(on: Stage, engines: Fleet) -> float:
    """An engine restarts without the flag for long prompts that the configuration states."""
    for number in range(6):
        await ask(on, 40_000, f"earlier document {number}")
    began_at = await anew(engines, long_prefill_token_threshold=0)

    async def some(number: int) -> None:
        long = [ask(on, 80_000, f"document {number}")] if number % 20 == 0 else []
        await asyncio.gather(ask(on, 300, f"user {number % 17}"), *long)

    await paced(300, 0.2, some)
    return began_at


@scene()
async def drained_and_restarted(on: Stage, engines: Fleet) -> float:
    """One engine is being drained while the other one restarts."""
    tasks = asyncio.create_task(chats(on, 40.0))
    await asyncio.sleep(10.0)
    async with on.client.post(on.proxy.admin_url + "/backends/b1/drain") as answer:
        assert answer.status == 200
    await asyncio.sleep(5.0)
    await engines.stop(0)
    began_at = asyncio.get_running_loop().time()
    await tasks
    return began_at


@scene()
async def idle_balancer(on: Stage, engines: Fleet) -> float:
    """A load balancer before an engine closes connections that are idle for 1.2 s."""
    port = await engines.stop(1)
    await engines.start(1)
    server_port = int(engines.engines[1].url.rpartition(":")[2])
    await engines.stacks[1].enter_async_context(balancer(port, server_port))
    await chats(on, 20.0)
    await asyncio.sleep(SINCE_S + 40.0)
    began_at = asyncio.get_running_loop().time()
    tasks = asyncio.create_task(chats(on, 50.0))
    for number in range(14):
        await ask(on, 60_000, f"document {number}")
        await asyncio.sleep(1.0)
    await tasks
    return began_at


@asynccontextmanager
async def balancer(port: int, server_port: int) -> AsyncIterator[None]:
    """Pass bytes between `port` and `server_port`, and close what is idle for `IDLE_S`."""
    running: set[asyncio.Task[Any]] = set()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        clock = asyncio.get_running_loop().time
        there, back = await asyncio.open_connection("127.0.0.1", server_port)
        last_at = clock()

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            nonlocal last_at
            while data := await source.read(1 << 16):
                last_at = clock()
                target.write(data)
                await target.drain()

        async def idle() -> None:
            while (rest_s := last_at + IDLE_S - clock()) > 0.0:  # noqa: ASYNC110
                await asyncio.sleep(rest_s + 1e-6)

        parts = [asyncio.create_task(part) for part in (copy(reader, back), copy(there, writer))]
        parts.append(asyncio.create_task(idle()))
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            pass  # by the end of the block below, and then done
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            writer.close()
            back.close()
            running.discard(task)

    server = await asyncio.start_server(connection, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
