"""How answers end: at stop strings, as vLLM's detokenizer finds them one token after another."""

import random
from typing import Any

import orjson
import pytest
from dialect_calls import ask

from forebay.replay.engine.server.answers import AnswerText, Ending, ending_of
from forebay.replay.engine.server.protocol import read_call
from forebay.replay.engine.tokenizer import BYTES_PER_TOKEN, Generation

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello world"}]}


def by_token(body: dict[str, Any], words: list[str]) -> tuple[list[str], str | None]:
    """Return the text of each event and the stop string, after vLLM 0.33's detokenizer."""
    stops, keeps = body["stop"], body["include_stop_str_in_output"]
    held = 0 if keeps else max(map(len, stops)) - 1
    text, sent = "", 0
    events: list[str] = []
    for count, word in enumerate(words, 1):
        text += word
        found: tuple[int, int, str] | None = None
        if count > body["min_tokens"]:
            for stop in stops:
                at = text.find(stop, max(0, len(text) + 1 - len(word) - len(stop)))
                if at >= 0 and (found is None or at + len(stop) < found[0]):
                    found = at + len(stop), at, stop
        if found is not None:
            text = text[: found[0] if keeps else found[1]]
        last = found is not None or count == len(words)
        shown = len(text) if last else max(sent, len(text) - held)
        events.append(text[sent:shown])
        sent = max(sent, shown)
        if found is not None:
            return events, found[2]
    return events, None


def test_stop_strings_end_answers_where_vllm_finds_them() -> None:
    ended = 0
    for seed in range(400):
        rng = random.Random(f"stops {seed}")
        body: dict[str, Any] = {
            "prompt": f"prompt {seed % 7}",
            "max_tokens": rng.randint(1, 40),
            "ignore_eos": True,
            "min_tokens": rng.choice([0, 0, 3, 20]),
            "include_stop_str_in_output": rng.random() < 0.3,
        }
        generation = Generation(read_call(body, chat=False, served_name="m").prompt)
        words = [generation.word(index).decode() for index in range(body["max_tokens"])]
        whole = generation.words(0, 40).decode()
        body["min_tokens"] = min(body["min_tokens"], body["max_tokens"])
        cuts = [(rng.randrange(150), rng.randint(1, 11)) for _ in range(rng.randint(1, 3))]
        body["stop"] = [whole[at : at + size] for at, size in cuts]
        call = read_call(body, chat=False, served_name="m")
        ending = ending_of(call, generation, 1_000)
        text = AnswerText(generation, call, ending)
        events, stopped_by = by_token(body, words)
        got = [
            text.between(at, at + 1, ending.reason if at + 1 == ending.tokens else None).decode()
            for at in range(ending.tokens)
        ]
        assert (got, ending.stopped_by) == (events, stopped_by), body
        assert ending.reason == ("stop" if stopped_by else "length")
        assert text.between(0, ending.tokens, ending.reason).decode() == "".join(events)
        ended += stopped_by is not None
    assert 100 < ended < 400


def test_an_answer_without_stop_strings() -> None:
    call = read_call(
        {"prompt": "x", "max_tokens": 5, "ignore_eos": True}, chat=False, served_name=""
    )
    generation = Generation(call.prompt)
    ending = ending_of(call, generation, 3)
    assert ending == Ending(3, 3, 3 * BYTES_PER_TOKEN, "length")
    text = AnswerText(generation, call, ending)
    assert text.between(1, 3, None) == generation.words(1, 3)
    assert text.between(0, 2, "abort") == generation.words(0, 2)


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (TEXT, {"prompt": "Hello"})])
def test_a_stop_string_over_the_wire(path: str, body: dict[str, Any]) -> None:
    body = {**body, "max_tokens": 20, "ignore_eos": True}

    def text_of(choice: dict[str, Any]) -> str:
        message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        return message.get("content") or ""

    def asked(**options: Any) -> dict[str, Any]:
        _, answer = ask(path, {**body, **options})
        whole: dict[str, Any] = orjson.loads(answer)
        return whole

    text = text_of(asked()["choices"][0])
    stop = text[18:23]
    answer = asked(stop=stop)
    choice = answer["choices"][0]
    assert text_of(choice) == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert answer["usage"]["completion_tokens"] == 6
    _, streamed = ask(path, {**body, "stop": [stop, "zz"], "stream": True})
    events = [orjson.loads(event[6:]) for event in streamed.strip().split(b"\n\n")[:-1]]
    assert "".join(text_of(event["choices"][0]) for event in events) == text_of(choice)
    last = events[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize(
    ("stop", "says"),
    [("", "stop cannot contain an empty string"), (["a", ""], "empty"), ([1], "valid string")],
)
def test_bad_stop_strings(stop: Any, says: str) -> None:
    status, answer = ask(TEXT, {"prompt": "x", "stop": stop})
    assert status == 400
    assert says in orjson.loads(answer)["error"]["message"]
