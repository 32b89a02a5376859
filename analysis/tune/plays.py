"""Play requests through a set-up in virtual time, and keep the arrays that figures are made of."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.analysis.statistics.quantiles import Floats
from forebay.replay.plan.slo import METRICS, Slo
from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.scenario import Scenario, simulate
from forebay.replay.sim.summary import Table
from forebay.traces.ground.command_line.garbage import no_collections
from forebay.traces.ground.schema import TraceRequest

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Play:
    """What one set-up made of the requests, in their order of arrival.

    Attributes:
        metrics: seconds of each request by metric (ttft, e2e, tpot, stall), NaN where undefined.
        done: the request was answered.
        in_time: the request met all targets.
        refused: number of requests that were rejected.
        gpu_s: GPU seconds in which servers computed.
        held_s: GPU seconds until the last answer, idle ones included.
        output_tokens: tokens of all answers.
        peak: most requests in flight on one server.
    """

    metrics: dict[str, Floats]
    done: Flags
    in_time: Flags
    refused: int
    gpu_s: float
    held_s: float
    output_tokens: int
    peak: int


def play(scenario: Scenario, rows: Sequence[TraceRequest], slos: Sequence[Slo]) -> Play:
    """Play `rows`, in order of arrival, at their times (InputError: a row fits no engine)."""
    with no_collections():
        simulated = simulate(rows, scenario)
        table = Table(simulated)
    ranks = scenario.engine.tensor_parallel_size
    _, _, output_tokens = table.completed_work()
    return Play(
        {name: table.metrics[name] for name in METRICS},
        table.done,
        table.good(slos),
        sum(outcome.reject is not None for outcome in simulated.outcomes),
        sum(simulated.busy) * table.last_s * ranks,
        scenario.gpus * table.last_s * ranks,
        int(output_tokens),
        _peak(simulated.outcomes),
    )


def _peak(outcomes: Sequence[SimOutcome]) -> int:
    """Return the most requests that were in flight on one server."""
    times: dict[str, list[tuple[float, int]]] = {}
    for outcome in outcomes:
        if outcome.backend is not None and outcome.sent_s is not None:
            events = times.setdefault(outcome.backend, [])
            events.append((outcome.sent_s, 1))
            if (finished_s := outcome.finished_s) is not None:
                events.append((finished_s, -1))
    most = 0
    for events in times.values():
        changes = np.array([change for _, change in sorted(events)])
        most = max(most, int(np.cumsum(changes).max()))
    return most
