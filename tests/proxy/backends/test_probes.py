"""What the proxy asks servers for, with which key, and what it makes of the answers."""

import asyncio
from typing import Any

import pytest
from stages.proxy_stage import (
    Call,
    RawBackend,
    answer,
    by_request,
    on_stage,
    silent,
    stage,
    until,
)

from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import load_config
from forebay.traces.ground.errors import InputError

KEY = "sk-of-the-servers"
CACHE = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'


async def embedding(call: Call) -> None:
    await call.send(answer(200, b'{"data":[]}'))


class TestKey:
    """Each server stands behind an ingress that wants the key on every path."""

    async def test_every_request_to_a_server_carries_the_key(self) -> None:
        servers = [RawBackend(key=KEY, metrics=CACHE, asleep=False, openapi=b"{}") for _ in "ab"]
        async with on_stage(*servers, upstream_api_key=KEY, tenants={"isolate_cache": True}) as (
            on,
            _,
        ):
            assert await on.status() == 200
            assert await on.status({"input": "x", "model": ""}, "/v1/embeddings") == 200
            assert all(link.kv_tokens == 1600 for link in on.proxy.backends.links.values())
            assert await on.status_of(f"{on.proxy.admin_url}/backends") == 200
            servers[0].healthy = False
            assert await on.proxy.backends.prober.finds_dead(on.proxy.backends.links["b0"])
            await asyncio.sleep(40)
        assert [server.keyless for server in servers] == [0, 0]
        assert all(server.health_asked > 30 for server in servers)

    async def test_lanes_of_one_server_carry_it(self) -> None:
        ranks = b"".join(CACHE.replace(b"{", b'{engine="%d",' % rank) for rank in range(2))
        server = RawBackend(key=KEY, metrics=ranks)
        async with on_stage(server, wait_up=2, upstream_api_key=KEY, each={"data_parallel": 2}) as (
            on,
            _,
        ):
            assert await on.status() == 200
        assert server.keyless == 0

    async def test_a_reload_with_the_right_key_brings_a_server_up(self) -> None:
        """What the wrong key kept it from telling is asked again."""
        server = RawBackend(key=KEY, metrics=CACHE, models={"m": {}})
        async with server.running():
            keys: dict[str, Any] = {
                "listen": {"port": 0, "admin_port": 0},
                "backends": [{"name": "b0", "url": server.url}],
            }

            def right() -> Config:
                return load_config(None, {**keys, "upstream_api_key": KEY}, {})

            async with stage([server.url], wait_up=0, load=right, upstream_api_key="old") as on:
                await until(lambda: bool(on.said))
                assert any("unreachable (health 401)" in line for line in on.said)
                await on.proxy.reloader.reload()
                await until(lambda: on.proxy.backends.links["b0"].up)
                link = on.proxy.backends.links["b0"]
                assert (link.kv_tokens, list(link.models or ())) == (1600, ["m"])

    async def test_metrics_behind_a_key_are_named_in_the_log_once(self) -> None:
        """/health is open, /metrics is not, and the proxy has no key."""
        server = RawBackend(key=KEY, unlocked=("GET /health ",))
        async with on_stage(server) as (on, _):
            await asyncio.sleep(100)
            assert [line for line in on.said if "metrics" in line] == [
                "backend b0 cannot be probed: its /metrics answers 401, so the size of its KV "
                "cache is unknown"
            ]


class TestHealthPath:
    @pytest.mark.parametrize("status", [200, 204, 299])
    async def test_any_2xx_is_healthy(self, status: int) -> None:
        server = RawBackend(health=("/v1/health/ready", status))
        async with on_stage(server, health={"path": "/v1/health/ready"}) as (on, _):
            assert await on.status() == 200
            link = on.proxy.backends.links["b0"]
            assert not await on.proxy.backends.prober.finds_dead(link)
            server.healthy = False
            await until(lambda: not link.up)

    @pytest.mark.parametrize("status", [307, 404, 500])
    async def test_others_are_not(self, status: int) -> None:
        async with on_stage(RawBackend(health=("/health", status)), wait_up=0) as (on, _):
            await asyncio.sleep(5)
            assert await on.status() == 503
            link = on.proxy.backends.links["b0"]
            assert await on.proxy.backends.prober.finds_dead(link)

    @pytest.mark.parametrize("path", ["health", "/", "", "/a b", "/health?x=1", "//", "/a\r\nb"])
    def test_the_path_must_be_plain(self, path: str) -> None:
        with pytest.raises(InputError, match="plain path"):
            load_config(None, {"health": {"path": path}}, {})


class TestSleep:
    """vLLM in sleep mode: /health is 200, /is_sleeping is true, no request is answered."""

    async def test_the_other_server_answers_all(self) -> None:
        servers = [RawBackend(asleep=True), RawBackend(asleep=False)]
        async with on_stage(*servers, wait_up=1) as (on, _):
            assert [await on.status() for _ in range(10)] == [200] * 10
            assert (len(servers[0].calls), len(servers[1].calls)) == (0, 10)
            states = [b["state"] for b in (await on.told("/status"))["backends"]]
            assert states == ["asleep", "up"]

    async def test_a_server_is_used_within_a_probe_of_waking(self) -> None:
        server = RawBackend(asleep=True)
        async with on_stage(server, wait_up=0) as (on, _):
            for _ in range(5):
                server.asleep = True
                await asyncio.sleep(1.5)
                async with on.post() as response:
                    assert response.status == 503
                    assert response.headers["retry-after"] == "1"
                server.asleep = False
                await asyncio.sleep(1.1)
                assert await on.status() == 200

    async def test_a_request_that_falls_asleep_is_answered_by_the_other(self) -> None:
        servers = [RawBackend(serve=silent, asleep=False), RawBackend(asleep=True)]
        async with on_stage(*servers, wait_up=1) as (on, _):
            waiting = asyncio.create_task(on.status())
            await until(lambda: len(servers[0].calls) == 1)
            servers[1].asleep = False
            await until(lambda: on.proxy.backends.links["b1"].up)
            servers[0].asleep = True
            assert await waiting == 200

    async def test_a_server_without_sleep_mode_is_asked_once(self) -> None:
        server = RawBackend(openapi=b"{}")
        async with on_stage(server) as (on, _):
            await asyncio.sleep(30)
            assert not on.proxy.backends.links["b0"].may_sleep


async def test_no_client_gets_503_in_a_drain_under_load() -> None:
    """The server that is left is then late against its predictions, as its peer never was."""
    slow_s = 0.05

    async def serve(call: Call) -> None:
        await asyncio.sleep(slow_s)
        await by_request(call)

    async with on_stage(serve, serve) as (on, _):

        async def ask(requests: int) -> list[int]:
            return [await on.status({"prompt": "x", "stream": True}) for _ in range(requests)]

        assert await asyncio.gather(*(ask(1) for _ in range(12))) == [[200]] * 12
        await on.client.post(f"{on.proxy.admin_url}/backends/b1/drain")
        slow_s = 3.0
        assert await asyncio.gather(*(ask(4) for _ in range(16))) == [[200] * 4] * 16
        assert not [line for line in on.said if "ejected" in line]
