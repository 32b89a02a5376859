"""Find the least number of GPUs that meets the targets, by simulating one count after another.

A search belongs to one seed. It starts at a guess, doubles its stride until one count fails and a
larger one meets the targets, and then halves the distance between them. Searches run in parallel
processes. Each is deterministic, so its result does not depend on the process.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from forebay.analysis.sizing.judge import FleetJudgement, JudgedWindow, Misses, judge
from forebay.analysis.sizing.targets import LatencyTarget, NotMet
from forebay.analysis.sizing.workload import Users
from forebay.analysis.statistics.units import numbered
from forebay.replay.sim.scenario import Enough, Scenario, simulate
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest


@dataclass(frozen=True, slots=True)
class Question:
    """A simulation with everything set but the number of GPUs.

    Attributes:
        decides: only whether the targets are met counts, so a simulation ends when one is lost.
    """

    users: Users
    scenario: Scenario
    targets: tuple[LatencyTarget, ...]
    window: JudgedWindow
    seed: int
    decides: bool = False

    @property
    def unit(self) -> str:
        """The noun of a count: a GPU, or a server of several."""
        return "GPU" if self.gpus_per_server == 1 else "server"

    @property
    def gpus_per_server(self) -> int:
        """The GPUs of one engine. The counts of an answer are engines."""
        return self.scenario.engine.tensor_parallel_size

    def paid_gpus(self, engines: int) -> int:
        """Return the GPUs of `engines` engines, one spare included."""
        return (engines + 1) * self.gpus_per_server

    def ask(self, gpus: int) -> FleetJudgement:
        """Simulate `gpus` GPUs. Raises InputError if a target has no request to judge."""
        window, trace = self.window, _trace(self.users, self.seed, self.window.total_s)

        def new_enough() -> Enough:
            return Misses(self.targets, trace, window).decide

        scenario = replace(self.scenario, gpus=gpus)
        simulated = simulate(trace, scenario, new_enough if self.decides else None)
        judged = judge(simulated, self.targets, window, self.seed)
        for attained in judged.attained:
            if not attained.count:
                raise InputError(
                    f"--slo {attained.target}: not one request of seed {self.seed} to judge it by"
                    f" in {window.judged_s:g} s; give a longer --window (an answer of one token has"
                    " no tpot), or omit the target"
                )
        return judged


@lru_cache(4)
def _trace(users: Users, seed: int, duration_s: float) -> Sequence[TraceRequest]:
    return users.requests(seed, duration_s)


@dataclass(frozen=True, slots=True)
class LeastCount:
    """The least count that met the targets, and the judgements of all counts tried."""

    question: Question
    gpus: int
    asked: dict[int, FleetJudgement] = field(repr=False)


def least_gpus(question: Question, guess: int, most: int) -> LeastCount:
    """Search from `guess`. Raises NotMet if `most` GPUs do not meet the targets."""
    judgements: dict[int, FleetJudgement] = {}

    def meets(gpus: int) -> bool:
        judgements[gpus] = question.ask(gpus)
        return judgements[gpus].met

    # Stride from the guess until one count fails and a larger one meets the targets.
    at = min(max(1, guess), most)
    stride = max(1, round(guess / 16))
    if meets(at):
        low, high = 0, at
        while high > 1:
            at = max(1, high - stride)
            if not meets(at):
                low = at
                break
            high, stride = at, stride * 2
    else:
        low, high = at, 0
        while not high:
            if low >= most:
                raise _unmet(judgements[low], question.unit)
            at = min(most, low + stride)
            if meets(at):
                high = at
            else:
                low, stride = at, stride * 2
    # Halve the distance between both.
    while high - low > 1:
        at = (low + high) // 2
        if meets(at):
            high = at
        else:
            low = at
    return LeastCount(question, high, judgements)


def _unmet(judged: FleetJudgement, unit: str) -> NotMet:
    missed = [attained for attained in judged.attained if not attained.met]
    shares = ", ".join(f"{attained.target}: met by {attained.shown}" for attained in missed)
    error = NotMet(
        f"--slo: not met with {numbered(judged.gpus, unit)} either ({shares}, GPUs "
        f"{judged.busy:.0%} busy): more {unit}s do not help; smaller chunks "
        "(--max-num-batched-tokens) shorten the stalls that prefills cause, else relax the target"
    )
    error.prefill_part = judged.usage.prefill_part
    return error
