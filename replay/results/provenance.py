"""Make `run.json`: everything needed to repeat a run, and the definitions of its numbers."""

import asyncio
import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.plan import ReplayPlan
from forebay.replay.send.http.connection import CONNECT_TIMEOUT_S, KEEP_ALIVE_S
from forebay.replay.send.http.measure import DEFINITIONS

_PACKAGES = ("forebay", "aiohttp", "uvloop", "hdrhistogram", "orjson", "pyarrow")


def run_record(plan: ReplayPlan, started_unix_s: float, ended: str) -> dict[str, Any]:
    """Make the content of `run.json`, inside the run's event loop.

    Args:
        started_unix_s: the wall clock at second 0.
    """
    options, source, scan, schedule = plan.options, plan.source, plan.scan, plan.schedule
    arrivals, loop = schedule.arrivals, type(asyncio.get_running_loop())
    # What was planned, and how it was sent. All times of the run count from its start.
    return {
        "run_id": plan.run_id,
        "started_at": datetime.fromtimestamp(started_unix_s, UTC).isoformat(),
        "started_unix_s": started_unix_s,
        "ended": ended,
        "trace": {
            "path": source.name,
            "sha256": source.sha256(),
            "rows": len(scan.arrivals_s) + scan.dropped,
            "skipped_bad": scan.skipped,
            "dropped_too_long": scan.dropped,
            "truncated_too_long": scan.truncated(schedule.count),
        },
        "order": "trace",
        "seed": options.seed,
        "arrivals": str(arrivals),
        "think_s": options.think_s,
        "turns": "wait" if scan.linked and options.turns == "wait" else "trace",
        **_of(options, "history", "lengths", "rate_per_s", "speed", "duration_s", "time_scale"),
        "schedule": {
            "requests": schedule.count,
            "window_s": schedule.window_s,
            "sha256": schedule.sha256,
        },
        "targets": [{"name": target.name, "url": target.base} for target in plan.targets],
        "model": plan.served.model,
        "metrics": list(options.metrics),
        "random_weights": plan.served.random_weights,
        "max_model_len": source.limit,
        **_of(options, "endpoint", "salt", "too_long"),
        "max_in_flight": arrivals.closed or options.max_in_flight,
        **_of(options, "processes", "ray", "warmup"),
        "timeouts_s": {
            "connect_wall": CONNECT_TIMEOUT_S,
            "first_token": options.first_token_timeout_s,
            "stall": options.stall_timeout_s,
            "drain": options.drain_timeout_s,
            "keep_alive_wall": KEEP_ALIVE_S,
        },
        "buckets": [asdict(bucket) for bucket in options.buckets],
        "slos": [asdict(slo) for slo in plan.slos],
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
        "loop": f"{loop.__module__}.{loop.__qualname__}",
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "definitions": DEFINITIONS,
    }


def _of(options: ReplayOptions, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
