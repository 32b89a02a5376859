"""A server stops in the middle of a stream, and another server goes on with it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from fakes.faulty_backends import ABORT, End, error_event, late
from fakes.text_engine import TEXT, WORDS, TextEngine
from stages.proxy_stage import ONE_SLOT, Stage, answer, on_stage, silent, until
from stages.vllm_stage import payloads

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me."}], "stream": True}
COMPLETION = {"prompt": "What?", "max_tokens": 99, "stream": True}
BODIES: dict[str, dict[str, Any]] = {"chat": CHAT, "completion": COMPLETION}
USAGE = {"stream_options": {"include_usage": True}}


@asynccontextmanager
async def before(*engines: TextEngine, **keys: Any) -> AsyncIterator[Stage]:
    """A proxy before these servers. Its first request goes to the first."""
    async with on_stage(*(engine.backend for engine in engines), **keys) as (on, _):
        yield on


async def ask(on: Stage, body: dict[str, Any], **options: Any) -> tuple[bytes, bool]:
    """A stream, and if it was whole."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    got = b""
    async with on.post(body, path, **options) as response:
        assert response.status == 200
        try:
            while part := await response.content.readany():
                got += part
        except aiohttp.ClientPayloadError:
            assert got.count(b"upstream_stream_error") == 1
            assert b"[DONE]" not in got
            return got, False
    assert got.endswith(b"data: [DONE]\n\n")
    assert got.count(b"[DONE]") == 1
    return got, True


def text_of(got: bytes) -> str:
    choices = [choice for event in payloads(got) for choice in event.get("choices", ())]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


async def uninterrupted(body: dict[str, Any]) -> bytes:
    engine = TextEngine()
    async with before(engine) as on:
        got, whole = await ask(on, body)
    assert whole
    return got


def nameless(got: bytes) -> list[dict[str, Any]]:
    """The events that say something, without the name of the answer."""
    events = []
    assert len({(event.pop("id"), event.pop("created")) for event in payloads(got)}) == 1
    for event in payloads(got):
        del event["id"], event["created"]
        event.get("usage", {}).pop("prompt_tokens_details", None)
        choice = (event["choices"] or [None])[0]
        said = choice is None or choice["finish_reason"] or "role" in choice.get("delta", {})
        if said or text_of(b"data: " + json.dumps(event).encode()):
            events.append(event)
    return events


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("usage", [False, True], ids=["", "usage"])
@pytest.mark.parametrize("after", range(1, len(WORDS) + 2))
async def test_the_client_sees_one_stream(after: int, usage: bool, body: str) -> None:
    """Wherever it dies: text, names and usage are those of a stream that nothing stopped."""
    asked = BODIES[body] | (USAGE if usage else {})
    dying, other = TextEngine(dies_after=after), TextEngine()
    async with before(dying, other) as on:
        got, whole = await ask(on, asked)
        metrics = await on.admin("/metrics")
    ended = body == "completion" and after > len(WORDS)
    assert whole == (not (ended and usage))  # else nobody knows its usage
    if not whole:
        return
    assert nameless(got) == nameless(await uninterrupted(asked))
    assert len(other.asked) == 1 - ended
    assert ('streams_continued_total{backend="b1"} 1.0' in metrics) is not ended


@pytest.mark.parametrize(
    "how", ["reset", "close", b"data: {", ABORT, error_event("dead", 500)], ids=str
)
async def test_however_it_stops(how: End | bytes) -> None:
    async with before(TextEngine(dies_after=7, how=how), TextEngine()) as on:
        got, whole = await ask(on, CHAT | USAGE)
    assert whole
    assert text_of(got) == TEXT


async def test_what_the_other_server_is_asked() -> None:
    """The text without white space at its end, and the rest of the limit."""
    dying, other = TextEngine(dies_after=7), TextEngine()
    body = CHAT | {"max_tokens": 12, "min_tokens": 3, "temperature": 0, "user": "x"}
    async with before(dying, other) as on:
        got, whole = await ask(on, body)
    assert whole
    assert text_of(got) == "".join(WORDS[:12])
    assert payloads(got)[-1]["choices"][0]["finish_reason"] == "length"
    said = {"role": "assistant", "content": "The dog sat."}
    messages = [{"role": "user", "content": "Tell me."}, said]
    rest = {"max_tokens": 8, "min_tokens": 0, "continue_final_message": True,
            "add_generation_prompt": False}  # fmt: skip
    assert other.asked == [body | rest | {"messages": messages}]


async def test_a_completion_without_a_limit_keeps_vllms_own() -> None:
    dying, other = TextEngine(dies_after=3), TextEngine()
    async with before(dying, other) as on:
        await ask(on, {"prompt": "What?", "stream": True})
    assert other.asked == [{"prompt": "What?The dog sat", "stream": True, "max_tokens": 13}]


MORE: dict[str, dict[str, Any]] = {
    "two choices": {"n": 2},
    "logprobs": {"logprobs": True},
    "a grammar": {"response_format": {"type": "json_object"}},
    "a call of a tool": {"tools": [{"type": "function"}], "tool_choice": "required"},
    "token ids": {"return_token_ids": True},
    "its own prefill": {"continue_final_message": True, "add_generation_prompt": False},
    "hidden reasoning": {"include_reasoning": False},
    "half a stop string": {"stop": "sat on", "include_stop_str_in_output": True},
}


async def ended(body: dict[str, Any], first: bytes = b"", **keys: Any) -> bytes:
    """The stream of a server that dies, with which no other server may go on."""
    dying, other = TextEngine(dies_after=4, first=first), TextEngine()
    async with before(dying, other, **keys) as on:
        got, whole = await ask(on, body)
    assert not whole
    assert not other.asked
    return got


@pytest.mark.parametrize("more", MORE)
async def test_everything_else_ends_as_before(more: str) -> None:
    assert text_of(await ended({**CHAT, **MORE[more]})) == "The dog sat"


@pytest.mark.parametrize("delta", [{"reasoning": "Hm"}, {"tool_calls": [{"index": 0}]}], ids=str)
async def test_reasoning_and_calls_of_tools_are_no_text(delta: dict[str, Any]) -> None:
    event = b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"
    await ended(CHAT, event)


def refusing(status: int, message: str) -> TextEngine:
    return TextEngine(refuses=answer(status, json.dumps({"error": {"message": message}}).encode()))


def without_tokenize() -> TextEngine:
    engine = TextEngine()
    engine.backend.tokenize = None
    return engine


OTHERS: dict[str, Callable[[], TextEngine]] = {
    "no such model": lambda: refusing(404, "The model `m` does not exist."),
    "no continue_final_message": lambda: refusing(400, "extra fields not permitted"),
    "fails": lambda: refusing(500, "oh"),
    "full": lambda: refusing(503, "busy"),
    "no /tokenize": without_tokenize,
    "a template that thinks": lambda: TextEngine(thinks="<think></think>"),
    "dies, too": lambda: TextEngine(dies_after=3),
    "dies at once": lambda: TextEngine(dies_after=0),
}


@pytest.mark.parametrize("which", OTHERS)
async def test_another_server_that_cannot_go_on(which: str) -> None:
    """The client gets the error event, and all that came before it once."""
    other = OTHERS[which]()
    async with before(TextEngine(dies_after=8), other, slots=1) as on:
        got, whole = await ask(on, CHAT)
        assert not whole
        assert await on.admin("/requests?by=slowest")
    assert TEXT.startswith(text_of(got))
    assert len(text_of(got)) >= len("".join(WORDS[:7]))
    assert len(other.asked) <= 1


async def test_it_is_switched_off() -> None:
    await ended(CHAT, retries={"continue_streams": False})


async def test_a_client_leaves_while_its_stream_moves() -> None:
    other = TextEngine()
    other.backend.serve = silent
    async with before(TextEngine(dies_after=4), other) as on:
        task = asyncio.create_task(ask(on, CHAT))
        await until(lambda: other.backend.open == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: other.backend.open == 0)


async def test_it_goes_before_those_that_wait() -> None:
    """Its other server is busy, and others wait for it. It says what it did."""
    made = TextEngine(dies_after=4, pause_s=0.3), TextEngine(pause_s=0.3)
    async with before(*made, **ONE_SLOT) as on:
        first = asyncio.create_task(ask(on, CHAT, headers={"x-request-id": "moved"}))
        await asyncio.sleep(0.5)
        assert await drain(on, "b0/drain") == 1
        tasks = [asyncio.create_task(ask(on, CHAT | {"user": str(n)})) for n in range(2)]
        got, whole = await first
        assert whole
        assert text_of(got) == TEXT
        assert [body.get("user") for body in made[1].asked][:2] == ["0", None]
        await asyncio.gather(*tasks)
        receipt = await on.told("/status?request=moved")
        await asyncio.sleep(1.0)  # the server ends its framing
    assert "Sent at once to b0" in receipt["verdict"]
    assert "Continued on b1 after 3 tokens." in receipt["verdict"]
    assert receipt["actual"]["ttft_s"] < 1.5


async def drain(on: Stage, target: str) -> int:
    async with on.client.post(f"{on.proxy.admin_url}/backends/{target}") as response:
        assert response.status == 200
        return int((await response.json())["in_flight"])


async def test_a_drain_now_moves_streams_as_often_as_it_is_asked() -> None:
    made = TextEngine(pause_s=1.0), TextEngine(pause_s=1.0)
    async with before(*made) as on:
        streams = [asyncio.create_task(ask(on, CHAT | USAGE | {"user": str(n)})) for n in range(4)]
        for name, other in (("b0", "b1"), ("b1", "b0"), ("b0", "b1")):
            await asyncio.sleep(4.5)
            await drain(on, f"{other}/ready")
            await drain(on, f"{name}/drain?now")
            await asyncio.sleep(0.5)
            assert await drain(on, f"{name}/drain?now") == 0
        for got, whole in await asyncio.gather(*streams):
            assert whole
            assert nameless(got) == nameless(await uninterrupted(CHAT | USAGE))
        assert "forebay_upstream_errors_total{" not in await on.admin("/metrics")
        await asyncio.sleep(2.0)


@pytest.mark.parametrize("why", ["logprobs", "no /tokenize", "nobody else"])
async def test_a_drain_now_leaves_what_nobody_can_go_on_with(why: str) -> None:
    other = without_tokenize() if why == "no /tokenize" else TextEngine()
    body = CHAT | ({"logprobs": True} if why == "logprobs" else {})
    engines = [TextEngine(pause_s=1.0)] + [other] * (why != "nobody else")
    async with before(*engines) as on:
        stream = asyncio.create_task(ask(on, body))
        await asyncio.sleep(4.5)
        assert await drain(on, "b0/drain?now") == 1
        got, whole = await stream
        assert whole
        assert text_of(got) == TEXT
        assert not other.asked
        await asyncio.sleep(2.0)


async def test_heartbeats_came_before_it() -> None:
    engines = TextEngine(dies_after=7), TextEngine()
    for engine in engines:
        engine.backend.serve = late(5.0, engine.serve)
    async with before(*engines, timeouts={"keep_alive": "1s"}) as on:
        got, whole = await ask(on, CHAT | USAGE)
    assert whole
    assert got.startswith(b": keep-alive\n\n")
    assert text_of(got) == TEXT


async def test_all_that_were_on_a_server_go_on() -> None:
    """A lost connection is outside the share of retries, as nothing is computed twice."""
    dying = TextEngine(dies_after=7)
    async with before(dying, TextEngine(), TextEngine()) as on:
        streams = [ask(on, CHAT | USAGE | {"user": str(number)}) for number in range(30)]
        told = await asyncio.gather(*streams)
    assert len(dying.asked) >= 10
    assert [(whole, text_of(got)) for got, whole in told] == [(True, TEXT)] * 30
