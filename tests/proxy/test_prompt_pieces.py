"""The beginning of a prompt as a request of its own."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.proxy.api.body import ParsedBody, read_fields
from forebay.proxy.api.dialects import CHAT, COMPLETIONS
from forebay.proxy.api.prefix_request import prefix_body
from forebay.proxy.api.prompt_text import chat_text
from forebay.proxy.api.token_estimate import TokenEstimate

TEXT = st.text(alphabet="aä€😀 \n", max_size=40)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT},
        optional={"tool_calls": st.just([{"id": "1", "type": "function"}]), "reasoning": TEXT},
    ),
    min_size=1,
    max_size=5,
)


def piece(fields: dict[str, Any], length: int) -> dict[str, Any] | None:
    body = asyncio.run(prefix_body(json.dumps(fields).encode(), length, chat="messages" in fields))
    return None if body is None else json.loads(body)


def asked(fields: dict[str, Any]) -> ParsedBody:
    body = json.dumps(fields).encode()
    chat = "messages" in fields
    estimate = TokenEstimate(4.0)
    return read_fields(
        fields,
        body,
        {},
        id_="r",
        dialect=CHAT if chat else COMPLETIONS,
        estimate=estimate,
        block_bytes=256,
    )


@given(messages=MESSAGES, share=st.floats(0, 1), tools=st.booleans())
def test_the_text_of_a_chat_begins_with_its_piece(
    messages: list[dict[str, Any]], share: float, tools: bool
) -> None:
    fields: dict[str, Any] = {"model": "m", "messages": messages}
    if tools:
        fields["tools"] = [{"type": "function", "function": {"name": "f"}}]
    whole = chat_text(fields).data
    length = int(share * len(whole))
    cut = piece(fields, length)
    if cut is None:
        return
    text = chat_text(cut).data
    assert isinstance(whole, bytes)
    assert isinstance(text, bytes)
    assert whole.startswith(text)
    assert len(text) <= length
    longest = max(len(str(m["content"]).encode()) for m in messages)
    if len(cut["messages"]) < len(messages):  # what is missing is less than the next one's head
        assert length - len(text) <= longest + 200


def test_a_long_message_is_cut_to_the_byte() -> None:
    content = "0123456789" * 1000
    cut = piece({"messages": [{"role": "user", "content": content}]}, 6006)
    assert cut is not None
    assert cut["messages"] == [{"role": "user", "content": content[:6000]}]


@pytest.mark.parametrize("length", [0, 3, 5])
def test_no_piece_before_the_first_message(length: int) -> None:
    assert piece({"messages": [{"role": "user", "content": "hello"}]}, length) is None


def test_completions() -> None:
    assert piece({"prompt": "aä€😀" * 9}, 12) == {
        "prompt": "aä€😀a",  # of the next one only half is left: nothing
        "stream": False,
        "max_tokens": 1,
    }
    ids = piece({"prompt": list(range(100))}, 40)
    assert ids is not None
    assert ids["prompt"] == list(range(10))


def test_it_asks_for_one_token_and_keeps_what_decides_about_the_cache() -> None:
    fields = {
        "model": "m",
        "messages": [{"role": "user", "content": "x" * 1000}],
        "cache_salt": "s",
        "tools": [],
        "tool_choice": "none",
        "chat_template_kwargs": {"a": 1},
        "priority": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 300,
        "min_tokens": 20,
        "n": 4,
    }
    cut = piece(fields, 500)
    assert cut is not None
    assert set(fields) - set(cut) == {
        "stream_options", "max_completion_tokens", "min_tokens", "n"
    }  # fmt: skip
    assert cut["stream"] is False
    assert cut["max_tokens"] == 1
    assert {k: cut[k] for k in ("model", "cache_salt", "chat_template_kwargs", "priority")} == {
        k: fields[k] for k in ("model", "cache_salt", "chat_template_kwargs", "priority")
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x", "echo": True},
        {"prompt": "x", "prompt_logprobs": 0},
        {"prompt": "x", "suffix": "y"},
        {"prompt": ["x", "y"]},
        {"prompt": [[1], [2]]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {"role": "user", "content": "y"},
            ]
        },
        {"messages": [{"role": "user", "content": "x"}], "truncate_prompt_tokens": 9},
    ],
)
def test_what_must_be_sent_whole(fields: dict[str, Any]) -> None:
    assert asked(fields).request.whole


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x", "echo": False, "prompt_logprobs": None},
        {"prompt": [1, 2]},
        {"messages": [{"role": "user", "content": "x"}]},
    ],
)
def test_what_need_not(fields: dict[str, Any]) -> None:
    assert not asked(fields).request.whole
