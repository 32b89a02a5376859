"""/v1/messages of the simulated server: what vLLM's converter makes of the same chat."""

import orjson
from dialect_calls import ask, told_events

PATH, CHAT = "/v1/messages", "/v1/chat/completions"
ASKED = {
    "model": "llama-3-8b",
    "max_tokens": 3,
    "messages": [{"role": "user", "content": "Hello world"}],
    "ignore_eos": True,
}


def test_a_whole_message_is_the_chat_under_other_names() -> None:
    _, chat = ask(CHAT, ASKED)
    status, body = ask(PATH, ASKED)
    text = orjson.loads(chat)["choices"][0]["message"]["content"]
    answer = orjson.loads(body)
    assert status == 200
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": text}],
        "model": "llama-3-8b",
        "stop_reason": "max_tokens",
        "usage": {"input_tokens": 7, "output_tokens": 3, "cache_creation_input_tokens": 0,
                  "cache_read_input_tokens": 0},
    }  # fmt: skip


def test_the_events_of_a_stream() -> None:
    told = told_events(PATH, ASKED, enable_prompt_tokens_details=False)
    assert [name for name, _ in told] == [
        "message_start", "content_block_start", *["content_block_delta"] * 3,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert all(data["type"] == name for name, data in told)
    start = told[0][1]["message"]
    assert start["usage"] == {"input_tokens": 7, "output_tokens": 0}
    assert start["content"] == []
    assert told[1][1] == {
        "type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0,
    }  # fmt: skip
    _, whole = ask(PATH, ASKED)
    text = "".join(data["delta"]["text"] for name, data in told if name == "content_block_delta")
    assert text == orjson.loads(whole)["content"][0]["text"]
    assert told[-2][1] == {
        "type": "message_delta",
        "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
        "usage": {"input_tokens": 7, "output_tokens": 3},
    }


def test_input_tokens_leave_out_what_the_cache_read_or_wrote() -> None:
    long = {**ASKED, "messages": [{"role": "user", "content": "x" * 4_000}]}
    _, body = ask(PATH, long)
    usage = orjson.loads(body)["usage"]
    _, chat = ask(CHAT, long)
    prompt = orjson.loads(chat)["usage"]["prompt_tokens"]
    assert usage["cache_read_input_tokens"] == 0
    assert usage["cache_creation_input_tokens"] == prompt // 16 * 16
    assert usage["input_tokens"] == prompt % 16


def test_the_system_prompt_counts() -> None:
    _, body = ask(PATH, {**ASKED, "system": "Be brief."}, enable_prompt_tokens_details=False)
    assert orjson.loads(body)["usage"]["input_tokens"] > 7


def test_errors_are_anthropics() -> None:
    for change, status, says in (
        ({"model": "other"}, 404, "The model `other` does not exist"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1"),
    ):
        got, body = ask(PATH, {**ASKED, **change})
        error = orjson.loads(body)
        assert got == status
        assert error["type"] == "error"
        assert says in error["error"]["message"]
    without = {key: value for key, value in ASKED.items() if key != "max_tokens"}
    assert ask(PATH, without)[0] == 400
