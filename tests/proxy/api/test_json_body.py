"""Large bodies are parsed in steps, with the same result as at once."""

import asyncio
import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.proxy.api import json_body
from forebay.proxy.api.dialects import CHAT
from forebay.proxy.api.json_body import FaultyJson, LongText, loads_in_steps, parse_any
from forebay.proxy.http1.errors import ApiError

AWKWARD = st.text(st.sampled_from(list('ab \\"/\n\t\u0000é你😀:{}[],u')), max_size=120)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | AWKWARD,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(AWKWARD, inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "LONG_BYTES", 20)
    monkeypatch.setattr(json_body, "CUT_BYTES", 5)
    monkeypatch.setattr(json_body, "FEW_BYTES", 2)


def result(body: bytes) -> Any:
    try:
        return asyncio.run(loads_in_steps(body))
    except (orjson.JSONDecodeError, FaultyJson):
        return "not JSON"


def expected(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return "not JSON"


@example(value='"' + 3 * "\0", ascii_=False, indent=None)  # a string and nothing else
@given(value=VALUES, ascii_=st.booleans(), indent=st.sampled_from([None, 1]))
def test_every_value_is_what_the_parser_gives(value: Any, ascii_: bool, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=ascii_, indent=indent).encode()
    assert result(body) == expected(body)


@given(value=VALUES, at=st.integers(0, 400), bad=st.binary(max_size=3), gone=st.integers(0, 3))
def test_every_damaged_body_is_refused_as_the_parser_does(
    value: Any, at: int, bad: bytes, gone: int
) -> None:
    body = json.dumps({"messages": value}).encode()
    at %= len(body)
    body = body[:at] + bad + body[at + gone :]
    assert result(body) == expected(body)


@given(
    value=VALUES,
    at=st.integers(0, 400),
    bad=st.sampled_from(
        [b"", b'"', b"\\", b"{", b"]", b",", b":", b"\0", b"\xff", b"\xed\xa0\x80"]
    ),
    gone=st.integers(0, 3),
)
def test_small_bodies_mean_the_same_to_both_parsers(
    value: Any, at: int, bad: bytes, gone: int
) -> None:
    body = json.dumps({"messages": value}).encode()
    at %= len(body)
    for small in (body, body[:at] + bad + body[at + gone :]):
        known = expected(small)
        if not isinstance(known, dict):
            with pytest.raises(ApiError):
                asyncio.run(parse_any(small))
        else:  # numbers beyond 64 bits are whole here, and floats there
            fields = asyncio.run(parse_any(small))
            assert orjson.loads(json.dumps(fields)) == known


def test_numbers_beyond_64_bits_are_in_a_prompt_as_in_that_of_a_large_body() -> None:
    tools = f'[{{"least":-{10**30},"most":{10**30}}}]'
    body = f'{{"messages":[{{"role":"user","content":"x"}}],"tools":{tools}}}'.encode()
    fields = asyncio.run(parse_any(body))
    assert CHAT.prompt_text(fields).data == CHAT.prompt_text(orjson.loads(body)).data


def test_a_long_string_is_parsed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    longest, loads = 0, orjson.loads

    def seen(data: bytes) -> Any:
        nonlocal longest
        longest = max(longest, len(data))
        return loads(data)

    monkeypatch.setattr(json_body, "LONG_BYTES", 100)
    monkeypatch.setattr(json_body, "CUT_BYTES", 50)
    monkeypatch.setattr(orjson, "loads", seen)
    for text in ("word " * 400, "A" * 2000, "你" * 700, '"\\' * 900):
        for ascii_ in (True, False):
            body = json.dumps({"messages": [{"content": text}]}, ensure_ascii=ascii_).encode()
            assert result(body) == {"messages": [{"content": text}]}
    assert longest <= 2 + 100


def test_long_strings_can_stay_in_pieces() -> None:
    text = "word é " * 20
    body = json.dumps({"prompt": text, "list": [text, "é" * 3], "a": text[:10]}).encode()
    kept = asyncio.run(loads_in_steps(body, in_pieces=True))
    assert isinstance(kept["prompt"], LongText)
    assert max(map(len, kept["prompt"].pieces)) <= 20
    assert str(kept["prompt"]) == str(kept["list"][0]) == text
    assert (str(kept["list"][1]), kept["a"]) == ("é" * 3, text[:10])


@pytest.mark.real_time
async def test_others_run_in_between() -> None:
    body = json.dumps({"prompt": "x" * 2000}).encode()
    parsing, count = asyncio.ensure_future(loads_in_steps(body)), 0
    while not parsing.done():
        await asyncio.sleep(0)
        count += 1
    assert await parsing == {"prompt": "x" * 2000}
    assert count >= 2000 / 20
