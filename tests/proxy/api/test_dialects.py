"""/v1/responses and /v1/messages are shaped as chats are."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from body_reading import read_body
from fakes.faulty_backends import answers, streams
from fakes.tenant_keys import key_of, keys_of
from stages.proxy_stage import (
    STREAM_HEAD,
    Call,
    RawBackend,
    Stage,
    answer,
    chunk,
    cut_off,
    error_of,
    on_stage,
    settle,
    silent,
    stage,
    until,
)

from forebay.proxy.api.dialects import CHAT, COMPLETIONS, DIALECTS, MESSAGES, RESPONSES, Dialect
from forebay.proxy.api.dialects.usage import usage_tokens
from forebay.proxy.core.model import BackendSpec, Bucket, Request, Send
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.http1.errors import ApiError
from forebay.proxy.relay.kept_responses import MOST_KEPT, KeptResponses

SHAPED = (RESPONSES, MESSAGES)
INPUT_USAGE = {
    "input_tokens": 7,
    "input_tokens_details": {"cached_tokens": 4},
    "output_tokens": 3,
    "total_tokens": 10,
}
LONG = "word " * 2_000


def event(kind: str, **fields: Any) -> bytes:
    return (
        b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({**fields, "type": kind}) + b"\n\n"
    )


def whole_response(id_: str) -> dict[str, Any]:
    return {"id": id_, "object": "response", "error": None, "output": [], "usage": INPUT_USAGE}


OPENING = event("response.created", response={"id": "r", "error": None, "usage": None})
OPENING += event("response.in_progress", response={"id": "r"})
STREAMS = {
    RESPONSES: (
        OPENING,
        event("response.output_text.delta", delta=' "response.completed" yes'),
        event("response.completed", response=whole_response("r")),
    ),
    MESSAGES: (
        event("ping"),
        event("message_start", message={"id": "m", "usage": {"input_tokens": 3}})
        + event("content_block_delta", delta={"type": "text_delta", "text": "message_stop"}),
        event("message_delta", usage={"input_tokens": 3, "cache_read_input_tokens": 4,
                                      "output_tokens": 3})
        + event("message_stop"),
    ),
}  # fmt: skip


def asked(dialect: Dialect, prompt: str = "hello", **more: Any) -> dict[str, Any]:
    if dialect is RESPONSES:
        return {"model": "m", "input": prompt, **more}
    return {
        "model": "m",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 9,
        **more,
    }


def read(dialect: Dialect, fields: dict[str, Any]) -> Any:
    body = orjson.dumps(fields)
    return read_body(body, dialect)


class TestFields:
    def test_a_conversation_has_the_same_prefix_in_every_api(self) -> None:
        """So a document is known again by whatever API the next question comes."""
        chat = {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "?"}]}
        request = read(CHAT, chat).request
        asks = {"role": "user", "content": "?"}
        for dialect, fields in (
            (RESPONSES, {"instructions": LONG, "input": "?"}),
            (RESPONSES, {"instructions": LONG, "input": [asks]}),
            (MESSAGES, {"system": LONG, "messages": [asks]}),
            (MESSAGES, {"system": [{"type": "text", "text": LONG}], "messages": [asks]}),
        ):
            other = read(dialect, fields).request
            assert (other.blocks, other.prompt_tokens) == (request.blocks, request.prompt_tokens)
            assert other.identity == request.identity

    def test_a_turn_begins_with_the_one_before(self) -> None:
        said = {"type": "message", "role": "assistant",
                "content": [{"type": "output_text", "text": LONG}]}  # fmt: skip
        called = {"type": "function_call", "name": "f", "arguments": LONG, "call_id": "1"}
        told = {"type": "function_call_output", "call_id": "1", "output": LONG}
        turn = [{"role": "user", "content": LONG}, said, called]
        before = read(RESPONSES, {"input": turn}).request.blocks
        after = read(RESPONSES, {"input": [*turn, told]}).request.blocks
        assert len(before) > 100
        assert after[: len(before)] == before

    @pytest.mark.parametrize("dialect", SHAPED)
    def test_the_limit_of_the_answer(self, dialect: Dialect) -> None:
        limit: dict[str, Any] = {dialect.limits[0]: 33, "n": 4}
        request = read(dialect, asked(dialect, **limit)).request
        assert (request.output_tokens, request.sequences) == (33, 1)

    @pytest.mark.parametrize(
        ("dialect", "fields"),
        [
            (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {}}}}),
            (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}),
            (MESSAGES, {"tools": [{"name": "f"}], "tool_choice": {"type": "any"}}),
        ],
    )
    def test_a_grammar_comes_before_the_first_token(
        self, dialect: Dialect, fields: dict[str, Any]
    ) -> None:
        free: dict[str, Any] = {
            "text": {"format": {"type": "text"}},
            "tool_choice": {"type": "auto"},
        }
        assert read(dialect, asked(dialect, **free)).request.pure
        assert not read(dialect, asked(dialect, **fields)).request.pure

    @pytest.mark.parametrize(
        ("dialect", "fields", "param"),
        [
            (RESPONSES, {}, "input"),
            (RESPONSES, {"input": 3}, "input"),
            (RESPONSES, {"input": ["a"]}, "input"),
            (RESPONSES, {"input": "a", "max_output_tokens": "many"}, "max_output_tokens"),
            (RESPONSES, {"input": "a", "previous_response_id": 7}, "previous_response_id"),
            (RESPONSES, {"input": "a", "background": 1}, "background"),
            (RESPONSES, {"input": "a", "background": True}, "background"),  # could not be read
            (MESSAGES, {"messages": "a"}, "messages"),
            (MESSAGES, {"messages": [], "system": "a"}, "messages"),
        ],
    )
    def test_a_wrong_type_is_named(
        self, dialect: Dialect, fields: dict[str, Any], param: str
    ) -> None:
        with pytest.raises(ApiError) as error:
            read(dialect, fields)
        assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (INPUT_USAGE, (7, 4, 3)),
        ({"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 3}, (7, 4, 3)),
        ({"input_tokens": 7, "output_tokens": 3}, (7, None, 3)),
        (
            {
                "input_tokens": 1,
                "cache_creation_input_tokens": 2,
                "cache_read_input_tokens": 4,
                "output_tokens": 3,
            },
            (7, 4, 3),
        ),
        (
            {
                "input_tokens": 7,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 3,
            },
            (7, None, 3),
        ),
        ({"input_tokens": -1, "output_tokens": 3}, (0, None, 0)),
    ],
)
def test_usage_has_other_names(usage: dict[str, Any], counts: tuple[int, int | None, int]) -> None:
    assert usage_tokens(usage) == counts


class TestStreams:
    @pytest.mark.parametrize("dialect", SHAPED)
    async def test_a_stream_is_relayed_byte_for_byte_and_counted(self, dialect: Dialect) -> None:
        opening, middle, end = STREAMS[dialect]

        async def serve(call: Call) -> None:
            await call.send(STREAM_HEAD + chunk(opening))
            await asyncio.sleep(2)
            await call.send(chunk(middle))
            await asyncio.sleep(1)
            await call.send(chunk(end) + b"0\r\n\r\n")

        async with on_stage(serve, timeouts={"keep_alive": "0s"}) as (on, _):
            posting = asyncio.ensure_future(
                on.post(asked(dialect, stream=True), dialect.path).__aenter__()
            )
            await asyncio.sleep(1)
            assert not posting.done()  # nothing is promised before the first token
            (queue,) = [b.prefill_queue for b in on.proxy.driver.shaper.backends.values()]
            assert len(queue.prefills) == 1
            response = await posting
            assert not queue.prefills
            assert response.headers["x-forebay-bucket"] == "chat"
            assert await response.read() == opening + middle + end
            await settle()
            on.assert_nothing_held()
            text = on.proxy.metrics.text().decode()
            assert 'forebay_prompt_tokens_total{backend="b0"} 7' in text
            assert 'forebay_cached_tokens_total{backend="b0"} 4' in text

    @pytest.mark.parametrize("dialect", SHAPED)
    @pytest.mark.parametrize("data_only", [False, True])
    async def test_a_clean_end_before_the_last_event_is_a_cut(
        self, dialect: Dialect, data_only: bool
    ) -> None:
        parts = list(STREAMS[dialect])
        if data_only:  # as some servers send them
            parts = [re.sub(rb"event: .*\n", b"", part) for part in parts]
        opening, middle, end = parts

        async with on_stage(streams(opening, middle)) as (on, backends):
            async with on.post(asked(dialect, stream=True), dialect.path) as response:
                got = await cut_off(response)
            last = got.removeprefix(opening + middle)
            assert last.startswith(b"event: error\ndata: ")
            said = orjson.loads(last.split(b"data: ")[1])
            assert (said["type"], said["error"]["code"]) == ("error", "upstream_stream_error")
            backends[0].serve = streams(opening, middle, end)
            assert (
                await on.read(asked(dialect, stream=True), dialect.path) == opening + middle + end
            )

    @pytest.mark.parametrize(
        ("dialect", "error"),
        [
            (RESPONSES, event("error", message="busy", code="server_error", param=None)),
            (MESSAGES, event("error", error={"type": "internal_error", "message": "busy"})),
        ],
    )
    async def test_an_error_before_the_first_token_goes_elsewhere(
        self, dialect: Dialect, error: bytes
    ) -> None:
        opening, middle, end = STREAMS[dialect]
        calls = 0

        async def serve(call: Call) -> None:
            nonlocal calls
            calls += 1
            rest = chunk(error) if calls == 1 else chunk(middle) + chunk(end)
            await call.send(STREAM_HEAD + chunk(opening) + rest + b"0\r\n\r\n")

        async with on_stage(serve, serve) as (on, _):
            assert (
                await on.read(asked(dialect, stream=True), dialect.path) == opening + middle + end
            )
            assert calls == 2


class TestShaping:
    @pytest.mark.parametrize("dialect", SHAPED)
    async def test_long_prompts_wait_in_their_bucket_and_are_rejected(
        self, dialect: Dialect
    ) -> None:
        buckets = [{"name": "chat", "up_to": 5000},
                   {"name": "document", "up_to": 131072, "max_queue": 2,
                    "prefills_per_backend": 1}]  # fmt: skip
        async with on_stage(silent, buckets=buckets) as (on, _):
            body = asked(dialect, "word " * 80_000)
            waiting = [
                asyncio.ensure_future(on.post({**body, "user": str(n)}, dialect.path).__aenter__())
                for n in range(3)
            ]
            await until(lambda: on.proxy.driver.shaper.queued("document") == 2)
            async with on.post(body, dialect.path) as response:
                assert response.status == 429
                assert int(response.headers["retry-after"]) >= 1
                assert (await error_of(response))["code"] in ("queue_full", "deadline_unattainable")
            for one in waiting:
                one.cancel()
            await settle()

    async def test_every_shaped_path_is_a_post(self) -> None:
        async def unasked(call: Call) -> None:
            raise AssertionError

        async with on_stage(unasked) as (on, _):
            for path in DIALECTS:
                async with on.client.get(on.url + path) as response:
                    assert (response.status, response.headers["allow"]) == (405, "POST, OPTIONS")
                    assert (await error_of(response))["code"] == "method_not_allowed"


class TestPreviousResponse:
    """`previous_response_id`: the backend that made a response keeps it, no other does."""

    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_next_turn_goes_where_the_response_is(self, stream: bool) -> None:
        made: dict[str, str] = {}

        def backend(name: str) -> Any:
            async def serve(call: Call) -> None:
                fields = json.loads(call.body)
                previous, id_ = fields.get("previous_response_id"), f"r{len(made)}"
                if previous is not None and made[previous] != name:
                    await call.send(answer(404, b'{"error":{"message":"unknown"}}'))
                    return
                made[id_] = name
                if not stream:
                    await call.send(answer(200, orjson.dumps(whole_response(id_))))
                    return
                end = event("response.completed", response=whole_response(id_))
                delta = event("response.output_text.delta", delta="a")
                await call.send(STREAM_HEAD + chunk(OPENING + delta) + chunk(end) + b"0\r\n\r\n")

            return serve

        async def turn(on: Stage, text: str, previous: str | None) -> str:
            body = asked(RESPONSES, text, previous_response_id=previous, stream=stream)
            async with on.post(body, RESPONSES.path) as response:
                assert response.status == 200, await response.read()
                await response.read()
            await settle()
            return list(made)[-1]

        async with on_stage(backend("x"), backend("y")) as (on, _):
            sessions = {text: await turn(on, text, None) for text in ("a", "b", "c", "d")}
            for _ in range(3):
                for text, previous in sessions.items():
                    sessions[text] = await turn(on, "and then?", previous)
            assert set(made.values()) == {"x", "y"}

    @pytest.mark.parametrize("keys", [False, True])
    async def test_a_response_is_read_where_it_is_kept_by_its_owner(
        self, keys: bool, tmp_path: Path
    ) -> None:
        def keeping(name: str) -> Any:
            return answers(200, orjson.dumps(whole_response(f"resp_{name}")))

        tenants = {"tenants": {"keys": keys_of(tmp_path, "owner", "other")}} if keys else {}
        async with on_stage(keeping("x"), keeping("y"), **tenants) as (on, backends):
            owner, other = key_of("owner"), key_of("other")
            for _ in range(4):
                assert await on.status(asked(RESPONSES), RESPONSES.path, headers=owner) == 200
            for name, backend in zip("xy", backends, strict=True):
                calls = len(backend.calls)
                path = f"{on.url}/v1/responses/resp_{name}"
                assert await on.status_of(path, headers=owner) == 200
                async with on.client.post(f"{path}/cancel", headers=owner) as response:
                    assert response.status == 200
                assert [call.head.split(" HTTP")[0] for call in backend.calls[calls:]] == [
                    f"GET /v1/responses/resp_{name}", f"POST /v1/responses/resp_{name}/cancel"
                ]  # fmt: skip
                assert await on.status_of(path, headers=other) == 404 if keys else 200
            calls = sum(len(backend.calls) for backend in backends)
            async with on.client.get(f"{on.url}/v1/responses/resp_z", headers=owner) as response:
                assert (await error_of(response))["code"] == "response_not_found"
            assert await on.status_of(f"{path}/input_items", headers=owner) == 404
            assert sum(len(backend.calls) for backend in backends) == calls

    def test_the_conversation_before_it_counts(self) -> None:
        kept, first = KeptResponses(), read(RESPONSES, asked(RESPONSES, LONG)).request
        kept.add("", "r1", first, "gpu1", 3_000)
        parsed = read(RESPONSES, asked(RESPONSES, previous_response_id="r1"))
        assert (parsed.previous_id, parsed.prompt_bytes) == ("r1", 0)  # teaches no estimate
        request = kept.going_on("", parsed.request, "r1")
        assert request.home == "gpu1"
        assert request.prompt_tokens == 3_000 + parsed.request.prompt_tokens
        assert request.blocks == first.blocks
        assert parsed.request.home == ""  # the request that came is as it was

    def test_another_tenants_response_is_unknown(self) -> None:
        kept, request = KeptResponses(), read(RESPONSES, asked(RESPONSES)).request
        kept.add("", "r1", request, "gpu1", 10)
        with pytest.raises(ApiError) as refused:
            kept.going_on("other", request, "r1")
        assert (refused.value.status, refused.value.param) == (404, "previous_response_id")
        # Of another worker, or from before a restart.
        assert kept.going_on("other", request, "r1", owned=True, home="gpu2").home == "gpu2"

    @pytest.mark.parametrize("makes_ids", [False, True])
    async def test_a_tenant_goes_on_from_its_own_responses_only(
        self, makes_ids: bool, tmp_path: Path
    ) -> None:
        """`makes_ids`: the server uses the id of the body, as vLLM does; else one of its own."""

        async def serve(call: Call) -> None:
            asked_id = json.loads(call.body)["request_id"]
            id_ = asked_id if makes_ids else f"resp_{len(asked_id)}"
            await call.send(answer(200, orjson.dumps(whole_response(id_))))

        keys = keys_of(tmp_path, "good", "evil")
        async with on_stage(serve, serve, tenants={"keys": keys}) as (on, backends):
            good, evil = key_of("good"), key_of("evil")

            async def ask(key: dict[str, str], **fields: Any) -> tuple[int, str]:
                body = asked(RESPONSES, **fields)
                async with on.post(body, RESPONSES.path, headers=key) as response:
                    fields = await response.json()
                    return response.status, fields.get("id") or fields["error"]["code"]

            _, diary = await ask(good)
            seen = sum(len(backend.calls) for backend in backends)
            for _ in range(6):
                assert await ask(evil, previous_response_id=diary) == (404, "response_not_found")
            assert sum(len(backend.calls) for backend in backends) == seen
            assert (await ask(good, previous_response_id=diary))[0] == 200
            on.proxy.app._relay.kept._of.clear()  # as after a restart
            status = (await ask(good, previous_response_id=diary))[0]
            assert status == (200 if makes_ids else 404)
            assert await ask(evil, previous_response_id=diary) == (404, "response_not_found")
            # Nor can a tenant put a response of its own in the place of another one's.
            assert (await ask(evil, request_id=diary))[1] != diary or not makes_ids

    async def test_without_keys_the_backend_knows_its_responses(self) -> None:
        async with on_stage(answers(200, orjson.dumps(whole_response("r1")))) as (on, backends):
            body = asked(RESPONSES, previous_response_id="resp_unknown")
            assert await on.status(body, RESPONSES.path) == 200
            assert b"request_id" not in backends[0].calls[0].body

    @pytest.mark.parametrize("keys", [False, True])
    async def test_an_id_names_its_backend_without_memory(self, keys: bool, tmp_path: Path) -> None:
        """It was lost after 1,024 others, and another worker never knew it."""

        async def serve(call: Call) -> None:
            post = call.head.startswith("POST")
            id_ = json.loads(call.body)["request_id"] if post else call.head.split()[1][14:]
            await call.send(answer(200, orjson.dumps(whole_response(id_))))

        section = {"tenants": {"keys": keys_of(tmp_path, "good")}} if keys else {}
        async with on_stage(serve, serve, serve, **section) as (on, backends):
            headers = key_of("good") if keys else {}

            async def ask(**fields: Any) -> tuple[str, list[int]]:
                before = [len(backend.calls) for backend in backends]
                body = asked(RESPONSES, **fields)
                async with on.post(body, RESPONSES.path, headers=headers) as response:
                    id_ = (await response.json())["id"]
                after = [len(backend.calls) for backend in backends]
                return id_, [b - a for a, b in zip(before, after, strict=True)]

            for _ in range(6):
                id_, at = await ask()
                on.proxy.app._relay.kept._of.clear()  # as in another worker
                calls = [len(backend.calls) for backend in backends]
                url = f"{on.url}/v1/responses/{id_}"
                assert await on.status_of(url, headers=headers) == 200
                counts = [len(backend.calls) for backend in backends]
                assert [b - a for a, b in zip(calls, counts, strict=True)] == at
                assert (await ask(previous_response_id=id_))[1] == at
            forged = id_[:-1] + ("0" if id_[-1] != "0" else "1")
            assert await on.status_of(f"{on.url}/v1/responses/{forged}", headers=headers) == 404
            if not keys:  # an id that the client has chosen stays
                assert (await ask(request_id="mine"))[0] == "mine"

    def test_a_bucket_that_its_backend_does_not_serve_goes_elsewhere(self) -> None:
        buckets = [Bucket("chat", 5_000), Bucket("document", 131_072, backends=("b",))]
        shaper = Shaper([BackendSpec(name, 8) for name in "ab"], buckets)
        for name in "ab":
            shaper.backend_up(name, 0.0)
        for tokens, backend in ((100, "a"), (50_000, "b")):
            (sent,) = shaper.arrive(Request(str(tokens), tokens, home="a"), 0.0)
            assert isinstance(sent, Send)
            assert sent.backend == backend

    def test_so_many_are_kept(self) -> None:
        kept, request = KeptResponses(), read(RESPONSES, asked(RESPONSES)).request
        for number in range(MOST_KEPT + 1):
            kept.add("", str(number), request, "gpu1", 10)
        assert kept.going_on("", request, "0").home == ""
        assert kept.going_on("", request, "1").home == "gpu1"

    def test_a_tenant_pushes_out_its_own(self) -> None:
        kept, request = KeptResponses(), read(RESPONSES, asked(RESPONSES)).request
        kept.add("other", "a", request, "gpu0", 10)
        for number in range(2 * MOST_KEPT):
            kept.add("", str(number), request, "gpu1", 10)
        assert kept.going_on("other", request, "a").home == "gpu0"
        assert kept.going_on("", request, str(MOST_KEPT)).home == ""
        assert kept.going_on("", request, str(MOST_KEPT + 1)).home == "gpu1"

    async def test_where_its_backend_is_down_another_may_say_so(self) -> None:
        unknown = answers(404, b'{"error":{"message":"no such response"}}')

        makes = answers(200, orjson.dumps(whole_response("r1")))

        async with on_stage(makes, unknown) as (on, backends):
            made, other = backends
            other.healthy = False
            await until(lambda: not on.proxy.backends.links["b1"].up)
            assert await on.status(asked(RESPONSES), RESPONSES.path) == 200
            other.healthy, made.healthy = True, False
            links = on.proxy.backends.links
            await until(lambda: links["b1"].up and not links["b0"].up)
            body = asked(RESPONSES, previous_response_id="r1")
            async with on.post(body, RESPONSES.path) as response:
                assert response.status == 503  # the conversation is not lost
                assert (await error_of(response))["code"] == "no_backend_available"
                assert response.headers["retry-after"] == "1"
            assert not other.calls
            made.healthy = True
            await until(lambda: links["b0"].up)
            assert await on.status(body, RESPONSES.path) == 200


@pytest.mark.real_time
async def test_the_client_of_openai_reads_a_stream_and_its_cut() -> None:
    """In real time: the client uses threads."""
    opening, delta, end = STREAMS[RESPONSES]

    async def serve(call: Call) -> None:
        whole = b"cut" not in call.body
        rest = chunk(end) + b"0\r\n\r\n" if whole else b"0\r\n\r\n"
        await call.send(STREAM_HEAD + chunk(opening + delta) + rest)

    backend = RawBackend(serve)
    async with backend.running(), stage([backend.url]) as on:
        client = openai.AsyncOpenAI(base_url=on.url + "/v1", api_key="k", max_retries=0)
        async with client:
            stream = await client.responses.create(model="m", input="whole", stream=True)
            kinds = [one.type async for one in stream]
            assert kinds[-1] == "response.completed"
            stream = await client.responses.create(model="m", input="cut", stream=True)
            with pytest.raises(openai.APIError):
                [one.type async for one in stream]


CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("dialect", "more", "reads"),
    [
        (CHAT, {}, True),
        (CHAT, {"prompt_logprobs": 1}, False),
        (CHAT, {"prompt_logprobs": 0}, False),
        (CHAT, {"prompt_logprobs": None}, True),
        (CHAT, {"logprobs": True, "top_logprobs": 5}, True),
        (CHAT, {"echo": True}, False),  # vLLM's top_logprobs is 0 by default
        (CHAT, {"echo": True, "top_logprobs": None}, True),
        (COMPLETIONS, {"prompt_logprobs": 1}, False),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, False),  # as lm-eval scores
        (COMPLETIONS, {"echo": True, "logprobs": 0}, False),
        (COMPLETIONS, {"echo": True}, True),
        (COMPLETIONS, {"echo": False, "logprobs": 1}, True),
        (RESPONSES, {"prompt_logprobs": 1}, True),  # not in that API
        (MESSAGES, {"prompt_logprobs": 1}, True),
    ],
)
def test_requests_that_read_no_cache(dialect: Dialect, more: dict[str, Any], reads: bool) -> None:
    """By `skip_reading_prefix_cache` of vLLM 0.32."""
    body = {"prompt": "x", "input": "x", "max_tokens": 1, **CHAT_BODY, **more}
    assert read_body(orjson.dumps(body), dialect=dialect).request.reads_cache == reads


async def test_the_prediction_of_a_request_that_reads_no_cache() -> None:
    """It is as for a cold prompt. The prompt enters the cache all the same."""
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 3}
    scoring = body | {"prompt_logprobs": 1}

    async with on_stage(None) as (on, _):

        async def cached(body: dict[str, Any]) -> tuple[int, float]:
            async with on.client.post(f"{on.proxy.admin_url}/preview", json=body) as response:
                (backend,) = (await response.json())["candidates"]
                return backend["matched_tokens"], backend["prefill_s"]

        cold = await cached(body)
        assert cold[0] == 0
        assert await on.status(scoring, "/v1/chat/completions") == 200
        warm = await cached(body)
        assert warm[0] > 0
        assert warm[1] < 0.5 * cold[1]
        again = await cached(scoring)
        assert again[0] == 0
        assert again[1] == pytest.approx(cold[1], rel=0.1)
