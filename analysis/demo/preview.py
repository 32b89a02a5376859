"""Simulate the traffic of the demo in virtual time: the proxy, and models of other routers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from forebay.analysis.demo.processes import Engines
from forebay.proxy.config.schema import Config
from forebay.replay.plan.slo import default_slos
from forebay.replay.sim.scenario import DIRECT, Scenario
from forebay.replay.sim.sweep import SweepCase, run_case
from forebay.replay.sim.workload import SimWorkload
from forebay.traces.ground.buckets import DEFAULT_BUCKETS
from forebay.traces.ground.schema import TraceRequest

ROUTERS = {
    "round-robin": DIRECT,
    "least connections": "least_connections",
    "cache-aware": "cache_aware",
    "forebay": Config().routing,
}
"""Names in the table, and policies of `forebay simulate`."""


def preview(rows: Sequence[TraceRequest], fleet: Engines) -> list[dict[str, Any]]:
    """Return a summary for each router, with its name under "case"."""
    engine = replace(fleet.config(), time_scale=1.0)
    workload = SimWorkload(trace=rows)
    slos = default_slos(DEFAULT_BUCKETS)
    return [
        run_case(SweepCase({"router": name}, Scenario(engine, fleet.count, policy), workload, slos))
        for name, policy in ROUTERS.items()
    ]
