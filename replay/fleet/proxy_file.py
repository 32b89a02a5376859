"""The proxy's configuration that fits a fleet: `forebay proxy --config` takes it as it is."""

from pathlib import Path
from typing import Any

import yaml

from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import load_config
from forebay.replay.fleet.plan import FleetPlan
from forebay.replay.fleet.sizes import CHAT_TOKENS
from forebay.traces.errors import InputError

HEADER = """\
# Written by `forebay fleet up` and overwritten by the next one; your own keys go in a file for
# its --config. max_concurrency is the servers' --max-num-seqs, long_prefill_token_threshold the
# flag of that name; kv_tokens: auto asks their /metrics.
"""
NEEDS_EXTRA = (
    "kv_events is left out of the proxy's configuration: it needs pip install 'forebay[kv-events]'"
)


def proxy_yaml(plan: FleetPlan, base: Path | None, *, kv_events: bool) -> str:
    """The file's text.

    Args:
        base: a configuration whose keys are kept; it may not have backends.
        kv_events: whether the proxy can follow them.

    Raises:
        InputError: where `base` is no proxy configuration, or has backends.
    """
    backends = []
    for server in plan.servers:
        backend: dict[str, Any] = {
            "name": server.name,
            "url": server.url,
            "max_concurrency": plan.setting.seqs,
        }
        if plan.setting.chunk:
            backend["long_prefill_token_threshold"] = plan.setting.chunk
        if kv_events and server.kv_events:
            backend |= {"kv_events": server.kv_events, "kv_replay": server.kv_replay}
        backends.append(backend)
    ours: dict[str, Any] = {"backends": backends, "affinity": {"kv_tokens": "auto"}}
    kept = _read(base, backends) if base else {}
    if "buckets" not in kept:
        ours["buckets"] = _buckets(plan.setting.context)
    affinity = {**ours["affinity"], **(kept.get("affinity") or {})}
    merged = {**ours, **kept, "affinity": affinity}
    return HEADER + yaml.safe_dump(merged, sort_keys=False, allow_unicode=True, width=120)


def _buckets(context: int | None) -> list[dict[str, Any]]:
    """The proxy's own, up to the context of the model."""
    longest = context or Config().buckets[-1].up_to
    buckets = [bucket.model_dump(exclude_defaults=True) for bucket in Config().buckets]
    if longest <= CHAT_TOKENS:
        return [{**buckets[0], "up_to": longest}]
    return [*buckets[:-1], {**buckets[-1], "up_to": longest}]


def _read(base: Path, backends: list[dict[str, Any]]) -> dict[str, Any]:
    """The keys of `base`, which must be right for a proxy in front of the fleet."""
    load_config(base, {"backends": backends}, {})
    kept: dict[str, Any] = yaml.safe_load(base.read_text(encoding="utf-8")) or {}
    if "backends" in kept:
        raise InputError(f"--config {base}: backends: leave them out, they are the fleet's")
    return kept
