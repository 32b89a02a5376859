"""Run a closed loop in virtual time: a fixed number of requests in flight on one engine.

There is no proxy and arrival times do not count: this measures the engine, not what users see.
"""

from collections.abc import Sequence
from dataclasses import replace

from forebay.replay.sim.engine.served import ServedEngine
from forebay.replay.sim.fleet import SimOutcome, sim_request
from forebay.traces.ground.schema import TraceRequest


def closed_loop(
    trace: Sequence[TraceRequest], engine: ServedEngine, name: str, at_once: int
) -> list[SimOutcome]:
    """Play all of `trace` on the idle `engine`, `at_once` in flight. Outcomes are in its order.

    A request arrives, in seconds, at the moment its slot became free.
    """
    outcomes: list[SimOutcome] = []
    rows = iter(trace)

    def send(count: int, now: float) -> None:
        for _ in range(count):
            row = next(rows, None)
            if row is None:
                return
            outcome = SimOutcome(replace(row, arrival_s=now))
            outcome.backend, outcome.sent_s, outcome.served = name, now, sim_request(row)
            outcomes.append(outcome)
            engine.send(outcome.served, now)

    send(at_once, 0.0)
    done = 0
    while done < len(outcomes):
        due = engine.next_at()
        _, finished = engine.advance(due)
        done += len(finished)
        send(len(finished), due)
    return outcomes
