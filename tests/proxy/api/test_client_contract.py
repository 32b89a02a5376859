"""What a client is told: figures in refusals, and whose timeout counts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import pytest
from body_reading import read_body
from multidict import CIMultiDict
from stages.proxy_stage import Stage, on_stage, settle, silent

from forebay.proxy.api.rejections import rejected
from forebay.proxy.core.model import Reject, Request
from forebay.proxy.http1.errors import ApiError

LONG = "x" * 400_000
READ_TIMEOUT, TIMEOUT = "x-stainless-read-timeout", "X-Request-Timeout"


def timeout_of(headers: dict[str, str], sdk_timeout: bool = True) -> float:
    parsed = read_body({"prompt": "x"}, headers=CIMultiDict(headers), sdk_timeout=sdk_timeout)
    return parsed.request.timeout_s


@pytest.mark.parametrize(
    ("headers", "timeout_s"),
    [
        ({}, inf),
        ({READ_TIMEOUT: "600"}, 600.0),  # the default of openai-python
        ({READ_TIMEOUT: "2.0"}, 2.0),
        ({READ_TIMEOUT: "2.0", TIMEOUT: "30"}, 30.0),
        ({TIMEOUT: "30s"}, 30.0),
        ({TIMEOUT: "500ms"}, 0.5),
        *(({READ_TIMEOUT: odd}, inf) for odd in ("", "None", "nan", "0", "-1", "soon")),
    ],
)
def test_the_timeout_that_counts(headers: dict[str, str], timeout_s: float) -> None:
    assert timeout_of(headers) == timeout_s


@pytest.mark.parametrize(
    ("headers", "timeout_s"),
    [
        ({"x-slo-ttft-ms": "1500"}, 1.5),
        ({"X-LLM-D-SLO-TTFT-MS": "1500"}, 1.5),
        ({"x-llm-d-inference-ttl": "30s"}, 30.0),
        ({"x-llm-d-inference-ttl": "30"}, 30.0),
        ({"Request-Timeout-Ms": "250"}, 0.25),
        ({"x-slo-ttft-ms": "1500", TIMEOUT: "3"}, 3.0),
        ({"request-timeout-ms": "1500", READ_TIMEOUT: "600"}, 1.5),
        ({"x-llm-d-slo-ttft-ms": "100", "x-slo-ttft-ms": "200"}, 0.1),
        *(({"x-slo-ttft-ms": odd}, inf) for odd in ("", "nan", "0", "-1", "soon", "5s", "1e999")),
    ],
)
def test_the_timeouts_of_other_routers_count(headers: dict[str, str], timeout_s: float) -> None:
    assert timeout_of(headers) == timeout_s
    assert timeout_of(headers, sdk_timeout=False) == timeout_s


def test_the_sdk_timeout_can_be_left_out() -> None:
    assert timeout_of({READ_TIMEOUT: "2.0"}, sdk_timeout=False) == inf
    assert timeout_of({TIMEOUT: "3"}, sdk_timeout=False) == 3.0


@pytest.mark.parametrize("odd", ["", "soon", "0", "-1s", "nan"])
def test_a_timeout_that_somebody_wrote_must_be_one(odd: str) -> None:
    with pytest.raises(ApiError, match="30s"):
        timeout_of({TIMEOUT: odd})


async def told(on: Stage, body: dict[str, Any], **headers: str) -> tuple[int, str, str]:
    """Status, message and Retry-After of one request."""
    async with on.post(body, headers=headers) as response:
        error = (await response.json())["error"]
        return response.status, error["message"], response.headers.get("Retry-After", "")


@asynccontextmanager
async def busy(bucket: dict[str, Any], **keys: Any) -> AsyncIterator[Stage]:
    """A proxy whose only backend a long prompt keeps busy."""
    buckets = [{"name": "all", "up_to": 150_000, **bucket}]
    async with on_stage(silent, buckets=buckets, **keys) as (on, _):
        body = {"prompt": LONG, "stream": True, "max_tokens": 3}
        held = [asyncio.create_task(on.post(body).__aenter__()) for _ in range(2)]
        await settle()
        await asyncio.sleep(0.1)
        yield on
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def test_a_prompt_that_is_too_long_is_told_both_lengths() -> None:
    async with busy({}, tokens={"bytes_per_token": 4.0}) as on:
        status, message, _ = await told(on, {"prompt": [7] * 200_000})
        assert (status, message) == (
            400,
            "Prompt is about 200,000 tokens; maximum context length 150,000.",
        )


async def test_a_wait_beyond_the_limit_is_told_with_the_limit() -> None:
    async with busy({"max_wait": "1s"}) as on:
        status, message, again = await told(on, {"prompt": "y", "stream": True})
        assert status == 429
        wait_s = message.removeprefix("Expected wait ").split(" s")[0]
        assert float(wait_s) > 1.0
        assert message == f"Expected wait {wait_s} s, limit 1.0 s; retry after {again} s."


@pytest.mark.parametrize("header", [READ_TIMEOUT, TIMEOUT])
async def test_a_wait_beyond_the_timeout_is_told_with_the_timeout(header: str) -> None:
    async with busy({"max_wait": "90s"}) as on:
        status, message, again = await told(on, {"prompt": "y", "stream": True}, **{header: "2.0"})
        assert status == 429
        assert message.startswith("Expected first token after ")
        assert message.endswith(f" s, your timeout is 2.0 s; retry after {again} s.")


async def test_the_sdk_timeout_does_not_count_where_the_configuration_says_so() -> None:
    async with busy({"max_wait": "90s"}, admission={"sdk_timeout": False}) as on:
        with pytest.raises(TimeoutError):  # it waits
            async with asyncio.timeout(5):
                await told(on, {"prompt": "y", "stream": True}, **{READ_TIMEOUT: "2.0"})


async def test_a_full_queue_is_told_with_its_length() -> None:
    async with busy({"max_wait": "90s", "max_queue": 1}) as on:
        status, message, again = await told(on, {"prompt": "y", "stream": True})
        wanted = f"1 requests of this length are waiting, limit 1; retry after {again} s."
        assert (status, message) == (429, wanted)


async def test_a_retry_without_hope_is_not_recommended() -> None:
    async with busy({"max_wait": "90s"}) as on:
        headers = {TIMEOUT: "0.5"}
        status, message, _ = await told(on, {"prompt": "z" * 400_000, "stream": True}, **headers)
        assert status == 429
        assert message.endswith("A retry will not help: the prompt alone takes longer.")
        assert "retry after" not in message


def test_a_request_whose_record_is_gone_is_told_why_without_figures() -> None:
    action = Reject(Request("a", 1), "deadline_unattainable", "chat", 0.0, 12.0)
    message = "The server cannot answer this request in time; retry after 12 s."
    assert rejected(action, "prompt").message == message


async def test_an_unknown_path_is_told_which_exist() -> None:
    async with on_stage(None) as (on, _):
        async with on.client.get(f"{on.url}/v1/chats") as response:
            message = (await response.json())["error"]["message"]
        assert message.startswith("Unknown path. Available: /v1/chat/completions, /v1/comp")
