"""Simulate a trace of any length without keeping its requests.

The arrival times are kept, because the schedule needs them all: making it takes 46 bytes a row (526
MiB for 10 million rows), and 8 bytes a row stay (149 MiB with everything else). Rows are read again
while they are played. A request that has ended is counted into histograms of three significant
digits, as in a replay. The share of the possible goodput and the times of sessions are not
computed, because they need every request.
"""

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from typing import Any

from forebay.replay.plan.schedule import Schedule
from forebay.replay.plan.slo import SESSION
from forebay.replay.plan.source import TraceSource
from forebay.replay.results.row import log_row
from forebay.replay.results.summary import RunTotals
from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.run_folder import row_of
from forebay.replay.sim.summary import simulated_verdict
from forebay.replay.sim.sweep import SweepCase
from forebay.replay.sim.workload import with_blocks
from forebay.traces.ground.command_line.garbage import no_collections
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.hlog import HlogWriter, IntervalLog
from forebay.traces.ground.schema import TraceRequest


def stream_case(case: SweepCase) -> dict[str, Any]:
    """Simulate one case, and return its summary with the keys of `summary.json`.

    Raises:
        InputError: a trace that cannot be read or paced, or a pace that needs all requests.
    """
    scenario, workload = case.scenario, case.workload
    if workload.load is not None or workload.arrivals.closed:
        raise InputError("--stream: give --rate or --speed; a --load needs all requests")
    if any(slo.metric == SESSION for slo in case.slos):
        raise InputError(f"--stream keeps no request: leave out --slo {SESSION}")
    source = workload.trace_source(scenario.engine.context)
    # Read the trace once for the times of all arrivals, and again while it is played.
    scan = source.scan()
    source.check(scan, len(scan.arrivals_s))
    if scan.linked and workload.turns == "wait":
        raise InputError("--stream keeps no request that others wait for: give --turns trace")
    schedule = workload.schedule(scan.arrivals_s, workload.rate)
    del scan
    # Count each request when it ends, so that no request stays in memory.
    buckets, engines = scenario.buckets(), scenario.new_engines()
    totals = RunTotals([bucket.name for bucket in buckets], case.slos)
    log = IntervalLog(HlogWriter(StringIO(), 0.0))

    def ended(outcome: SimOutcome) -> None:
        row = row_of(outcome, buckets, None)
        totals.add(row)
        log_row(log, row)

    fleet = scenario.new_fleet(engines, ended)
    gc.collect()
    started = time.process_time()
    with no_collections():
        fleet.run(_paced(source, schedule))
    log.close(totals.last_done_s)
    # The summary of a replay, with what only a simulation knows.
    summary = totals.summary(log.totals, schedule.window_s, closed=False, scale=1.0)
    last_s = totals.last_done_s  # 0.0 if every request was rejected as it came
    busy = [engine.busy_s / last_s if last_s else 0.0 for engine in engines.values()]
    return {
        "case": dict(case.values),
        **summary,
        **simulated_verdict(totals.requests, totals.completed, dict(totals.rejected)),
        "possible_goodput_per_s": None,
        "share_of_possible": None,
        "sessions": None,  # their requests are not kept
        "session_e2e_ms": None,
        "busy": [round(share, 4) for share in busy],
        "preemptions": sum(engine.preemptions for engine in engines.values()),
        "constants_remarks": scenario.constants_remarks(),
        "cpu_s": round(time.process_time() - started, 3),
    }


def _paced(source: TraceSource, schedule: Schedule) -> Iterator[TraceRequest]:
    first_s = schedule.times_s[0]
    for row, at_s in zip(source.requests(), schedule.times_s, strict=False):
        yield replace(with_blocks(row), arrival_s=at_s - first_s)
