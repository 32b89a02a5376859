"""The simulated server against answers recorded from vLLM 0.32: bytes, headers, order, names.

The recordings lie beside the repository and may be missing; what the server says is also fixed by
our own answers in tests/golden (tests/replay/engine/server/test_answers_golden.py).
"""

import ast
import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

import aiohttp
import pytest
import wire
from paths import SHARED
from prometheus_client.parser import text_string_to_metric_families
from stages.engine_stage import HELLO, Client, chat, completion, get, on_server, post

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.options import ServerOptions
from forebay.replay.engine.server.server import start_engine

SAMPLES = SHARED / "vllm_cpu" / "samples"
NAMES = sorted(path.stem for path in SAMPLES.glob("*") if path.is_file())
OUT_OF_SCOPE = {
    "ok_completion_n2": "the simulated engine gives one choice to one prompt, and says so in a 400",
    "kv_events": "test_kv_events.py has its keys",
    "kv_eviction_experiment": "test_kv_events.py has its order",
}
ADDED = b',"random_weights":true'  # to a model in /v1/models; vLLM has nothing that says so

# Bodies that the recording names but does not show. Four letters are one token here.
X = "xxxx"
LONG, FITS = X * 17_000, X * 16_000
FILES: dict[str, dict[str, object]] = {
    "@long.json": {"prompt": LONG, "max_tokens": 1},
    "@longs.json": {"prompt": LONG, "max_tokens": 1, "stream": True},
    "@longc.json": {"messages": [{"role": "user", "content": LONG}]},
    "@longcs.json": {"messages": [{"role": "user", "content": LONG}], "stream": True},
    "@longm.json": {"prompt": FITS, "max_tokens": 1_000},
    "@longmc.json": {"messages": [{"role": "user", "content": FITS}], "max_tokens": 1_000},
    "@longtr.json": {
        "messages": [{"role": "user", "content": LONG}],
        **{"truncate_prompt_tokens": 100, "max_tokens": 3, "ignore_eos": True},
    },
}


@pytest.mark.parametrize("name", NAMES)
async def test_as_recorded(name: str) -> None:
    if name in OUT_OF_SCOPE:
        pytest.skip(OUT_OF_SCOPE[name])
    path = next(SAMPLES.glob(f"{name}.*"))
    text = path.read_text()
    if text.startswith("### request: "):
        request_line, _, rest = text.partition("\n")
        await check_exchange(name, wire.read_question(request_line, FILES), wire.read_answer(rest))
    else:
        await SCENES[name](text)


async def check_exchange(name: str, question: wire.Question, recorded: wire.Answer) -> None:
    async with on_server(vllm_version="0.32") as (_, client):  # as recorded
        if name == "ok_truncate":  # the recorded server had answered this one before
            await wire.ask(client, post("/v1/completions", FILES["@longm.json"]))
        answer = await wire.ask(client, question)
    answered = replace(answer, body=answer.body.replace(ADDED, b""))
    exact = b'"finish_reason":"stop"' not in recorded.body  # else the model decides the length
    ours, theirs = wire.masked(answered, exact), wire.masked(recorded, exact)
    assert (ours if has_tokens(theirs) else wire.without_tokens(ours)) == theirs


def has_tokens(lines: list[str]) -> bool:
    return not any(line.startswith("data: ") for line in lines) or wire.without_tokens(
        lines
    ) != list(lines)


def tail(text: str) -> list[str]:
    """Events from the last choice on, of a recording that ends with curl's exit status."""
    return wire.masked_events(
        text.partition("...\n\n")[2].partition("\ncurl exit")[0].encode(), False
    )


async def left_while_running(questions: list[wire.Question]) -> list[wire.Answer]:
    """Answers to clients that wait when SIGTERM comes."""
    async with Client() as client:
        config = EngineConfig(served_model_name="tiny", enable_request_id_headers=True)
        async with start_engine(config) as engine:
            base = [
                wire.Question(q.method, engine.url + q.path, q.headers, q.body) for q in questions
            ]
            waiting = [asyncio.create_task(wire.ask(client, one)) for one in base]
            await asyncio.sleep(0.5)
            assert engine.core.running == len(questions)
        answers = await asyncio.gather(*waiting)
        with pytest.raises(aiohttp.ClientConnectorError):
            await wire.ask(client, get(f"{engine.url}/health"))
    return answers


async def stream_sigterm_abort(text: str) -> None:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    endless = {"max_tokens": 5_000, "ignore_eos": True, **usage}
    questions = [completion({**HELLO, **usage}), chat("Hello", **endless)]
    answers = await left_while_running(questions)
    recorded = text.split("## SIGTERM")[1:]
    assert len(recorded) == len(answers)
    for answer, part in zip(answers, recorded, strict=True):
        head = wire.masked(wire.read_answer(part.partition("\n...")[0]))
        ours = wire.masked(answer, False)
        assert [*ours[: len(head)], *ours[-3:]] == [*head, *tail(part)]
        assert '"finish_reason": "abort"' in ours[-3]


async def nonstream_sigterm_abort(text: str) -> None:
    (answer,) = await left_while_running([chat("Hello", max_tokens=5_000, ignore_eos=True)])
    # The recording's text was shortened by hand, quotes and all: mend its JSON and its length.
    mended = re.sub(r'"content":".*","refusal"', '"content":"x","refusal"', text)
    head, _, body = mended.partition("curl exit")[0].partition("\n\n")
    length = f"content-length: {len(body.encode())}"
    head = re.sub(r"content-length: \d+", length, head)
    recorded = wire.read_answer(f"{head}\n\n{body}")
    assert wire.masked(answer, False) == wire.masked(recorded, False)
    assert b'"finish_reason":"abort"' in answer.body


async def sigterm_default(text: str) -> None:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    asked = [completion({**HELLO, **usage}), completion(HELLO)]
    streamed, whole = await left_while_running(asked)
    last = ast.literal_eval(re.findall(r"last (\[.*\])", text)[0])
    assert wire.masked(streamed, False)[-2:] == wire.masked_events(
        "\n\n".join(last).encode(), False
    )
    headers = ast.literal_eval(re.findall(r"(\{'date'.*\})", text)[0])
    assert whole.status == "200 OK"
    assert whole.headers.keys() == headers.keys()


async def in_flight_when_the_engine_dies() -> tuple[wire.Answer, wire.Answer, bytes]:
    async with on_server("engine-dead:40") as (engine, client):
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        whole = asyncio.create_task(wire.ask(client, completion(HELLO)))
        streamed = await wire.ask(client, chat("Hello", max_tokens=5_000, **usage))
        answer = await whole
        async with Client(engine.url) as other:
            with pytest.raises(aiohttp.ClientConnectorError):
                await wire.ask(other, get("/health"))
        await asyncio.wait_for(engine.stepping, 1)
    events = streamed.body.split(b"\n\n")
    assert sum(b'"finish_reason":null' in event for event in events) == 1 + 40
    return streamed, answer, b"\n\n".join(events[-3:])


async def engine_dead(text: str) -> None:
    _, whole, end = await in_flight_when_the_engine_dies()
    last = ast.literal_eval(re.findall(r"last (\[.*\])", text)[0])
    assert end.decode() == "\n\n".join([*last, ""])
    body, headers = re.findall(r"nonstream 500 (\{.*\}) (\{'date'.*\})", text)[0]
    assert (whole.status, whole.body.decode()) == ("500 Internal Server Error", body)
    assert whole.headers.keys() == ast.literal_eval(headers).keys()


async def stream_engine_dead(text: str) -> None:
    _, _, end = await in_flight_when_the_engine_dies()
    assert text.partition("\n\n")[2].startswith(end.decode())


async def err_401_api_key(text: str) -> None:
    options = ServerOptions(api_key=["secret-1", "secret-2"])
    async with on_server(options=options) as (_, client):
        token = {"Authorization": "Bearer secret-2"}
        answers = [
            await wire.ask(client, completion({"prompt": "x"})),
            await wire.ask(client, completion({"prompt": "x"}, Authorization="Bearer wrong")),
            await wire.ask(client, completion({"prompt": "x"}, Authorization="Basic secret-2")),
            await wire.ask(client, wire.Question("GET", "/v1/nope", {}, None)),
            await wire.ask(client, completion({"prompt": "x"}, **token)),
            *[await wire.ask(client, get(path)) for path in ("/health", "/metrics", "/load")],
        ]
    recorded = wire.masked(wire.read_answer(text))
    assert [wire.masked(answer) for answer in answers[:4]] == [recorded] * 4
    assert [answer.status for answer in answers[4:]] == ["200 OK"] * 4


async def err_503_queue_full(text: str) -> None:
    async with on_server(max_num_seqs=2, max_num_queued_reqs=5) as (_, client):
        body = {**HELLO, "max_tokens": 500}
        filling = [asyncio.create_task(wire.ask(client, completion(body))) for _ in range(5)]
        await asyncio.sleep(0.5)
        load = await wire.ask(client, get("/load"))
        refused = [
            await wire.ask(client, completion(body)),
            await wire.ask(client, chat("Hello", stream=True)),
        ]
        assert {(await task).status for task in filling} == {"200 OK"}
        metrics = await wire.ask(client, get("/metrics"))
    assert text.partition("\n")[0].endswith(load.body.decode())
    recorded = re.findall(r"6th.*: 503 (\{'date'.*?\}) (\{.*\})", text)
    for answer, (headers, body) in zip(refused, recorded, strict=True):
        assert (answer.status, answer.body.decode()) == ("503 Service Unavailable", body)
        assert answer.headers.keys() == ast.literal_eval(headers).keys()
    counted = 'vllm:admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"} 2.0'
    assert counted in metrics.body.decode().splitlines()


async def misc_behaviour(text: str) -> None:
    """Compare line by line; "ok" stands for a successful answer."""
    options = ServerOptions(server_dev_mode=True, enable_prompt_tokens_details=True)
    async with on_server(options=options, enable_request_id_headers=False) as (_, client):

        async def status(question: wire.Question) -> str:
            return (await wire.ask(client, question)).status

        short = {"prompt": "x" * 400, "max_tokens": 1}
        assert await status(completion({**short, "priority": 5})) == "200 OK"
        named = await wire.ask(client, completion(short, **{"X-Request-Id": "abc"}))
        assert json.loads(named.body)["id"] == "cmpl-abc"
        assert "x-request-id" not in named.headers
        same = completion(short, **{"X-Request-Id": "same"})
        assert set(await asyncio.gather(*(status(same) for _ in range(4)))) == {"200 OK"}
        assert await status(completion(short, Authorization="Bearer wrong")) == "200 OK"
        reset = await wire.ask(client, post("/reset_prefix_cache", {}))
        assert f"200 {reset.body.decode()}" in text
        after = json.loads((await wire.ask(client, completion(short))).body)["usage"]
        assert f"cached after reset {after['prompt_tokens_details']['cached_tokens']}" in text
        running = asyncio.create_task(wire.ask(client, completion(HELLO)))
        await asyncio.sleep(0.5)
        busy = await wire.ask(client, post("/reset_prefix_cache", {}))
        assert busy.body == b'{"success":false}'
        running.cancel()

    # Four workers tokenize, so that all come before the first one is computed.
    answered = {}
    async with on_server(max_num_queued_tokens=5_000, renderer_num_workers=4) as (_, client):
        for path in ("completions", "chat/completions"):
            for stream in (False, True):
                given = {
                    "prompt": X * 4_000,
                    "messages": [{"role": "user", "content": X * 4_000}],
                    **{"max_tokens": 2, "stream": stream},
                }
                asked = [wire.ask(client, post(f"/v1/{path}", given)) for _ in range(3)]
                answered[f"{path} stream {stream}"] = await asyncio.gather(*asked)
        alone = await wire.ask(client, completion({"prompt": X * 8_000}))
        assert alone.status == "200 OK"
    for title, answers in answered.items():
        ours = [
            (
                int(answer.status[:3]),
                answer.headers["content-type"],
                answer.body.decode() if b'"error"' in answer.body else "ok",
            )
            for answer in answers
        ]
        (line,) = re.findall(rf"^{title} (\[.*\])$", text, re.MULTILINE)
        assert sorted(ours) == sorted(ast.literal_eval(line))


async def our_metrics() -> str:
    async with on_server(max_model_len=131_072) as (_, client):
        await wire.ask(client, completion({"prompt": "x"}))
        text = (await wire.ask(client, get("/metrics"))).body.decode()
    kept = [line for line in text.splitlines(keepends=True) if "forebay_engine_" not in line]
    return "".join(kept)


async def metric_names(text: str) -> None:
    types = dict(line.rsplit(" ", 1) for line in text.splitlines())
    ours = dict(re.findall(r"^# TYPE (\S+) (\S+)$", await our_metrics(), re.MULTILINE))
    assert len(ours) >= 30
    assert ours.items() <= types.items()


async def metrics_help(text: str) -> None:
    help_of = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    for name, says in re.findall(r"^# HELP (\S+) (.*)$", await our_metrics(), re.MULTILINE):
        assert help_of[name].startswith(says.rstrip(".")), name


async def metrics_full(text: str) -> None:
    def shapes(exposition: str) -> dict[str, set[tuple[str, ...]]]:
        """Label names of each sample, and the bounds of buckets."""
        found: dict[str, set[tuple[str, ...]]] = {}
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                kept = {k: v if k in SPELLED_OUT else "" for k, v in sample.labels.items()}
                shape = tuple(f"{key}={value}" for key, value in sorted(kept.items()))
                found.setdefault(sample.name, set()).add(shape)
        return found

    theirs, ours = shapes(text), shapes(await our_metrics())
    (info,), (their_info,) = ours.pop("vllm:cache_config_info"), theirs["vllm:cache_config_info"]
    assert set(info) < set(their_info)
    for name, labels in ours.items():
        assert labels == theirs[name], name


SPELLED_OUT = {"le", "reason", "source", "finished_reason", "sleep_state"}


async def openapi(text: str) -> None:
    known = {
        (method.upper(), path)
        for path, methods in json.loads(text)["paths"].items()
        for method in methods
    }
    allowed = []
    async with on_server() as (_, client):
        for method, path in sorted(known | {("GET", "/reset_prefix_cache")}):
            answer = await wire.ask(client, wire.Question("DELETE", path, {}, None))
            allowed.append((method, path, answer.headers.get("allow", "")))
    served = [(method, path) for method, path, allow in allowed if method in allow]
    assert set(served) <= known
    assert len(served) == 14
    for _, path, allow in allowed:  # and by no other method
        assert {(method, path) for method in allow.split(",") if method} <= known


SCENES: dict[str, Callable[[str], Awaitable[None]]] = {
    scene.__name__: scene
    for scene in (
        *(engine_dead, stream_engine_dead, err_401_api_key, err_503_queue_full, misc_behaviour),
        *(metric_names, metrics_help, metrics_full, openapi),
        *(stream_sigterm_abort, nonstream_sigterm_abort, sigterm_default),
    )
}
