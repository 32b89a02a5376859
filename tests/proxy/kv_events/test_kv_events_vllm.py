"""The prefix index of the proxy behind a real vLLM's KV events: what it predicts, vLLM reports."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from ports import free_ports
from stages.proxy_stage import Stage, stage
from vllm_server import ModelSize, needed_vllm_python, vllm_server, write_model

from forebay.traces.ground.schema import TraceRequest
from forebay.traces.text import prompt_text

pytestmark = pytest.mark.timeout(400)
BLOCKS = 120  # of 32 tokens: two documents of 1,500 and a bit
DOCUMENTS = 4
Told = tuple[str, str, str]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """URL, event and replay endpoints of a real server with a small pool."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    write_model(folder, ModelSize())
    events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    options = {
        "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events",
        "endpoint": events.replace("127.0.0.1", "*"), "replay_endpoint": replay,
    }  # fmt: skip
    flags = (
        "--max-model-len", "3000", "--num-gpu-blocks-override", str(BLOCKS),
        "--kv-events-config", json.dumps(options),
    )  # fmt: skip
    python = needed_vllm_python()
    with vllm_server(python, folder, folder.parent / "vllm.log", *flags) as url:
        yield url, events, replay


async def ask(scene: Stage, document: int, question: int, *, chat: bool) -> int:
    text = prompt_text(TraceRequest(f"document {document}", 0.0, 1_500, 1), "")
    text += prompt_text(TraceRequest(f"question {question}", 0.0, 40, 1), "")
    prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    body = {"model": "tiny", **prompt, "max_tokens": 4, "ignore_eos": True}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    async with scene.post(body, path) as response:
        usage: dict[str, Any] = (await response.json())["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def quiet(scene: Stage) -> None:
    """Wait until nothing is to be tokenised and no event has come for a while."""
    translator = scene.proxy.app._relay.translator
    assert translator is not None
    (backend,) = scene.proxy.driver.shaper.backends.values()
    assert backend.cache.engine_blocks is not None
    same, before = 0, -1
    while same < 20 or not translator.idle:
        await asyncio.sleep(0.01)  # a real process: it gives no sign when it has told all
        copies = hash(frozenset(backend.cache.engine_blocks._copies.items()))
        same, before = (same + 1, before) if copies == before else (0, copies)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.real_time
async def test_vllm_reports_the_predicted_hits(vllm: Told, chat: bool) -> None:
    url, events, replay = vllm

    backend = {"name": "b0", "url": url, "kv_events": events, "kv_replay": replay}
    async with stage([url], backends=[backend]) as scene:
        (core,) = scene.proxy.driver.shaper.backends.values()
        for question in range(3):
            for document in range(DOCUMENTS):
                await ask(scene, document, question, chat=chat)
                await quiet(scene)
        assert core.cache.mode == "exact"
        rng, told, wrong = random.Random(5), [], core.cache.error.absolute_tokens
        for question in range(100, 120):
            told.append(await ask(scene, rng.randrange(DOCUMENTS), question, chat=chat))
            await quiet(scene)
            assert core.cache.error.absolute_tokens == wrong, told
        assert min(told) == 0
        assert max(told) >= 1_472
        assert len(set(told)) > 2
