"""Split prefill over real sockets: the requests that backends get, whatever they answer."""

import asyncio
import json
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from proxy_stage import (
    DONE,
    WHOLE,
    Call,
    RawBackend,
    Stage,
    answer,
    by_request,
    error_of,
    note_a_chat,
    on_stage,
    settle,
    until,
)

PIECES: dict[str, Any] = {"each": {"prefill_piece": "500ms"}}
PROMPT = "".join(f"{number:9} " for number in range(20_000))  # 50k tokens, 2.6 s of prefill
LONG = {"prompt": PROMPT, "max_tokens": 3, "stream": True}


def piece_of(call: Call) -> str | None:
    """The prompt of a part; None for the request itself, or for a chat."""
    fields = json.loads(call.body)
    return None if fields["max_tokens"] != 1 else fields["prompt"]


def pieces(backend: RawBackend) -> list[str]:
    return [p for call in backend.calls if (p := piece_of(call)) is not None]


async def chats_flow(on: Stage) -> None:
    note_a_chat(on)
    async with on.post({"prompt": "hi", "max_tokens": 3}) as response:
        assert response.status == 200


async def ask(on: Stage, body: dict[str, Any] = LONG) -> tuple[int, bytes]:
    async with on.post(body) as response:
        return response.status, await response.read()


def test_each_is_longer_and_the_last_is_the_request_itself() -> None:
    async def scene(on: Stage, backends: list[RawBackend]) -> None:
        await chats_flow(on)
        status, body = await ask(on)
        assert status == 200
        assert body.endswith(DONE)
        (backend,) = backends
        sent = pieces(backend)
        assert len(sent) >= 3
        assert [len(p) for p in sent] == sorted({len(p) for p in sent})
        assert all(PROMPT.startswith(piece) for piece in sent)
        assert json.loads(backend.calls[-1].body) == LONG
        assert len(backend.calls) == 1 + len(sent) + 1
        assert all("x-request-id" in call.head.lower() for call in backend.calls)

    on_stage(scene, None, **PIECES)


def test_metrics_count_one_request() -> None:
    async def scene(on: Stage, backends: list[RawBackend]) -> None:
        await chats_flow(on)
        await ask(on)
        async with on.client.get(f"{on.proxy.admin_url}/metrics") as response:
            text = await response.text()
        assert 'forebay_queue_seconds_count{bucket="document"} 1.0' in text

    on_stage(scene, None, **PIECES)


@pytest.mark.parametrize("others", [0, 3_000])
def test_what_is_its_own_is_no_hit(others: int) -> None:
    """Parts of its own prompt that the backend computed are no cache hits; those of others are."""
    held: list[str] = [PROMPT[: 4 * others]]

    async def serve(call: Call) -> None:
        prompt = json.loads(call.body)["prompt"]
        cached = max((len(p) for p in held if prompt.startswith(p)), default=0)
        held.append(prompt)
        usage = {
            "prompt_tokens": len(prompt) // 4, "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": min(cached, len(prompt) - 4) // 4},
        }  # fmt: skip
        await call.send(answer(200, json.dumps({**json.loads(WHOLE), "usage": usage}).encode()))

    async def scene(on: Stage, backends: list[RawBackend]) -> None:
        note_a_chat(on)
        async with on.post({"prompt": "", "max_tokens": 3}) as response:
            assert response.status == 200
        async with on.post({**LONG, "stream": False}) as response:
            usage = (await response.json())["usage"]  # as the backend counts
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached - int(response.headers["x-forebay-piece-tokens"]) == others
        assert len(pieces(backends[0])) >= 3
        text = on.proxy.metrics.text().decode()
        assert f'forebay_cached_tokens_total{{backend="b0"}} {others}.0' in text

    on_stage(scene, serve, **PIECES)


def test_whole_without_others_or_when_off() -> None:
    async def scene(on: Stage, backends: list[RawBackend]) -> None:
        async with on.post(LONG) as response:
            assert response.status == 200
            assert "x-forebay-piece-tokens" not in response.headers
            await response.read()
        assert not pieces(backends[0])

    on_stage(scene, None, **PIECES)

    async def flowing(on: Stage, backends: list[RawBackend]) -> None:
        await chats_flow(on)
        await scene(on, backends)

    on_stage(flowing, None, each={"prefill_piece": "off"})


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_piece_that_is_refused_is_not_asked_for_again(status: int) -> None:
    """The client gets the backend's answer to the whole prompt."""

    async def serve(call: Call) -> None:
        if piece_of(call) is None:
            await by_request(call)
        else:
            await call.send(answer(status, b'{"error":{}}'))

    async def scene(on: Stage, backends: list[RawBackend]) -> None:
        await chats_flow(on)
        cost = on.proxy.driver.shaper.backends["b0"].cost
        before = cost.observations
        assert (await ask(on))[0] == 200
        assert len(pieces(backends[0])) == 1
        assert cost.observations <= before + 1  # the refusal says nothing of what prefills take

    on_stage(scene, serve, **PIECES)


def test_a_backend_that_fails_in_a_piece() -> None:
    """Another one begins again."""

    async def fails(call: Call) -> None:
        if piece_of(call) is None:
            await by_request(call)
        else:
            call.reset()

    async def scene(on: Stage, backends: list[RawBackend]) -> None:
        await chats_flow(on)
        status, body = await ask(on)
        assert status == 200
        assert body.endswith(DONE)
        failed = [b for b in backends if b.serve is fails and pieces(b)]
        if failed:  # else it went to the other one at once
            assert len(pieces(failed[0])) == 1

    on_stage(scene, fails, None, **PIECES)


def test_the_only_backend_fails_in_a_piece() -> None:
    async def fails(call: Call) -> None:
        if piece_of(call) is None:
            await by_request(call)
        else:
            await call.send(answer(500, b"{}"))

    async def scene(on: Stage, backends: list[RawBackend]) -> None:
        await chats_flow(on)
        async with on.post(LONG) as response:
            assert response.status == 500
        assert len(pieces(backends[0])) == 1

    on_stage(scene, fails, **PIECES)


async def hangs_in_pieces(call: Call) -> None:
    if piece_of(call) is None:
        await by_request(call)
    else:
        await call.hung_up()


def test_a_client_that_leaves_in_a_piece() -> None:
    """The backend is hung up on, and nothing more is asked of it."""

    async def scene(on: Stage, backends: list[RawBackend]) -> None:
        await chats_flow(on)
        task = asyncio.create_task(ask(on))
        await until(lambda: backends[0].open == 1)
        task.cancel()
        await until(lambda: backends[0].open == 0)
        await settle()
        assert len(pieces(backends[0])) == 1

    on_stage(scene, hangs_in_pieces, **PIECES)


def test_a_client_that_leaves_between_two() -> None:
    async def scene(on: Stage, backends: list[RawBackend]) -> None:
        await chats_flow(on)
        shaper = on.proxy.driver.shaper
        task = asyncio.create_task(ask(on))
        await until(lambda: backends[0].open == 1)
        shaper.backends["b0"].most_prefills = 0  # no room for the next
        end.set()
        await until(lambda: shaper.queued("document") == 1)
        task.cancel()
        await until(lambda: shaper.queued("document") == 0)
        shaper.backends["b0"].most_prefills = inf

    async def held(call: Call) -> None:
        if piece_of(call) is not None:
            await end.wait()
        await by_request(call)

    end = asyncio.Event()
    on_stage(scene, held, **PIECES)


def test_a_drain_ends_it() -> None:
    async def scene(on: Stage, backends: list[RawBackend]) -> None:
        await chats_flow(on)
        task = asyncio.create_task(on.post(LONG).__aenter__())
        await until(lambda: backends[0].open == 1)
        assert await on.proxy.drain(0.1) == 1
        response = await task
        assert response.status == 503
        assert (await error_of(response))["code"] == "draining"

    on_stage(scene, hangs_in_pieces, **PIECES)


def test_a_backend_that_never_answers_a_piece() -> None:
    async def scene(on: Stage, backends: list[RawBackend]) -> None:
        await chats_flow(on)
        async with on.post(LONG) as response:
            assert response.status == 504

    on_stage(scene, hangs_in_pieces, timeouts={"first_token": "3s"}, **PIECES)


@pytest.mark.parametrize(
    "made",
    [
        lambda: answer(200, b"no json"),
        lambda: answer(200, b'{"choices":[{"finish_reason":"abort"}]}'),
        lambda: answer(200, WHOLE, "content-encoding: gzip"),
    ],
)
def test_what_is_no_answer_is_a_failure(made: Callable[[], bytes]) -> None:
    async def broken(call: Call) -> None:
        if piece_of(call) is None:
            await by_request(call)
        else:
            await call.send(made())

    async def scene(on: Stage, backends: list[RawBackend]) -> None:
        await chats_flow(on)
        async with on.post(LONG) as response:
            assert response.status == 502

    on_stage(scene, broken, **PIECES)


def test_a_chat_is_cut_in_its_long_message() -> None:
    body = {
        "messages": [
            {"role": "system", "content": "Answer."},
            {"role": "user", "content": PROMPT},
            {"role": "user", "content": "What was it?"},
        ],
        "max_tokens": 3,
        "stream": True,
    }

    async def scene(on: Stage, backends: list[RawBackend]) -> None:
        await chats_flow(on)
        async with on.post(body, path="/v1/chat/completions") as response:
            assert response.status == 200
        *sent, last = [json.loads(call.body) for call in backends[0].calls[1:]]
        assert last == body
        assert len(sent) >= 3
        for one in sent:
            assert [m["role"] for m in one["messages"]] == ["system", "user"]
            assert PROMPT.startswith(one["messages"][1]["content"])

    on_stage(scene, None, **PIECES)
