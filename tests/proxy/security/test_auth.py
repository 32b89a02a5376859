"""API keys: their format, the requests they admit, and the paths they protect."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.faulty_backends import answers
from said import Said
from stages.proxy_stage import RawBackend, Stage, error_of, on_stage, whole

from forebay.proxy.api.cache_salt import CacheSalts
from forebay.proxy.cli import main
from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import config_yaml, load_config
from forebay.proxy.core.model import Request, Tenant
from forebay.proxy.log_events import LogEvent
from forebay.proxy.security.auth import Failures
from forebay.proxy.security.guards import WATCH_S, Security
from forebay.proxy.security.keys import KeyRing, parse_keys, read_keys
from forebay.proxy.telemetry.metrics.tenant_labels import TenantLabels
from forebay.traces.ground.errors import InputError

ONE = {"backends": [{"url": "http://127.0.0.1:8001"}]}
KEYS = """
# the search team
acme: sk-acme-first-key-0001
acme: sk-acme-second-key-002
"bolt": "sk-bolt-only-key-00003"
"""
ACME, ACME2, BOLT = "sk-acme-first-key-0001", "sk-acme-second-key-002", "sk-bolt-only-key-00003"
HASHED = f"core: sha256:{sha256(b'a key').hexdigest().upper()}"


def key_file(tmp_path: Path, text: str = KEYS) -> Path:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    return path


def with_key(key: str, **more: str) -> dict[str, Any]:
    return {"headers": {"authorization": f"Bearer {key}", **more}}


def decisions(on: Stage) -> list[Request]:
    """The requests that the shaper decides on from now on."""
    seen: list[Request] = []
    on.proxy.driver._record = lambda now, action: seen.append(action.request)
    return seen


class TestKeys:
    @pytest.mark.parametrize(
        ("key", "tenant"),
        [(ACME, "acme"), (ACME2, "acme"), (BOLT, "bolt"), (ACME[:-1], None), ("", None),
         (ACME + " ", None), ("sk-ä\udc80", None)],
    )  # fmt: skip
    def test_whose_key_it_is(self, key: str, tenant: str | None) -> None:
        ring = parse_keys(KEYS, "keys")
        assert ring.tenant(key) == tenant
        assert (len(ring), [*ring.tenants], ring.short_keys) == (3, ["acme", "bolt"], 0)

    def test_a_hashed_key_and_a_short_one(self) -> None:
        ring = parse_keys(f"{HASHED}, pool: short", "keys")
        assert (ring.tenant("a key"), ring.tenant("short")) == ("core", "pool")
        assert ring.short_keys == 1

    def test_every_key_of_many_is_found_and_none_is_kept_in_clear(self) -> None:
        ring = parse_keys("\n".join(f"t{i % 7}: key-{i}" for i in range(2000)), "keys")
        assert all(ring.tenant(f"key-{i}") == f"t{i % 7}" for i in range(2000))
        assert len(ring) == 2000
        assert "key-" not in repr(ring._by_head)

    def test_equal_beginnings_of_digests_are_told_apart(self) -> None:
        first, second = sha256(b"first").digest(), sha256(b"second").digest()
        other = second[:8] + first[8:]
        ring = KeyRing({other: "wrong", second: "right"})
        assert ring.tenant("second") == "right"
        assert KeyRing({other: "wrong"}).tenant("second") is None

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("acme sk-secret-key", "keys:1: give `tenant: key`"),
            ("a: k1\nacme:sk-secret-key", "keys:2: give `tenant: key`"),
            ("acme: sk-secret-key # mine", "keys:1: give"),
            ("acme:\n  - sk-secret-key", "keys:1: give"),
            ("ac/me: sk-secret-key", "keys:1: a tenant's name"),
            ("acme: sk-secret-kéy", "keys:1: a key is"),
            ("acme: sha256:sk-secret-key", "keys:1: sha256: needs 64"),
            ("acme: sk-secret-key\nbolt: sk-secret-key", "keys:2: this key already belongs to ac"),
            ("# nothing\n", "keys has no key"),
        ],
    )
    def test_mistakes_name_the_line_and_not_the_key(self, text: str, words: str) -> None:
        with pytest.raises(InputError) as error:
            parse_keys(text, "keys")
        assert words in str(error.value)
        assert "secret" not in str(error.value)
        assert "\n" not in str(error.value)

    def test_where_keys_come_from(self, tmp_path: Path) -> None:
        assert [*read_keys(str(key_file(tmp_path)), {}).tenants] == ["acme", "bolt"]
        assert [*read_keys("env:KEYS", {"KEYS": "a: x1,b: x2"}).tenants] == ["a", "b"]
        for source, words in [
            ("env:KEYS", "the environment variable KEYS is not set"),
            (str(tmp_path / "none"), "No such file"),
            (str(tmp_path), "Is a directory"),
        ]:
            with pytest.raises(InputError, match=words):
                read_keys(source, {})
        (tmp_path / "keys").write_bytes(b"acme: \xff\xfe")
        with pytest.raises(InputError, match="not a text file"):
            read_keys(str(tmp_path / "keys"), {})


class TestFailures:
    def test_an_allowance_that_comes_back(self) -> None:
        failures = Failures(at_once=2, per_s=0.5)
        counted = [(0.0, 0.0), (0.0, 0.0), (0.0, 2.0), (1.0, 1.0), (2.0, 0.0), (2.0, 2.0)]
        assert [failures.count("1.2.3.4", now) for now, _ in counted] == [w for _, w in counted]
        assert failures.count("1.2.3.5", 2.0) == 0

    def test_a_holder_of_a_network_counts_once(self) -> None:
        failures = Failures(at_once=1)
        assert failures.count("2001:db8::1", 0) == 0
        assert failures.count("2001:db8::ffff:1%eth0", 0) == 1
        assert failures.count("2001:db8:0:1::1", 0) == 0
        assert failures.count("::ffff:10.0.0.1", 0) == 0
        assert failures.count("::ffff:10.0.0.2", 0) == 0
        assert failures.count("10.0.0.1", 0) == 1

    def test_the_table_is_bounded_and_forgets_the_longest_unheard_of(self) -> None:
        failures = Failures(at_once=1, addresses=100)
        for i in range(1000):
            failures.count(f"10.0.{i >> 8}.{i & 255}", 0)
            failures.count("1.2.3.4", 0)
        assert len(failures) == 100
        assert failures.count("1.2.3.4", 0) == 1


class TestConfiguration:
    def test_tenants(self) -> None:
        config = load_config(None, {**ONE, "tenants": yaml.safe_load("""
            keys: keys.yaml
            default_weight: 3
            known:
              acme: {weight: 2, tokens_per_s: 50000, burst_tokens: 500000, trust_group: rag}
              bolt: {tokens_per_s: 100}
              core: {}
            """)}, {})  # fmt: skip
        assert config.core_tenants() == [
            Tenant("acme", 2, 50_000, 500_000),
            Tenant("bolt", 3, 100, 6_000),
            Tenant("core", 3, inf, inf),
        ]
        assert load_config(None, ONE, {}).core_tenants() == []
        assert Config.model_validate(yaml.safe_load(config_yaml(config))) == config

    @pytest.mark.parametrize(
        ("tenants", "isolates"),
        [
            ({}, False),
            ({"keys": "f"}, True),
            ({"keys": "f", "isolate_cache": False}, False),
            ({"isolate_cache": True}, True),
            ({"keys": "f", "isolate_cache": "auto"}, True),
        ],
    )
    def test_when_caches_are_isolated(self, tenants: dict[str, Any], isolates: bool) -> None:
        assert load_config(None, {**ONE, "tenants": tenants}, {}).tenants.isolates is isolates

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"known": {"a b": {}}}, "tenants.known.a b"),
            ({"known": {"a": {"burst_tokens": 5}}}, "burst_tokens needs tokens_per_s"),
            ({"known": {"a": {"weight": 0}}}, "tenants.known.a.weight: 0: "),
            ({"known": {"a": {"weight": inf}}}, "tenants.known.a.weight"),
            ({"known": {"a": {"trust_group": "x:y"}}}, "tenants.known.a.trust_group"),
            ({"default_weight": -1}, "tenants.default_weight: -1: "),
            ({"isolate_cache": "perhaps"}, "tenants.isolate_cache"),
            ({"kees": "x"}, "did you mean keys?"),
            ({"keys": {"acme": "sk-canary"}}, "tenants.keys: give text"),
        ],
    )
    def test_mistakes(self, values: dict[str, Any], words: str) -> None:
        with pytest.raises(InputError) as error:
            load_config(None, {**ONE, "tenants": values}, {})
        assert words in str(error.value)
        assert "canary" not in str(error.value)

    def test_secrets_are_not_repeated(self) -> None:
        for environ in ({"FOREBAY_UPSTREAM_API_KEY": "[canary"}, {"FOREBAY_UPSTREAM_API_KEY": "1"}):
            with pytest.raises(InputError, match="FOREBAY_UPSTREAM_API_KEY") as error:
                load_config(None, ONE, environ)
            assert "canary" not in str(error.value)
            assert "1:" not in str(error.value)
        keys = {"FOREBAY_API_KEYS": "acme: canary", "FOREBAY_CACHE_SECRET": "canary" * 9}
        config = load_config(None, {**ONE, "tenants": {"keys": "env:FOREBAY_API_KEYS"}}, keys)
        assert "canary" not in config_yaml(config) + repr(config)


class TestCheckConfig:
    @pytest.mark.parametrize(
        ("keys", "status", "words"),
        [(KEYS, 0, "valid"), (f"acme: {ACME} oops", 2, "keys:1: give"), (None, 2, "No such file")],
    )
    def test_reads_the_files_that_it_names(
        self,
        keys: str | None,
        status: int,
        words: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        if keys is not None:
            key_file(tmp_path, keys).chmod(0o600)
        values = {**ONE, "tenants": {"keys": str(tmp_path / "keys")}, "upstream_api_key": BOLT}
        config = tmp_path / "proxy.yaml"
        config.write_text(yaml.safe_dump(values))
        assert main(["proxy", "--config", str(config), "--check-config"]) == status
        assert main(["proxy", "--config", str(config), "--print-config"]) == 0
        printed = capsys.readouterr()
        assert words in printed.err
        assert printed.err.count("\n") == 1
        assert "sk-" not in printed.out + printed.err

    def test_warns_of_keys_that_can_be_guessed_or_read(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        key_file(tmp_path, "acme: sk-12").chmod(0o644)
        config = tmp_path / "proxy.yaml"
        config.write_text(yaml.safe_dump({**ONE, "tenants": {"keys": str(tmp_path / "keys")}}))
        assert main(["proxy", "--config", str(config), "--check-config"]) == 0
        said = capsys.readouterr().err
        assert "warning: 1 API keys are shorter than 16 characters: can be guessed" in said
        assert "can be read by other users (mode 644)" in said
        assert "sk-12" not in said


async def check(security: Security, said: Said) -> None:
    """Look twice: a file is taken when it has not changed in between."""
    await security.check_files(said)
    await security.check_files(said)


class TestReload:
    def make(self, path: Path, **tenants: Any) -> Config:
        return load_config(None, {**ONE, "tenants": {"keys": str(path), **tenants}}, {})

    async def test_a_bad_file_keeps_the_old_keys_and_is_said_once(self, tmp_path: Path) -> None:
        path = key_file(tmp_path)
        security = Security(self.make(path), {})
        old, said = security.auth.ring, Said()
        security.say_notes(said)
        assert said == ["3 API keys of 2 tenants"]
        said.clear()
        await check(security, said)
        assert not said
        path.write_text("acme: sk-canary-new\nbroken\n")
        await check(security, said)
        await check(security, said)
        assert security.auth.ring is old
        assert [line for line in said if f"{path}:2: give" in line] == said
        assert len(said) == 1
        path.unlink()
        await check(security, said)
        assert security.auth.ring is old
        assert "No such file" in said[1]
        key_file(tmp_path, "bolt: sk-canary-newer-0001\n")
        await check(security, said)
        ring = security.auth.ring
        assert ring is not None
        assert (ring.tenant("sk-canary-newer-0001"), ring.tenant(ACME)) == ("bolt", None)
        assert said[2:] == ["using the new keys and certificate; 1 API keys of 1 tenants"]
        assert "canary" not in "".join(said)
        refused, renewed = LogEvent.KEYS_REFUSED, LogEvent.KEYS_LOADED
        assert [e for e, *_ in said.events[1:]] == [refused, refused, renewed]

    async def test_a_file_that_is_being_written_waits(self, tmp_path: Path) -> None:
        """Line by line, then cut in a key for good: neither is taken."""
        path = key_file(tmp_path, f"acme: {ACME}\nbolt: {BOLT}\n")
        security = Security(self.make(path), {})
        old, said = security.auth.ring, Said()
        for lines in range(1, 4):
            path.write_text("".join(f"t{i}: sk-canary-{i}-0123456789\n" for i in range(lines)))
            await security.check_files(said)
            assert security.auth.ring is old
        path.write_text(f"acme: {ACME}\nbolt: {BOLT[:-5]}")
        await check(security, said)
        assert security.auth.ring is old
        assert len(said) == 1
        assert "half written" in said[0]
        path.write_text(f"bolt: {BOLT}\n")
        await check(security, said)
        assert security.auth.ring is not None
        assert [*security.auth.ring.tenants] == ["bolt"]

    def test_a_new_configuration_is_taken_whole_or_not_at_all(self, tmp_path: Path) -> None:
        path = key_file(tmp_path)
        security = Security(self.make(path), {"FOREBAY_CACHE_SECRET": "s" * 16})
        alone = CacheSalts(b"s" * 16, {}).salt("acme")
        assert security.salts is not None
        assert security.salts.salt("acme") == alone
        with pytest.raises(InputError):
            security.reload(self.make(tmp_path / "none", isolate_cache=False))
        assert security.salts is not None
        security.reload(self.make(path, known={"acme": {"trust_group": "rag"}}))
        assert security.salts.salt("acme") != alone
        security.reload(self.make(path, isolate_cache=False))
        assert security.salts is None
        security.reload(load_config(None, ONE, {}))
        assert security.auth.ring is None

    def test_a_secret_that_is_too_short(self) -> None:
        with pytest.raises(InputError, match="FOREBAY_CACHE_SECRET: give 16 characters"):
            Security(load_config(None, ONE, {}), {"FOREBAY_CACHE_SECRET": "canary"})


@asynccontextmanager
async def with_keys(tmp_path: Path, **keys: Any) -> AsyncIterator[tuple[Stage, RawBackend]]:
    """A proxy that asks for keys, and its backend."""
    tenants = {"keys": str(key_file(tmp_path))}
    async with on_stage(whole, tenants=tenants, **keys) as (on, (backend,)):
        yield on, backend


class TestOverHttp:
    @pytest.mark.parametrize(
        "headers",
        [
            {},
            *(
                {"authorization": given}
                for given in (
                    "", "Bearer", "Bearer ", f"Basic {ACME}", f"Bearer {ACME}x",
                    f"Bearer {ACME} {ACME}",
                )
            ),
            {"x-api-key": f"{ACME}x"},
            {"api-key": f"{ACME}x"},
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
    async def test_wrong_keys(self, headers: dict[str, str], path: str, tmp_path: Path) -> None:
        async with with_keys(tmp_path) as (on, backend):
            async with on.post(path=path, headers=headers) as response:
                assert response.status == 401
                assert response.headers["www-authenticate"] == "Bearer"
                error = await error_of(response)
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
            for name in ("Authorization", "x-api-key", "api-key"):
                assert f"`{name}: " in error["message"]
            assert not backend.calls

    @pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
    async def test_right_keys_name_tenants_and_go_no_further(
        self, scheme: str, tmp_path: Path
    ) -> None:
        async with with_keys(tmp_path, upstream_api_key="upstream-key") as (on, backend):
            seen = decisions(on)
            for key in (ACME, ACME2, BOLT):
                assert await on.status(headers={"authorization": f"{scheme} {key}"}) == 200
            assert await on.status(path="/v1/embeddings", **with_key(BOLT)) == 200
            assert [request.tenant for request in seen] == ["acme", "acme", "bolt"]
            heads = [call.head.lower() for call in backend.calls]
            assert len(heads) == 4
            assert all("authorization: bearer upstream-key\r\n" in head for head in heads)
            assert not any(key in head for head in heads for key in (ACME, ACME2, BOLT))

    @pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/embeddings"])
    @pytest.mark.parametrize(
        "headers",
        [
            {"x-api-key": ACME},
            {"api-key": ACME},
            {"authorization": ACME},
            {"authorization": "Bearer of-another-login", "x-api-key": ACME},
            {"authorization": f"Bearer {ACME}", "x-api-key": "another"},
            {"authorization": f"Bearer {ACME}", "x-api-key": BOLT},
            {"x-api-key": "another", "api-key": ACME},
        ],
    )
    async def test_a_key_counts_wherever_an_api_puts_it(
        self, headers: dict[str, str], path: str, tmp_path: Path
    ) -> None:
        body = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}

        async with with_keys(tmp_path) as (on, backend):
            seen = decisions(on)
            assert await on.status(body, path=path, headers=headers) == 200
            assert [request.tenant for request in seen] == ["acme"] * (path != "/v1/embeddings")
            (call,) = backend.calls
            for key in (ACME, BOLT, "another"):
                assert key not in call.head

    async def test_without_a_key_of_its_own_the_backend_gets_none(self, tmp_path: Path) -> None:
        async with with_keys(tmp_path) as (on, backend):
            assert await on.status(**with_key(ACME)) == 200
            assert await on.status_of(on.url + "/v1/models", **with_key(ACME)) == 200
            assert not any("authorization" in call.head.lower() for call in backend.calls)

    async def test_health_needs_no_key_and_unknown_paths_say_nothing_new(
        self, tmp_path: Path
    ) -> None:
        async with with_keys(tmp_path) as (on, _):
            for path, status in (("/health", 200), ("/metrics", 404), ("/v1/models", 401)):
                assert await on.status_of(on.url + path) == status

    async def test_refused_before_the_body_is_read(self, tmp_path: Path) -> None:
        """The client has sent no byte of the body, and got no `100 Continue`."""
        async with with_keys(tmp_path) as (on, _):
            host, port = on.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer nobody\r\n"
                b"content-length: 8000000\r\nexpect: 100-continue\r\n\r\n"
            )
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 401")
            assert b"connection: close" in head.lower()
            assert b"100 Continue" not in head + await reader.read()  # until it is closed
            writer.close()

    @pytest.mark.parametrize("failures", [0, 30])
    @pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/embeddings"])
    async def test_a_connection_lives_on_after_a_refusal_only_if_the_body_was_there(
        self, path: bytes, failures: int, tmp_path: Path
    ) -> None:
        """The rest of an unread body could be taken for a request."""
        async with with_keys(tmp_path) as (on, backend):
            for _ in range(failures):
                async with on.post(**with_key("nobody")):
                    pass
            status = b"429" if failures else b"401"
            host, port = on.url.removeprefix("http://").split(":")
            head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 22\r\n\r\n" % path
            for body, closed in ((b'{"prompt": "x"}       ', False), (b"", True)):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(head + body)
                told = (await reader.readuntil(b"\r\n\r\n")).lower()
                assert told.startswith(b"http/1.1 " + status)
                assert (b"connection: close" in told) is closed
                length = int(told.partition(b"content-length: ")[2].split(b"\r")[0])
                await reader.readexactly(length)
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                answers = await reader.read()
                assert answers.startswith(b"" if closed else b"HTTP/1.1 200")
                assert bool(answers) is not closed
                writer.close()
            assert not backend.calls

    async def test_a_key_that_is_not_ascii_or_given_twice_is_no_http(self, tmp_path: Path) -> None:
        async with with_keys(tmp_path) as (on, backend):
            twice = [("authorization", f"Bearer {ACME}"), ("authorization", f"Bearer {BOLT}")]
            for headers in ([("authorization", "Bearer ÿ")], twice):
                async with on.client.post(
                    on.url + "/v1/completions", data=b"{}", headers=headers
                ) as response:
                    assert response.status == 400
                    assert (await response.json())["error"]["code"] == "bad_http"
            assert not backend.calls

    async def test_a_preflight_has_no_key_and_a_refusal_can_be_read_by_the_page(
        self, tmp_path: Path
    ) -> None:
        origin = {"origin": "https://chat.example"}

        async with with_keys(tmp_path, cors_origins=["https://chat.example"]) as (on, _):
            for path in ("/v1/completions", "/v1/models"):
                async with on.client.options(
                    on.url + path, headers={**origin, "access-control-request-method": "POST"}
                ) as response:
                    assert response.status == 204
                    assert "authorization" in response.headers["access-control-allow-headers"]
            async with on.post(headers=origin) as response:
                assert response.status == 401
                assert response.headers["access-control-allow-origin"] == origin["origin"]

    async def test_answers_are_counted_by_tenant(self, tmp_path: Path) -> None:
        async with with_keys(tmp_path) as (on, _):
            for key in (ACME, ACME2, BOLT, "nobody"):
                async with on.post(**with_key(key)):
                    pass
            assert await on.status(b"{", **with_key(BOLT)) == 400
            async with on.client.get(on.url + "/v1/models", **with_key(ACME)):
                pass
            text = on.proxy.metrics.text().decode()
            for tenant, status, count in (
                ("acme", 200, 3), ("bolt", 200, 1), ("bolt", 400, 1), ("none", 401, 1),
            ):  # fmt: skip
                line = f'requests_total{{status="{status}",tenant="{tenant}"}} {count}.0'
                assert f"forebay_tenant_{line}" in text

    async def test_the_length_of_a_prompt_is_taken_from_its_tenants_texts(
        self, tmp_path: Path
    ) -> None:
        async with with_keys(tmp_path) as (on, _):
            seen = decisions(on)
            for _ in range(100):
                on.proxy.app._estimate.learn(32_768, 16_384, "acme")
            for key in (BOLT, ACME):
                assert await on.status({"prompt": "x" * 4000}, **with_key(key)) == 200
            assert [request.prompt_tokens for request in seen] == [1000, 2000]

    async def test_a_flood_of_wrong_keys_gets_429_and_right_ones_still_pass(
        self, tmp_path: Path
    ) -> None:
        async with with_keys(tmp_path) as (on, _):
            statuses = []
            for _ in range(40):
                async with on.post(**with_key("nobody")) as response:
                    statuses.append(response.status)
            assert statuses[:20] == [401] * 20
            assert statuses[-1] == 429
            async with on.post(**with_key("nobody")) as response:
                error = (await response.json())["error"]
                assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_failures")
                assert int(response.headers["retry-after"]) >= 1
                assert response.headers["x-should-retry"] == "false"
            assert await on.status(**with_key(ACME)) == 200

    async def test_keys_change_while_it_runs(self, tmp_path: Path) -> None:
        async with with_keys(tmp_path) as (on, _):
            key_file(tmp_path, "new: sk-brand-new-key-0001\n")
            await asyncio.sleep(3 * WATCH_S)
            for key, status in ((ACME, 401), ("sk-brand-new-key-0001", 200)):
                assert await on.status(**with_key(key)) == status
            assert any("1 API keys of 1 tenants" in line for line in on.said)
            assert not any("sk-" in line for line in on.said)

    async def test_service_classes(self, tmp_path: Path) -> None:
        cases: list[tuple[dict[str, Any], dict[str, str], str | int]] = [
            ({}, {}, "standard"),
            ({"priority": 0}, {}, "standard"),
            ({"priority": -3}, {}, "interactive"),
            ({"priority": 7}, {}, "batch"),
            ({"priority": None}, {}, "standard"),
            ({"priority": 7}, {"x-forebay-class": "interactive"}, "interactive"),
            ({"priority": "soon"}, {"x-forebay-class": "batch"}, 400),
            ({"priority": True}, {}, "batch"),  # vLLM takes it for 1
            ({}, {"x-forebay-class": "urgent"}, 400),
            ({}, {"x-forebay-class": ""}, 400),
        ]

        async with with_keys(tmp_path) as (on, backend):
            seen = decisions(on)
            for fields, headers, wanted in cases:
                body = {"prompt": "x", **fields}
                async with on.post(body, **with_key(ACME, **headers)) as response:
                    if wanted == 400:
                        assert response.status == 400
                        param = (await response.json())["error"]["param"]
                        assert param == ("x-forebay-class" if not fields else "priority")
                    else:
                        assert response.status == 200
                        assert seen.pop().service_class == wanted
                        sent = json.loads(backend.calls[-1].body)
                        # Other tenants' requests in the engine are not passed.
                        own = {"priority": 0} if body.get("priority") else {}
                        assert {**sent, "cache_salt": 0} == {**body, **own, "cache_salt": 0}
            assert not seen


async def test_without_keys_the_clients_authorization_is_the_backends_to_check() -> None:
    async with on_stage(answers(401, b'{"error":"Unauthorized"}')) as (on, (backend,)):
        async with on.post(**with_key("theirs")) as response:
            assert (response.status, await response.read()) == (
                401,
                b'{"error":"Unauthorized"}',
            )
        assert "Bearer theirs" in backend.calls[0].head


def test_tenants_as_labels_are_few_and_stay_what_they_are() -> None:
    labels = TenantLabels(["acme"], most=2)
    names = ["", "a", "acme", "b", "c", "a", "d", "b"]
    assert [labels.label(name) for name in names] == [
        "none", "a", "acme", "b", "other", "a", "other", "b",
    ]  # fmt: skip
    assert len({labels.label(f"t{i}") for i in range(1000)}) == 1
    labels.configure(["d", "a"])
    assert [labels.label(name) for name in "dac"] == ["d", "a", "other"]
