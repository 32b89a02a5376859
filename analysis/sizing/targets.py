"""Latency targets on percentiles."""

import re
from dataclasses import dataclass

from forebay.analysis.sizing.workload import CLASSES, Users
from forebay.replay.plan.slo import METRICS, parse_slos
from forebay.traces.ground.buckets import DEFAULT_BUCKETS
from forebay.traces.ground.errors import InputError

DEFAULT_SLO = ",".join(
    [
        *(f"{bucket.name}.ttft_p95={bucket.target_s:g}s" for bucket in DEFAULT_BUCKETS),
        "tpot_p95=100ms",
    ]
)
_NAME = re.compile(r"(?:([a-z]+)\.)?([a-z0-9]+)_p([0-9]+(?:\.[0-9]+)?)")


class NotMet(InputError):
    """No number of GPUs meets a target. Any other bad input is a plain InputError.

    Attributes:
        prefill_part: share of the work that is prefill, in the largest fleet that was simulated.
    """

    prefill_part: float = 0.0


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """At least `share` of the requests of `kind` (None: all) have `metric` <= `limit_s`."""

    kind: str | None
    metric: str
    share: float
    limit_s: float

    @property
    def name(self) -> str:
        return f"{f'{self.kind}.' if self.kind else ''}{self.metric}_p{self.share * 100:g}"

    def __str__(self) -> str:
        limit = f"{self.limit_s:g}s" if self.limit_s >= 1 else f"{self.limit_s * 1e3:g}ms"
        return f"{self.name}={limit}"

    def concerns(self, kind: str) -> bool:
        return self.kind in (None, kind)


def default_targets(users: Users) -> tuple[LatencyTarget, ...]:
    """The targets of `DEFAULT_SLO` for the kinds of requests that `users` send."""
    rates = users.rates_per_s()
    return tuple(slo for slo in parse_targets(DEFAULT_SLO) if slo.kind is None or slo.kind in rates)


def parse_targets(text: str) -> tuple[LatencyTarget, ...]:
    """Read `chat.ttft_p95=2s,tpot_p95=100ms`. Raises InputError.

    `itl` is judged as `stall`, the longest gap in an answer, which is stricter than all gaps.
    """
    targets = []
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        match = _NAME.fullmatch(name)
        if not match and value and name.rpartition(".")[2] in (*METRICS, "itl"):
            raise InputError(
                f"--slo: {part.strip()!r} names no percentile; for 95 % of the requests write "
                f"{name}_p95={value}"
            )
        if not match or not value or not 0 < float(match[3]) < 100:
            raise InputError(
                f"--slo: {part.strip()!r} is not [BUCKET.]METRIC_pNN=TIME; e.g. {DEFAULT_SLO}"
            )
        kind, metric = match[1], "stall" if match[2] == "itl" else match[2]
        if metric not in METRICS:
            raise InputError(f"--slo: no metric {metric!r}; one of: {', '.join(METRICS)}, itl")
        bucket = f"{kind}." if kind else ""
        (slo,) = parse_slos(f"{bucket}{metric}={value}", CLASSES)
        targets.append(LatencyTarget(kind, metric, float(match[3]) / 100, slo.limit_s))
    return tuple(targets)
