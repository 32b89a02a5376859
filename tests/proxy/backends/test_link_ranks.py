"""The data-parallel ranks of one server are lanes: backends that share a URL."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.faulty_backends import answers, late
from stages.proxy_stage import RawBackend, Stage, by_request, on_stage, stage, until

from forebay.proxy.admin.backend_facts import engine_facts
from forebay.proxy.backends.discovery import Discovery
from forebay.proxy.config.backends import LaneConfig, lanes
from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import load_config
from forebay.traces.ground.errors import InputError

SERVER = {"url": "http://127.0.0.1:8001", "data_parallel": 4}


def engines(*blocks: int) -> bytes:
    """vLLM's metrics with so many blocks of 16 tokens for each rank, in no order."""
    lines = [
        f'vllm:cache_config_info{{block_size="16",engine="{rank}",num_gpu_blocks="{count}"}} 1.0\n'
        for rank, count in enumerate(blocks)
    ]
    return "".join(reversed(lines)).encode()


def ranks_asked(backend: RawBackend) -> list[str]:
    return [
        line.partition(": ")[2]
        for call in backend.calls
        for line in call.head.split("\r\n")
        if line.lower().startswith("x-data-parallel-rank:")
    ]


async def ask(on: Stage, count: int = 1, **options: Any) -> list[tuple[int, str]]:
    """Ask so often at once; returns each status and backend."""

    async def one(n: int) -> tuple[int, str]:
        body = {"prompt": f"{n} hello", "max_tokens": 3}
        async with on.post(body, **options) as response:
            return response.status, response.headers.get("x-forebay-backend", "")

    return await asyncio.gather(*map(one, range(count)))


# Configuration


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"data_parallel": 0}, "data_parallel: 0: "),
        ({"data_parallel": -1}, "data_parallel: -1: "),
        ({"data_parallel": 65}, "data_parallel: 65: "),
        ({"data_parallel": 1.5}, "data_parallel: 1.5: "),
        ({"data_parallel": "many"}, "data_parallel: 'many': "),
        ({"data_parallel": None}, "data_parallel: None: "),
        ({"rank": 1}, "rank: unknown key"),
        ({"kv_events": "ipc:///tmp/x"}, "ipc:///tmp/x: with data_parallel give rank 0's endpoint"),
        ({"kv_events": "tcp://h:0"}, "tcp://h:0: with data_parallel give rank 0's endpoint"),
        ({"kv_events": "tcp://h:65533"}, "the other ranks have the next 3 ports"),
        (
            {"kv_events": "tcp://h:5557", "kv_replay": "tcp://h:65535"},
            "tcp://h:65535: with data_parallel give rank 0's endpoint",
        ),
    ],
)
def test_bad_input_is_one_line(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as raised:
        load_config(None, {"backends": [SERVER | keys]}, {})
    assert str(raised.value).startswith("command line: backends.0")
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_names_of_lanes_are_nobody_elses() -> None:
    other = {"name": "gpu0-rank1", "url": "http://127.0.0.1:8002"}
    with pytest.raises(InputError, match="the name 'gpu0-rank1' is given twice"):
        load_config(None, {"backends": [SERVER, other]}, {})


def test_each_rank_has_its_number_and_its_endpoints() -> None:
    keys = {"kv_events": "tcp://*:5557", "kv_replay": "tcp://10.0.0.1:65532", "max_concurrency": 7}
    (backend,) = load_config(None, {"backends": [SERVER | keys]}, {}).backends
    found = lanes(backend)
    assert [lane.name for lane in found] == [f"gpu0-rank{rank}" for rank in range(4)]
    assert [lane.kv_events for lane in found] == [f"tcp://*:{5557 + n}" for n in range(4)]
    assert [lane.kv_replay for lane in found] == [f"tcp://10.0.0.1:{65532 + n}" for n in range(4)]
    assert [lane.rank for lane in found if isinstance(lane, LaneConfig)] == [0, 1, 2, 3]
    assert {(lane.url, lane.max_concurrency) for lane in found} == {(backend.url, 7)}


def test_a_server_of_one_rank_has_no_lanes() -> None:
    config = load_config(None, {"backends": [SERVER | {"data_parallel": 1}]}, {})
    assert lanes(config.backends[0]) == [config.backends[0]]


def test_a_bucket_and_a_list_in_a_file_name_servers(tmp_path: Path) -> None:
    listed = tmp_path / "servers.json"
    listed.write_text(json.dumps([{"name": "moe", **SERVER, "data_parallel": 2}]))
    bucket = {"name": "chat", "up_to": 5000, "backends": ["moe"]}
    read = load_config(None, {"backends_file": str(listed), "buckets": [bucket]}, {})
    config = Discovery(lambda *_: None).expand(read)
    assert [backend.name for backend in config.backends] == ["moe-rank0", "moe-rank1"]
    assert config.buckets[0].backends == ("moe-rank0", "moe-rank1")
    listed.write_text(json.dumps([SERVER | {"data_parallel": "x"}]))
    with pytest.raises(InputError) as raised:
        load_config(None, {"backends_file": str(listed)}, {})
    assert str(raised.value).startswith(f"{listed}: backends.0.data_parallel: 'x': ")


def test_the_doctor_reads_the_metrics_of_one_rank() -> None:
    page = "".join(
        f'vllm:prefix_cache_hits_total{{engine="{engine}",model_name="m"}} {engine}.0\n'
        f'vllm:request_prompt_tokens_count{{engine="{engine}",model_name="m"}} 10.0\n'
        for engine in (10, 8, 9)  # a node of several: its ranks are not counted from 0
    ).encode()
    assert engine_facts(page, 0) == {"prefix_hits": 8.0, "prompts": 10.0}
    assert engine_facts(page, 2) == {"prefix_hits": 10.0, "prompts": 10.0}
    assert engine_facts(page) == {"prefix_hits": 27.0, "prompts": 30.0}


# A running proxy


async def test_requests_go_to_the_rank_that_was_chosen() -> None:
    async with on_stage(None, each={"data_parallel": 4}, wait_up=4) as (on, backends):
        told = await ask(on, 8, headers={"x-data-parallel-rank": "9"})
        assert {status for status, _ in told} == {200}
        assert {name for _, name in told} == {f"b0-rank{rank}" for rank in range(4)}
        assert sorted(ranks_asked(backends[0])) == sorted(name[-1] for _, name in told)
        for path in ("/v1/embeddings", "/v1/embeddings"):  # these pass no queue
            assert await on.status({"input": "x"}, path=path) == 200
        assert len(ranks_asked(backends[0])) == 10


async def test_each_rank_has_its_own_kv_cache_and_the_server_is_asked_once() -> None:
    backend = RawBackend(metrics=engines(100, 200, 300), models={"m": {}})
    async with (
        backend.running(),
        stage([backend.url], each={"data_parallel": 3}, wait_up=3) as on,
    ):
        core = on.proxy.driver.shaper.backends
        assert [core[f"b0-rank{rank}"].kv_tokens for rank in range(3)] == [1600, 3200, 4800]
        assert (backend.metrics_asked, backend.models_asked) == (1, 1)
        asked = backend.health_asked
        await asyncio.sleep(20)
        assert 18 <= backend.health_asked - asked <= 22
        assert (backend.metrics_asked, backend.models_asked) == (1, 1)


async def test_a_rank_that_the_server_does_not_have_gets_no_work() -> None:
    backend = RawBackend(metrics=engines(100, 100))
    async with (
        backend.running(),
        stage([backend.url], each={"data_parallel": 3}, wait_up=2) as on,
    ):
        await asyncio.sleep(5)
        assert {name for _, name in await ask(on, 9)} == {"b0-rank0", "b0-rank1"}
        assert (
            "backend b0-rank2 is unreachable (its server has 2 of 3 ranks); "
            "it will be used once it answers"
        ) in on.said
        backend.metrics = engines(100, 100, 100)  # restarted with more
        await until(lambda: on.proxy.backends.links["b0-rank2"].up)


@pytest.mark.parametrize(("ranks", "name"), [(1, "b0"), (2, "b0-rank0")])
async def test_ranks_that_get_no_work_are_told(ranks: int, name: str) -> None:
    backend = RawBackend(metrics=engines(*[100] * 8))
    async with (
        backend.running(),
        stage([backend.url], each={"data_parallel": ranks}, wait_up=ranks) as on,
    ):
        line = f"backend {name}: its server has 8 data-parallel ranks: set data_parallel: 8"
        assert [said for said in on.said if "data-parallel" in said] == [line]


async def test_a_server_that_ignores_the_rank_still_answers() -> None:
    backend = RawBackend(metrics=b"")  # no vLLM: it does not say how many ranks it has
    async with (
        backend.running(),
        stage([backend.url], each={"data_parallel": 2}, wait_up=2) as on,
    ):
        assert {status for status, _ in await ask(on, 20)} == {200}


async def dying(call: Any) -> None:
    """Take requests, and never answer them."""
    await call.hung_up()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_dead_server_loses_all_lanes_and_no_request(path: str) -> None:
    async with AsyncExitStack() as stack:
        good = await stack.enter_async_context(RawBackend().running())
        async with AsyncExitStack() as life:
            bad = await life.enter_async_context(RawBackend(dying).running())
            on = await stack.enter_async_context(
                stage([good.url, bad.url], each={"data_parallel": 4}, wait_up=8)
            )
            waiting = asyncio.create_task(ask(on, 16, path=path))
            await until(lambda: bad.open > 3)
        # Its connections break, and it refuses new ones.
        told = await waiting + await ask(on, 16, path=path)
        assert [status for status, _ in told] == [200] * 32
        dead = [u for u in on.proxy.backends.links.values() if u.config.url == bad.url]
        await until(lambda: not any(lane.up for lane in dead))
        on.assert_nothing_held()


async def test_a_reload_changes_the_number_of_ranks_and_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "forebay.yaml"

    def load() -> Config:
        return load_config(file, {"listen": {"port": 0, "admin_port": 0}}, {})

    backend = RawBackend(late(2, by_request), metrics=engines(*[100] * 8))
    async with backend.running():

        def write(ranks: Any) -> None:
            server = {"name": "b0", "url": backend.url, "data_parallel": ranks}
            limits = {"loop_lag": "10s"}
            keys = {"backends": [server], "debug_headers": True, "limits": limits}
            file.write_text(yaml.safe_dump(keys))

        async with stage([backend.url], each={"data_parallel": 2}, wait_up=2, load=load) as on:
            core, told = on.proxy.driver.shaper.backends, []
            for ranks in (4, 2, 1, 8):
                running = asyncio.create_task(ask(on, 20))
                await asyncio.sleep(0.5)
                write(ranks)
                assert await on.proxy.reloader.reload() == "applied"
                told += await running
                await asyncio.sleep(1)
                names = {f"b0-rank{n}" for n in range(ranks)} if ranks > 1 else {"b0"}
                assert set(core) == names
                assert all(link.up for link in on.proxy.backends.links.values())
                told += await ask(on, 20)
            assert {status for status, _ in told} == {200}
            asked = backend.health_asked
            await asyncio.sleep(10)
            assert 9 <= backend.health_asked - asked <= 11
            for wrong in (0, "x", 65):
                write(wrong)
                assert await on.proxy.reloader.reload() == "failed"
                assert "backends.0.data_parallel" in on.proxy.reloader.message
            assert {status for status, _ in await ask(on, 8)} == {200}
            on.assert_nothing_held()


async def test_a_refused_rank_reaches_the_client_as_vllm_says_it() -> None:
    """A vLLM whose metrics are closed: nothing tells the number of its ranks."""

    out_of_range = answers(400, b'{"error":{"message":"data_parallel_rank 3 is out of range"}}')

    async with on_stage(out_of_range, each={"data_parallel": 4}, wait_up=4) as (on, _):
        assert [status for status, _ in await ask(on)] == [400]
        assert all(link.up for link in on.proxy.backends.links.values())
