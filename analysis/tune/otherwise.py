"""The whole question: play the present set-up, check the twin, play the others, judge. No I/O."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from forebay.analysis.tune.figures import Observed, OtherwiseRow, Repeat, repeat, rows_of
from forebay.analysis.tune.plays import Play
from forebay.analysis.tune.setups import AS_IT_IS, SetUp, set_ups
from forebay.analysis.tune.verdict import Verdict, judge
from forebay.replay.plan.slo import Slo
from forebay.replay.sim.scenario import Scenario
from forebay.traces.ground.buckets import bucket_of
from forebay.traces.ground.schema import TraceRequest

Players = Callable[[Sequence[Scenario]], Iterable[Play]]
"""Plays the same requests through each scenario, in their order."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of `forebay tune`.

    Attributes:
        fitted: the twin's step times were fitted to the observed times.
        rows: the present set-up first. Alone, if the twin gives no advice.
        impossible: set-ups that this model and GPU cannot have, with the reason.
        in_buckets: number of requests by bucket.
    """

    requests: int
    span_s: float
    slos: tuple[Slo, ...]
    in_buckets: dict[str, int]
    twin: Repeat
    fitted: bool
    rows: tuple[OtherwiseRow, ...]
    impossible: dict[str, str]
    verdict: Verdict


def otherwise(
    base: Scenario,
    rows: Sequence[TraceRequest],
    slos: tuple[Slo, ...],
    run: Players,
    *,
    observed: Observed | None = None,
    fitted: Scenario | None = None,
    price_per_gpu_hour: float | None = None,
    most_change: float = inf,
) -> Answer:
    """Answer for `rows`, in order of arrival.

    Args:
        base: the present set-up.
        observed: what happened to the rows.
        fitted: the same set-up with step times fitted to that. It counts if it repeats it better.
        most_change: set-ups with a larger `change` are not played.
    """
    buckets = base.buckets()
    bucket = np.array([bucket_of(r.input_tokens, buckets) or "other" for r in rows], dtype=object)
    # The twin is judged before anything else is played: its word may be worth nothing.
    tried = [base] if fitted is None else [base, fitted]
    plays = list(run(tried))
    twins = [
        Repeat() if observed is None else repeat(observed, each, bucket, slos) for each in plays
    ]
    chosen = min(range(len(tried)), key=lambda n: (bool(twins[n].why_not), twins[n].distance))
    base, present, twin = tried[chosen], plays[chosen], twins[chosen]
    # A twin that repeats what happened plays the others.
    proposed: list[SetUp] = []
    impossible: dict[str, str] = {}
    if not twin.why_not:
        proposed, impossible = set_ups(base, present.peak)
        proposed = [set_up for set_up in proposed if set_up.change <= most_change]
    shown = [SetUp(AS_IT_IS, base), *proposed]
    played = [present, *run([set_up.scenario for set_up in proposed])] if proposed else [present]
    compared = rows_of(shown, played, bucket, twin, price_per_gpu_hour)
    return Answer(
        len(rows),
        rows[-1].arrival_s,
        slos,
        {name: int((bucket == name).sum()) for name in dict.fromkeys(bucket)},
        twin,
        fitted is not None and chosen == 1,
        tuple(compared),
        impossible,
        judge(compared, twin),
    )
