"""Faults that people reported elsewhere, where no other module tests them.

`docs/reference/faults.md` and the pages beside it have all of them.
"""

import json

from stages.proxy_stage import on_stage


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
