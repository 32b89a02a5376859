"""Ask every backend for its version, its models and its metrics.

Only for `forebay doctor`: no decision depends on it. Each question is bounded in time and size.
"""

import asyncio
import re
from collections.abc import Iterable
from typing import Any

import orjson

from forebay.proxy.backends.link import BackendLink
from forebay.proxy.backends.pool import Backends
from forebay.proxy.config.backends import rank_of
from forebay.proxy.http1.client.backend_errors import UpstreamFault

MOST_MODELS = 50
FACT_S = 1.5  # less than a worker has for its whole answer (share/workers_admin.py)
_SAMPLE = re.compile(rb"^vllm:([a-z_]+)(?:\{([^}]*)\})? ([0-9.e+-]+)", re.MULTILINE)
_ENGINE = re.compile(rb'engine="(\d+)"')
SUMMED = {  # over engines and models: the key of the answer by the name in vLLM's metrics
    b"num_requests_running": "running",
    b"num_requests_waiting": "waiting",
    b"num_preemptions_total": "preemptions",
    b"prefix_cache_queries_total": "prefix_queries",
    b"prefix_cache_hits_total": "prefix_hits",
    b"request_prompt_tokens_sum": "prompt_tokens",
    b"request_prompt_tokens_count": "prompts",
    b"request_queue_time_seconds_sum": "queue_s",
    b"request_prefill_time_seconds_sum": "prefill_s",
    b"request_prefill_time_seconds_count": "prefills",
}


async def backend_facts(
    backends: Backends, links: Iterable[BackendLink] | None = None
) -> list[dict[str, Any]]:
    """Return the facts of each backend as JSON, with None for a fact that it does not report.

    Args:
        links: the backends to ask, or None for all.
    """
    chosen = backends.links.values() if links is None else links
    return list(await asyncio.gather(*(_facts(backends, link) for link in list(chosen))))


async def _facts(backends: Backends, link: BackendLink) -> dict[str, Any]:
    version, models, metrics = await asyncio.gather(
        *(_get(backends, link, path) for path in ("/version", "/v1/models", "/metrics"))
    )
    reported_version = _json(version).get("version")
    entries = _json(models).get("data")
    entries = entries if isinstance(entries, list) else []
    names = [entry.get("id") for entry in entries if isinstance(entry, dict)]
    return {
        "name": link.name,
        "answers": any(answer is not None for answer in (version, models, metrics)),
        "version": reported_version if isinstance(reported_version, str) else None,
        "ignores_salt": sorted(link.salting.drops or ()),
        "salt_unknown": sorted(link.salting.unknown),
        "models": [name for name in names if isinstance(name, str)][:MOST_MODELS] or None,
        "engine": engine_facts(metrics, rank_of(link.config)) if metrics else None,
    }


async def _get(backends: Backends, link: BackendLink, path: str) -> bytes | None:
    try:
        async with asyncio.timeout(FACT_S):
            status, body = await backends.prober.get(link, path)
    except (TimeoutError, UpstreamFault, ValueError):
        return None
    return body if status == 200 else None


def _json(body: bytes | None) -> dict[str, Any]:
    try:
        fields = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}


def engine_facts(metrics: bytes, rank: int | None = None) -> dict[str, Any] | None:
    """Return the facts in vLLM's metrics, or None for metrics of another server.

    Args:
        rank: number of an engine of the server, or None for all its engines.
    """
    facts: dict[str, Any] = {}
    engines = sorted({int(number) for number in _ENGINE.findall(metrics)})
    label = b"" if rank is None or rank >= len(engines) else b'engine="%d"' % engines[rank]
    for name, labels, value in _SAMPLE.findall(metrics):
        if label not in labels:
            continue
        if name in SUMMED:
            facts[SUMMED[name]] = facts.get(SUMMED[name], 0.0) + float(value)
        elif name == b"cache_config_info":
            fields = dict(re.findall(rb'(\w+)="([^"]*)"', labels))
            caching = fields.get(b"enable_prefix_caching")
            facts["prefix_caching"] = None if caching is None else caching == b"True"
            size = fields.get(b"block_size", b"")
            facts["block_tokens"] = int(size) if size.isdigit() else None
    return facts or None
