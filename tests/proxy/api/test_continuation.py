"""What another backend is asked for the rest of an answer, and how its events become its own."""

import json
from typing import Any

import pytest

from forebay.proxy.api.dialects import CHAT, COMPLETIONS
from forebay.proxy.api.dialects.continuation import (
    MOST_TEXT_BYTES,
    CannotContinue,
    SentText,
    generated,
    limited,
    may_continue,
    with_text,
)

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 9}


def event(text: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    return json.dumps({"id": "1", "choices": [choice | more]}, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("fields", "may"),
    [
        ({}, True),
        ({"logprobs": False, "return_token_ids": None, "include_reasoning": True}, True),
        ({"logprobs": 0}, False),  # a completion: the logprob of the token itself
        ({"logprobs": True}, False),
        ({"return_token_ids": True}, False),
        ({"add_generation_prompt": False}, False),
        ({"continue_final_message": True}, False),
        ({"include_reasoning": False}, False),
        ({"vllm_xargs": {"x": 1}}, False),
    ],
)
def test_a_text_must_be_all_of_the_answer(fields: dict[str, Any], may: bool) -> None:
    assert may_continue(fields) is may


def test_without_text_the_same_is_asked_again() -> None:
    assert with_text(ASKED, "") is ASKED
    assert limited(ASKED, CHAT.limits, 0) == ASKED


@pytest.mark.parametrize(
    ("sent", "stop", "may"),
    [
        ("a b", "b c", False),
        ("a b", ["x", "b\n"], False),
        ("a b", "\nb", True),
        ("a b", "c", True),
        ("a\n", "\n\n", True),  # the white space is made again
    ],
)
def test_half_a_stop_string_that_is_shown_ends_it(sent: str, stop: Any, may: bool) -> None:
    hidden = ASKED | {"stop": stop}
    assert with_text(hidden, sent.rstrip())["continue_final_message"] is True
    try:
        with_text(hidden | {"include_stop_str_in_output": True}, sent.rstrip())
    except CannotContinue:
        assert not may
    else:
        assert may


def test_limits_shrink_by_what_was_generated() -> None:
    asked = ASKED | {"max_completion_tokens": "8", "min_tokens": 3}
    rest = limited(asked, CHAT.limits, 5)
    assert [rest[name] for name in ("max_tokens", "max_completion_tokens", "min_tokens")] == [
        4,
        3,
        0,
    ]
    assert limited({"prompt": ""}, COMPLETIONS.limits, 5)["max_tokens"] == 11
    with pytest.raises(CannotContinue):
        limited(asked, CHAT.limits, 8)


@pytest.mark.parametrize(
    ("text", "before", "after", "count"),
    [
        ([5, 6], [1, 2], [1, 2, 5, 6], 2),
        ([9, 6], [1, 2], [1, 2, 5, 6], 2),  # its first token alone is another
        ([9, 5, 6], [1, 2], [1, 2, 5, 6], 2),  # a space of its own
        ([5, 6], [1, 2], [1, 3, 5, 6], None),  # another template
        ([5, 6], [1, 2], [1, 2, 7, 8, 5, 6], None),  # the template thinks
        ([5, 6], [1, 2], [1, 2, 5, 7], None),
        ([5], [1, 2], [1, 2], None),  # the template drops it
        ([5, 6], [1, 2], [1, 5, 6], None),
    ],
)
def test_the_prompt_must_be_the_old_one_and_the_text(
    text: list[int], before: list[int], after: list[int], count: int | None
) -> None:
    if count is not None:
        assert generated(text, before, after) == count
        return
    with pytest.raises(CannotContinue):
        generated(text, before, after)


def test_the_text_is_kept_as_it_was_sent() -> None:
    sent, texts = SentText(), ["", 'a "', "\\", "é🙂", "\n\t", "x"]
    for text in texts:
        sent.add(event(text))
    assert sent.words() == "".join(texts)
    assert [sent.lost, sent.ended] == [False, False]


@pytest.mark.parametrize(
    "odd",
    [
        event("x", logprobs={"content": []} | {"y": 1}),
        event("x", index=1),
        event("x", token_ids=[1]),
        event("x", delta={"content": "x", "reasoning": "y"}),
        event("x", delta={"tool_calls": [{"index": 0}]}),
        event("x", delta={"content": ["x"]}),
        b'{"id":"1"}',
        b"[]",
        b"no JSON",
        b'{"choices":[{"text":"\\ud83d"}]}',
        event("x" * (MOST_TEXT_BYTES + 1)),
    ],
)
def test_more_than_text_is_lost(odd: bytes) -> None:
    sent = SentText()
    sent.add(odd)
    assert sent.lost
    assert not sent.text


def joined(sent: SentText, *texts: str) -> str:
    events = [sent.joined(b"", event(text))[1] for text in texts]
    told = [json.loads(one) for one in events if one]
    assert all(one["id"] == "first" for one in told)
    return "".join(one["choices"][0]["delta"]["content"] for one in told)


@pytest.mark.parametrize(
    ("first", "then", "whole"),
    [
        ("a \n", [" ", "\n", "b"], "a \nb"),
        ("a \n", [" \n b"], "a \n b"),
        ("a \n", [" ", "b"], "a \nb"),  # sampled anew: it had less white space
        ("a \n", ["b"], "a \nb"),
        ("a \n", [" ", "\n", "\n", "b", " c"], "a \n\nb c"),
        ("a", [" b"], "a b"),
        ("\n", ["", "\n", "b"], "\nb"),
    ],
)
def test_white_space_that_comes_again_is_left_out(first: str, then: list[str], whole: str) -> None:
    sent = SentText()
    sent.add(event(first).replace(b'"1"', b'"first"'))
    sent.go_on(1)
    assert first + joined(sent, *then) == whole


def test_usage_counts_the_whole_answer() -> None:
    sent = SentText()
    sent.add(event("a"))
    sent.go_on(4)
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13,
             "prompt_tokens_details": {"cached_tokens": 9}}  # fmt: skip
    _, payload = sent.joined(b"", json.dumps({"id": "2", "choices": [], "usage": usage}).encode())
    assert json.loads(payload)["usage"] == {
        "prompt_tokens": 6, "completion_tokens": 7, "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 6},
    }  # fmt: skip


@pytest.mark.parametrize("payload", [b"", b"[DONE]", b'{"error":{"message":"x"}}', b"[1]"])
def test_what_is_no_event_of_the_answer_passes(payload: bytes) -> None:
    sent = SentText()
    sent.go_on(0)
    assert sent.joined(b"raw", payload) == (b"raw", payload)
