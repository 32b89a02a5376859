"""Lists of prompts and n above 1, against what vLLM 0.32.0 for the CPU answered."""

from typing import Any

import aiohttp
import orjson
import pytest
from dialect_calls import ask

from forebay.replay.clock.virtual_loop import run
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import start_engine

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
THREE = {"max_tokens": 3, "ignore_eos": True}
PROMPTS = {**THREE, "prompt": ["Hello world", "Hi"]}
QUESTION = {**THREE, "messages": [{"role": "user", "content": "Hello world"}]}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
EACH = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}

# Recorded, with id, time and words left out.
RECORDED_LIST = (
    '{"id":"","object":"text_completion","created":0,"model":"","choices":[{"index":0,"text":"",'
    '"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,'
    '"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null},{"index":1,"text":"",'
    '"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,'
    '"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}],"service_tier":null,'
    '"system_fingerprint":"","usage":{"prompt_tokens":4,"total_tokens":10,"completion_tokens":6,'
    '"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":null,'
    '"multimodal_tokens":null},"completion_tokens_details":null},"kv_transfer_params":null,'
    '"ec_transfer_params":null,"metrics":null}'
)
RECORDED_CHOICES = (
    '[{"index":0,"message":{"role":"assistant","content":"","refusal":null,"annotations":null,'
    '"audio":null,"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"length",'
    '"stop_reason":null,"token_ids":null,"routed_experts":null},{"index":1,"message":{"role":'
    '"assistant","content":"","refusal":null,"annotations":null,"audio":null,"function_call":null,'
    '"reasoning":null},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":'
    'null,"routed_experts":null}]'
)
RECORDED_ROLES = [
    '{"object":"chat.completion.chunk","choices":[{"index":INDEX,"delta":{"role":"assistant",'
    '"content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,'
    '"prompt_text":null}'.replace("INDEX", str(index))
    for index in range(2)
]


def answer(path: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    status, data = ask(path, body, **options)
    assert status == 200, data
    read: dict[str, Any] = orjson.loads(data)
    return read


def events(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, data = ask(path, body, enable_prompt_tokens_details=True)
    assert status == 200
    lines = [line for line in data.decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [orjson.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_list_of_prompts_as_recorded() -> None:
    told = answer(TEXT, PROMPTS, enable_prompt_tokens_details=True)
    texts = [choice["text"] for choice in told["choices"]]
    alone = [answer(TEXT, {**THREE, "prompt": prompt}) for prompt in PROMPTS["prompt"]]  # type: ignore[attr-defined]
    assert texts == [single["choices"][0]["text"] for single in alone]
    blank = {"id": "", "created": 0, "model": "", "system_fingerprint": ""}
    told = {name: blank.get(name, value) for name, value in told.items()}
    told["choices"] = [{**choice, "text": ""} for choice in told["choices"]]
    assert orjson.dumps(told).decode() == RECORDED_LIST


def test_choices_of_a_chat_as_recorded() -> None:
    told = answer(CHAT, {**QUESTION, "n": 2})
    words = [choice["message"]["content"] for choice in told["choices"]]
    assert words[0] != words[1]
    assert words[0] == answer(CHAT, QUESTION)["choices"][0]["message"]["content"]
    for choice in told["choices"]:
        choice["message"]["content"] = ""
    assert orjson.dumps(told["choices"]).decode() == RECORDED_CHOICES
    usage = told["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6


def test_the_index_of_each_choice_of_each_prompt() -> None:
    told = answer(TEXT, {**PROMPTS, "n": 2})
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in told["choices"]}) == 4
    assert told["usage"]["prompt_tokens"] == 4
    assert told["usage"]["completion_tokens"] == 12
    ids = answer(TEXT, {**THREE, "prompt": [[1, 2, 3], [4]]})
    assert ids["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("options", [USAGE, EACH])
def test_a_stream_ends_each_choice_and_counts_all(options: dict[str, Any]) -> None:
    whole = answer(TEXT, {**PROMPTS, "n": 2})
    told = events(TEXT, {**PROMPTS, "n": 2, **options})
    *chunks, usage = told
    texts, ends = ["", "", "", ""], [0, 0, 0, 0]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] == "length"
        produced = chunk.get("usage", {}).get("completion_tokens", 0)
        assert produced <= 3
        assert ("usage" in chunk) == (options is EACH)
    assert ends == [1, 1, 1, 1]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert usage["choices"] == []
    counted = {"prompt_tokens": 4, "total_tokens": 16, "completion_tokens": 12}
    assert usage["usage"] == {**counted, "prompt_tokens_details": {"cached_tokens": 0}}


def test_all_roles_come_before_the_first_word() -> None:
    told = events(CHAT, {**QUESTION, "n": 2, **USAGE})
    for chunk, recorded in zip(told, RECORDED_ROLES, strict=False):
        kept = {name: chunk[name] for name in chunk if name not in ("id", "created", "model")}
        assert orjson.dumps(kept).decode() == recorded
    roles = [chunk for chunk in told[:-1] if "role" in chunk["choices"][0]["delta"]]
    assert len(roles) == 2
    assert told[-1]["usage"]["completion_tokens"] == 6


def test_n_counts_once_for_each_prompt_and_shares_its_cache() -> None:
    """vLLM counts 2 + 1 in request_params_n for these, and five finished requests."""

    async def main() -> tuple[str, int]:
        async with (
            start_engine(EngineConfig("llama-3-8b", seed=1)) as engine,
            aiohttp.ClientSession(engine.url) as client,
        ):
            for body in ({**PROMPTS, "n": 2}, {**THREE, "prompt": "one"}):
                async with client.post(TEXT, json=body) as response:
                    assert response.status == 200
            async with client.get("/metrics") as response:
                return await response.text(), engine.core.running + engine.core.waiting

    text, left = run(main())
    assert left == 0
    values = {line.split(" ")[0]: float(line.split(" ")[-1]) for line in text.splitlines()[1:]
              if not line.startswith("#")}  # fmt: skip
    label = '{engine="0",model_name="llama-3-8b"}'
    assert values[f"vllm:request_params_n_count{label}"] == 3
    assert values[f"vllm:request_params_n_sum{label}"] == 5
    assert values[f"vllm:request_generation_tokens_count{label}"] == 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_all_choices_along(stream: bool) -> None:
    async def main() -> int:
        async with (
            start_engine(EngineConfig("llama-3-8b", seed=1)) as engine,
            aiohttp.ClientSession(engine.url) as client,
        ):
            body = {"prompt": ["a", "b"], "n": 3, "max_tokens": 5_000, "ignore_eos": True}
            with pytest.raises(TimeoutError):
                async with client.post(
                    TEXT, json={**body, "stream": stream},
                    timeout=aiohttp.ClientTimeout(total=1.0),
                ) as response:  # fmt: skip
                    await response.read()
            async with client.post(TEXT, json={**THREE, "prompt": "after"}) as response:
                assert response.status == 200
            return engine.core.running + engine.core.waiting

    assert run(main()) == 0
