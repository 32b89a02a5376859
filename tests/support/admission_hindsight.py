"""Check in virtual time whether rejections were right, by admitting the rejected requests.

Would more requests have met their targets under another admission rule, or without rejections
(admitted requests then leave the queue at their deadline)? The difference counts the rejections
that cost one request its answer in time and gave it to no other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from forebay.proxy.core.model import Bucket, RejectReason, Request
from forebay.proxy.core.policy.admission import Admit
from forebay.proxy.core.policy.admission import refuse as by_rule
from forebay.proxy.core.policy.routing import Option
from forebay.replay.sim.fleet import Fleet, SimOutcome
from forebay.replay.sim.scenario import Scenario
from forebay.traces.ground.buckets import bucket_of
from forebay.traces.ground.command_line.garbage import no_collections
from forebay.traces.ground.schema import TraceRequest


@dataclass(frozen=True, slots=True)
class TtftTargets:
    """TTFT targets by bucket, in seconds. A bucket without a name here has no target.

    The policy gets the target as the client's timeout.
    """

    scenario: Scenario
    ttft_s: Mapping[str, float]

    def of(self, row: TraceRequest) -> float:
        return self.ttft_s.get(bucket_of(row.input_tokens, self.scenario.buckets()) or "", inf)

    def met(self, outcome: SimOutcome) -> bool:
        return outcome.ttft_s is not None and outcome.ttft_s <= self.of(outcome.request)


@dataclass(frozen=True, slots=True)
class RejectionHindsight:
    """The admission decisions of one trace, judged.

    Attributes:
        requests: number of requests.
        met: number with a first token in time.
        missed: admitted requests without a first token in time.
        rejected: requests rejected on arrival.
        otherwise: number of requests in time under each other rule, by its name.
    """

    requests: int
    met: int
    missed: Sequence[SimOutcome]
    rejected: Sequence[SimOutcome]
    otherwise: Mapping[str, int]

    @property
    def missed_share(self) -> float:
        """Share of the admitted requests that missed their targets."""
        return len(self.missed) / max(1, self.requests - len(self.rejected))

    @property
    def false_together(self) -> float:
        """Share of the requests that the best of the other rules would have gained."""
        return max(0, max(self.otherwise.values()) - self.met) / max(1, self.requests)


def judge(trace: Sequence[TraceRequest], targets: TtftTargets) -> RejectionHindsight:
    """Play the trace by the rule and by others."""
    outcomes = _play(trace, targets, by_rule)
    rejected = [o for o in outcomes if o.reject and not o.reject.queued_s]
    met = sum(map(targets.met, outcomes))
    missed = [
        o for o in outcomes if not targets.met(o) and not (o.reject and not o.reject.queued_s)
    ]
    otherwise = {
        name: sum(map(targets.met, _play(trace, targets, rule))) for name, rule in OTHERS.items()
    }
    return RejectionHindsight(len(trace), met, missed, rejected, otherwise)


def _never(
    request: Request, bucket: Bucket, option: Option, queued: int, idle: bool
) -> RejectReason | None:
    return None


def _without_margin(
    request: Request, bucket: Bucket, option: Option, queued: int, idle: bool
) -> RejectReason | None:
    option.margin_s = 0.0
    return by_rule(request, bucket, option, queued, idle)


OTHERS: Mapping[str, Admit] = {"never": _never, "without margin": _without_margin}


def _play(trace: Sequence[TraceRequest], targets: TtftTargets, admit: Admit) -> list[SimOutcome]:
    scenario = targets.scenario
    engines = scenario.new_engines()
    policy = scenario.new_policy(list(engines), admit)
    with no_collections():
        return Fleet(policy, engines, patience=targets.of).run(trace)
