"""/v1/responses of the simulated server: the events and keys of vLLM's, the text of the chat's."""

from typing import Any

import orjson
from dialect_calls import ask, told_events

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
ASKED = {"model": "llama-3-8b", "input": "Hello world", "max_output_tokens": 3, "ignore_eos": True}
TALK = {"messages": [{"role": "user", "content": "Hello world"}], "ignore_eos": True}


def test_a_whole_response_has_the_text_of_the_chat() -> None:
    _, chat = ask(CHAT, {**TALK, "max_tokens": 3})
    status, body = ask(PATH, ASKED)
    answer = orjson.loads(body)
    assert status == 200
    assert answer["id"].startswith("resp_")
    assert answer["object"] == "response"
    (item,) = answer["output"]
    assert item["content"][0]["text"] == orjson.loads(chat)["choices"][0]["message"]["content"]
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (7, 3, 10)
    assert usage["input_tokens_details"]["cached_tokens"] == 0


def test_the_events_of_a_stream() -> None:
    told = told_events(PATH, ASKED)
    assert [name.removeprefix("response.") for name, _ in told] == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * 3, "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
    text = "".join(data["delta"] for name, data in told if name.endswith("text.delta"))
    last = told[-1][1]["response"]
    assert last["output"][0]["content"][0]["text"] == text == told[7][1]["text"]
    assert last["status"] == "incomplete"
    assert told[0][1]["response"]["status"] == "in_progress"
    assert last["usage"]["output_tokens"] == 3


def test_what_is_not_served_says_so() -> None:
    def said(**change: Any) -> tuple[int, str]:
        status, body = ask(PATH, {**ASKED, **change})
        return status, orjson.loads(body)["error"]["message"]

    assert said(previous_response_id="resp_1") == (404, "Response with id 'resp_1' not found.")
    assert said(input=[{"type": "function_call_output", "output": "x"}])[0] == 400
    assert ask(PATH, {"model": "llama-3-8b"})[0] == 400
    status, body = ask(PATH, {**ASKED, "instructions": "Be brief."})
    assert status == 200
    assert orjson.loads(body)["usage"]["input_tokens"] > 7
