"""Signed tokens of an identity provider name tenants: which count, and how their keys rotate."""

import asyncio
import json
import sys
import time
from base64 import urlsafe_b64encode as b64
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import thread_time
from typing import Any

import pytest
from said import Said
from stages.proxy_stage import error_of, now, on_stage, settle
from stages.raw_client import ask, before_oracle, post

from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import load_config
from forebay.proxy.config.tenants import JwtConfig
from forebay.proxy.identity.jwks import FETCH_EVERY_S, MOST_BYTES, RETRY_S, KeySet, parse_jwks
from forebay.proxy.identity.jwt_tokens import BAD_S, MOST_KNOWN, MOST_TRIED, JwtVerifier
from forebay.proxy.log_events import LogEvent
from forebay.proxy.security.auth import FAILURES_AT_ONCE
from forebay.proxy.security.guards import Security
from forebay.traces.ground.errors import InputError

jwt = pytest.importorskip("jwt")
pytest.importorskip("cryptography")
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa  # noqa: E402
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat  # noqa: E402

AUDIENCE, ISSUER = "forebay", "https://id.example.com"
CONFIG = JwtConfig(jwks="keys.json", audience=AUDIENCE, issuer=ISSUER)
API_KEY = "key-of-acme-0123456789"


@cache
def private(name: str) -> Any:
    if name.startswith("ec"):
        return ec.generate_private_key(ec.SECP256R1())
    if name.startswith("ed"):
        return ed25519.Ed25519PrivateKey.generate()
    return rsa.generate_private_key(65537, 2048)


def algorithm(name: str) -> str:
    return {"ec": "ES256", "ed": "EdDSA"}.get(name[:2], "RS256")


def public(name: str, **more: Any) -> dict[str, Any]:
    """The key as a provider lists it."""
    maker = jwt.algorithms.get_default_algorithms()[algorithm(name)]
    listed = json.loads(maker.to_jwk(private(name).public_key()))
    return {**listed, "kid": name, "use": "sig", **more}


def jwks(*names: str) -> str:
    return json.dumps({"keys": [public(name) for name in names]})


def token(key: str = "rsa1", alg: str = "", headers: Any = None, **claims: Any) -> str:
    good = {"sub": "acme", "aud": AUDIENCE, "iss": ISSUER, "exp": time.time() + 600}
    made = {name: value for name, value in {**good, **claims}.items() if value is not None}
    names = {"kid": key} if headers is None else headers
    return str(jwt.encode(made, private(key), alg or algorithm(key), headers=names))


def verifier(*names: str, config: JwtConfig = CONFIG, **options: Any) -> JwtVerifier:
    keys = KeySet()
    keys.take(parse_jwks(jwks(*names or ("rsa1",)).encode(), "keys.json"))
    return JwtVerifier(config, keys, **options)


async def check(security: Security, said: Said) -> None:
    for _ in range(2):  # a file must stay the same for one look
        await security.check_files(said)


# Which tokens count.


@pytest.mark.parametrize("key", ["rsa1", "ec1", "ed1"])
def test_a_sound_token_names_its_tenant(key: str) -> None:
    known = verifier("rsa1", "ec1", "ed1")
    assert known.tenant(token(key)) == "acme"
    assert known.tenant(token(key, headers={})) == "acme"  # without a key id each key is tried
    assert known.tenant(token(key, aud=["other", AUDIENCE])) == "acme"
    of_claim = JwtConfig(jwks="k", audience=AUDIENCE, tenant_claim="org")
    assert verifier(key, config=of_claim).tenant(token(key, org="bolt", iss="x")) == "bolt"


class Counting:
    """Counts the signatures that a verifier checks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, decode = 0, jwt.decode

        def counted(*args: Any, **more: Any) -> Any:
            self.count += 1
            return decode(*args, **more)

        monkeypatch.setattr(jwt, "decode", counted)


def test_a_bad_token_is_checked_once_and_with_a_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.time()
    names = [f"rsa{number}" for number in range(1, 8)]
    known = verifier(*names, now=lambda: clock)
    bad = token("rsa9", headers={})
    counting = Counting(monkeypatch)
    for _ in range(5):
        assert known.tenant(bad) is None
    assert counting.count == MOST_TRIED  # once with each of a few keys
    assert known.tenant(token("rsa7")) == "acme"  # its key is named
    clock += BAD_S
    assert known.tenant(bad) is None
    assert counting.count == 2 * MOST_TRIED + 1
    for number in range(MOST_KNOWN + 10):
        known.tenant(f"{number}.b.c")
    assert len(known._bad) == MOST_KNOWN


def public_pem() -> bytes:
    key = private("rsa1").public_key()
    return bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def signed_with_the_public_key() -> str:
    """The old trick: HMAC with the public key, which everybody has, as its secret."""
    import hmac

    head, claims, _ = token().split(".")
    head = b64(json.dumps({"alg": "HS256", "kid": "rsa1"}).encode()).rstrip(b"=").decode()
    code = hmac.digest(public_pem(), f"{head}.{claims}".encode(), "sha256")
    return f"{head}.{claims}.{b64(code).rstrip(b'=').decode()}"


UNSOUND: dict[str, Callable[[], str]] = {
    "another audience": lambda: token(aud="other"),
    "no audience": lambda: token(aud=None),
    "another issuer": lambda: token(iss="https://evil.example.com"),
    "no issuer": lambda: token(iss=None),
    "over": lambda: token(exp=time.time() - 31),
    "without an end": lambda: token(exp=None),
    "an end beyond numbers": lambda: token(exp=1e400),
    "not yet": lambda: token(nbf=time.time() + 60),
    "signed by somebody else": lambda: token("rsa2", headers={"kid": "rsa1"}),
    "an unknown key": lambda: token("rsa2"),
    "not signed": lambda: str(jwt.encode({"sub": "acme", "aud": AUDIENCE}, None, "none")),
    "signed with the public key": signed_with_the_public_key,
    "no tenant": lambda: token(sub=None),
    "a tenant that is no name": lambda: token(sub="a/b"),
    "a tenant and a line": lambda: token(sub="acme\n"),
    "a tenant that is too long": lambda: token(sub="a" * 65),
    "a number for a tenant": lambda: token(sub=7),
    "cut": lambda: token()[:-9],
    "changed": lambda: token().replace(".", ".A", 1),
    "empty parts": lambda: "..",
    "no base64": lambda: "a.ü.c",
    "a long one": lambda: token(more="x" * 20_000),
    "a critical header": lambda: token(headers={"kid": "rsa1", "crit": ["x"], "x": 1}),
    "a key id that is a list": lambda: token(headers={"kid": "rsa1", "jwk": public("rsa2")})[:-1],
}


@pytest.mark.parametrize("kind", UNSOUND)
def test_any_other_token_names_nobody(kind: str) -> None:
    known = verifier()
    assert known.tenant(token()) == "acme"
    assert known.tenant(UNSOUND[kind]()) is None


def test_a_token_is_checked_once_until_it_is_over_or_keys_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.time()
    asked: list[str] = []
    keys = KeySet()
    keys.take(parse_jwks(jwks("rsa1").encode(), "k"))
    known = JwtVerifier(CONFIG, keys, now=lambda: now)
    claims = known._claims

    def counted(token: str) -> dict[str, Any]:
        asked.append(token)
        return claims(token)

    monkeypatch.setattr(known, "_claims", counted)
    one = token(exp=now + 60)
    assert [known.tenant(one) for _ in range(5)] == ["acme"] * 5
    assert len(asked) == 1
    now += 91.0
    known.tenant(one)
    assert len(asked) == 2  # its end, with what clocks may differ
    now -= 91.0
    keys.take(parse_jwks(jwks("rsa2").encode(), "k"))
    assert known.tenant(one) is None
    assert MOST_KNOWN == 4_096
    known._known.update({b"%d" % n: ("x", now + 60) for n in range(MOST_KNOWN)})
    known.tenant(token("rsa2"))
    assert len(known._known) == MOST_KNOWN


# Keys of a provider.


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is no JWKS"), (b"{}", "is no JWKS"), (b"[]", "is no JWKS"),
        (b'{"keys": 7}', "is no JWKS"), (b"[" * 100_000, "is no JWKS"),
        (b"\xff", "is no JWKS"), (b'{"keys": []}', "has no public key"),
        (b'{"keys": [7, {"kty": "RSA"}, {"kty": "oct", "k": "c2VjcmV0"}]}', "has no public key"),
        (b'{"keys": [{"kty": "RSA", "n": "!", "e": "AQAB"}]}', "has no public key"),
        (b'{"keys": [{"kty": "EC", "crv": "P-1", "x": "AQ", "y": "AQ"}]}', "has no public key"),
        (b" " * (MOST_BYTES + 1), "is larger than 1 MiB"),
    ],
)  # fmt: skip
def test_a_document_that_is_no_list_of_keys(data: bytes, why: str) -> None:
    with pytest.raises(InputError, match=r"tenants.jwt.jwks: keys.json") as error:
        parse_jwks(data, "keys.json")
    assert why in str(error.value)


def test_keys_for_other_uses_are_left_out() -> None:
    listed = {"keys": [public("rsa1", use="enc"), public("rsa2"), public("ec1", alg="HS256")]}
    assert [key.key_id for key in parse_jwks(json.dumps(listed).encode(), "k")] == ["rsa2"]


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"jwks": "k.json"}, "jwks needs audience"),
        ({"jwks": "http://id.example.com/jwks", "audience": "a"}, "a URL with https"),
        ({"jwks": "ftp://id.example.com/jwks", "audience": "a"}, "a URL with https"),
        ({"jwks": "https://u:p@id.example.com/", "audience": "a"}, "without user or password"),
        ({"jwks": "https://", "audience": "a"}, "a URL with https"),
        ({"jwks": "", "audience": "a"}, "at least 1 character"),
        ({"jwks": "k", "audience": "a", "claim": "x"}, "claim"),
    ],
)
def test_mistakes(section: dict[str, Any], why: str) -> None:
    backends = [{"url": "http://127.0.0.1:8001"}]
    with pytest.raises(InputError, match=why):
        load_config(None, {"backends": backends, "tenants": {"jwt": section}}, {})


def made(path: Path, **tenants: Any) -> Config:
    section = {"jwks": str(path), "audience": AUDIENCE}
    backends = [{"url": "http://127.0.0.1:8001"}]
    return load_config(None, {"backends": backends, "tenants": {"jwt": section, **tenants}}, {})


def test_without_the_library_one_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    path.write_text(jwks("rsa1"))
    monkeypatch.setitem(sys.modules, "jwt", None)
    with pytest.raises(InputError, match=r"pip install 'forebay\[jwt\]'"):
        Security(made(path), {})
    with pytest.raises(InputError, match="cannot read"):
        Security(made(tmp_path / "none"), {})


@pytest.mark.real_time
async def test_a_url_is_read_and_a_server_that_is_not_there_is_said() -> None:
    """In real time and over sockets: a thread reads."""

    said, keys = Said(), KeySet()

    async def provider(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = jwks("rsa1").encode()
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async with await asyncio.start_server(provider, "127.0.0.1") as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/jwks"
        keys.follow(url)
        await keys.refresh(said)
    assert [key.key_id for key in keys.keys] == ["rsa1"]
    await keys.refresh(said)
    assert len(keys.keys) == 1
    assert "Connection refused" in said[0]


async def test_a_file_rotates_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    path, said = tmp_path / "keys.json", Said()
    path.write_text(jwks("rsa1"))
    security = Security(made(path), {})

    def tenants() -> list[str | None]:
        known = security.auth._verifier
        assert known is not None
        return [known.tenant(token(key)) for key in ("rsa1", "rsa2")]

    assert tenants() == ["acme", None]
    for bad in (jwks("rsa2")[:-1], "{}", ""):  # half written
        path.write_text(bad)
        await check(security, said)
        assert tenants() == ["acme", None]
    path.write_text(jwks("rsa1", "rsa2"))
    await check(security, said)
    assert tenants() == ["acme", "acme"]
    path.write_text(jwks("rsa2"))
    await check(security, said)
    assert tenants() == [None, "acme"]
    assert said[-1] == "using the new keys and certificate; 1 keys for tokens"


async def test_a_url_is_asked_for_unknown_keys_and_kept_when_it_fails() -> None:
    answers: list[Any] = [jwks("rsa1")]
    asked: list[float] = []

    loop, said = asyncio.get_running_loop(), Said()

    async def fetch(url: str) -> bytes:
        asked.append(loop.time())
        answer = answers[0]
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer.encode())

    keys = KeySet()
    keys.follow("https://id.example.com/jwks")
    await keys.refresh(said, fetch)
    known = JwtVerifier(CONFIG, keys)
    keeping = asyncio.create_task(keys.keep_fresh(said, fetch))
    assert known.tenant(token("rsa1")) == "acme"
    answers[0] = jwks("rsa1", "rsa2")
    for _ in range(50):  # however many come
        assert known.tenant(token("rsa2")) is None
    await asyncio.sleep(RETRY_S + 1)
    assert (known.tenant(token("rsa2")), len(asked)) == ("acme", 2)
    await asyncio.sleep(FETCH_EVERY_S + 1)
    assert len(asked) == 3
    assert known.remembered(token("rsa2", jti="1")) is None
    known.tenant(sound := token("rsa2", jti="2"))
    await asyncio.sleep(FETCH_EVERY_S + 1)
    assert known.remembered(sound) == ("acme",)  # the same answer changes no keys
    for failure in (OSError("refused"), "{}"):
        answers[0] = failure
        await asyncio.sleep(3 * FETCH_EVERY_S)
        assert known.tenant(token("rsa1")) == "acme"
    events = [event for event, *_ in said.events]
    assert events == [LogEvent.JWKS_UNREACHABLE] * 2  # one for each reason
    assert "cannot read https://id.example.com/jwks (refused)" in said[0]
    answers[0] = jwks("rsa2")
    keys.follow("https://id.example.com/other")
    await asyncio.sleep(0.1)
    assert known.tenant(token("rsa1")) is None  # at once
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


# Over HTTP.


async def test_tokens_and_keys_side_by_side_and_at_a_reload(tmp_path: Path) -> None:
    keys, file = tmp_path / "keys", tmp_path / "jwks.json"
    keys.write_text(f"acme: {API_KEY}\n")
    file.write_text(jwks("rsa1"))
    section = {"jwks": str(file), "audience": AUDIENCE, "issuer": ISSUER}
    tenants: dict[str, Any] = {"keys": str(keys), "jwt": section}

    async with on_stage(None, tenants=tenants) as (on, backends):

        async def ask(key: str, header: str = "authorization") -> tuple[int, str]:
            value = f"Bearer {key}" if header == "authorization" else key
            async with on.post(headers={header: value}) as response:
                code = "" if response.status == 200 else (await error_of(response))["code"]
                return response.status, code

        assert await ask(API_KEY) == (200, "")
        for header in ("authorization", "x-api-key", "api-key"):
            assert await ask(token(sub="bolt"), header) == (200, "")
        for call in backends[0].calls:
            assert "authorization" not in call.head.lower()
            assert "api-key" not in call.head.lower()
            assert b'"cache_salt"' in call.body  # tokens name tenants, so caches are apart
        assert len({call.body for call in backends[0].calls}) == 2
        assert await ask(token(aud="x")) == (401, "invalid_api_key")
        # A user who has chosen the name of a tenant with a key would spend its budget.
        async with on.post(headers={"api-key": token(sub="acme")}) as response:
            assert response.status == 401
            assert "tenant that has a key" in (await error_of(response))["message"]
        keys.write_text(f"bolt: {API_KEY}\n")
        on.proxy.security.reload(on.proxy.reloader.config)
        assert await ask(token(sub="acme")) == (200, "")  # remembered as a sound token
        assert await ask(token(sub="bolt")) == (401, "invalid_api_key")
        asking = [asyncio.create_task(ask(token(sub=f"t{n}"))) for n in range(20)]
        on.proxy.security.reload(on.proxy.reloader.config)  # at the same moment
        assert await asyncio.gather(*asking) == [(200, "")] * 20
        await settle()


async def test_strangers_tokens_are_checked_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All signatures of a stranger's tokens were checked before it got its 429."""
    file, checked, tenant = tmp_path / "jwks.json", list[float](), JwtVerifier.tenant
    file.write_text(jwks("rsa1"))

    def slow(self: JwtVerifier, text: str) -> str | None:
        checked.append(round(now(), 3))
        until = thread_time() + 0.003
        while thread_time() < until:
            pass
        return tenant(self, text)

    async with on_stage(None, tenants={"jwt": {"jwks": str(file), "audience": AUDIENCE}}) as (
        on,
        _,
    ):

        async def ask(key: str) -> int:
            return await on.status(headers={"authorization": f"Bearer {key}"})

        for _ in range(int(FAILURES_AT_ONCE)):
            assert await ask("wrong") == 401
        monkeypatch.setattr(JwtVerifier, "tenant", slow)
        bad = [ask(token("rsa2", jti=str(number))) for number in range(6)]
        assert await asyncio.gather(*bad, ask(token("rsa1"))) == [429] * 6 + [200]
        assert len(checked) == len(set(checked)) == 7  # each at a moment of its own


# What a stranger sends.


def test_texts_that_are_no_token() -> None:
    known = verifier()
    head, claims, signature = token().split(".")
    deep = b64(b"[" * 12_000).rstrip(b"=").decode()
    for text in (
        token(exp=10**400),
        f"{deep}.{claims}.{signature}",
        f"{head}.{deep}.{signature}",
        f"{head}.{claims}.\udcff",
        "\udcff.\udcff.\udcff",
        "a.b.\0",
    ):
        assert known.tenant(text) is None


HEADERS = ("authorization: Bearer ", "authorization: ", "x-api-key: ", "api-key: ")


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/embeddings"])
async def test_every_byte_in_a_key_is_401(header: str, path: bytes, tmp_path: Path) -> None:
    """A byte that HTTP forbids is 400, and so is one that could not be forwarded as it is."""
    file, keys = tmp_path / "jwks", tmp_path / "keys"
    file.write_text(jwks("rsa1"), "utf-8")
    keys.write_text(f"acme: {API_KEY}\n", "utf-8")
    tenants = {"jwt": {"jwks": str(file), "audience": AUDIENCE}, "keys": str(keys)}
    statuses: dict[int, int] = {}
    async with before_oracle(tenants=tenants) as (on, oracle):
        for byte in range(1, 256):
            await asyncio.sleep(1.0)  # the allowance of an address
            sent = header.encode() + b"a.b." + bytes([byte])
            statuses[byte] = (await ask(on, post(sent, path=path))).status
        assert not [asked for asked in oracle.requests if asked.method == "POST"]
        assert not [line for line in on.said if "internal error" in line]
    assert set(statuses.values()) == {400, 401}
    ascii_only = header.startswith("authorization")
    sound = [*range(0x21, 0x7F), *([] if ascii_only else range(0x80, 256))]
    assert all(statuses[byte] == 401 for byte in sound)
