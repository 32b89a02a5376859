"""Whether refusals were right, found out by not making them.

A refusal says that a request would not have met its target. In virtual time that can be tried: the
same trace is played once more and the request is taken in. Nothing else differs before it arrives,
so the answer is exact. Two questions are asked.

Alone: would this one have met its target? Under a lasting overload that is so for nearly every one:
whoever is taken in by way of exception takes the place of the next, and somebody must be refused.
No rule can have few such refusals and few late answers at once.

Together: would more requests have met theirs if refusals were made by another rule, or not at all
(those taken in then leave the queue when their time is over)? What that comes to are the refusals
that cost somebody an answer in time and gave it to nobody else.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from forebay.proxy.core.model import Bucket, RejectReason, Request
from forebay.proxy.core.policy.admission import Admit, refuse
from forebay.proxy.core.policy.routing import Option
from forebay.replay.sim.fleet import Fleet, SimOutcome
from forebay.replay.sim.scenario import Scenario
from forebay.traces.buckets import bucket_of
from forebay.traces.schema import TraceRequest

AFTER_S = 60.0  # later arrivals than this do not matter to one request any more


@dataclass(frozen=True, slots=True)
class TtftTargets:
    """By when a first token is wanted, by bucket, in seconds; what is not named has none.

    The policy is told: it is the client's timeout.
    """

    scenario: Scenario
    ttft_s: Mapping[str, float]

    def of(self, row: TraceRequest) -> float:
        return self.ttft_s.get(bucket_of(row.input_tokens, self.scenario.buckets()) or "", inf)

    def met(self, outcome: SimOutcome) -> bool:
        return outcome.ttft_s is not None and outcome.ttft_s <= self.of(outcome.request)


@dataclass(frozen=True, slots=True)
class RejectionHindsight:
    """How right the decisions about a trace were.

    Attributes:
        requests: how many there were.
        met: of them, those with a first token in time.
        missed: taken in, and without a first token in time.
        refused: on arrival.
        tried: of the refusals that were tried alone (a sample, or all), whether each was false.
        otherwise: how many would have met their targets under other rules, by name.
    """

    requests: int
    met: int
    missed: Sequence[SimOutcome]
    refused: Sequence[SimOutcome]
    tried: Mapping[str, bool]
    otherwise: Mapping[str, int]

    @property
    def missed_share(self) -> float:
        """Admitted but missed: of the requests taken in."""
        return len(self.missed) / max(1, self.requests - len(self.refused))

    @property
    def false_alone(self) -> float:
        """Of the refusals: those that would have met their targets, all others decided by rule."""
        return sum(self.tried.values()) / max(1, len(self.tried))

    @property
    def false_together(self) -> float:
        """Of the requests: those refused for nothing; what the best of the other rules gains."""
        return max(0, max(self.otherwise.values()) - self.met) / max(1, self.requests)


def judge(
    trace: Sequence[TraceRequest], targets: TtftTargets, sample: int = 100, seed: int = 0
) -> RejectionHindsight:
    """Play the trace by the rule and by others, and try up to `sample` refusals alone."""
    outcomes = _play(trace, targets, refuse)
    refused = [o for o in outcomes if o.reject and not o.reject.queued_s]
    met = sum(map(targets.met, outcomes))
    missed = [
        o for o in outcomes if not targets.met(o) and not (o.reject and not o.reject.queued_s)
    ]
    chosen = refused
    if len(refused) > sample:
        chosen = Random(f"{seed}:refusals").sample(refused, sample)
    tried = {o.request.id: _false(o.request, trace, targets) for o in chosen}
    otherwise = {
        name: sum(map(targets.met, _play(trace, targets, rule))) for name, rule in OTHERS.items()
    }
    return RejectionHindsight(len(trace), met, missed, refused, tried, otherwise)


def _false(row: TraceRequest, trace: Sequence[TraceRequest], targets: TtftTargets) -> bool:
    """Whether the request meets its target when it is taken in."""
    until = row.arrival_s + AFTER_S
    after = _play([r for r in trace if r.arrival_s < until], targets, _but(row.id))
    return targets.met(next(o for o in after if o.request.id == row.id))


def _never(
    request: Request, bucket: Bucket, option: Option, queued: int, idle: bool
) -> RejectReason | None:
    return None


def _without_margin(
    request: Request, bucket: Bucket, option: Option, queued: int, idle: bool
) -> RejectReason | None:
    option.margin_s = 0.0
    return refuse(request, bucket, option, queued, idle)


OTHERS: Mapping[str, Admit] = {"never": _never, "without margin": _without_margin}


def _but(request_id: str) -> Admit:
    """The rule, but for one request, which is taken in."""

    def admit(
        request: Request, bucket: Bucket, option: Option, queued: int, idle: bool
    ) -> RejectReason | None:
        if request.id == request_id:
            return None
        return refuse(request, bucket, option, queued, idle)

    return admit


def _play(trace: Sequence[TraceRequest], targets: TtftTargets, admit: Admit) -> list[SimOutcome]:
    scenario = targets.scenario
    engines = {f"gpu{number}": scenario.new_engine() for number in range(scenario.gpus)}
    policy = scenario.new_policy(list(engines), admit)
    collecting = gc.isenabled()
    gc.disable()
    try:
        return Fleet(policy, engines, patience=targets.of).run(trace)
    finally:
        if collecting:
            gc.enable()
