"""The hashes of a large prompt are those of a small one, whatever pieces it comes in."""

import asyncio
from typing import Any

import orjson
import pytest
from body_reading import read_body
from hypothesis import given
from hypothesis import strategies as st

from forebay.proxy.api import body as body_module
from forebay.proxy.api import json_body
from forebay.proxy.api.block_hashes import BlockHashes, chain, identity
from forebay.proxy.api.body import ParsedBody
from forebay.proxy.api.json_body import parse_any

BLOCK_BYTES = 16
LONG = "word é\n" * 20
CALLS = [{"function": {"arguments": LONG}}]
IMAGE = {"type": "image_url", "image_url": {"url": f"data:{LONG * 20}"}}
UNKNOWN = {"type": "new", "new": {"url": f"data:{LONG * 20}"}}
CHATS = [
    [{"role": "user", "content": LONG}, {"role": "user", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": LONG}, LONG, {"text": "a"}]}],
    [{"role": "assistant", "reasoning": LONG, "content": None, "tool_calls": CALLS}],
    [{"role": "user", "content": "hello"}] * 40,
]


@given(st.lists(st.binary(max_size=50), max_size=12), st.sampled_from([None, "salt"]))
def test_any_pieces(pieces: list[bytes], salt: str | None) -> None:
    hashes = BlockHashes(BLOCK_BYTES, salt)
    for piece in pieces:
        hashes.write(piece)
    whole = b"".join(pieces)
    chained = chain(whole, BLOCK_BYTES, salt)
    assert (len(hashes), hashes.hashes()) == (len(whole), chained)
    known = identity(whole, BLOCK_BYTES, chained)
    assert identity(hashes, BLOCK_BYTES, chained) == known
    other = whole + b"!"
    assert identity(other, BLOCK_BYTES, chain(other, BLOCK_BYTES, salt)) != known


def understood(fields: dict[str, Any]) -> ParsedBody:
    body = orjson.dumps(fields)
    parsed = asyncio.run(parse_any(body, in_pieces=True))
    return read_body(parsed, body=body, block_bytes=BLOCK_BYTES)


def as_large(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, long_bytes: int = 64
) -> ParsedBody:
    with monkeypatch.context() as change:
        change.setattr(body_module, "LARGE_BYTES", 1)
        change.setattr(json_body, "CUT_BYTES", 8)
        change.setattr(json_body, "LONG_BYTES", long_bytes)
        return understood(fields)


@pytest.mark.parametrize(
    "fields",
    [
        *({"messages": messages, "tools": [{"name": LONG}]} for messages in CHATS),
        {"prompt": LONG},
        {"prompt": [LONG, "a", LONG]},
        {"prompt": "short", "model": LONG, "cache_salt": LONG},
        {"prompt": list(range(400))},
    ],
)
def test_a_large_body_is_read_as_a_small_one(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = as_large(fields, monkeypatch), understood(fields)
    assert large == small
    assert large.request.identity == small.request.identity != 0


@pytest.mark.parametrize("part", [IMAGE, UNKNOWN])
def test_media_count_by_their_digest(part: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what stands for them in a small body: only requests of one size share a prefix."""
    fields = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": LONG}]}]}
    large, small = as_large(fields, monkeypatch, 1500), understood(fields)
    assert large.request.prompt_tokens == small.request.prompt_tokens
    assert as_large(fields, monkeypatch, 1500).request.blocks == large.request.blocks
    other = orjson.loads(orjson.dumps(fields).replace(b"data:word", b"data:moon"))
    assert as_large(other, monkeypatch, 1500).request.blocks[1:] != large.request.blocks[1:]
