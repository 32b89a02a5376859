"""Tenants do not see each other in the prefix cache, whatever they send."""

import asyncio
import base64
import hashlib
import hmac
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest
from body_reading import read_body
from cache_spy import KEYS, Spy, ks_p
from fakes.tenant_keys import keys_of
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict
from stages.proxy_stage import RawBackend, on_stage, stage

from forebay.proxy.api.body import ParsedBody
from forebay.proxy.api.cache_salt import CacheSalts, cache_secret, share_cache_secret
from forebay.proxy.api.dialects import COMPLETIONS
from forebay.proxy.api.fields import with_members
from forebay.proxy.api.unshaped_body import prepared
from forebay.proxy.backends.models import Models
from forebay.proxy.backends.salt_support import paths_of_version, paths_without_salt
from forebay.proxy.diagnose.doctor.caches import isolation
from forebay.proxy.diagnose.scene import Scene
from forebay.proxy.http1.errors import ApiError
from forebay.replay.clock.virtual_loop import run

SECRET = b"a secret of the tests"
SALTS = CacheSalts(SECRET, {"rag1": "rag", "rag2": "rag"})
TENANTS = {"keys": "env:KEYS"}


class Served(BaseModel):
    """A body as vLLM reads it: a pydantic model that allows unknown fields."""

    model_config = ConfigDict(extra="allow")
    cache_salt: str | None = None


def understood(body: bytes, tenant: str, salts: CacheSalts | None) -> ParsedBody:
    return read_body(body, COMPLETIONS, tenant=tenant, salts=salts)


def salted(body: bytes, content_type: str = "application/json") -> bytes:
    """The body of a request that is not shaped."""
    return asyncio.run(prepared(body, content_type, "acme", SALTS, Models()))[0]


def parsers_agree_on(body: bytes) -> str:
    """The salt that every parser a vLLM may use finds in `body`."""
    found = {
        json.loads(body)["cache_salt"],
        orjson.loads(body)["cache_salt"],
        Served.model_validate_json(body).cache_salt,
        Served.model_validate(json.loads(body)).cache_salt,
    }
    assert len(found) == 1
    return str(found.pop())


class TestSalts:
    def test_the_formula(self) -> None:
        code = hmac.new(SECRET, b"acme\0theirs", hashlib.sha256).digest()
        assert SALTS.salt("acme", "theirs") == base64.urlsafe_b64encode(code)[:22].decode()

    def test_only_a_trust_group_shares_a_salt(self) -> None:
        named = {
            name: SALTS.salt(*name)
            for name in [("acme",), ("acme", "u1"), ("acme", "u2"), ("bolt",), ("bolt", "u1"),
                         ("rag",), ("rag1",), ("",), ("group",)]
        }  # fmt: skip
        assert len(set(named.values())) == len(named)
        assert SALTS.salt("rag1", "u") == SALTS.salt("rag2", "u")
        assert SALTS.salt("rag1") != CacheSalts(b"another", {"rag1": "rag"}).salt("rag1")

    def test_the_secret(self) -> None:
        assert cache_secret({}) != cache_secret({})
        environ: dict[str, str] = {}
        share_cache_secret(environ)
        assert cache_secret(environ) == cache_secret(dict(environ))
        before = dict(environ)
        share_cache_secret(environ)
        assert environ == before


class TestMediaIds:
    """vLLM caches media under a client's `uuid` for all tenants, whatever the salt."""

    PART = {"type": "image_url", "image_url": None, "uuid": "guessed"}  # noqa: RUF012
    TEXT = {"type": "text", "text": "what is this?"}  # noqa: RUF012

    def chat(self, part: dict[str, Any], salts: CacheSalts | None) -> ParsedBody:
        messages = [{"role": "system", "content": "x"}, {"role": "user"},
                    {"role": "user", "content": [self.TEXT, part]}]  # fmt: skip
        fields: dict[str, Any] = {"messages": messages}
        return read_body(json.dumps(fields).encode(), tenant="acme", salts=salts)

    def test_in_a_chat(self) -> None:
        with pytest.raises(ApiError) as refused:
            self.chat(self.PART, SALTS)
        assert (refused.value.status, refused.value.code) == (400, "uuid_not_allowed")
        assert refused.value.param == "messages"

    def test_only_where_caches_are_isolated(self) -> None:
        assert b"guessed" in self.chat(self.PART, None).body

    def test_a_part_without_one_passes(self) -> None:
        self.chat({**self.PART, "uuid": None}, SALTS)
        self.chat({"type": "text", "text": "uuid"}, SALTS)

    @pytest.mark.parametrize("name", ["messages", "input"])
    def test_on_paths_that_are_not_shaped(self, name: str) -> None:
        body = json.dumps({name: [{"role": "user", "content": [self.PART]}]}).encode()
        with pytest.raises(ApiError) as refused:
            salted(body)
        assert (refused.value.code, refused.value.param) == ("uuid_not_allowed", name)

    @pytest.mark.parametrize(
        "value", [[1, 2], ["x"], "x", None, {}, [[1]], [{"content": "x"}, 5, {}, {"content": [7]}]]
    )
    def test_anything_else_is_the_backends_to_judge(self, value: object) -> None:
        body = json.dumps({"input": value, "messages": value}).encode()
        sent = salted(body)
        assert parsers_agree_on(sent) == SALTS.salt("acme")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


class TestSplicing:
    @given(
        st.dictionaries(st.text() | st.just("cache_salt"), json_values),
        st.text(" \t\r\n"),
        st.sampled_from([None, 2]),
    )
    def test_any_object_gets_exactly_one_member_more(
        self, fields: dict[str, Any], space: str, indent: int | None
    ) -> None:
        try:
            body = json.dumps(fields, indent=indent).encode() + space.encode()
            orjson.loads(body)
        except orjson.JSONDecodeError:
            return  # lone surrogates: refused before anything is spliced
        out = with_members(body, {"cache_salt": '"SALT"'}, empty=not fields)
        assert parsers_agree_on(out) == "SALT"
        assert json.loads(out) == {**fields, "cache_salt": "SALT"}
        kept = body.rstrip(b" \t\r\n")[:-1]
        assert out.startswith(kept)

    @pytest.mark.parametrize(
        "body",
        [
            b'{"prompt":"x","cache_salt":"mine"}',
            b'{"cache_salt":"mine","prompt":"x","cache_salt":"mine too"}',
            b'{"prompt":"x","cache\\u005fsalt":"mine"}',
            b'{"prompt":"x","\\u0063ache_salt":"mine"} \n\t ',
            b'{"prompt":"x","cache_salt":null}',
            b'{"prompt":"}","a":{"cache_salt":"mine"}}',
            b'{"prompt":"\\"}","a":[{}]}',
            b'{"cache_salt":"mine",\n"prompt":"x"}\n',
        ],
    )
    def test_whatever_a_client_writes_the_tenants_salt_counts(self, body: bytes) -> None:
        asked = understood(body, "acme", SALTS)
        theirs = orjson.loads(body).get("cache_salt")
        assert parsers_agree_on(asked.body) == SALTS.salt("acme", theirs)

    @pytest.mark.parametrize(
        "body",
        [
            b'{"prompt":"x","a":"}',  # a string left open: the salt would fall into it
            b'{"prompt":"x","a":{}',
            b'{"prompt":"x"}}',
            b'{"prompt":"x"} {}',
            b'{"prompt":"x"}\0',
            b'{"prompt":"x",}',
            b'[{"prompt":"x"}]',
            b'{"prompt":"x","cache_salt":7}',
            b'{"prompt":"x","cache_salt":""}',
            b'{"prompt":"x","cache_salt":["a"]}',
            b"",
        ],
    )
    def test_a_body_that_is_no_sound_object_is_refused(self, body: bytes) -> None:
        with pytest.raises(ApiError) as error:
            understood(body, "acme", SALTS)
        assert error.value.status == 400
        with pytest.raises(ApiError):
            salted(body)

    @pytest.mark.parametrize("coding", ["utf-8-sig", "utf-16", "utf-32-be"])
    def test_other_codings_get_the_tenants_salt(self, coding: str) -> None:
        """They are passed on as UTF-8, so that no parser takes the salt for something else."""
        theirs = "mine"
        body = json.dumps({"prompt": "x", "cache_salt": theirs}).encode(coding)
        assert parsers_agree_on(salted(body)) == SALTS.salt("acme", theirs)

    def test_without_isolation_not_a_byte_changes(self) -> None:
        body = b'{ "prompt":"x" , "cache_salt" : "mine" }\n'
        assert understood(body, "acme", None).body is body

    def test_requests_that_are_not_shaped(self) -> None:
        made = salted(b"{}", "")
        assert made == b'{"cache_salt":"%b"}' % SALTS.salt("acme").encode()
        form = b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\n{}\r\n--x--'
        assert salted(form, "multipart/form-data") is form


class TestOwnIndex:
    """The proxy's own prefix index leaks nothing between tenants either."""

    LONG = b'{"prompt":"%b"}' % (b"x" * 2000)

    def test_equal_prompts_of_two_tenants_have_no_block_in_common(self) -> None:
        acme, bolt = (understood(self.LONG, t, SALTS).request.blocks for t in ("acme", "bolt"))
        assert len(acme) == len(bolt) == 7
        assert not set(acme) & set(bolt)
        assert understood(self.LONG, "acme", SALTS).request.blocks == acme

    def test_a_group_shares_and_a_clients_own_salt_parts(self) -> None:
        one, two = (understood(self.LONG, t, SALTS).request.blocks for t in ("rag1", "rag2"))
        assert one == two
        mine = self.LONG[:-1] + b',"cache_salt":"mine"}'
        for salts in (SALTS, None):
            plain = understood(self.LONG, "acme", salts).request.blocks
            parted = understood(mine, "acme", salts).request.blocks
            assert not set(plain) & set(parted)


@pytest.fixture
def two_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", KEYS)


@pytest.mark.usefixtures("two_keys")
class TestSideChannel:
    def test_an_identical_prompt_of_another_tenant_cannot_be_told(self) -> None:
        spy = Spy(isolate=True)
        run(spy.play(12))
        assert set(spy.cached["asked before"]) == {0}
        assert ks_p(spy.ttft_s["asked before"], spy.ttft_s["new"]) > 0.05
        assert spy.cached["own"][0] > 7_000  # a tenant's own cache is as good as ever

    def test_the_test_sees_the_leak_where_there_is_one(self) -> None:
        spy = Spy(isolate=False, engines=1)
        run(spy.play(12))
        assert min(spy.cached["asked before"]) > 7_000
        assert ks_p(spy.ttft_s["asked before"], spy.ttft_s["new"]) < 0.001

    async def test_the_backend_gets_the_salt_of_the_tenant(self) -> None:
        async with on_stage(None, tenants=TENANTS) as (on, (backend,)):
            for path in ("/v1/completions", "/v1/embeddings", "/tokenize"):
                for key in ("key-of-victim", "key-of-spy"):
                    body = {"prompt": "x", "cache_salt": "guess"}
                    headers = {"authorization": f"Bearer {key}"}
                    async with on.post(body, path=path, headers=headers) as response:
                        assert response.status == 200
                        assert "x-forebay-salt" not in response.headers
            salts = on.proxy.security.salts
            assert salts is not None
            wanted = [salts.salt(t, "guess") for t in ("victim", "spy")]
            assert [json.loads(call.body)["cache_salt"] for call in backend.calls] == [
                *wanted, *wanted, "guess", "guess",
            ]  # fmt: skip


def test_ks_p_against_known_values() -> None:
    """scipy.stats.ks_2samp(range(20), range(k, 20 + k), method="asymp"), to the approximation."""
    a = [float(i) for i in range(20)]
    assert ks_p(a, a) == 1.0
    assert ks_p(a, [x + 20 for x in a]) < 1e-6
    assert 0.2 < ks_p(a, [x + 6 for x in a]) < 0.35


# Servers that drop the salt.


def openapi(**members: bool) -> bytes:
    """A document with a request class for each path (`v1_messages`), with the salt or without."""
    paths, schemas = {}, {}
    for name, salted_ in members.items():
        salt = {"cache_salt": {"type": "string"}} if salted_ else {}
        schemas[name] = {"properties": {"model": {"type": "string"}, **salt}}
        schema = {"anyOf": [{"$ref": f"#/components/schemas/{name}"}]} if salted_ else {
            "$ref": f"#/components/schemas/{name}"
        }  # fmt: skip
        content = {"application/json": {"schema": schema}}
        path = "/" + name.replace("_", "/", 1).replace("chat_", "chat/")
        paths[path] = {"post": {"requestBody": {"content": content}}}
    return json.dumps({"paths": paths, "components": {"schemas": schemas}}).encode()


OLD = openapi(v1_chat_completions=True, v1_messages=False)
NEW = openapi(v1_chat_completions=True, v1_messages=True)
ALL_OF = NEW.replace(b'"v1_messages": {"properties"', b'"v1_messages": {"allOf"')
UNKNOWN = (frozenset[str](), frozenset(["/v1/messages"]))


def test_the_document_says_which_paths_drop_the_salt() -> None:
    assert paths_without_salt(OLD) == (frozenset(["/v1/messages"]), frozenset())
    assert paths_without_salt(NEW) == (frozenset(), frozenset())
    assert paths_without_salt(b"[]") is None
    assert paths_without_salt(b'{"paths": {"/v1/messages": 3}}') is None
    without_schema: dict[str, Any] = {
        "paths": {"/v1/messages": {"post": {}}, "/rerank": {"get": {}}}
    }
    assert paths_without_salt(json.dumps(without_schema).encode()) == UNKNOWN
    assert paths_without_salt(ALL_OF) == UNKNOWN


def test_without_a_document_the_version_says_it() -> None:
    assert paths_of_version(b'{"version": "0.11.0"}') == (frozenset(["/v1/messages"]), frozenset())
    assert paths_of_version(b'{"version": "0.32.1"}') == (frozenset(), frozenset())
    for answer in (b'{"version": "0.25.0"}', b'{"version": "dev"}', b"[]", b"x"):
        assert paths_of_version(answer) is None


@pytest.mark.parametrize(
    ("document", "version", "finding"),
    [
        (OLD, None, "error"),
        (NEW, b'{"version": "0.11.0"}', ""),
        (None, b'{"version": "0.11.0"}', "error"),
        (None, None, "warning"),
        (None, b'{"version": "0.25.1"}', "warning"),
        (None, b'{"version": "0.32.1"}', ""),
        (ALL_OF, None, "warning"),
        (b" " * (20 << 20), None, "warning"),
        (b" " * (20 << 20), b'{"version": "0.11.0"}', "error"),
    ],
    ids=[
        *("old", "new", "old version", "nothing said", "some version", "new version"),
        *("allOf", "large"),
        "large, old version",
    ],
)
async def test_a_server_that_drops_salts_is_named_and_its_cache_is_shared(
    document: bytes | None, version: bytes | None, finding: str, tmp_path: Path
) -> None:
    """What is not known is a warning, in the log and for `forebay doctor`."""
    drops = finding == "error"
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(
            RawBackend(openapi=document, version=version).running()
        )
        tenants = {"keys": keys_of(tmp_path, "good", "evil")}
        on = await stack.enter_async_context(stage([backend.url], tenants=tenants))
        facts = json.loads(await (await on.client.get(on.proxy.admin_url + "/backends")).read())
        assert facts[0]["ignores_salt"] == (["/v1/messages"] if drops else [])
        assert on.proxy.backends.salts.ignored == ({"/v1/messages"} if drops else frozenset())
        lines = [line for line in on.said if "drops cache_salt" in line]
        assert len(lines) == drops
        unknown = "it is not known whether b0 keeps caches apart on /v1/messages"
        lines = [line for line in on.said if line.startswith(unknown)]
        assert len(lines) == (finding == "warning")
        found = list(isolation(Scene({"backends": []}, facts)))
        assert [severity for severity, *_ in found] == ([finding] if finding else [])
        assert all(text == unknown for severity, text, _ in found if severity == "warning")


def test_the_index_of_a_path_that_drops_salts_is_one_for_all_tenants() -> None:
    body = json.dumps({"prompt": "word " * 2_000}).encode()

    def blocks(tenant: str, ignore_salt: frozenset[str]) -> tuple[int, ...]:
        asked = read_body(body, tenant=tenant, salts=SALTS, ignore_salt=ignore_salt)
        return asked.request.blocks

    drops = frozenset(["/v1/completions"])
    assert blocks("good", drops) == blocks("evil", drops)
    other = frozenset(["/v1/messages"])
    assert not set(blocks("good", other)) & set(blocks("evil", other))


def test_white_space_after_a_body_is_not_looked_at_byte_by_byte() -> None:
    """15 MB of it stopped all streams for half a second of processor time."""

    class Body(bytes):
        reads = 0

        def __getitem__(self, place: Any) -> Any:
            Body.reads += 1
            return super().__getitem__(place)

    body = Body(b'{"a":"}"}' + b" " * 100_000)
    assert with_members(body, {"b": "1"}) == b'{"a":"}","b":1}'
    assert Body.reads < 10
