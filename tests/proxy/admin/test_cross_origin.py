"""The admin port rejects requests of other sites' pages, and parameters that it does not know."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from stages.proxy_stage import RawBackend, Stage, stage

from forebay.proxy.http1.server.listen import listen
from forebay.proxy.http1.server.server import HttpServer
from forebay.proxy.workers.workers import WorkerPool
from forebay.proxy.workers.workers_admin import WorkersAdmin

pytestmark = pytest.mark.real_time

WAIT_S = 20
EVIL = "http://evil.example"
REFUSED = [
    {"sec-fetch-site": "cross-site", "origin": EVIL},
    {"sec-fetch-site": "same-site"},  # another port of this machine
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-origin", "origin": EVIL},
    {"origin": EVIL},  # over plain HTTP browsers send Origin alone
    {"origin": "null"},
    {"origin": ""},
    {"origin": "http://127.0.0.1"},  # the same machine, another port
    {"origin": "http://{host}.evil.example"},
    {"origin": "http://evil.example@{host}"},
    {"origin": "null", "host": "null"},
]
PASSED = [
    {},  # curl
    {"sec-fetch-site": "same-origin", "origin": "http://{host}"},
    {"sec-fetch-site": "none"},
    {"origin": "http://{host}"},
    {"origin": "https://ops.example", "host": "OPS.example"},  # behind a reverse proxy
]


def of(headers: dict[str, str], admin: str) -> dict[str, str]:
    host = admin.removeprefix("http://")
    return {name: value.format(host=host) for name, value in headers.items()}


async def assert_refused(answer: aiohttp.ClientResponse) -> None:
    assert answer.status == 403
    error = (await answer.json())["error"]
    assert error["code"] == "cross_site"
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"] == "a1"
    assert "access-control-allow-origin" not in answer.headers


@asynccontextmanager
async def one_proxy() -> AsyncIterator[Stage]:
    async with (
        asyncio.timeout(WAIT_S),
        RawBackend().running() as backend,
        stage([backend.url]) as on,
    ):
        yield on


class TestOneProxy:
    @pytest.mark.parametrize("headers", REFUSED)
    async def test_a_page_of_another_site_neither_drains_nor_reloads(
        self, headers: dict[str, str]
    ) -> None:
        async with one_proxy() as on:
            admin = on.proxy.admin_url
            sent = {**of(headers, admin), "x-request-id": "a1"}
            before = on.proxy.reloader.message
            for path in ("/drain", "/reload", "/drain?x", "/none"):
                async with on.client.post(admin + path, headers=sent) as answer:
                    await assert_refused(answer)
            assert not on.proxy.stop.is_set()
            assert on.proxy.reloader.message == before
            # What reads is not refused: pages may not read the answer.
            async with on.client.get(admin + "/status", headers=sent) as answer:
                assert answer.status == 200
                assert "access-control-allow-origin" not in answer.headers

    @pytest.mark.parametrize("headers", PASSED)
    async def test_scripts_and_own_pages_pass(self, headers: dict[str, str]) -> None:
        async with one_proxy() as on:
            admin = on.proxy.admin_url
            sent = of(headers, admin)
            async with on.client.post(admin + "/reload", headers=sent) as answer:
                text = await answer.text()
                assert text == "failed: reload failed: it was not read from a file\n"
            async with on.client.post(admin + "/drain", headers=sent) as answer:
                assert answer.status == 202
            assert on.proxy.stop.is_set()

    @pytest.mark.parametrize(
        ("method", "target"),
        [
            ("POST", "/drain?backend=gpu1"),
            ("POST", "/drain?" + "x=1&" * 20),
            ("POST", "/reload?dry_run"),
            ("GET", "/status?reqest=a"),
            ("GET", "/metrics?ago=5&since=4"),
            ("GET", "/requests?by=slowest&tenant=a"),
            ("GET", "/backends?name=b0"),
        ],
    )
    async def test_an_unknown_parameter_does_nothing(self, method: str, target: str) -> None:
        async with one_proxy() as on:
            async with on.client.request(method, on.proxy.admin_url + target) as answer:
                assert answer.status == 400
                assert (await answer.json())["error"]["code"] == "unknown_parameter"
            assert not on.proxy.stop.is_set()

    @pytest.mark.parametrize(
        "target", ["/status", "/metrics?ago=5", "/requests?by=slowest&count=3", "/healthz?verbose"]
    )
    async def test_known_parameters_pass(self, target: str) -> None:
        async with one_proxy() as on:
            assert await on.status_of(on.proxy.admin_url + target) == 200


async def test_workers_are_not_drained_by_a_page() -> None:
    workers = WorkerPool([], 2, print)
    async with (
        asyncio.timeout(WAIT_S),
        WorkersAdmin(workers) as pages,
        aiohttp.ClientSession() as client,
    ):
        runner, port = await listen(HttpServer(pages.handle), "127.0.0.1", 0)
        try:
            admin = f"http://127.0.0.1:{port}"
            for headers in REFUSED:
                sent = {**of(headers, admin), "x-request-id": "a1"}
                async with client.post(admin + "/drain", headers=sent) as answer:
                    await assert_refused(answer)
            assert not workers.stop.is_set()
            for headers in PASSED:
                workers.stop.clear()
                async with client.post(admin + "/drain", headers=of(headers, admin)) as answer:
                    assert answer.status == 202
                assert workers.stop.is_set()
            workers.stop.clear()
            async with client.post(admin + "/drain?backend=gpu1") as answer:
                assert (await answer.json())["error"]["code"] == "unknown_parameter"
            assert not workers.stop.is_set()
        finally:
            await runner.cleanup()
            workers.hub.close()
