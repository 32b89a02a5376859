"""Tenants named by API keys share the proxy as the configuration says, also after a reload."""

import asyncio
from pathlib import Path

from proxy_stage import RawBackend, stage

from forebay.proxy.config.sources import load_config
from forebay.replay.sim.clock import run

KEYS = "acme: key-of-acme-0123456789\nzeta: key-of-zeta-0123456789\n"


def test_a_quota_binds_its_tenant_only_and_outlives_a_reload(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    tenants = {
        "keys": str(keys),
        "known": {"acme": {"tokens_per_s": 10, "burst_tokens": 1_000}},
    }
    body = {"prompt": "x" * 3_600}  # about 900 tokens

    async def main() -> None:
        backend = RawBackend()
        async with backend.running() as raw, stage([raw.url], tenants=tenants) as on:

            async def ask(tenant: str) -> int:
                key = {"authorization": f"Bearer key-of-{tenant}-0123456789"}
                async with on.post(body, headers=key) as response:
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
                    config.core_buckets(),
                    now,
                    route=core._dispatcher.route,
                    affinity=core._dispatcher.affinity,
                    dispatch_ahead_s=0.3,
                    tenants=config.core_tenants(),
                    default_weight=2.0,
                )
            )
            assert await ask("acme") == 429
            await asyncio.sleep(100)
            assert await ask("acme") == 200

    run(main())
