"""The admin port of several workers passes questions on to each of them."""

import aiohttp
import orjson
import pytest

from forebay.proxy.http1.server.listen import listen
from forebay.proxy.http1.server.server import HttpServer
from forebay.proxy.workers.workers import WorkerPool
from forebay.proxy.workers.workers_admin import WorkersAdmin


async def test_a_drain_now_reaches_every_worker_and_is_a_drain_for_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets: list[str] = []

    async def answers(_: object, target: str, method: str = "GET") -> dict[int, tuple[int, bytes]]:
        targets.append(target)
        fields = {"backend": "gpu0", "draining": True, "in_flight": 2}
        return {0: (200, orjson.dumps(fields)), 1: (200, orjson.dumps(fields))}

    monkeypatch.setattr(WorkersAdmin, "_ask", answers)
    workers = WorkerPool([], 2, print)
    async with WorkersAdmin(workers) as pages, aiohttp.ClientSession() as client:
        runner, port = await listen(HttpServer(pages.handle), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{port}/backends/gpu0"
        async with client.post(f"{url}/drain?now") as answer:
            assert (await answer.json())["in_flight"] == 4
        assert targets == ["/backends/gpu0/drain?now"]
        assert pages._drained == {"/backends/gpu0/drain"}
        async with client.post(f"{url}/ready") as answer:
            assert answer.status == 200
        assert not pages._drained
        await runner.cleanup()
    workers.hub.close()
