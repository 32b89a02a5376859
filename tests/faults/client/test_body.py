"""Malformed bodies: one clear 400, and the backend sees nothing.

The invariants at the end are those that `make fuzz` checks for longer.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import invariants
import pytest
from body_reading import read_body
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from paths import TESTS
from pydantic import TypeAdapter, ValidationError
from stages.proxy_stage import Stage, stage
from stages.raw_client import Oracle, ask, before_oracle, post

from forebay.proxy import app
from forebay.proxy.api.dialects import COMPLETIONS
from forebay.proxy.api.token_estimate import MAX_TENANTS, TokenEstimate
from forebay.proxy.http1.errors import ApiError
from forebay.proxy.http1.headers import request_id, to_backend, to_client, unforwardable
from forebay.proxy.http1.server import request_coding

DEEP = b"[" * 100_000 + b"]" * 100_000
CHAT = b"/v1/chat/completions"

NOT_JSON = {
    "empty": b"",
    "not-json": b"{nope}",
    "deep": b'{"prompt":' + DEEP + b"}",
    "not-utf-8": b'{"prompt":"\xff"}',
    "latin-1": b'{"prompt":"caf\xe9"}',
    "encoded-surrogate": b'{"prompt":"\xed\xa0\x80"}',
    "lone-surrogate": b'{"prompt":"\\ud800"}',
    "overlong": b'{"prompt":"\xc0\xaf"}',
    "trailing": b'{"prompt":"x"} y',
    "two": b'{"prompt":"x"}{"prompt":"y"}',
    "cut": b'{"prompt":"x"',
    "nul": b'{"prompt":"x"}\x00',
    "control": b'{"prompt":"a\nb"}',
    "comment": b'{"prompt":"x"}//',
    "form": b"prompt=x",
}
WRONG = {
    "array": (b'["prompt"]', None),
    "string": (b'"prompt"', None),
    "null": (b"null", None),
    "no-prompt": (b"{}", "prompt"),
    "prompt-number": (b'{"prompt":7}', "prompt"),
    "prompt-empty": (b'{"prompt":[]}', "prompt"),
    "prompt-negative-id": (b'{"prompt":[1,-1]}', "prompt"),
    "prompt-object": (b'{"prompt":{"a":1}}', "prompt"),
    "prompt-float": (b'{"prompt":[1.5]}', "prompt"),
    "prompt-huge-id": (b'{"prompt":[4294967296]}', "prompt"),
    "prompt-mixed": (b'{"prompt":["a",1]}', "prompt"),
    "model-number": (b'{"prompt":"x","model":1}', "model"),
    "stream-text": (b'{"prompt":"x","stream":"perhaps"}', "stream"),
    "tokens-text": (b'{"prompt":"x","max_tokens":"many"}', "max_tokens"),
    "tokens-float": (b'{"prompt":"x","max_tokens":1.5}', "max_tokens"),
    "tokens-beyond-64-bit": (b'{"prompt":"x","max_tokens":99999999999999999999}', "max_tokens"),
}
WRONG_CHATS = {
    "no-messages": (b'{"prompt":"x"}', "messages"),
    "messages-null": (b'{"messages":null}', "messages"),
    "messages-empty": (b'{"messages":[]}', "messages"),
    "messages-string": (b'{"messages":"hi"}', "messages"),
    "message-string": (b'{"messages":["hi"]}', "messages"),
    "content-number": (b'{"messages":[{"role":"user","content":7}]}', "messages"),
    "content-of-numbers": (b'{"messages":[{"content":[1,1]}]}', "messages"),
    "part-null": (b'{"messages":[{"content":["a",null]}]}', "messages"),
    "part-list": (b'{"messages":[{"content":[[]]}]}', "messages"),
}
TAKEN = {
    "nan": b'{"prompt":"x","temperature":NaN}',
    "infinity": b'{"prompt":"x","y":[-Infinity,Infinity]}',
    "nan-in-large": b'{"prompt":"' + b"x" * 600_000 + b'","y":NaN}',
    "stream-string": b'{"prompt":"x","stream":"false"}',
    "stream-number": b'{"prompt":"x","stream":0.0}',
    "tokens-true": b'{"prompt":"x","max_tokens":true,"priority":false}',
    "prompt-whole-floats": b'{"prompt":[1.0,2.0]}',
    "prompt-true": b'{"prompt":[true]}',
    "prompt-digits": b'{"prompt":["7",7]}',
    "prompts-of-digits": b'{"prompt":[["7",7],[1.0]]}',
    "deep": b'{"prompt":"x","y":' + b"[" * 900 + b"]" * 900 + b"}",
    "keys-inside": (
        b'{"prompt":"x","logit_bias":{"n":1,"model":{"prompt":2}},"n":1,"stop":["n",{"n":1}]}'
    ),
    "keys-in-text": b'{"prompt":"\\u0073tream\\",\\"prompt\\":1,\\"n\\":1,\\"n\\":1"}',
    "odd-values": b'{"prompt":"x","temperature":"hot","n":-1,"stop":{},"logit_bias":[1e300]}',
    "escapes": b' {\n "prompt" : "\\u00e9\\ud83d\\ude00" , "unknown": [1.0, 1e2] } ',
    "harmless-repeat": b'{"prompt":"x","top_p":1,"top_p":0.5,"max_tokens":null}',
    "token-ids": b'{"prompt":[1,2,3],"echo":true}',
    "utf-8": b'{"prompt":"' + "é😀".encode() * 100 + b'"}',
    **{
        f"number-{n}": f'{{"prompt":"x","max_tokens":{n},"n":{n},"priority":{n}}}'.encode()
        for n in ("100.0", '"100"', '" 100 "', "1e2", '"100.0"')
    },
}
TAKEN_CHATS = {
    "deep-part": (
        b'{"messages":[{"content":[{"type":"text","text":"x","a":' + b"[" * 600
        + b'"' + b"y" * 9_000 + b'"' + b"]" * 600 + b"}]}]}"
    ),
    "deep-tools": (
        b'{"messages":[{"role":"user","content":"x"}],"tools":' + b"[" * 600 + b"]" * 600 + b"}"
    ),
    "deep-calls": b'{"messages":[{"tool_calls":' + b"[" * 600 + b"]" * 600 + b"}]}",
    "deep-reasoning": b'{"messages":[{"reasoning":' + b"[" * 600 + b"]" * 600 + b"}]}",
    **{
        f"role-{at}": b'{"messages":[{"role":' + role + b',"content":"x"}]}'
        for at, role in enumerate((b"[" * 1000 + b"]" * 1000, b"7", b"null", b'"\\u00e9"'))
    },
}  # fmt: skip
TOOL_CALL = {"id": "1", "type": "function", "function": {"name": "f1", "arguments": "{}"}}
AGENTS: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": None, "name": None},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ],
    "tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(128)],
    "temperature": None, "stop": None, "guided_json": {"type": "object"}, "top_k": 7,
    "cache_salt": "mine", "seed": 10**30, "chat_template_kwargs": {"enable_thinking": False},
    "stream_options": None,
}  # fmt: skip
"""Bodies of agents, as people reported them elsewhere."""
TAKEN_CHATS["agents"] = json.dumps(AGENTS, indent=1).encode()
TOO_MANY = {
    "parts": b'{"messages":[{"role":"user","content":[' + b"1," * 500_000 + b"1]}]}",
    "messages": b'{"messages":[' + b"{}," * 100_000 + b"{}]}",
    "calls": b'{"messages":[{"tool_calls":[' + b"1," * 500_000 + b"1]}]}",
    "objects": b'{"messages":[' + b"{}," * 5_000_000 + b"{}]}",
    "lists": b'{"messages":[' + b"[]," * 350_000 + b"[]]}",
    "keys": b'{"messages":[],"metadata":{' + b'"k":1,' * 300_000 + b'"k":1}}',
}


async def refused(on: Stage, oracle: Oracle, data: bytes) -> dict[str, Any]:
    answer = await ask(on, data)
    assert answer.status == 400
    assert not oracle.requests
    return answer.error


async def test_a_body_that_is_not_json() -> None:
    async with before_oracle() as (on, oracle):
        for name, body in NOT_JSON.items():
            for path in (CHAT, b"/v1/completions"):
                error = await refused(on, oracle, post(body=body, path=path))
                assert error["code"] == "invalid_json", name


async def test_json_that_vllm_reads_passes_byte_for_byte() -> None:
    """Python's parser and pydantic read more than JSON: the backend judges it."""
    async with before_oracle() as (on, oracle):
        for path, bodies in ((b"/v1/completions", TAKEN), (CHAT, TAKEN_CHATS)):
            for name, body in bodies.items():
                assert (await ask(on, post(body=body, path=path))).status == 200, name
                assert oracle.requests.pop().body == body, name


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/embeddings"])
@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"]
)
async def test_other_encodings_of_json_reach_the_backend_as_utf_8(
    encoding: str, path: bytes
) -> None:
    text = '{"prompt":"é😀","input":"x"}'

    async with before_oracle() as (on, oracle):
        assert (await ask(on, post(body=text.encode(encoding), path=path))).status == 200
        body = oracle.requests.pop().body
        assert json.loads(body)["prompt"] == "é😀"
        assert body == text.encode() or path == b"/v1/embeddings"
        for cut in (b"{\0", text.encode("utf-16")[:-1], b"\xff\xfe", b"\0\0\0{"):
            if path == b"/v1/completions":
                assert (await ask(on, post(body=cut, path=path))).error["code"] == "invalid_json"


async def test_wrong_types_name_the_parameter() -> None:
    async with before_oracle() as (on, oracle):
        for path, wrong in ((b"/v1/completions", WRONG), (CHAT, WRONG_CHATS)):
            for name, (body, param) in wrong.items():
                error = await refused(on, oracle, post(body=body, path=path))
                assert (error["code"], error["param"]) == ("invalid_type", param), name


KINDS: tuple[Any, ...] = (
    None,
    True,
    7,
    1.5,
    "x" * 2000,
    [],
    ["x" * 2000],
    {},
    {"a": "data:" + "x" * 2000},
)
FIELDS = ("model", "stream", "max_tokens", "n", "best_of", "priority", "tools", "documents",
          "chat_template_kwargs", "cache_salt", "stream_options", "echo")  # fmt: skip


def odd_chats() -> Iterator[dict[str, Any]]:
    """Chats in which one field has a value of any kind, of the request, a message or a part."""
    for value in KINDS:
        for name in FIELDS:
            yield {"messages": [{"role": "user", "content": "x"}], name: value}
        for name in ("role", "content", "name", "tool_calls", "reasoning"):
            yield {"messages": [{"role": "user", "content": "x", name: value}]}
        for name in ("type", "text", "image_url", "uuid", "x"):
            parts = [{"type": "text", "text": "x" * 2000, name: value}, {name: value}]
            yield {"messages": [{"role": "user", "content": [part]} for part in parts]}


async def test_a_value_of_any_kind_in_any_place_is_no_fault_of_ours() -> None:
    async with before_oracle() as (on, _):
        for fields in odd_chats():
            body = json.dumps(fields, separators=(",", ":")).encode()
            answer = await ask(on, post(body=body, path=CHAT))
            assert answer.status in (200, 400), fields
        part = {"type": {"a": 1}, "text": "x" * 2000}
        body = json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()
        answer = await ask(on, post(body=body, path=CHAT))
        assert (answer.status, answer.error["param"]) == (400, "messages")


async def test_a_fault_of_ours_is_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr(app, "read_fields", fails)

    async with Oracle().running() as oracle, stage([oracle.url]) as on:
        for _ in range(2):
            for _ in range(20):
                assert (await ask(on, post())).status == 500
            await asyncio.sleep(61)
        lines = [line for line in on.said if "internal error" in line]
        assert len(lines) == 2
        assert "KeyError in test_body.py:" in lines[0]
        assert "19 more" in lines[1]
        assert "secret" not in lines[0]


async def test_too_many_items() -> None:
    async with before_oracle() as (on, oracle):
        for name, body in TOO_MANY.items():
            error = await refused(on, oracle, post(body=body, path=CHAT))
            assert error["code"] == "too_many_items", name
            assert "more than" in error["message"], name


def repeats() -> Iterator[tuple[str, bytes]]:
    """Keys given twice, and bodies that have them."""
    long = b'"stop":"' + b"s" * (1 << 20) + b'"'
    yield "model", b'{"model":"a","prompt":"x","model":"b"}'
    yield "max_tokens", b'{"max_tokens":9000,"prompt":"x","max_tokens" : 1}'
    yield "input", b'{"input":"a","model":"m","input":["b"]}'
    yield "max_output_tokens", b'{"max_output_tokens":9,"input":"x","max_output_tokens":1}'
    yield "system", b'{"system":"a","prompt":"x","system":"b"}'
    yield "n", b'{"n":64,"prompt":"x","n":1}'
    yield "stream", b'{"prompt":"x","\\u0073tream":true,"stream":false}'
    yield "prompt", b'{"prompt":"x",' + long + b',\n "prompt"\n:\n"y"}'
    yield "prompt", b'{"prompt":"x","stop":[' + b'"s",' * 200_000 + b'"s"],"prompt":"y"}'
    for value in (b"true,false", b"false,true"):
        first, last = value.split(b",")
        yield "stream", b'{"stream":' + first + b',"prompt":"x","stream":' + last + b"}"


async def test_a_key_given_twice_is_refused() -> None:
    async with before_oracle() as (on, oracle):
        for key, body in repeats():
            error = await refused(on, oracle, post(body=body))
            assert (error["code"], error["param"]) == ("repeated_key", key), body[:80]
        body = b'{"messages":[{"role":"user","content":"x"}],"messages":[]}'
        error = await refused(on, oracle, post(body=body, path=CHAT))
        assert (error["code"], error["param"]) == ("repeated_key", "messages")


@pytest.mark.parametrize(
    "codings", [[b"deflate"], [b"br"], [b"x"], [b"gzip, zstd"], [b"gzip", b"br"], [b"BR"]]
)
async def test_bodies_in_other_codings(
    codings: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brotli is an extra; without it `br` is another coding, too."""
    monkeypatch.setattr(request_coding, "has_brotli", lambda: False)

    async with before_oracle() as (on, oracle):
        headers = [b"Content-Encoding: " + coding for coding in codings]
        answer = await ask(on, post(*headers, body=b"\x1f\x8b\x08"))
        assert (answer.status, answer.error["param"]) == (415, "content-encoding")
        assert answer.closes
        assert not oracle.requests
        assert (await ask(on, post(b"Content-Encoding: identity"))).status == 200


@pytest.fixture(scope="module", autouse=True)
def _one_loop() -> Iterator[None]:
    yield
    invariants.close()


EVENTS = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([
            b"data: ", b"data:", b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\r", b"\n", b": x",
            b"[DONE]", b'{"choices":[{"text":"x"}]}', b'{"error":{}}', b"{", b"event: x\n",
            b"x" * 300,
        ]),
    ),
    max_size=30,
)  # fmt: skip
CUTS = st.lists(st.integers(0, 600), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(["prompt", "messages", "role", "content", "text", "tools", "tool_calls",
                         "max_tokens", "max_completion_tokens", "stream", "model", "type",
                         "image_url", "video_url", "n", "documents", "reasoning"]),
        inner, max_size=6,
    ),
    max_leaves=25,
)  # fmt: skip


class TestInvariants:
    @settings(max_examples=300, derandomize=True, deadline=None)
    @given(EVENTS, CUTS)
    def test_events_do_not_depend_on_cuts(self, parts: list[bytes], cuts: list[int]) -> None:
        invariants.check_sse(b"".join(parts), cuts)

    @settings(max_examples=300, derandomize=True, deadline=None)
    @given(
        st.lists(st.binary(max_size=120), max_size=6),
        st.lists(
            st.tuples(
                st.sampled_from(["content-encoding", "expect", "accept"]),
                st.sampled_from(["identity", "gzip", "100-continue", "", "x"]) | st.text(),
            ),
            max_size=3,
        ),
        st.booleans(),
        st.integers(0, invariants.BUDGET),
    )
    def test_bodies(
        self, pieces: list[bytes], headers: list[tuple[str, str]], stated: bool, taken: int
    ) -> None:
        length = sum(map(len, pieces)) if stated else None
        invariants.check_body(pieces, headers, length, taken)

    @settings(max_examples=300, derandomize=True, deadline=None)
    @given(JSON, st.booleans())
    def test_prompts(self, fields: Any, chat: bool) -> None:
        invariants.check_prompt(json.dumps(fields).encode(), chat)

    @settings(max_examples=60, derandomize=True, deadline=None)
    @given(JSON, st.integers(1, 20_000), st.sampled_from(["content", "tool_calls", ""]))
    def test_prompts_of_many(self, item: Any, count: int, name: str) -> None:
        one = json.dumps(item)
        items = f"[{','.join([one] * min(count, 1 + 200_000 // len(one)))}]"
        messages = f'[{{"{name}":{items}}}]' if name else items
        invariants.check_prompt(f'{{"messages":{messages}}}'.encode(), chat=True)
        invariants.check_prompt(f'{{"prompt":{items}}}'.encode(), chat=False)

    @settings(max_examples=200, derandomize=True, deadline=None)
    @given(st.binary(max_size=300), st.booleans())
    def test_prompts_of_bytes(self, body: bytes, chat: bool) -> None:
        invariants.check_prompt(body, chat)

    @settings(max_examples=300, derandomize=True, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["Authorization", "x-request-id", "X-REQUEST-ID", "accept",
                                 "traceparent", "host", "transfer-encoding", "content-length",
                                 "connection", "cookie", "retry-after", "location"])
                | st.from_regex(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,20}", fullmatch=True),
                st.text(max_size=30) | st.from_regex(r"[ -~]{0,70}", fullmatch=True),
            ),
            max_size=8,
        )
    )  # fmt: skip
    def test_headers(self, pairs: list[tuple[str, str]]) -> None:
        """Headers are forwarded from a short list, printable, and never those of framing."""
        headers = CIMultiDictProxy(CIMultiDict(pairs))
        id_ = request_id(headers)
        assert 1 <= len(id_) <= 64
        assert id_.isascii()
        assert id_.replace("-", "").replace(".", "").replace("_", "").isalnum() or id_ in "-._"
        passed = to_backend(headers, id_)
        assert set(passed) <= {"content-type", "accept", "authorization", "traceparent",
                               "tracestate", "x-request-id", "x-session-id"}  # fmt: skip
        if unforwardable(headers) is None:
            assert all(value.isascii() and value.isprintable() for value in passed.values())
        assert not {"location", "connection", "transfer-encoding", "content-length"} & set(
            to_client(headers, 503)
        )


@pytest.mark.parametrize("value", [100, 100.0, "100", 1.5, "x", [], {}, 1e300, "1" * 5000])
def test_limits_are_those_of_pydantic(value: Any) -> None:
    """The engine reads these fields by pydantic: the same number counts in the KV budget."""
    try:
        seen = TypeAdapter(int).validate_python(value)
    except ValidationError:
        seen = None
    fields = {"prompt": "x", "max_tokens": 2, "n": value}
    if value == 1e300:  # orjson reads a whole number that large like this, and vLLM takes it
        with pytest.raises(ApiError):
            read_body(fields, COMPLETIONS)
    else:
        assert read_body(fields, COMPLETIONS).request.output_tokens == min(
            2 * max(1, seen or 1), 1 << 20
        )
    fields = {"prompt": "x", "max_tokens": value}
    if seen is None:
        with pytest.raises(ApiError):
            read_body(fields, COMPLETIONS)
    else:
        assert read_body(fields, COMPLETIONS).request.output_tokens == min(seen, 1 << 20)


class TestEstimate:
    def test_each_tenant_has_its_own(self) -> None:
        estimate = TokenEstimate(4.0)
        for _ in range(200):
            estimate.learn(3000, 1000, "german")
            estimate.learn(6000, 1000, "code")
        assert estimate.tokens(3000, "german") == pytest.approx(1000, rel=0.01)
        assert estimate.tokens(6000, "code") == pytest.approx(1000, rel=0.01)
        assert 667 < estimate.tokens(4000, "new") < 1334

    @pytest.mark.parametrize(
        "tokens", [0, -1, True, 1 << 31, 10**100, 1.5, float("nan"), "7", None, [1]]
    )
    def test_counts_that_cannot_be_are_ignored(self, tokens: Any) -> None:
        estimate = TokenEstimate(4.0)
        estimate.learn(10_000, tokens, "a")
        assert (estimate.tokens(400, "a"), estimate.bytes_per_token) == (100, 4.0)

    @given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(-9, 1 << 40)), max_size=50))
    def test_any_usage_leaves_a_sane_ratio(self, usages: list[tuple[int, int]]) -> None:
        estimate = TokenEstimate(4.0)
        for prompt_bytes, tokens in usages:
            before = estimate.tokens(1_000_000, "a")
            estimate.learn(prompt_bytes, tokens, "a")
            assert 62_500 <= estimate.tokens(1_000_000, "a") <= 1_000_512
            # One answer moves it by a fifth at most, whatever it says.
            assert estimate.tokens(1_000_000, "a") == pytest.approx(before, rel=0.205)

    def test_tenants_are_bounded(self) -> None:
        estimate = TokenEstimate(4.0)
        for i in range(MAX_TENANTS + 500):
            estimate.learn(3000, 1000, f"t{i}")
        assert len(estimate._tenants) == MAX_TENANTS


def test_fuzz_targets_have_their_dictionaries() -> None:
    folder = TESTS / "fuzz"
    for target in folder.glob("fuzz_*.py"):
        assert folder.joinpath(target.stem.removeprefix("fuzz_") + ".dict").is_file()
