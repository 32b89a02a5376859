"""A closed loop in virtual time: so many requests in flight on one engine, the next when one ends.

No proxy, no arrival times: what an engine can do is asked, not what users would see.
"""

from collections.abc import Sequence
from dataclasses import replace

from forebay.replay.sim.fleet import Engine, Outcome, served
from forebay.traces.schema import TraceRequest


def closed_loop(
    trace: Sequence[TraceRequest], engine: Engine, name: str, at_once: int
) -> list[Outcome]:
    """Play all of `trace` on the idle `engine`, `at_once` in flight; outcomes in its order.

    A request's arrival is the moment its place was free, seconds; the trace's times do not count.
    """
    outcomes: list[Outcome] = []
    rows = iter(trace)

    def send(count: int, now: float) -> None:
        for _ in range(count):
            row = next(rows, None)
            if row is None:
                return
            outcome = Outcome(replace(row, arrival_s=now))
            outcome.backend, outcome.sent_s, outcome.served = name, now, served(row)
            outcomes.append(outcome)
            # What HTTP and tokenising cost delays every request alike: nobody overtakes.
            handed.append((now + engine.request_s, outcome))

    handed: list[tuple[float, Outcome]] = []
    send(at_once, 0.0)
    arrived, done = 0, 0
    while done < len(outcomes):
        due = engine.next_at()
        if arrived < len(handed) and handed[arrived][0] <= due:
            at, outcome = handed[arrived]
            arrived += 1
            assert outcome.served is not None
            engine.add(outcome.served, at)
            continue
        _, finished = engine.advance(due)
        done += len(finished)
        send(len(finished), due)
    return outcomes
