"""Measure the capacity of engines for a trace: completed requests a second when all are queued.

"80 % load" and "2x capacity" refer to this rate. Requests go to the engines in turn, without a
proxy and without waiting for arrivals. Latency plays no part.
"""

from collections.abc import Sequence
from math import inf

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import sim_request
from forebay.traces.ground.schema import TraceRequest


def capacity_per_s(trace: Sequence[TraceRequest], config: EngineConfig, count: int) -> float:
    """Return the requests a second that `count` engines complete when all are queued at once."""
    return len(trace) / max(
        drain_s(trace[first::count], config) for first in range(min(count, len(trace)))
    )


def mixed_capacity_per_s(trace: Sequence[TraceRequest], configs: Sequence[EngineConfig]) -> float:
    """Return the requests a second that different engines complete together.

    Each engine completes its part of the rate of a fleet of `count` equal engines. Handed out in
    turn, all requests would wait for the slowest engine.
    """
    count = len(configs)
    parts = {config: capacity_per_s(trace, config, count) / count for config in set(configs)}
    return sum(parts[config] for config in configs)


def drain_s(trace: Sequence[TraceRequest], config: EngineConfig) -> float:
    """Return the seconds that one engine takes for `trace`, queued at once in order of arrival."""
    engine, now = served_engine(config), 0.0
    for row in trace:
        engine.send(sim_request(row), now)
    while (at := engine.next_at()) < inf:
        now = at
        engine.advance(now)
    return now
