"""/metrics is what Prometheus expects, and stays small whatever clients and backends do."""

import asyncio
import json
import re
from contextlib import AsyncExitStack, suppress
from typing import Any

import aiohttp
import pytest
from fakes.faulty_backends import streams
from prometheus_client.parser import text_string_to_metric_families
from stages.proxy_stage import (
    EVENT,
    STREAMED,
    WHOLE,
    Call,
    RawBackend,
    Stage,
    answer,
    by_request,
    on_stage,
    stage,
)

MOST_SERIES = 800
NO_UNIT = {
    "forebay_alone",
    "forebay_queue_depth",
    "forebay_config_generation",
    "forebay_backend_up",
    "forebay_backend_state",
    "forebay_saturation",
    "forebay_backends_wanted",
}
PLURALS = ("_requests", "_blocks", "_connections", "_classes", "_seconds")


async def whatever(call: Call) -> None:
    """A backend that answers each request with a status derived from its number."""
    number = json.loads(call.body).get("user", "200")
    if number == "200":
        await by_request(call)
    elif number == "reset":
        call.reset()
    else:
        await call.send(answer(int(number), WHOLE))


async def test_the_exposition_and_how_many_series_there_are() -> None:
    async with AsyncExitStack() as stack:
        backends = [
            await stack.enter_async_context(RawBackend(whatever).running()) for _ in range(4)
        ]
        on = await stack.enter_async_context(stage([b.url for b in backends]))
        users = ["200", "reset", *map(str, (201, 404, 405, 418, 422, 451, 500, 501, 507, 599))]
        for number, user in enumerate(users * 2):
            for path in ("/v1/completions", "/v1/chat/completions"):
                for size, streams in ((9, True), (9, False), (60_000, True), (900_000, False)):
                    prompt = f"{number} " + "x" * size
                    asked: dict[str, Any] = (
                        {"messages": [{"role": "user", "content": prompt}]}
                        if "chat" in path
                        else {"prompt": prompt}
                    )
                    body = {
                        **asked,
                        "user": user,
                        "model": f"model-{number}",
                        "stream": streams,
                    }
                    with suppress(aiohttp.ClientError):  # a cut stream
                        await on.read(body, path)
        for number in range(30):
            headers = {"x-request-id": f"id{number}", "x-request-timeout": f"{number}"}
            async with on.client.request(
                ("GET", "PUT")[number % 2], f"{on.url}/path/{number}", headers=headers
            ) as response:
                assert response.status == 404
        text = on.proxy.metrics.text().decode()
        check(text)


def check(text: str) -> None:
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    series = [sample for family in families for sample in family.samples]
    print(f"{len(series)} series, {len(text)} bytes")
    assert len(series) <= MOST_SERIES
    assert len({(s.name, *sorted(s.labels.items())) for s in series}) == len(series)
    ours = [f for f in families if f.name.startswith(("forebay_", "gen_ai_"))]
    assert len(ours) >= 20
    for family in ours:
        assert family.type in ("counter", "gauge", "histogram"), family
        assert len(family.documentation.split()) >= 2, family.name
        assert re.search(rf"^# HELP {family.name}(_total)? .", text, re.MULTILINE)
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        elif family.type == "histogram":
            assert family.name.endswith(("_seconds", "_ratio", "_usage")), family.name
        elif family.name not in NO_UNIT:
            plural = family.name.endswith(PLURALS)
            assert plural or family.name.endswith("_info"), family.name
        for sample in family.samples:
            for value in sample.labels.values():
                assert not re.search(r"model-|path|^id\d", value), sample
    names = {family.name for family in families}
    assert names >= {
        "gen_ai_server_request_duration_seconds",
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_time_per_output_token_seconds",
        "gen_ai_client_token_usage",
        "forebay_event_loop_lag_seconds",
        "forebay_client_connections",
        "process_resident_memory_bytes",
        "process_open_fds",
    }


async def test_the_figures_of_one_stream() -> None:
    async with on_stage(None) as (on, _):
        await on.read({"prompt": "x", "stream": True, "max_tokens": 3})
        text = on.proxy.metrics.text().decode()
        for line in (
            'gen_ai_server_request_duration_seconds_count{error_type="",'
            'gen_ai_operation_name="text_completion"} 1.0',
            "gen_ai_server_time_to_first_token_seconds_count{"
            'gen_ai_operation_name="text_completion"} 1.0',
            "gen_ai_server_time_per_output_token_seconds_count{"
            'gen_ai_operation_name="text_completion"} 1.0',
            'gen_ai_client_token_usage_sum{gen_ai_operation_name="text_completion",'
            'gen_ai_token_type="input"} 7.0',
            'gen_ai_client_token_usage_sum{gen_ai_operation_name="text_completion",'
            'gen_ai_token_type="output"} 3.0',
            'forebay_cached_tokens_total{backend="b0"} 4.0',
        ):
            assert line in text


def counted(on: Stage, name: str) -> dict[str, float]:
    """Return the samples of a counter by their labels as text."""
    lines = on.proxy.metrics.text().decode().splitlines()
    found = [line.removeprefix(name).split() for line in lines if line.startswith(f"{name}{{")]
    return {labels: float(value) for labels, value in found}


async def test_every_503_without_a_backend_is_a_rejection() -> None:
    """On paths with a queue and without."""
    async with on_stage(RawBackend(healthy=False), wait_up=0) as (on, _):
        await asyncio.sleep(3)
        for _ in range(3):
            assert await on.status() == 503
            assert await on.status({"input": "x"}, "/v1/embeddings") == 503
            assert await on.status_of(f"{on.url}/v1/models") == 503
        found = counted(on, "forebay_rejects_total")
        assert sum(found.values()) == 9
        assert all("no_backend_available" in labels for labels in found)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_response_that_was_cut_is_no_200(path: str) -> None:
    async with on_stage(streams(EVENT, end="reset"), None) as (on, _):
        for _ in range(2):
            async with on.post({**STREAMED, "input": "x"}, path) as response:
                with suppress(aiohttp.ClientPayloadError):
                    await response.read()
        found = counted(on, "forebay_responses_total")
        statuses = sorted(labels.partition("status=")[2] for labels in found)
        assert statuses == ['"200"}', '"cut"}']
