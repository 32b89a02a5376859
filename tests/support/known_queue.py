"""A search on an engine whose highest load is known exactly.

A simulated engine that runs one request at a time, fed with equal requests at Poisson times, is the
queue M/D/1, whose waiting times have a closed form (A. K. Erlang, 1909; H. C. Tijms, A First Course
in Stochastic Models, 2003, 9.2). So the highest load at which 99 % wait at most ten service times
is known to any number of digits. The search knows nothing of this.
"""

from dataclasses import dataclass, replace
from decimal import Decimal, getcontext
from math import factorial

from forebay.analysis.search.cli import PARTS, SIM_PART, SIM_RESOLUTION
from forebay.analysis.search.result import SearchResult, result_of
from forebay.analysis.search.search import LoadSearch, SearchQuestion, least_part_s
from forebay.analysis.simulation.sim_trials import SimTrials
from forebay.replay.engine.config import EngineConfig
from forebay.replay.plan.schedule import Arrivals
from forebay.replay.plan.slo import Slo
from forebay.replay.sim.scenario import DIRECT, Scenario, simulate
from forebay.traces.ground.schema import TraceRequest

WANTED = 0.99
WAITS = 10  # service times that a request may wait
SCENARIO = Scenario(EngineConfig("llama-3-8b", "h200", max_num_seqs=1), 1, DIRECT)


@dataclass(frozen=True, slots=True)
class KnownQueue:
    """The engine as a queue: `lone_s` is an answer without waiting, `knee_per_s` the exact load."""

    service_s: float
    lone_s: float
    knee_per_s: float

    @property
    def slo(self) -> Slo:
        return Slo(None, "e2e", self.lone_s + WAITS * self.service_s)


def within(rate_per_s: float, service_s: float, wait_s: float) -> float:
    """Return the probability that a request of M/D/1 waits at most `wait_s`."""
    getcontext().prec = 60  # terms of both signs cancel
    rate, service, wait = Decimal(rate_per_s), Decimal(service_s), Decimal(wait_s)
    total = Decimal(0)
    for k in range(int(wait / service) + 1):
        left = rate * (wait - k * service)
        total += (-left) ** k / factorial(k) * left.exp() if k else left.exp()
    return float((1 - rate * service) * total)


def requests(count: int) -> list[TraceRequest]:
    return [TraceRequest(f"r{number}", float(number), 1000, 16) for number in range(count)]


def known_queue() -> KnownQueue:
    """Measure the engine's service time, and compute the knee from it."""
    at_once = [replace(row, arrival_s=0.0) for row in requests(300)]
    ends = [outcome.finished_s or 0.0 for outcome in simulate(at_once, SCENARIO).outcomes]
    service_s = (ends[-1] - ends[99]) / 200
    low, high = 0.1 / service_s, 0.999 / service_s
    for _ in range(60):
        middle = (low + high) / 2
        if within(middle, service_s, WAITS * service_s) >= WANTED:
            low = middle
        else:
            high = middle
    return KnownQueue(service_s, ends[0], low)


def searched(
    queue: KnownQueue,
    seed: int,
    resolution: float = SIM_RESOLUTION,
    part: int = SIM_PART,
    parts: int = PARTS,
) -> SearchResult:
    question = SearchQuestion(
        requests(20 * part),
        WANTED,
        resolution,
        part,
        parts,
        0.6 * queue.knee_per_s,
        least_part_s((queue.slo,), ()),
    )
    maker = SimTrials(SCENARIO, (queue.slo,), Arrivals("poisson"), seed)
    search = LoadSearch(question, maker)
    return result_of(search, search.run(), [str(queue.slo)])
