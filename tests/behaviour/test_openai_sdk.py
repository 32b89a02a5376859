"""openai-python pointed at the proxy works unchanged."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import openai
import pytest
from fakes.faulty_backends import answers
from stages.proxy_stage import RawBackend, silent, stage

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import start_engine

# The client uses threads, which a virtual clock cannot wait for.
pytestmark = pytest.mark.real_time

MESSAGES: Any = [{"role": "user", "content": "Say something."}]
TOO_MANY: Any = [{"role": "user", "content": "x" * 3_000_000}]  # at any number of bytes per token
NO_LIST: Any = "hello"


@asynccontextmanager
async def with_client(
    backend: RawBackend | None = None, **keys: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a proxy in front of an engine, or of `backend`."""
    async with AsyncExitStack() as stack:
        running = backend.running() if backend else start_engine(EngineConfig(time_scale=20))
        url = (await stack.enter_async_context(running)).url  # type: ignore[attr-defined]
        on = await stack.enter_async_context(stage([url], **keys))
        client = openai.AsyncOpenAI(base_url=on.url + "/v1", api_key="k", max_retries=0)
        async with client:
            yield client


async def has_one(backend: RawBackend) -> None:
    """Wait until a request has come to it."""
    while not backend.calls:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_chat() -> None:
    async with with_client() as client:
        got = await client.chat.completions.create(
            model="llama-3-8b", messages=MESSAGES, max_tokens=5
        )
        assert got.choices[0].message.content
        assert got.usage is not None
        assert got.usage.completion_tokens == 5
        assert got.usage.prompt_tokens_details is not None
        assert got.usage.prompt_tokens_details.cached_tokens == 0


async def test_chat_stream_with_usage() -> None:
    async with with_client() as client:
        stream = await client.chat.completions.create(
            model="llama-3-8b",
            messages=MESSAGES,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert len(text.split()) == 5
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 5


async def test_completion_with_token_ids_and_models() -> None:
    async with with_client() as client:
        got = await client.completions.create(
            model="llama-3-8b", prompt=list(range(100)), max_tokens=3
        )
        assert got.usage is not None
        assert got.usage.prompt_tokens == 100
        assert [model.id async for model in client.models.list()] == ["llama-3-8b"]


async def test_raw_response_headers() -> None:
    async with with_client() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="llama-3-8b", messages=MESSAGES, max_tokens=2,
            extra_headers={"x-request-id": "mine-1"},
        )  # fmt: skip
        assert raw.headers["x-request-id"] == "mine-1"
        assert raw.headers["x-forebay-bucket"] == "chat"
        assert float(raw.headers["x-forebay-queue-ms"]) >= 0
        assert raw.parse().choices


async def test_mistakes_are_the_right_exceptions() -> None:
    async with with_client() as client:
        create = client.chat.completions.create
        with pytest.raises(openai.NotFoundError) as wrong_model:
            await create(model="nope", messages=MESSAGES)
        assert wrong_model.value.param == "model"
        with pytest.raises(openai.BadRequestError) as wrong_type:
            await create(model="llama-3-8b", messages=NO_LIST)
        assert wrong_type.value.code == "invalid_type"
        with pytest.raises(openai.BadRequestError) as too_long:
            await create(model="llama-3-8b", messages=TOO_MANY)
        assert too_long.value.code == "context_length_exceeded"
        assert too_long.value.param == "messages"
        with pytest.raises(openai.NotFoundError):
            await client.files.list()


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, openai.AuthenticationError), (429, openai.RateLimitError),
     (500, openai.InternalServerError), (503, openai.InternalServerError)],
)  # fmt: skip
async def test_the_backends_own_errors(status: int, kind: type[Exception]) -> None:
    fail = answers(status, b'{"error":{"message":"no","type":"t","param":null,"code":1}}')

    async with with_client(RawBackend(fail)) as client:
        with pytest.raises(kind):
            await client.chat.completions.create(model="m", messages=MESSAGES)


async def ask(client: openai.AsyncOpenAI, text: str = "Say something.", **headers: str) -> None:
    messages: Any = [{"role": "user", "content": text}]
    await client.chat.completions.create(model="m", messages=messages, extra_headers=headers)


@asynccontextmanager
async def behind(text: str, bucket: dict[str, Any], **keys: Any) -> AsyncIterator[Any]:
    """A client of a proxy whose only backend has a prompt that it does not answer."""
    backend = RawBackend(silent)
    async with with_client(backend, buckets=[{"max_wait": "30s", **bucket}], **keys) as client:
        held = asyncio.create_task(ask(client, text))
        await has_one(backend)
        yield client
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)


async def test_a_full_queue_is_a_rate_limit_and_says_when_to_retry() -> None:
    bucket = {"name": "chat", "up_to": 5000, "max_queue": 0}
    async with behind("hello", bucket, slots=1) as client:
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(client)
        assert refused.value.code == "queue_full"
        assert int(refused.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(("words", "again"), [(12, None), (60_000, "false")])
async def test_a_client_is_told_not_to_come_back_only_when_that_is_hopeless(
    words: int, again: str | None
) -> None:
    """Behind a long prompt a short one is late; another long one would be late wherever it is."""
    async with behind("other " * 60_000, {"name": "all", "up_to": 200_000}) as client:
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(client, "word " * words, **{"x-request-timeout": "0.5"})
        assert refused.value.code == "deadline_unattainable"
        assert refused.value.response.headers.get("x-should-retry") == again
        assert int(refused.value.response.headers["retry-after"]) >= 1


async def test_the_timeout_of_the_client_counts() -> None:
    """It sends that with each request; behind a long prompt a short one would be late."""
    async with behind("other " * 60_000, {"name": "all", "up_to": 200_000}) as client:
        with pytest.raises(openai.RateLimitError, match=r"your timeout is 1\.5 s") as refused:
            await ask(client.with_options(timeout=1.5), "word " * 12)
        assert refused.value.code == "deadline_unattainable"


async def test_a_cut_stream_raises() -> None:
    async def die(call: Any) -> None:
        from stages.proxy_stage import EVENT, STREAM_HEAD, chunk

        await call.send(STREAM_HEAD + chunk(EVENT))
        call.writer.close()

    async with with_client(RawBackend(die)) as client:
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        await anext(stream)
        with pytest.raises(openai.APIError) as cut:
            await anext(stream)
        assert cut.value.code == "upstream_stream_error"
