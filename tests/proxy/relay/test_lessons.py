"""The speed of an engine is learned only from first tokens that show a prefill."""

import asyncio
import json
from typing import Any

import pytest
from body_reading import read_body
from stages.proxy_stage import Call, by_request, on_stage

from forebay.proxy.api.dialects import CHAT, COMPLETIONS
from forebay.proxy.core.model import Request

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/slow.png"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
NAMED = {"type": "function", "function": {"name": "f"}}


def request_of(fields: dict[str, Any], chat: bool = True) -> Request:
    content = fields.pop("content", "hello")
    prompt = {"messages": [{"role": "user", "content": content}]} if chat else {"prompt": content}
    return read_body({**prompt, **fields}, CHAT if chat else COMPLETIONS).request


@pytest.mark.parametrize(
    ("pure", "fields"),
    [
        (True, {}),
        (True, {"tools": TOOLS}),
        (True, {"tools": TOOLS, "tool_choice": "auto"}),
        (True, {"tools": [], "tool_choice": "required"}),
        (True, {"response_format": {"type": "text"}}),
        (True, {"response_format": None, "guided_json": None, "use_beam_search": False}),
        (True, {"content": [{"type": "text", "text": "a"}]}),
        (False, {"content": [IMAGE]}),
        (False, {"content": [{"type": "text", "text": "a"}, IMAGE]}),
        (False, {"tools": TOOLS, "tool_choice": "required"}),
        (False, {"tools": TOOLS, "tool_choice": NAMED}),
        (False, {"response_format": SCHEMA}),
        (False, {"response_format": {"type": "json_object"}}),
        (False, {"response_format": "?"}),
        (False, {"structured_outputs": {"regex": "a+"}}),
        (False, {"guided_choice": ["a", "b"]}),
        (False, {"prompt_logprobs": 0}),
        (False, {"kv_transfer_params": {"do_remote_prefill": True}}),
    ],
)
def test_which_first_tokens_show_a_prefill(pure: bool, fields: dict[str, Any]) -> None:
    request = request_of({"stream": True, **fields})
    assert (request.pure, request.streams) == (pure, pure)


def test_the_first_token_of_a_batch_comes_before_its_other_prefills() -> None:
    assert not request_of({"content": ["a", "b"], "stream": True}, chat=False).pure
    assert request_of({"content": [1, 2], "stream": True}, chat=False).pure


def test_completions_know_no_max_completion_tokens() -> None:
    """vLLM generates max_tokens, so the end of the answer is not its first token."""
    limits = {"max_completion_tokens": 1, "max_tokens": 900}
    chat, completion = request_of(limits), request_of(limits, chat=False)
    assert (chat.output_tokens, chat.streams) == (1, True)
    assert (completion.output_tokens, completion.streams) == (900, False)


async def vision(call: Call) -> None:
    """Answers text at once, and what has an image or a grammar after 10 s."""
    slow = b"image_url" in call.body or b"json_schema" in call.body
    await asyncio.sleep(10.0 if slow else 0.03)
    await by_request(call)


@pytest.mark.parametrize(
    "slow", [{"content": [IMAGE]}, {"content": "x" * 40_000, "response_format": SCHEMA}]
)
async def test_slow_images_and_grammars_cost_others_nothing(slow: dict[str, Any]) -> None:
    """46 of 113 chats of another tenant were rejected, and a backend was ejected."""
    statuses: list[int] = []

    async with on_stage(vision, vision) as (on, _):

        async def ask(content: Any, **more: Any) -> int:
            body = {"messages": [{"role": "user", "content": content}], "stream": True, **more}
            async with on.post(body, "/v1/chat/completions") as response:
                await response.read()
                return int(response.status)

        async def good() -> None:
            statuses.append(await ask("hello"))

        async with asyncio.TaskGroup() as group:
            for number in range(120):
                group.create_task(ask(**slow))
                for _ in range(4):
                    group.create_task(good())
                    await asyncio.sleep(0.05)
                if number == 60:
                    on.proxy.backends.health.look_for_gray(on.proxy.driver.clock())
        assert statuses.count(200) == len(statuses) == 480
        counts = [on.proxy.backends.health.counts(f"b{i}") for i in range(2)]
        assert not any("ejected" in state for count in counts for state, _ in count), counts


async def test_a_whole_answer_of_an_engine_that_knows_no_limit_teaches_nothing() -> None:
    """`max_completion_tokens: 1` in completions: vLLM generates 900 tokens, which take 20 s."""

    async def generates(call: Call) -> None:
        await asyncio.sleep(20.0 if json.loads(call.body).get("max_tokens") == 900 else 0.03)
        await by_request(call)

    async with on_stage(generates) as (on, _):
        odd = {"prompt": "x", "max_completion_tokens": 1, "max_tokens": 900}
        async with asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(on.post(odd).__aenter__())
                await asyncio.sleep(5.0)
        cost = on.proxy.driver.shaper.backends["b0"].cost
        assert cost.predict_s(100, 100) < 0.1
