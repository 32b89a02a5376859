"""What the proxy itself refuses, a real vLLM refuses too, but for a few kinds that protect others.

Each body is sent to vLLM, and to a proxy in front of a server that takes everything. CODES holds
every code of a refusal that is about what was sent.
"""

import asyncio
import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
import vllm_server as real
from paths import ROOT
from stages.proxy_stage import RawBackend, Stage, on_stage
from vllm_server import ModelSize, needed_vllm_python, vllm_server, write_model

from forebay.proxy.api.dialects import DIALECTS

pytestmark = pytest.mark.timeout(900)
COMPLETIONS, CHAT, RESPONSES, MESSAGES = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
assert {COMPLETIONS, CHAT, RESPONSES, MESSAGES} == set(DIALECTS)
USER = {"role": "user", "content": "x"}
OF_VLLM = {"invalid_json", "invalid_type", "context_length_exceeded", "unsupported_value",
           "invalid_encoding"}  # fmt: skip
OURS = {
    "repeated_key": "a server may take the first of two keys where the proxy takes the last",
    "too_many_items": "to read so many lists and objects would hold up everybody",
    "unknown_parameter": "only the admin port says so",
    "uuid_not_allowed": "vLLM caches such media for all tenants",
    "request_too_large": "memory",
    "request_timeout": "memory",
    "headers_too_large": "memory",
    "uri_too_long": "memory",
    "unsupported_encoding": "vLLM takes the compressed bytes for JSON",
    "bad_http": "framing",
    "method_not_allowed": "no body is read",
    "not_found": "operators' paths",
    "model_not_found": "no server has the model, or the tenant may not use it",
    "response_not_found": "another tenant's response",
    "invalid_api_key": "keys",
    "cross_site": "the admin port",
}
"""Codes of refusals that vLLM does not know, or that protect others, each with the reason."""
LOAD = {
    "queue_full", "deadline_unattainable", "tenant_quota", "tenant_concurrency", "draining",
    "no_backend_available", "overloaded", "too_many_connections", "too_many_failures",
    "internal_error", "upstream_error", "upstream_stream_error", "upstream_timeout",
}  # fmt: skip


def of(path: str, **fields: Any) -> tuple[str, bytes]:
    """A body that is sound but for these fields."""
    sound: dict[str, Any] = {
        COMPLETIONS: {"prompt": "x", "max_tokens": 1},
        CHAT: {"messages": [USER], "max_tokens": 1},
        RESPONSES: {"input": "x", "max_output_tokens": 1},
        MESSAGES: {"messages": [USER], "max_tokens": 1},
    }[path]
    made = {"model": "tiny", **sound, **fields}
    return path, json.dumps({name: value for name, value in made.items() if value != "-"}).encode()


def raw(body: bytes, path: str = COMPLETIONS) -> tuple[str, bytes]:
    return path, body.replace(b"P", b'"model":"tiny","max_tokens":1,"prompt":"x"')


def content(*parts: Any, path: str = CHAT) -> tuple[str, bytes]:
    return of(path, messages=[{"role": "user", "content": list(parts)}])


BUCKETS = [{"name": "all", "up_to": 4_096}]  # as the context of vLLM here
BODIES: dict[str, tuple[str, bytes]] = {
    "empty": raw(b""), "not json": raw(b"{nope}"), "very deep": raw(b"{P,y:" + b"[" * 3_000),
    "latin-1": raw(b'{P,"y":"\xe9"}'), "trailing": raw(b"{P} y"), "nul": raw(b"{P}\0"),
    "control": raw(b'{P,"y":"a\nb"}'), "array": raw(b'["prompt"]'), "null": raw(b"null"),
    "surrogate in a prompt": raw(b'{"model":"tiny","prompt":"\\ud800","max_tokens":1}'),
    "no prompt": of(COMPLETIONS, prompt="-"), "a prompt as object": of(COMPLETIONS, prompt={}),
    "parts of token ids": of(COMPLETIONS, prompt=[1.5]),
    "a token id of 33 bits": of(COMPLETIONS, prompt=[1 << 32]),
    "a token id below 0": of(COMPLETIONS, prompt=[-1]),
    "prompts of two kinds": of(COMPLETIONS, prompt=["a", 1]),
    "ids of two kinds": of(COMPLETIONS, prompt=[1, "a"]),
    "null in ids": of(COMPLETIONS, prompt=[None]),
    "no prompts": of(COMPLETIONS, prompt=[]),
    "a model as number": of(COMPLETIONS, model=1), "stream 2": of(COMPLETIONS, stream=2),
    "stream as list": of(COMPLETIONS, stream=[]), "stream maybe": of(COMPLETIONS, stream="maybe"),
    "parts of tokens": of(COMPLETIONS, max_tokens=1.5), "tokens as list": of(CHAT, max_tokens=[]),
    "tokens beyond 64 bits": of(COMPLETIONS, max_tokens=1 << 70), "n": of(COMPLETIONS, n=1 << 70),
    "a priority beyond": of(COMPLETIONS, priority=1 << 70),
    "an empty salt": of(COMPLETIONS, cache_salt=""), "a salt as number": of(CHAT, cache_salt=7),
    "embeddings as number": of(COMPLETIONS, prompt="-", prompt_embeds=7),
    "no messages": of(CHAT, messages="-"), "zero messages": of(CHAT, messages=[]),
    "a message as text": of(CHAT, messages=["x"]), "messages as text": of(CHAT, messages="x"),
    "content as number": of(CHAT, messages=[{"role": "user", "content": 7}]),
    "a part as number": content(1), "a part as null": content("a", None),
    "a part as list": content([]),
    "a type as number": content({"type": 7, "text": "x"}),
    "16,400 messages": of(CHAT, messages=[USER] * 16_400),
    "16,400 prompts": of(COMPLETIONS, prompt=["x"] * 16_400),
    "140,000 lists": of(CHAT, y=[[]] * 140_000),
    "two prompts": raw(b'{P,"prompt":"y"}'),
    "no input": of(RESPONSES, input="-"), "zero input": of(RESPONSES, input=[]),
    "input as number": of(RESPONSES, input=7), "an item as text": of(RESPONSES, input=["x"]),
    "an id as number": of(RESPONSES, previous_response_id=7),
    "content of responses": of(RESPONSES, input=[{"role": "user", "content": 7}]),
    "in the background": of(RESPONSES, background=True),
    "background as list": of(RESPONSES, background=[]),
    "system as number": of(MESSAGES, system=7), "zero of anthropic": of(MESSAGES, messages=[]),
    "content of anthropic": of(MESSAGES, messages=[{"role": "user", "content": 7}]),
    "too long": of(COMPLETIONS, prompt="ab " * 40_000),
    # Taken by both.
    "nan": raw(b'{P,"y":NaN}'), "bom": raw(b"\xef\xbb\xbf{P}"), "stream 0": of(MESSAGES, stream=0),
    "whole floats": of(COMPLETIONS, prompt=[1.0, True, "2"]), "true": of(CHAT, max_tokens=True),
    "deep part": content({"type": "text", "text": "x", "y": json.loads("[" * 300 + "]" * 300)}),
    "a deep field": raw(b'{P,"y":' + b"[" * 800 + b"]" * 800 + b"}"),
}  # fmt: skip


def ask(url: str, path: str, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(url.partition("//")[2], timeout=300)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python, folder = needed_vllm_python(), tmp_path_factory.mktemp("vllm") / "model"
    write_model(folder, ModelSize())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real, "START_S", 600.0)  # of a machine with much to do
        with vllm_server(python, folder, folder.parent / "log", "--max-model-len", "4096") as url:
            yield url


async def refusal(on: Stage, backend: RawBackend, path: str, body: bytes) -> str:
    """The code of the refusal; "" if the server got the request."""
    before = len(backend.calls)
    async with on.post(body, path=path) as response:
        data = await response.read()
    if len(backend.calls) > before:
        return ""
    assert response.status >= 400
    return str(json.loads(data)["error"]["code"])


@pytest.mark.real_time
async def test_the_proxy_refuses_what_vllm_refuses(vllm: str) -> None:
    async with on_stage(None, buckets=BUCKETS) as (on, (backend,)):
        for name, (path, body) in BODIES.items():
            code = await refusal(on, backend, path, body)
            if code in OURS or not code:
                continue
            status, said = await asyncio.to_thread(ask, vllm, path, body)
            assert 400 <= status < 500, (name, code, status, said[:300])


@pytest.mark.real_time
async def test_every_refusal_has_a_body_or_a_reason() -> None:
    async with on_stage(None, buckets=BUCKETS) as (on, (backend,)):
        met = {await refusal(on, backend, path, body) for path, body in BODIES.values()}
    assert met >= {"", "invalid_json", "invalid_type", "too_many_items", "repeated_key"}
    page = (
        (ROOT / "docs" / "reference" / "http.md").read_text("utf-8").partition("## Error codes")[2]
    )
    table = page.partition("<!-- end -->")[0]
    codes = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert codes == OF_VLLM | set(OURS) | LOAD
    for code in ("repeated_key", "too_many_items", "uuid_not_allowed", "unsupported_value"):
        assert f"| `{code}`" in page.partition("What vLLM would take")[2]


def test_the_paths_that_are_passed_on_are_vllms(vllm: str) -> None:
    from forebay.proxy.config.checks import OPERATOR_PATHS
    from forebay.proxy.config.paths import GENERATING, ROUTED

    connection = http.client.HTTPConnection(vllm.partition("//")[2], timeout=60)
    connection.request("GET", "/openapi.json")
    served = {path for path in json.loads(connection.getresponse().read())["paths"]}
    connection.close()
    plain = {path for path in served if "{" not in path}
    # This model only generates, so paths for other kinds of models are not served here.
    known = {*ROUTED, *GENERATING, *DIALECTS, *OPERATOR_PATHS}
    ours = {"/health", "/ping", "/load", "/version", "/metrics", "/is_sleeping", "/is_paused"}
    rest = sorted(plain - known - ours)
    # SageMaker's name for all paths, an operator's, a publisher's, and a chat without a dialect.
    assert rest == ["/invocations", "/is_scaling_elastic_ep", "/kv_event_sources", "/v1/systemone"]
    assert {"/v1/models", "/tokenize", "/v1/completions"} <= plain
