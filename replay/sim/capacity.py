"""What engines can do at most with a given trace: how fast they empty it when all of it is there.

The measure behind "80 % load" and "2x capacity": requests handed out in turn, no proxy, no waiting
for arrivals. Nothing here looks at latency.
"""

from collections.abc import Sequence

from forebay.replay.engine.async_engine import new_core
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.cluster import served
from forebay.traces.schema import TraceRequest


def capacity_per_s(trace: Sequence[TraceRequest], config: EngineConfig, count: int) -> float:
    """Requests a second that `count` engines complete when all of `trace` is there at once."""
    return len(trace) / max(
        drain_s(trace[first::count], config) for first in range(min(count, len(trace)))
    )


def drain_s(trace: Sequence[TraceRequest], config: EngineConfig) -> float:
    """Seconds one engine takes for all of `trace`, submitted at once in the order of arrival."""
    engine, now = new_core(config), 0.0
    for row in trace:
        engine.add(served(row, 0.0, engine.limits.block_size))
    while engine.has_work:
        now += engine.step(now).duration_s
    return now
