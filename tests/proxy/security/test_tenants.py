"""Tenants named by API keys share the proxy as the configuration says, also after a reload."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fakes.faulty_backends import streams
from fakes.tenant_keys import key_of, keys_of
from stages.proxy_stage import (
    DONE,
    EVENT,
    STREAM_HEAD,
    USAGE,
    Call,
    RawBackend,
    by_request,
    chunk,
    on_stage,
    settle,
    stage,
)

from forebay.proxy.config.sources import load_config
from forebay.proxy.config.tenants import KnownTenant, Tenants
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.http1.client.client import Origin
from forebay.proxy.security.spending import HOUR_S

KNOWN = {"acme": {"tokens_per_s": 10, "burst_tokens": 1_000}}


async def test_embeddings_use_the_same_quota(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "acme", "zeta")
    async with on_stage(None, tenants={"keys": keys, "known": KNOWN}) as (on, _):

        async def ask(tenant: str, path: str, body: object) -> int:
            async with on.post(body, path=path, headers=key_of(tenant)) as response:
                if response.status == 429:
                    assert (await response.json())["error"]["code"] == "tenant_quota"
                    assert int(response.headers["retry-after"]) > 10
                return int(response.status)

        text = {"input": "x" * 3_600}  # about 900 tokens
        assert await ask("acme", "/v1/embeddings", text) == 200
        assert await ask("acme", "/v1/embeddings", text) == 429
        assert await ask("acme", "/v1/completions", {"prompt": "x" * 3_600}) == 429
        assert await ask("acme", "/tokenize", {"prompt": "x" * 3_600}) == 200  # without an engine
        assert await ask("zeta", "/v1/embeddings", text) == 200
        assert await ask("acme", "/v1/rerank", {"query": "x"}) == 200  # there is room for it
        await asyncio.sleep(100)
        assert await ask("acme", "/v1/embeddings", text) == 200
        counted = 'forebay_rejects_total{bucket="none",reason="tenant_quota"} 1.0'
        assert counted in on.proxy.metrics.text().decode()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("limit", [KNOWN["acme"], {"tokens_per_hour": 5}])
async def test_tenants_that_are_not_listed_may_count_as_one(
    limit: dict[str, int], path: str, tmp_path: Path
) -> None:
    """Each of 1,500 users of an identity provider had a share and limits of its own."""
    keys = keys_of(tmp_path, "acme", "yoda", "zeta")
    known = {"acme": {}, "*": {"weight": 2, **limit}}
    async with on_stage(None, tenants={"keys": keys, "known": known}) as (on, (backend,)):

        async def ask(tenant: str) -> int:
            text = {"prompt": "x" * 3_600, "input": "x" * 3_600}
            return await on.status(text, path, headers=key_of(tenant))

        names = ("yoda", "zeta", "acme", "acme")
        assert [await ask(name) for name in names] == [200, 429, 200, 200]
        salts = [json.loads(call.body)["cache_salt"] for call in backend.calls]
        debts = on.proxy.app.turns.debts
        assert debts.paid_at("*") > 0.0 > debts.paid_at("zeta")
        fairness = on.proxy.driver.shaper._state.fairness
        assert fairness.weight("*") == 2.0
        await asyncio.sleep(HOUR_S)
        assert await ask("zeta") == 200  # its cache is its own
        assert json.loads(backend.calls[-1].body)["cache_salt"] not in salts


def test_the_entry_of_tenants_that_are_not_listed() -> None:
    tenants = Tenants(known={"acme": KnownTenant(), "*": KnownTenant(max_concurrency=1)})
    assert tenants.entry("zeta") is tenants.known["*"]
    assert tenants.entry("acme") is tenants.known["acme"]
    assert tenants.entry("") is None  # without keys
    assert Tenants(known={"acme": KnownTenant()}).entry("zeta") is None
    for of_one in ({"trust_group": "g"}, {"certificates": ("a",)}):
        with pytest.raises(ValueError, match="strangers to each other"):
            Tenants(known={"*": KnownTenant(**of_one)})


async def test_embeddings_that_no_backend_answers_use_no_quota(tmp_path: Path) -> None:
    tenants = {"keys": keys_of(tmp_path, "acme"), "known": KNOWN}
    async with on_stage(None, tenants=tenants) as (on, _):

        async def ask(body: object) -> int:
            return await on.status(body, "/v1/embeddings", headers=key_of("acme"))

        link = on.proxy.backends.links["b0"]
        assert await ask(b'{"input": ' + b"x" * 3_600) == 400
        good, link.origin = link.origin, Origin("http://127.0.0.1:9", 1.0)
        assert [await ask({"input": "x" * 3_600}) for _ in range(2)] == [503, 503]
        link.origin = good
        await asyncio.sleep(5)  # its health is asked again
        assert await ask({"input": "x" * 3_600}) == 200


async def test_a_quota_binds_its_tenant_only_and_outlives_a_reload(tmp_path: Path) -> None:
    tenants = {"keys": keys_of(tmp_path, "acme", "zeta"), "known": KNOWN}
    body = {"prompt": "x" * 3_600}  # about 900 tokens

    backend = RawBackend()
    async with backend.running() as raw, stage([raw.url], tenants=tenants) as on:

        async def ask(tenant: str) -> int:
            async with on.post(body, headers=key_of(tenant)) as response:
                if response.status == 429:
                    assert (await response.json())["error"]["code"] == "tenant_quota"
                    assert 30 <= int(response.headers["retry-after"]) <= 60
                status: int = response.status
                return status

        assert await ask("acme") == 200
        assert await ask("acme") == 429
        assert await ask("zeta") == 200
        config = load_config(
            None,
            {
                "backends": [{"url": raw.url}],
                "tenants": {**tenants, "default_weight": 2.0},
            },
            {},
        )
        on.proxy.driver.change(
            lambda core, now: core.changes.reconfigure(
                config.core_buckets(), now, tenants=config.core_tenants(), default_weight=2.0
            )
        )
        assert await ask("acme") == 429
        await asyncio.sleep(100)
        assert await ask("acme") == 200


def keyed(tmp_path: Path, **acme: Any) -> dict[str, Any]:
    """Keys of two tenants; what acme is known by."""
    keys = keys_of(tmp_path, "acme", "zeta")
    return {"tenants": {"keys": keys, "isolate_cache": False, "known": {"acme": acme}}}


async def test_priority_means_nothing_to_other_tenants(tmp_path: Path) -> None:
    """Without `priority: true` an engine that orders by it would take the client's number."""
    async with on_stage(None, **keyed(tmp_path)) as (on, backends):
        body = {"prompt": "x", "max_tokens": 3, "priority": -5}
        assert await on.status(body, headers=key_of("zeta")) == 200
        assert json.loads(backends[0].calls[0].body) == {**body, "priority": 0}
        (record,) = on.proxy.driver.shaper.recorder.receipts.ended.values()
        assert record.service_class == "interactive"


def test_a_class_above_its_grant_is_shed_as_standard() -> None:
    tenants = Tenants(known={"a": KnownTenant(classes=("interactive",))})
    for tenant, asked, counts in (
        ("a", "interactive", "interactive"),
        ("b", "interactive", "standard"),
        ("b", "batch", "batch"),
        ("", "interactive", "interactive"),
    ):
        assert tenants.class_among_all(tenant, asked) == counts  # type: ignore[arg-type]


@pytest.mark.parametrize("asks", [None, {"include_usage": False}, {"include_usage": True}])
async def test_a_stream_of_a_tenant_with_a_quota_is_counted(tmp_path: Path, asks: Any) -> None:
    """The event with the usage reaches only the client that asked for it."""
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    if asks is not None:
        body["stream_options"] = asks

    async with on_stage(None, **keyed(tmp_path, tokens_per_s=1_000)) as (on, backends):
        texts = []
        for tenant in ("acme", "zeta"):
            texts.append(await on.read(body, headers=key_of(tenant)))
        acme, zeta = (json.loads(call.body) for call in backends[0].calls)
        assert acme["stream_options"]["include_usage"] is True
        assert zeta == body
        assert texts[1] == EVENT + EVENT + USAGE + DONE
        assert texts[0] == (texts[1] if asks == {"include_usage": True} else EVENT + EVENT + DONE)


async def test_a_ratio_taught_by_blanks_gains_nothing(tmp_path: Path) -> None:
    """Blanks are few tokens for their bytes; dense text then looked like few tokens, too."""
    quota, burst, seconds = 100, 2_000, 30

    async def count(call: Call) -> None:
        """A token is a byte that is no blank, or 16 blanks."""
        prompt = json.loads(call.body)["prompt"]
        tokens = len(prompt.replace(" ", "")) + prompt.count(" ") // 16
        computed.append(tokens)
        usage = USAGE.replace(b'"prompt_tokens":7', b'"prompt_tokens":%d' % tokens)
        asked = b"include_usage" in call.body
        await call.send(STREAM_HEAD + chunk(EVENT) + chunk(usage if asked else b": none\n\n"))
        await call.send(chunk(DONE) + b"0\r\n\r\n")

    computed: list[int] = []

    keys = keyed(tmp_path, tokens_per_s=quota, burst_tokens=burst)
    async with on_stage(count, **keys) as (on, _):

        async def ask(prompt: str, **more: Any) -> None:
            body = {"prompt": prompt, "max_tokens": 3, "stream": True, **more}
            await on.read(body, headers=key_of("acme"))

        for _ in range(60):
            await ask(" " * 3_200, stream_options={"include_usage": True})
            await asyncio.sleep(2)
        computed.clear()
        for _ in range(4 * seconds):
            await ask("x" * 1_600)
            await asyncio.sleep(0.25)
        assert 1_600 < sum(computed) <= 1.1 * (burst + quota * seconds) + 1_600


async def test_a_prompt_that_was_never_counted_costs_twice_its_estimate(tmp_path: Path) -> None:
    """The client leaves before the end of its stream, where the usage would be."""

    keys = keyed(tmp_path, tokens_per_s=0.01, burst_tokens=3_500)
    async with on_stage(streams(EVENT, end="stay"), **keys) as (on, _):
        body = {"prompt": "x" * 4_000, "max_tokens": 3, "stream": True}
        for status in (200, 200, 429):
            assert await on.status(body, headers=key_of("acme")) == status
            await settle()


@pytest.mark.parametrize("split", [False, True])
async def test_answers_without_usage_are_measured_by_their_events(split: bool) -> None:
    """Streams of 50 tokens under a `max_tokens` of 5,000 reserve little once twenty have ended."""

    async def serve(call: Call) -> None:
        await call.send(STREAM_HEAD)
        for _ in range(10):
            tokens = [chunk(EVENT)] * 5 if split else [chunk(EVENT * 5)]
            await call.send(b"".join(tokens))
            await asyncio.sleep(0.01)
        await call.send(chunk(DONE) + b"0\r\n\r\n")

    async with on_stage(serve) as (on, _):
        lengths = on.proxy.driver.shaper._state.output_lengths
        for _ in range(20):
            assert lengths.expected("", "chat", 5_000) == 5_000
            await on.read({"prompt": "x", "max_tokens": 5_000, "stream": True})
            await settle()
        assert 50 <= lengths.expected("", "chat", 5_000) < 70


@pytest.mark.parametrize(
    ("fields", "sequences"),
    [
        ({"prompt": "x"}, 1),
        ({"prompt": "x", "n": 3}, 3),
        ({"prompt": ["x"] * 4}, 4),
        ({"prompt": ["x"] * 4, "n": 3, "best_of": 5}, 12),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]], "n": 2}, 4),
    ],
)
async def test_each_output_of_each_prompt_takes_a_slot(
    fields: dict[str, Any], sequences: int
) -> None:
    async def serve(call: Call) -> None:
        running.append(shapers[0].backends["b0"].sequences)
        await by_request(call)

    running: list[int] = []
    shapers: list[Shaper] = []

    async with on_stage(serve) as (on, _):
        shapers.append(on.proxy.driver.shaper)
        assert await on.status({"max_tokens": 3, **fields}) == 200
        assert running == [sequences]
