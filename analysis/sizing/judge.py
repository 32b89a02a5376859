"""Judge whether a simulated fleet met its targets. Pure.

A percentile target is met if at least that share of its requests stayed within the limit. A
rejected request exceeds every limit. An answer of one token has no TPOT and does not count there.
Requests that arrived during the warm-up or the cool-down are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from forebay.analysis.sizing.binding import Usage, usage
from forebay.analysis.sizing.targets import LatencyTarget
from forebay.analysis.sizing.workload import CLASSES, class_of
from forebay.analysis.statistics.quantiles import order_statistic
from forebay.analysis.statistics.units import NONE
from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.scenario import Simulated
from forebay.replay.sim.summary import Table
from forebay.traces.ground.schema import TraceRequest


@dataclass(frozen=True, slots=True)
class JudgedWindow:
    """Seconds of arrivals. Only requests of `judged_s` count, and load continues after them."""

    warmup_s: float
    judged_s: float
    cooldown_s: float = 10.0

    @property
    def total_s(self) -> float:
        return self.warmup_s + self.judged_s + self.cooldown_s

    def counts(self, arrival_s: float) -> bool:
        return self.warmup_s <= arrival_s < self.warmup_s + self.judged_s


@dataclass(frozen=True, slots=True)
class Attained:
    """One target: `good` of `count` requests met it. `value_s` is the measured percentile."""

    target: LatencyTarget
    good: int
    count: int
    value_s: float

    @property
    def share(self) -> float | None:
        """The share of requests that met the target, or None without requests."""
        return self.good / self.count if self.count else None

    @property
    def shown(self) -> str:
        return NONE if self.share is None else f"{self.share:.1%}"

    @property
    def met(self) -> bool:
        """True if the target is met. False without requests."""
        return self.count > 0 and self.good >= self.target.share * self.count - 1e-9


@dataclass(frozen=True, slots=True)
class ClassTimes:
    """TTFT percentiles of one class in seconds, inf if that share was rejected."""

    count: int
    rejected: int
    p50_s: float
    p95_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class FleetJudgement:
    """The result of one simulation within the judged window.

    Attributes:
        hit_ratio: cached share of the prompt tokens of served requests.
        cpu_s: processor seconds of the simulation.
    """

    gpus: int
    seed: int
    attained: tuple[Attained, ...]
    classes: dict[str, ClassTimes]
    tpot_p95_s: float
    usage: Usage
    hit_ratio: float
    preemptions: int
    cpu_s: float

    @property
    def met(self) -> bool:
        return all(target.met for target in self.attained)

    @property
    def busy(self) -> float:
        """Share of time that an engine works, 1 if a backlog grew."""
        return min(1.0, self.usage.work_s)

    @property
    def rejected(self) -> int:
        return sum(times.rejected for times in self.classes.values())


def judge(
    simulated: Simulated, targets: Sequence[LatencyTarget], window: JudgedWindow, seed: int
) -> FleetJudgement:
    """Judge the arrivals that count."""
    table = Table(simulated)
    # Requests of the warm-up and the cool-down do not count.
    inside = np.array([window.counts(arrival_s) for arrival_s in table.arrival_s], dtype=np.bool_)
    kinds = np.array([class_of(outcome.request) for outcome in simulated.outcomes], dtype=object)
    served = [outcome for outcome in simulated.outcomes if outcome.served]
    prompts = sum(outcome.request.input_tokens for outcome in served)
    # Chats and documents also have percentiles of their own.
    classes = {}
    for kind in CLASSES:
        chosen = inside & (kinds == kind)
        if chosen.any():
            ttft = _samples(table, "ttft", chosen)
            marks = [order_statistic(ttft, share) for share in (0.5, 0.95, 0.99)]
            rejected = int((chosen & ~table.done).sum())
            classes[kind] = ClassTimes(int(chosen.sum()), rejected, *marks)
    return FleetJudgement(
        gpus=simulated.scenario.gpus,
        seed=seed,
        attained=tuple(
            _attained(table, target, inside & (kinds == target.kind) if target.kind else inside)
            for target in targets
        ),
        classes=classes,
        tpot_p95_s=_quantile(_samples(table, "tpot", inside), 0.95),
        usage=usage(simulated, window.total_s),
        hit_ratio=sum(outcome.cached_tokens for outcome in served) / prompts if prompts else 0.0,
        preemptions=simulated.preemptions,
        cpu_s=simulated.cpu_s,
    )


class Misses:
    """Counts requests that missed a target, until the rest cannot make up for them."""

    def __init__(
        self,
        targets: Sequence[LatencyTarget],
        trace: Sequence[TraceRequest],
        window: JudgedWindow,
    ) -> None:
        self._window = window
        kinds = [class_of(row) for row in trace if window.counts(row.arrival_s)]
        # A percentile lets a share of its samples miss. A request whose time is undefined is no
        # sample. It is counted all the same, so a simulation may end late, but never too early.
        self._left = {
            target: (1 - target.share) * sum(target.concerns(kind) for kind in kinds) + 1e-6
            for target in targets
        }

    def decide(self, outcome: SimOutcome) -> bool:
        """Count a request that has ended. True if a target is lost."""
        row = outcome.request
        if not self._window.counts(row.arrival_s):
            return False
        kind = class_of(row)
        for target in self._left:
            if target.concerns(kind) and _seconds(outcome, target.metric) > target.limit_s + 1e-9:
                self._left[target] -= 1
        return min(self._left.values()) < 0


def _seconds(outcome: SimOutcome, metric: str) -> float:
    """Return a metric of a request as `Table` has it: inf if rejected, 0 where undefined."""
    row, first, last = outcome.request, outcome.first_token_s, outcome.finished_s
    if first is None or last is None:
        return inf
    if metric == "ttft":
        return first - row.arrival_s
    if metric == "e2e":
        return last - row.arrival_s
    if metric not in ("tpot", "stall") or row.output_tokens < 2:
        return 0.0
    return outcome.stall_s if metric == "stall" else (last - first) / (row.output_tokens - 1)


def _samples(table: Table, metric: str, chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Ascending values of `metric`: inf for rejected requests, no value where undefined."""
    values = np.where(table.done, table.metrics[metric], inf)[chosen]
    return np.sort(values[~np.isnan(values)])


def _quantile(ordered: NDArray[np.float64], share: float) -> float:
    return order_statistic(ordered, share) if len(ordered) else 0.0


def _attained(table: Table, target: LatencyTarget, chosen: NDArray[np.bool_]) -> Attained:
    values = _samples(table, target.metric, chosen)
    good = int((values <= target.limit_s).sum())
    return Attained(target, good, len(values), _quantile(values, target.share))
