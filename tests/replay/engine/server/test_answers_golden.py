"""The simulated server's answers, byte for byte, against files made from its own.

They fix the wire format where the recordings of real vLLM are missing. To make them anew, after
test_server_wire.py has passed:  python tests/replay/engine/server/test_answers_golden.py
"""

import asyncio
import re
import sys
from pathlib import Path

import pytest
from paths import GOLDEN

sys.path.insert(0, str(Path(__file__).parents[3] / "support"))  # when run as a script

import wire
from stages.engine_stage import HELLO, chat, completion, get, on_server, post

from forebay.replay.clock.virtual_loop import run
from forebay.replay.engine.server.options import ServerOptions

USAGE = {"stream": True, "stream_options": {"include_usage": True}}
EACH = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
THREE = {"max_tokens": 3, "ignore_eos": True}
TEXT = {"prompt": "Hello world", **THREE}
QUESTIONS = {
    "chat": chat("Hello world", **THREE),
    "chat_stops": chat("Hello", max_tokens=100_000),
    "chat_stream": chat("Hello world", **THREE, stream=True),
    "chat_stream_usage": chat("Hello world", **THREE, **USAGE),
    "chat_stream_usage_each": chat("Hello world", **THREE, **EACH),
    "completion": completion(TEXT),
    "completion_named": completion(TEXT, **{"X-Request-Id": "mine"}),
    "completion_stream": completion({**TEXT, "stream": True}),
    "completion_stream_usage": completion({**TEXT, **USAGE}),
    "completion_stream_usage_each": completion({**TEXT, **EACH}),
    "err_json": wire.Question(
        "POST", "/v1/completions", {"Content-Type": "application/json"}, b'{"prompt": '
    ),
    "err_content_type": wire.Question(
        "POST", "/v1/completions", {"Content-Type": "text/plain"}, b"{}"
    ),
    "err_missing": post("/v1/chat/completions", {}),
    "err_model": completion({"model": "nope", "prompt": "x"}),
    "err_too_long": completion({"prompt": "x" * 70_000}),
    "err_value": completion({"prompt": "x", "max_tokens": -1}),
    "err_path": get("/v1/nope"),
    "err_method": get("/v1/completions"),
    "health": get("/health"),
    "load": get("/load"),
    "metrics": get("/metrics"),
    "models": get("/v1/models"),
    "tokenize": post("/tokenize", {"prompt": "Hello", "return_token_strs": True}),
    "version": get("/version"),
}
WITH_FAULT = {
    "fault_reject": ("reject", chat("Hello")),
    "fault_stream_503": ("stream-503", chat("Hello", **USAGE)),
    "fault_abort": ("abort:2", chat("Hello", **USAGE)),
    "fault_engine_dead": ("engine-dead:2", completion({**HELLO, **USAGE})),
    "fault_truncate": ("truncate:2", completion({**HELLO, **USAGE})),
}


async def answer_to(name: str) -> bytes:
    fault, question = WITH_FAULT.get(name) or (None, QUESTIONS[name])
    async with on_server(fault, num_gpu_blocks_override=1_000) as (_, client):
        return shown(question, await wire.ask(client, question))


def shown(question: wire.Question, answer: wire.Answer) -> bytes:
    """Request and answer, with the times of day masked and long bodies cut."""
    asked = (question.body or b"")[:200]
    headers = {**answer.headers, "date": "*"}
    lines = [f"{question.method} {question.path}", "", answer.status]
    lines += sorted(f"{name}: {value}" for name, value in headers.items())
    body = re.sub(rb'"created":\d+', b'"created":0', answer.body)
    # The length of `created` never changes, that of the content therefore neither.
    head = "\n".join(lines).replace("\n\n", f"\n{asked.decode()}\n\n", 1)
    return head.encode() + b"\n\n" + body


NAMES = [*QUESTIONS, *WITH_FAULT]


@pytest.mark.parametrize("name", NAMES)
async def test_answers_keep_their_bytes(name: str) -> None:
    assert (await answer_to(name)).decode() == (GOLDEN / f"{name}.txt").read_bytes().decode()


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(NAMES)


async def test_an_unauthorized_request_is_told_no_more_than_that() -> None:
    async with on_server(options=ServerOptions(api_key=["secret"])) as (_, client):
        asked = [wire.ask(client, one) for one in (completion(TEXT), get("/v1/nope"))]
        first, second = await asyncio.gather(*asked)
        assert first == second
        answer = first
    assert (answer.status, answer.body) == ("401 Unauthorized", b'{"error":"Unauthorized"}')
    assert set(answer.headers) == {"content-length", "content-type", "date", "server"}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.iterdir():
        old.unlink()
    for each in NAMES:
        (GOLDEN / f"{each}.txt").write_bytes(run(answer_to(each)))
