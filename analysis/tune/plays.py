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
    """The outcomes of the requests in a set-up, in order of arrival.

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


class Player:
    """Plays the same requests through any set-up."""

    def __init__(self, rows: Sequence[TraceRequest], slos: Sequence[Slo]) -> None:
        self._rows, self._slos = rows, slos

    def play(self, scenario: Scenario) -> Play:
        """Play the rows, in order of arrival, at their times (InputError: a row fits no engine)."""
        with no_collections():
            simulated = simulate(self._rows, scenario)
            table = Table(simulated)
        ranks = scenario.engine.tensor_parallel_size
        _, _, output_tokens = table.completed_work()
        return Play(
            {name: table.metrics[name] for name in METRICS},
            table.done,
            table.good(self._slos),
            sum(outcome.reject is not None for outcome in simulated.outcomes),
            sum(simulated.busy) * table.last_s * ranks,
            scenario.gpus * table.last_s * ranks,
            int(output_tokens),
            _peak(simulated.outcomes),
        )


_of_process: list[Player] = []
"""The player of a process of the pool, which gets the rows once: they take as long as a play."""


def start_player(rows: Sequence[TraceRequest], slos: Sequence[Slo]) -> None:
    """Begin a process of the pool."""
    _of_process[:] = [Player(rows, slos)]


def play_here(scenario: Scenario) -> Play:
    """Play a set-up in a process of the pool."""
    return _of_process[0].play(scenario)


def _peak(outcomes: Sequence[SimOutcome]) -> int:
    """Return the most requests that were in flight on one server."""
    sent = [o for o in outcomes if o.sent_s is not None and o.finished_s is not None]
    servers = np.array([outcome.backend for outcome in sent], dtype=object)
    starts_s, ends_s = (
        np.array([getattr(outcome, name) for outcome in sent], dtype=float)
        for name in ("sent_s", "finished_s")
    )
    most = 0
    for server in dict.fromkeys(servers):
        begun, ended = (np.sort(times[servers == server]) for times in (starts_s, ends_s))
        in_flight = np.arange(1, len(begun) + 1) - np.searchsorted(ended, begun, side="right")
        most = max(most, int(in_flight.max()))
    return most
