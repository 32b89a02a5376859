"""Faults that people reported elsewhere, where no other module tests them.

`docs/reference/faults.md` and the pages beside it have all of them.
"""

import json

import pytest
from proxy_stage import on_stage

LABELS = (
    b'vllm:cache_config_info{num_gpu_blocks="1000",block_size="784"%s} 1.0\n'
    b"vllm:num_requests_running 0.0\n"
)


@pytest.mark.parametrize(
    ("label", "tokens"),
    [
        (b',kv_cache_size_tokens="123456"', 123_456),  # a hybrid divides its blocks among groups
        (b',kv_cache_size_tokens="None"', 784_000),
        (b"", 784_000),
    ],
)
async def test_the_label_of_the_kv_cache_counts_before_the_product(
    label: bytes, tokens: int
) -> None:
    async with on_stage(None) as (on, backends):
        backends[0].metrics = LABELS % label
        link = on.proxy.backends.links["b0"]
        await on.proxy.backends.prober._ask_size(link)
        assert link.kv_tokens == tokens


async def test_bodies_of_agents_pass_byte_for_byte() -> None:
    tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(128)]
    call = {"id": "1", "type": "function", "function": {"name": "f1", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": None, "name": None},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ]
    fields = {
        "model": "m", "messages": messages, "tools": tools, "temperature": None, "stop": None,
        "guided_json": {"type": "object"}, "top_k": 7, "cache_salt": "mine", "seed": 10**30,
        "chat_template_kwargs": {"enable_thinking": False}, "stream_options": None,
    }  # fmt: skip
    body = json.dumps(fields, indent=1).encode()

    async with on_stage(None) as (on, backends):
        assert await on.status(body, path="/v1/chat/completions") == 200
        assert backends[0].calls[0].body == body
