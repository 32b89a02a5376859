"""What engines can do at most with a given trace: how fast they empty it when all of it is there.

The measure behind "80 % load" and "2x capacity": requests handed out in turn, no proxy, no waiting
for arrivals. Nothing here looks at latency.
"""

from collections.abc import Sequence
from math import inf

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.fleet import served
from forebay.replay.sim.skipping import SkippingEngine
from forebay.traces.schema import TraceRequest


def capacity_per_s(trace: Sequence[TraceRequest], config: EngineConfig, count: int) -> float:
    """Requests a second that `count` engines complete when all of `trace` is there at once."""
    return len(trace) / max(
        drain_s(trace[first::count], config) for first in range(min(count, len(trace)))
    )


def drain_s(trace: Sequence[TraceRequest], config: EngineConfig) -> float:
    """Seconds one engine takes for all of `trace`, submitted at once in the order of arrival."""
    engine, now = SkippingEngine(config), 0.0
    for row in trace:
        engine.add(served(row), now)
    while (at := engine.next_at()) < inf:
        now = at
        engine.advance(now)
    return now
