"""Real processes: workers on one port, proxies that meet on a Redis or Valkey server.

Waits are bounded and end as soon as what is waited for is there.
"""

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from ports import free_ports
from said import Said
from stages.proxy_processes import proxy_process
from stages.proxy_stage import Call, RawBackend, by_request, settle
from stages.started import PATIENCE_S

from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import config_yaml, load_config
from forebay.proxy.core.model import BackendSpec, Bucket, Request
from forebay.proxy.core.peers import Peering
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.driver import Driver
from forebay.proxy.serve import Proxy, start_proxy
from forebay.proxy.share.exchange import exchanging
from forebay.proxy.share.hub import Hub, HubLink
from forebay.proxy.share.redis_link import RedisLink
from forebay.proxy.share.wire import VERSION
from forebay.proxy.workers.serve_workers import patience_s
from forebay.proxy.workers.worker import worker_environment
from forebay.traces.ground.errors import InputError

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")


async def until(there: Callable[[], Awaitable[Any]]) -> Any:
    """Ask `there` until it returns something, and return that."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := await there()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return found


async def until_now(there: Callable[[], object]) -> None:
    async def check() -> object:
        return there()

    await until(check)


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="no SO_REUSEPORT here")
@pytest.mark.real_time
async def test_workers_share_a_port_outlive_a_dead_one_and_drain() -> None:
    release = asyncio.Event()

    async def serve(call: Call) -> None:
        if b"slow" in call.body:
            await release.wait()
        await by_request(call)

    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(RawBackend(serve).running())
        process, url, admin = await stack.enter_async_context(
            proxy_process("--workers", "2", "--backend", backend.url)
        )
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        )

        async def post(prompt: str = "hi") -> int:
            body = {"prompt": prompt, "max_tokens": 3}
            async with client.post(url + "/v1/completions", json=body) as response:
                await response.read()
                return response.status

        async def status() -> dict[str, Any]:
            async with client.get(admin + "/status") as response:
                return dict(await response.json())

        async def both_met() -> list[dict[str, Any]]:
            """The workers, once each takes work and knows the other."""
            workers = list((await status())["workers"])
            told = [w["status"] for w in workers if w["status"]]
            met = [s for s in told if s["ready"] and len(s["share"]["peers"]) == 1]
            return workers if len(met) == 2 else []

        workers = await until(both_met)
        assert all(w["status"]["share"]["mode"] == "hub" for w in workers)
        assert {await post() for _ in range(40)} == {200}

        async def counted() -> list[str]:
            """Answers by worker; one that does not answer in time is left out."""
            async with client.get(admin + "/metrics") as response:
                series = (await response.text()).splitlines()
            found = [s for s in series if s.startswith("forebay_responses_total{")]
            return found if sum(float(s.split()[-1]) for s in found) == 40 else []

        answers = await until(counted)
        assert all(any(f'worker="{i}"' in s for s in answers) for i in (0, 1))

        victim, survivor = workers[0]["pid"], workers[1]["pid"]
        os.kill(victim, signal.SIGKILL)

        async def forgotten() -> bool:
            told = (await status())["workers"][1]["status"]
            return told is not None and workers[0]["status"]["share"]["id"] not in [
                peer["id"] for peer in told["share"]["peers"]
            ]

        await until(forgotten)
        assert {await post() for _ in range(10)} == {200}
        again = await until(both_met)
        assert [w["restarts"] for w in again] == [1, 0]
        assert again[0]["pid"] != victim
        assert again[1]["pid"] == survivor

        slow = [asyncio.create_task(post("slow")) for _ in range(6)]
        await until_now(lambda: backend.open == 6)
        process.send_signal(signal.SIGTERM)

        async def refused() -> bool:
            try:
                async with client.get(admin + "/readyz") as response:
                    return response.status == 503
            except aiohttp.ClientError:
                return True

        await until(refused)
        release.set()
        assert await asyncio.gather(*slow) == [200] * 6
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="no SO_REUSEPORT here")
@pytest.mark.real_time
async def test_a_worker_that_is_stopped_is_replaced_and_no_proxy_is_ready_meanwhile() -> None:
    async with (
        RawBackend().running() as backend,
        proxy_process("--workers", "2", "--backend", backend.url) as (_, _, admin),
        aiohttp.ClientSession() as client,
    ):

        async def ready() -> bool:
            async with client.get(admin + "/readyz") as response:
                return response.status == 200

        async def unready() -> bool:
            return not await ready()

        async def workers() -> Any:
            async with client.get(admin + "/status") as response:
                return (await response.json())["workers"]

        await until(ready)
        stopped = (await workers())[0]["pid"]
        os.kill(stopped, signal.SIGSTOP)
        await until(unready)
        await until(ready)
        one, other = await workers()
        assert one["pid"] != stopped
        assert (one["restarts"], other["restarts"]) == (1, 0)


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="no SO_REUSEPORT here")
def test_sighup_reaches_every_worker_and_a_reload_finds_nothing_changed(tmp_path: Path) -> None:
    """Not the port that they share nor the files of their own, which the file does not name."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            backend = await stack.enter_async_context(RawBackend().running())
            config = tmp_path / "forebay.yaml"
            config.write_text(f"metrics: {{hlog: {tmp_path}/ttft.hlog}}\n")
            process, _, admin = await stack.enter_async_context(
                proxy_process("--workers", "2", "--config", str(config), "--backend", backend.url)
            )
            client = await stack.enter_async_context(aiohttp.ClientSession())

            async def told() -> list[dict[str, Any]]:
                async with client.get(admin + "/status") as response:
                    workers = (await response.json())["workers"]
                # One that does not answer in time has none.
                return [worker["status"]["config"] for worker in workers if worker["status"]]

            async def both() -> list[dict[str, Any]]:
                found = await told()
                return found if len(found) == 2 else []

            assert [c["last_reload"] for c in await until(both)] == ["none yet"] * 2
            process.send_signal(signal.SIGHUP)

            async def reloaded() -> bool:
                return [c["last_reload"] for c in await told()] == ["unchanged"] * 2

            await until(reloaded)
            assert all(c["needs_restart"] == [] for c in await until(both))
            async with client.post(admin + "/reload") as response:
                assert (response.status, await response.text()) == (200, "unchanged\n")
            config.write_text("listn: {}\n")
            async with client.post(admin + "/reload") as response:
                assert response.status == 400
                assert "listn: unknown key" in await response.text()

    asyncio.run(main())
    assert {path.name for path in tmp_path.glob("*.hlog")} == {"ttft.0.hlog", "ttft.1.hlog"}


def test_workers_get_as_long_as_they_were_promised_since() -> None:
    def config(lame_duck: str, drain: str) -> Config:
        timeouts = {"lame_duck": lame_duck, "drain": drain}
        return load_config(None, {"backends": [{"url": "http://x:1"}], "timeouts": timeouts}, {})

    def bad() -> Config:
        raise InputError("bad")

    assert patience_s(config("2s", "3s"), lambda: config("1s", "40s")) == 41.0
    assert patience_s(config("2s", "3s"), lambda: config("0s", "1s")) == 5.0
    assert patience_s(config("2s", "3s"), bad) == 5.0


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is ours on Linux only")
@pytest.mark.real_time
async def test_the_admin_ports_of_all_are_where_they_were_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Admin ports need no key: on a public address anybody could drain the proxy."""
    monkeypatch.setenv("FOREBAY_LISTEN__ADMIN_HOST", "127.0.0.2")

    async with (
        RawBackend().running() as backend,
        proxy_process("--workers", "2", "--backend", backend.url) as (_, url, admin),
        aiohttp.ClientSession() as client,
    ):
        assert url.startswith("http://127.0.0.1:")
        assert admin.startswith("http://127.0.0.2:")
        async with client.get(admin + "/status", headers={"x-request-id": "a1"}) as response:
            assert response.headers["x-request-id"] == "a1"
            workers = (await response.json())["workers"]
        async with client.get(admin + "/none") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "not_found"
            assert response.headers["x-request-id"]
        for own in (admin, *(worker["admin_url"] for worker in workers)):
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.get(own.replace("127.0.0.2", "127.0.0.1") + "/healthz")


def test_workers_do_not_speak_to_the_service_manager() -> None:
    given = {"NOTIFY_SOCKET": "/run/notify", "FOREBAY_UPSTREAM_API_KEY": "k"}
    assert worker_environment(given) == {"FOREBAY_UPSTREAM_API_KEY": "k"}


def test_workers_that_cannot_start_are_bad_input(tmp_path: Path) -> None:
    async def main() -> tuple[int | None, str]:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "forebay.proxy", "proxy", "--workers", "2",
                "--backend", "http://127.0.0.1:9", "--admin-port", "0",
                "--port", str(taken.getsockname()[1]),
                stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            async with asyncio.timeout(PATIENCE_S):
                _, said = await process.communicate()
            return process.returncode, said.decode()

    status, said = asyncio.run(main())
    assert status == 2
    assert said.count("\n") == 1
    assert "listen.port: cannot listen on 127.0.0.1" in said


def a_driver() -> Driver:
    shaper = Shaper([BackendSpec("a", 4)], [Bucket("chat", 5_000)])
    driver = Driver(shaper, lambda now, action: None)
    driver.backend_up("a")
    return driver


@pytest.mark.real_time
async def test_hub_brings_books_and_its_end_leaves_everybody_alone() -> None:
    said = Said()
    hub = Hub(lambda worker, data: None)
    links = [HubLink(hub.new_end(i)) for i in range(2)]
    drivers = [a_driver() for _ in links]
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(exchanging(driver, [link], said))
            for driver, link in zip(drivers, links, strict=True)
        ]
        async with drivers[0].slot(Request("r", 1_000)):
            await until_now(lambda: drivers[1].shaper.backends["a"].running == 1)
        await until_now(lambda: drivers[1].shaper.backends["a"].running == 0)
        for bad in (b"", b"{}", b'{"v":1}', b"\xff" * 100):
            one.heard(bad)
        assert one.bad == 4
        assert one.status()["alone_since"] is None
        hub.close()
        await until_now(lambda: one.alone_since and other.alone_since)
        await until_now(lambda: not drivers[0].shaper.peering.peers.names)
        assert drivers[0].shaper.backends["a"].elsewhere is None
        assert "alone" in said[-1]
    for driver, link in zip(drivers, links, strict=True):
        driver.close()
        link.close()


@pytest.mark.real_time
async def test_old_and_own_messages_are_no_news() -> None:
    driver = a_driver()
    async with exchanging(driver, [], print) as exchange:
        text = '{"v":%d,"id":"%s","n":%d,"backends":{},"tenants":{}}'
        for sender, number in (("p", 5), ("p", 5), ("p", 4), (exchange.sender, 9), ("p", 6)):
            exchange.heard((text % (VERSION, sender, number)).encode())
        exchange.heard((text % (VERSION - 1, "q", 1)).encode())
        assert exchange.received == 2
        assert exchange.status()["mode"] == "off"
    driver.close()


@pytest.mark.real_time
async def test_a_fault_of_ours_is_said_once_and_the_exchange_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(peering: Peering, now: float) -> None:
        raise ZeroDivisionError

    said = Said()
    hub = Hub(lambda worker, data: None)
    link = HubLink(hub.new_end(0))
    driver = a_driver()
    async with exchanging(driver, [link], said) as exchange:
        monkeypatch.setattr(Peering, "report", broken)
        await until_now(lambda: exchange.failed >= 2)
        monkeypatch.undo()
        published = exchange.published
        await until_now(lambda: exchange.published > published)
    assert [line for line in said if "internal" in line] == [
        "share: internal error: ZeroDivisionError"
    ]
    hub.close()
    link.close()
    driver.close()


def test_share_url() -> None:
    def config(url: str) -> Any:
        return load_config(None, {"backends": [{"url": "http://h:1"}], "share": url}, {})

    shown = config_yaml(config("redis://:geheim@h:6379/0?prefix=x"))
    assert "geheim" not in shown
    for bad in ("h:6379", "http://h", "redis://", "redis://h:0"):
        with pytest.raises(InputError, match=r"share: .*redis://host:6379"):
            config(bad)


@asynccontextmanager
async def redis_server(port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A server of our own, once it takes connections; killed on leaving."""
    assert SERVER is not None
    process = await asyncio.create_subprocess_exec(
        SERVER, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip

    async def answers() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        await writer.wait_closed()
        return True

    try:
        await until(answers)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.skipif(SERVER is None, reason="no valkey-server or redis-server on PATH")
@pytest.mark.real_time
async def test_proxies_meet_on_redis_go_on_alone_without_it_and_meet_again() -> None:
    pytest.importorskip("redis", reason="pip install 'forebay[redis]'")

    (port,) = free_ports(1)
    said = Said()
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(RawBackend().running())
        client = await stack.enter_async_context(aiohttp.ClientSession())
        keys = {
            "listen": {"port": 0, "admin_port": 0},
            "backends": [{"url": backend.url}],
            "share": f"redis://127.0.0.1:{port}/3?prefix=test",
        }
        config = load_config(None, keys, {})
        proxies: list[Proxy] = []

        async def met() -> bool:
            return all(
                len(p.driver.shaper.peering.peers) == 1 and p.exchange.alone_since is None
                for p in proxies
            )

        async def alone() -> bool:
            return all(
                not p.driver.shaper.peering.peers.names and p.exchange.alone_since for p in proxies
            )

        async def share(proxy: Proxy) -> dict[str, Any]:
            async with client.get(proxy.admin_url + "/status") as response:
                return dict((await response.json())["share"])

        async def served() -> bool:
            statuses = []
            for proxy in proxies:
                body = {"prompt": "hi", "max_tokens": 3}
                async with client.post(proxy.url + "/v1/completions", json=body) as response:
                    await response.read()
                    statuses.append(response.status)
            return statuses == [200] * len(proxies)

        for _ in range(2):
            proxies.append(await stack.enter_async_context(start_proxy(config, said)))
        # No server yet: that is no reason not to serve.
        await until(served)
        assert (await share(proxies[0]))["alone_since"]
        async with redis_server(port) as server:

            async def knows_the_other() -> bool:
                told = await share(proxies[0])
                assert told["mode"] == "redis"
                return [peer["id"] for peer in told["peers"]] == [proxies[1].exchange.sender]

            async def refused() -> bool:
                await publish(port, "test:3:books", b"not ours")  # lost on who is not there
                return all(p.exchange.bad for p in proxies)

            await until(met)
            await until(knows_the_other)
            await until(refused)
            server.kill()
            await server.wait()
        await until(alone)
        assert await served()
        told = await share(proxies[0])
        assert told["alone_since"]
        assert told["links"][0]["trouble"]
        async with redis_server(port) as server:

            async def no_more_alone() -> bool:
                return (await share(proxies[1]))["alone_since"] is None

            await until(met)
            await until(no_more_alone)
            server.send_signal(signal.SIGSTOP)  # connected, and says nothing
            await until(alone)
            assert await served()
            server.send_signal(signal.SIGCONT)
            await until(met)
    assert any("alone" in line for line in said)


async def test_a_fault_in_a_session_is_said_and_the_next_session_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("redis", reason="pip install 'forebay[redis]'")

    sessions, second = list[RedisLink](), asyncio.Event()

    async def session(link: RedisLink, heard: object) -> None:
        sessions.append(link)
        link.trouble = ""  # connected
        if len(sessions) == 1:
            raise ExceptionGroup("", [ExceptionGroup("", [KeyError("our own")])])
        second.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(RedisLink, "_session", session)
    link = RedisLink("redis://127.0.0.1:1")
    async with asyncio.timeout(60), link.listen(lambda data: None):
        await settle()
        assert (link.connected, link.trouble) == (False, "internal error: KeyError")
        await second.wait()
        assert link.connected


async def publish(port: int, channel: str, data: bytes) -> None:
    from redis.asyncio import Redis

    async with Redis(port=port) as client:
        await client.publish(channel, data)
