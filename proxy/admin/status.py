"""The JSON of `/status`: the proxy, its configuration, and each backend."""

import asyncio
import platform
from importlib.metadata import version
from typing import Any

from forebay.proxy.api.dialects import DIALECTS
from forebay.proxy.app import App
from forebay.proxy.backends.pool import Backends
from forebay.proxy.core.policy.long_prefills import blocks_short_prompts
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.reload import Reloader
from forebay.proxy.services import Services
from forebay.traces.ground.command_line.messages import SHOWN

VERSIONS = {
    "forebay": version("forebay"),
    "python": platform.python_version(),
    "aiohttp": version("aiohttp"),
}


def status_fields(
    services: Services, app: App, reloader: Reloader, *, uptime_s: float
) -> dict[str, Any]:
    """Return the JSON of `/status`."""
    shaper, now, config = services.driver.shaper, services.driver.clock(), reloader.config
    protection, capture, ledger = services.protection, services.capture, services.ledger
    return {
        "ready": app.ready,
        "mode": config.mode,
        "routing": config.observe.routing if config.mode == "observe" else config.routing,
        "draining": app.draining or app.leaving,
        "versions": VERSIONS,
        "config": {
            "generation": reloader.generation,
            "last_reload": reloader.message,
            "needs_restart": list(reloader.restart),
        },
        "shedding_classes": protection.shed,
        "short_of": list(protection.reading.over(0)),
        "uptime_s": round(uptime_s, 1),
        "active_requests": app.active,
        "tasks": len(asyncio.all_tasks()),
        "bytes_per_token": round(services.estimate.bytes_per_token, 3),
        "queued": {bucket: shaper.queued(bucket) for bucket in shaper.buckets},
        "held": app.held.count,
        "capture": capture.status() if capture else None,
        "usage": ledger.status() if ledger else None,
        "share": services.exchange.status(),
        "unserved_names": services.backends.models.unserved_names(),
        "backends": [
            {**_backend(backend, shaper, now), **_state(services.backends, backend, now)}
            for backend in shaper.backends.values()
        ],
    }


def _backend(backend: Backend, shaper: Shaper, now: float) -> dict[str, Any]:
    fixed, linear, pairs = backend.cost.scale
    return {
        "name": backend.name,
        "up": backend.up,
        "in_flight": len(backend.in_flight) + backend.passing,
        "in_flight_elsewhere": backend.running - backend.sequences - backend.passing,
        "max_concurrency": backend.spec.max_concurrency,
        "long_prefill_token_threshold": (
            int(backend.spec.chunk_tokens)
            if backend.prefill_queue.chunked and backend.spec.scheduler == "vllm"
            else None
        ),
        "scheduler": backend.spec.scheduler,
        "long_prompts_block": blocks_short_prompts(backend.spec, shaper.buckets.values()),
        "prefills": len(backend.prefills),
        "backlog_s": round(backend.prefill_queue.backlog_s(now), 3),
        "queued": {bucket: len(queue) for bucket, queue in backend.queues.items()},
        "kv_tokens": None if backend.kv_tokens == float("inf") else backend.kv_tokens,
        "models": None if backend.models is None else sorted(backend.models)[:SHOWN],
        "models_count": None if backend.models is None else len(backend.models),
        "kv_reserved_tokens": backend.kv.tokens,
        "prefix_index_blocks": len(backend.cache.prefixes),
        "prefix_index": _prefix_index(backend),
        "prompt_tokens_sent": backend.sent_prompt_tokens,
        "prefill_cost": {
            "observations": backend.cost.observations,
            "proven_tokens": round(backend.cost.proven_tokens),
            "relative_error": round(backend.cost.error.at(1.0), 3),
            "seconds_10k_tokens": round(backend.cost.predict_s(10_000, 10_000), 4),
            "seconds_100k_tokens": round(backend.cost.predict_s(100_000, 100_000), 4),
            "scale": [round(x, 4) for x in (fixed, linear, pairs)],
        },
    }


def _state(backends: Backends, backend: Backend, now: float) -> dict[str, Any]:
    """Return the state of a backend's link, with its health unless it is being removed."""
    name, health = backend.name, backends.health
    link = backends.links.get(name)
    drained = link is not None and link.drained
    state = {
        "draining": backend.draining or drained,
        "lost_model": link.lost_model if link is not None else "",
    }
    if name not in health:
        return state
    return {**state, **health.status(name, now)}


def _prefix_index(backend: Backend) -> dict[str, Any]:
    """Return the mode of the prefix index, and its error in tokens per request."""
    error, held = backend.cache.error, backend.cache.engine_blocks
    return {
        "mode": backend.cache.mode,
        "paths": {
            # Other prompts cannot be tokenised as the engine does it (kv_events/tokenize.py).
            path: backend.cache.mode if dialect.tokenizes else backend.cache.estimate
            for path, dialect in DIALECTS.items()
        },
        "held_engine_blocks": None if held is None else len(held),
        "kept_share": round(backend.cache.kept, 3),
        "answers": error.answers,
        "mean_error_tokens": round(error.mean_tokens, 1),
        "bias_tokens": round(error.bias_tokens, 1),
        "within_a_block": round(error.within_block_share, 4),
    }
