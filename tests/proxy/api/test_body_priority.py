"""The `priority` in the body that a backend with --scheduling-policy priority gets."""

import json
from typing import Any

import pytest
from stages.proxy_stage import on_stage

ORDERED: dict[str, Any] = {"each": {"priority": True}}
BODY = b'{"prompt": "hello", "max_tokens": 3 } '


def fields_of(body: bytes) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=lambda pairs: pairs)
    return pairs


async def test_without_the_key_the_body_stays_as_it_is() -> None:
    async with on_stage(None) as (on, backends):
        body = BODY.replace(b"}", b', "priority": -3}')
        assert await on.status(body) == 200
        assert backends[0].calls[0].body == body


@pytest.mark.parametrize(
    ("asked", "headers", "told"),
    [
        ("", {}, 0),
        (', "priority": null', {}, 0),
        (', "priority": -987654321', {}, -1_000),  # the class, and no more
        (', "priority": -9, "pri\\u006frity": 7', {}, 1_000),
        (', "priority": -5', {"x-forebay-class": "batch"}, 1_000),
    ],
)
async def test_the_priority_is_forebays_whatever_the_client_says(
    asked: str, headers: dict[str, str], told: int
) -> None:
    async with on_stage(None, **ORDERED) as (on, backends):
        body = BODY.replace(b" }", asked.encode() + b" }")
        assert await on.status(body, headers=headers) == 200
        (call,) = backends[0].calls
        assert fields_of(call.body)[-1] == ("priority", told)
        assert json.loads(call.body) == json.loads(body) | {"priority": told}
        assert call.body.startswith(body.rstrip()[:-1])


async def test_the_priority_stands_beside_a_cache_salt() -> None:
    async with on_stage(None, tenants={"isolate_cache": True}, **ORDERED) as (on, backends):
        assert await on.status(BODY) == 200
        names = [name for name, _ in fields_of(backends[0].calls[0].body)]
        assert names == ["prompt", "max_tokens", "cache_salt", "priority"]
