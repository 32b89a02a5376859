"""Data-parallel ranks behind one URL: vLLM's choice, the header that overrides it, the metrics."""

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import refusal
from fakes.kv_models import write_config
from stages.engine_stage import Client, on_server
from stages.proxy_stage import stage

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.loop.ranks import EngineRanks
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.server.options import ServerOptions
from forebay.replay.engine.server.server import start_engine

RANKS = 3
THREE = ServerOptions(data_parallel_size=RANKS)
TOKENS = 50
BODY = {"model": "tiny", "prompt": "hello there", "max_tokens": TOKENS, "ignore_eos": True}


def asked(n: int, prompt: int = 16, output: int = 500) -> EngineRequest:
    return EngineRequest(str(n), prompt, output, [], arrival_s=0.0)


def chosen(ranks: EngineRanks, requests: Sequence[EngineRequest]) -> list[int]:
    """The rank that each request goes to."""
    found = []
    for request in requests:
        before = [loop.core.running + loop.core.waiting for loop in ranks.loops]
        ranks.add(request)
        after = [loop.core.running + loop.core.waiting for loop in ranks.loops]
        (rank,) = [n for n, (old, new) in enumerate(zip(before, after, strict=True)) if new > old]
        found.append(rank)
    return found


async def post(
    client: Client, path: str, body: dict[str, Any], rank: str | None = None
) -> tuple[int, str]:
    headers = {} if rank is None else {"X-data-parallel-rank": rank}
    async with client.post(path, json=body, headers=headers) as answer:
        return answer.status, await answer.text()


async def counted(client: Client, name: str) -> dict[str, float]:
    """The samples of a metric by its label `engine`."""
    async with client.get("/metrics") as answer:
        page = await answer.text()
    found = re.findall(rf'^vllm:{name}{{engine="(\d+)",model_name="tiny"}} (\S+)$', page, re.M)
    return {engine: float(value) for engine, value in found}


async def test_equal_ranks_are_taken_in_turn() -> None:
    found = chosen(EngineRanks(EngineConfig(), RANKS), [asked(n) for n in range(7)])
    assert found == [0, 1, 2, 0, 1, 2, 0]


async def test_the_rank_with_the_fewest_requests_is_taken() -> None:
    ranks = EngineRanks(EngineConfig(), RANKS)
    for n in range(4):
        ranks.add(asked(n), n % 2)
    ranks.add(asked(4), 1)
    found = chosen(ranks, [asked(n) for n in range(5, 9)])
    assert found == [2, 2, 2, 0]  # of equals, the turn decides


async def test_a_queue_counts_more_where_the_cache_is_full() -> None:
    """Both ranks have two requests, one of which waits. That of rank 0 counts 3.6 instead of 1."""

    config = EngineConfig(num_gpu_blocks_override=101, max_model_len=1_600, max_num_seqs=1)
    ranks = EngineRanks(config, 2)
    first, second = (loop.core for loop in ranks.loops)
    for n, core, prompt in ((0, first, 1_500), (1, second, 100)):
        core.add(asked(n, prompt, 64))
        core.step(0.0)
        core.add(asked(n + 2, 16))
    assert first.kv_usage == pytest.approx(0.94)
    assert second.kv_usage < 0.5
    assert chosen(ranks, [asked(n) for n in range(4, 8)]) == [1, 1, 1, 0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
async def test_the_header_chooses_the_rank(path: str) -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "hello"}]}
    if path != "/v1/completions":
        del body["prompt"]

    async with on_server(options=THREE) as (_, client):
        for rank in ("1", "2", "2"):
            status, text = await post(client, path, body, rank)
            assert status == 200, text
        found = await counted(client, "request_success_total") or await counted(
            client, "generation_tokens_total"
        )
    assert found["0"] == 0
    assert found["2"] == 2 * found["1"] > 0


async def test_other_headers_leave_the_choice_to_the_server() -> None:
    async with on_server(options=THREE) as (_, client):
        for rank in ("one", "", None):
            assert (await post(client, "/v1/completions", BODY, rank))[0] == 200
        asked_of = {"model": "tiny", "input": "hello", "max_output_tokens": 50}
        for _ in range(3):  # vLLM reads no header there
            assert (await post(client, "/v1/responses", asked_of, "7"))[0] == 200
        assert min((await counted(client, "prompt_tokens_total")).values()) > 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_rank_that_is_not_there_is_a_400(path: str) -> None:
    """Bodies and statuses as recorded from vLLM 0.32: a stream has begun when the rank is read."""
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    body = BODY if path == "/v1/completions" else {"max_tokens": TOKENS, **chat}

    async with on_server(options=THREE) as (_, client):
        for rank in ("7", "-1"):
            error = {
                "message": f"data_parallel_rank {rank} is out of range [0, 3).",
                "type": "BadRequestError", "param": None, "code": 400,
            }  # fmt: skip
            status, text = await post(client, path, body, rank)
            assert (status, json.loads(text)) == (400, {"error": error})
            status, text = await post(client, path, {**body, "stream": True}, rank)
            assert status == 200
            assert text == f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n"
        assert set((await counted(client, "prompt_tokens_total")).values()) == {0.0}


async def test_a_server_of_one_engine_has_rank_0() -> None:
    async with on_server() as (_, client):
        found = [(await post(client, "/v1/completions", BODY, rank))[0] for rank in ("0", "1")]
        assert found == [200, 400]


async def test_each_rank_has_a_cache_and_series_of_its_own() -> None:
    document = {**BODY, "prompt": "word " * 2_000}

    async with on_server(options=THREE) as (_, client):
        for rank in ("0", "0", "1"):
            await post(client, "/v1/completions", document, rank)
        async with client.get("/metrics") as answer:
            page = await answer.text()
        engines = re.findall(r'^vllm:cache_config_info{.*engine="(\d)".*$', page, re.M)
        hits, engines = await counted(client, "prefix_cache_hits_total"), engines
    assert hits["0"] > 1_000
    assert hits["1"] == hits["2"] == 0
    assert engines == ["0", "1", "2"]


async def test_a_queue_limit_is_of_the_whole_server() -> None:
    async with on_server(options=THREE, max_num_queued_reqs=RANKS) as (_, client):
        answers = await asyncio.gather(
            *(post(client, "/v1/completions", BODY) for _ in range(RANKS + 2))
        )
        statuses = sorted(status for status, _ in answers)
    assert statuses == [200] * RANKS + [503] * 2


async def test_the_proxy_has_a_lane_for_each_rank() -> None:
    """The proxy's lanes and the engine's ranks are the same: each request is where it was sent."""

    config = EngineConfig(served_model_name="tiny", seed=1)
    async with start_engine(config, options=THREE) as server:
        keys = {"data_parallel": RANKS}
        async with stage([server.url], each=keys, wait_up=RANKS) as on:

            async def ask(n: int) -> str:
                async with on.post({**BODY, "prompt": f"{n} hello"}) as answer:
                    assert answer.status == 200
                    return str(answer.headers["x-forebay-backend"])

            lanes = await asyncio.gather(*map(ask, range(12)))
        async with Client(server.url) as client:
            lanes, tokens = lanes, await counted(client, "generation_tokens_total")
    sent = {f"{rank}": lanes.count(f"b0-rank{rank}") for rank in range(RANKS)}
    assert min(sent.values()) > 0
    assert tokens == {rank: count * TOKENS for rank, count in sent.items()}


def test_ranks_that_share_experts_are_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path, "mistralai/Mixtral-8x7B-v0.1")
    words = ["engine", "--model", str(path), "--tp", "4", "--port", "0", "-dp", "2"]
    line = refusal(*words)
    assert "--data-parallel-size 2: ranks of " in line
    assert line.endswith("share experts, which is not simulated; leave it out")
