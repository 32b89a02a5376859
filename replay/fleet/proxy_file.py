"""Write the proxy's configuration for a fleet, ready for `forebay proxy --config`."""

from pathlib import Path
from typing import Any

import yaml

from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import load_config
from forebay.replay.fleet.plan import CHAT_TOKENS, FleetPlan
from forebay.traces.ground.errors import InputError

HEADER = """\
# Written by `forebay fleet up`; the next one overwrites it. Put your own keys in a file and give
# it to `fleet up --config`. max_concurrency is the servers' --max-num-seqs, and
# long_prefill_token_threshold is their flag of that name. priority: they run with
# --scheduling-policy priority. scheduler: they run with Forebay's --scheduler-cls.
# kv_tokens: auto reads their /metrics.
"""
NEEDS_EXTRA = (
    "the proxy's configuration is without kv_events: they need pip install 'forebay[kv-events]'"
)


def proxy_yaml(plan: FleetPlan, base: Path | None, *, kv_events: bool) -> str:
    """Return the text of the file.

    Args:
        base: a configuration whose keys are kept. It may not have backends.
        kv_events: True if the proxy can follow KV events.

    Raises:
        InputError: where `base` is not a proxy configuration, or has backends.
    """
    keys: list[dict[str, Any]] = [
        {
            "name": server.name,
            "url": server.url,
            "max_concurrency": plan.seqs,
            "scheduler": "forebay" if plan.has_class else None,
            "long_prefill_token_threshold": plan.chunk or None,
            "priority": plan.policy == "priority" or None,
            "kv_events": server.kv_events if kv_events else None,
            "kv_replay": server.kv_replay if kv_events else None,
        }
        for server in plan.servers
    ]
    backends = [{key: value for key, value in all_.items() if value is not None} for all_ in keys]
    written: dict[str, Any] = {"backends": backends, "affinity": {"kv_tokens": "auto"}}
    user_keys = _read(base, backends) if base else {}
    if "buckets" not in user_keys:
        written["buckets"] = _buckets(plan.context)
    affinity = {**written["affinity"], **(user_keys.get("affinity") or {})}
    merged = {**written, **user_keys, "affinity": affinity}
    return HEADER + yaml.safe_dump(merged, sort_keys=False, allow_unicode=True, width=120)


def _buckets(context: int | None) -> list[dict[str, Any]]:
    """Return the proxy's default buckets, limited to the context of the model."""
    longest = context or Config().buckets[-1].up_to
    buckets = [bucket.model_dump(exclude_defaults=True) for bucket in Config().buckets]
    if longest <= CHAT_TOKENS:
        return [{**buckets[0], "up_to": longest}]
    return [*buckets[:-1], {**buckets[-1], "up_to": longest}]


def _read(base: Path, backends: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the keys of `base` (InputError: they do not suit a proxy for the fleet)."""
    load_config(base, {"backends": backends}, {})
    keys: dict[str, Any] = yaml.safe_load(base.read_text(encoding="utf-8")) or {}
    if "backends" in keys:
        raise InputError(f"--config {base}: backends: leave them out, the fleet's are written")
    return keys
