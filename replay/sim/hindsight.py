"""Whether refusals were right, found out by admitting what was refused.

A refusal says that a request would not have met its target. In virtual time that can be tried: the
same trace is played once more, and that one request is taken in. Nothing else differs before it
arrives, so the answer is exact.

Two things are asked of each. Would it have met its target itself? And would more requests have met
theirs altogether? Under a lasting overload the first is often so and the second is not: whoever is
taken in takes the place of the next.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from forebay.proxy.core.admission import Admit, refuse
from forebay.proxy.core.model import Bucket, RejectReason, Request
from forebay.proxy.core.routing import Option
from forebay.replay.sim.fleet import Fleet, Outcome
from forebay.replay.sim.scenario import Scenario
from forebay.traces.buckets import bucket_of
from forebay.traces.schema import TraceRequest

HORIZON_S = 60.0  # after a refusal: what taking the request in changes for others is over by then


@dataclass(frozen=True, slots=True)
class Targets:
    """By when a first token is wanted, by bucket, in seconds; what is not named has none.

    The policy is told: it is the client's timeout.
    """

    scenario: Scenario
    ttft_s: Mapping[str, float]

    def of(self, row: TraceRequest) -> float:
        return self.ttft_s.get(bucket_of(row.input_tokens, self.scenario.buckets()) or "", inf)

    def met(self, outcome: Outcome) -> bool:
        return outcome.ttft_s is not None and outcome.ttft_s <= self.of(outcome.request)


@dataclass(frozen=True, slots=True)
class Tried:
    """One refusal, and what taking the request in would have done.

    Attributes:
        ttft_s: of the request; None where it would have been refused in the queue after all.
        met: it would have met its target.
        gained: how many more of all requests would have met theirs, within HORIZON_S.
    """

    outcome: Outcome
    ttft_s: float | None
    met: bool
    gained: int


@dataclass(frozen=True, slots=True)
class Judged:
    """How right the decisions about a trace were.

    Attributes:
        missed: of those taken in, those without a first token in time.
        refused: on arrival.
        tried: a sample of these, or all.
    """

    requests: int
    met: int
    missed: Sequence[Outcome]
    refused: Sequence[Outcome]
    tried: Sequence[Tried]

    @property
    def missed_share(self) -> float:
        """Of the requests taken in."""
        return len(self.missed) / max(1, self.requests - len(self.refused))

    @property
    def false_share(self) -> float:
        """Of the refusals: those that would have met their targets."""
        return sum(t.met for t in self.tried) / max(1, len(self.tried))

    @property
    def false_rate(self) -> float:
        """Of the requests: those refused that would have met their targets."""
        return self.false_share * len(self.refused) / max(1, self.requests)

    @property
    def costly_share(self) -> float:
        """Of the refusals: those without which more requests would have met their targets."""
        return sum(t.met and t.gained > 0 for t in self.tried) / max(1, len(self.tried))

    @property
    def gained(self) -> float:
        """Requests more that meet their targets, on average, for a refusal that is not made."""
        return sum(t.gained for t in self.tried) / max(1, len(self.tried))


def judge(
    trace: Sequence[TraceRequest], targets: Targets, sample: int = 100, seed: int = 0
) -> Judged:
    """Play the trace, then try up to `sample` of its refusals, drawn at random."""
    outcomes = _play(trace, targets, refuse)
    refused = [o for o in outcomes if o.reject and not o.reject.queued_s]
    taken = [o for o in outcomes if not (o.reject and not o.reject.queued_s)]
    missed = [o for o in taken if not targets.met(o)]
    chosen = refused
    if len(refused) > sample:
        chosen = Random(f"{seed}:refusals").sample(refused, sample)
    tried = [_try(o, trace, outcomes, targets) for o in chosen]
    return Judged(len(trace), len(taken) - len(missed), missed, refused, tried)


def _try(
    outcome: Outcome,
    trace: Sequence[TraceRequest],
    before: Sequence[Outcome],
    targets: Targets,
) -> Tried:
    row = outcome.request
    until = row.arrival_s + HORIZON_S
    # Those that come later change nothing for those that are counted, but for the queue's order.
    part = [r for r in trace if r.arrival_s < until + HORIZON_S / 2]
    after = _play(part, targets, _but(row.id))
    counted = sum(r.arrival_s < until for r in part)
    then = sum(map(targets.met, after[:counted])) - sum(map(targets.met, before[:counted]))
    itself = next(o for o in after if o.request.id == row.id)
    return Tried(outcome, itself.ttft_s, targets.met(itself), then)


def _but(request_id: str) -> Admit:
    """The rule, but for one request, which is taken in."""

    def admit(
        request: Request, bucket: Bucket, option: Option, queued: int, idle: bool
    ) -> RejectReason | None:
        if request.id == request_id:
            return None
        return refuse(request, bucket, option, queued, idle)

    return admit


def _play(trace: Sequence[TraceRequest], targets: Targets, admit: Admit) -> list[Outcome]:
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
