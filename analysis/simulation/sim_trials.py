"""Measure loads of `forebay search` in virtual time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.analysis.runs.run import LATENCIES as COLUMNS
from forebay.analysis.search.trial import TrialRow, part_seed, trial_row
from forebay.replay.plan.schedule import Arrivals
from forebay.replay.plan.slo import SESSION, Slo, check_sessions
from forebay.replay.sim.scenario import Scenario, simulate
from forebay.replay.sim.summary import Table
from forebay.replay.sim.workload import SimWorkload
from forebay.traces.ground.schema import TraceRequest


@dataclass(frozen=True, slots=True)
class SimTrials:
    """Trials in virtual time. Every part starts with empty engines."""

    scenario: Scenario
    slos: tuple[Slo, ...]
    arrivals: Arrivals
    seed: int

    def run(self, rows: Sequence[TraceRequest], rate_per_s: float, part: int) -> TrialRow:
        workload = SimWorkload(
            rows, arrivals=self.arrivals, rate=rate_per_s, seed=part_seed(self.seed, part)
        )
        trace, _ = workload.requests(self.scenario.engine.context, lambda _: 0.0)
        table = Table(simulate(trace, self.scenario))
        values = {metric: np.where(table.done, table.metrics[metric], np.nan) for metric in COLUMNS}
        check_sessions(self.slos, bool(table.tasks_s))
        values[SESSION] = table.metrics[SESSION]
        return trial_row(rate_per_s, part, table.arrival_s, table.bucket, values, self.slos)
