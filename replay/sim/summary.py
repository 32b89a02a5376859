"""What a simulation came to: the keys of `summary.json`, computed at once with numpy.

The keys and definitions are those of a replay. A request is sent the moment it is due, so the lag
is 0 and service is response. Gaps between tokens are known as the largest of a request (stall) and
their mean (TPOT) only, so `itl_ms` and `icl_ms` have no sample.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.scenario import Simulated
from forebay.replay.slo import Slo
from forebay.replay.summary import INFINITE, PERCENTILES, rank_of
from forebay.traces.buckets import bucket_of

Floats = NDArray[np.float64]
METRICS = {
    "ttft_ms": "ttft",
    "ttft_service_ms": "ttft",
    "tpot_ms": "tpot",
    "itl_ms": "unknown",
    "icl_ms": "unknown",
    "e2e_ms": "e2e",
    "e2e_service_ms": "e2e",
    "stall_ms": "stall",
}


class Table:
    """One value a request, in order of arrival; NaN where undefined."""

    def __init__(self, simulated: Simulated) -> None:
        outcomes = simulated.outcomes
        buckets = simulated.scenario.buckets()
        self.names = [bucket.name for bucket in buckets]
        rows = [o.request for o in outcomes]
        self.bucket = np.array(
            [bucket_of(row.input_tokens, buckets) or "other" for row in rows], dtype=object
        )
        self.arrival_s = np.array([row.arrival_s for row in rows])
        self.prompt_tokens = np.array([row.input_tokens for row in rows])
        output = np.array([row.output_tokens for row in rows], dtype=float)
        first = _times(outcomes, "first_token_s")
        last = _times(outcomes, "finished_s")
        self.done = ~np.isnan(last)
        with np.errstate(divide="ignore", invalid="ignore"):
            tpot = np.where(output > 1, (last - first) / (output - 1), np.nan)
        stall = np.array([o.stall_s if o.served else math.nan for o in outcomes])
        self.metrics: dict[str, Floats] = {
            "ttft": first - self.arrival_s,
            "e2e": last - self.arrival_s,
            "tpot": tpot,
            "stall": np.where(self.done & (output > 1), stall, np.nan),
            "unknown": np.full(len(outcomes), np.nan),
        }
        self.queue_s = _times(outcomes, "sent_s") - self.arrival_s
        self.last_s = float(np.nanmax(last)) if self.done.any() else 0.0

    def good(self, slos: Sequence[Slo]) -> NDArray[np.bool_]:
        """Whether each request met every target that applies to it."""
        good = self.done.copy()
        for slo in slos:
            values = self.metrics[slo.metric]
            applies = self.bucket == slo.bucket if slo.bucket else np.ones(len(good), bool)
            missed = values > slo.limit_s
            if slo.metric in ("ttft", "e2e"):
                missed |= np.isnan(values)
            good &= ~(applies & missed)
        return good


def summarise(simulated: Simulated, slos: Sequence[Slo], window_s: float) -> dict[str, Any]:
    """The summary; `window_s` is how long arrivals went on, seconds."""
    table, outcomes = Table(simulated), simulated.outcomes
    good = table.good(slos)
    served = [o for o in outcomes if o.served]
    prompt_tokens = sum(o.request.input_tokens for o in served)
    cached_tokens = sum(o.cached_tokens for o in served)
    by_backend: Counter[str] = Counter()
    for outcome in served:
        by_backend[outcome.backend or ""] += outcome.request.input_tokens
    rejected = Counter(o.reject.reason for o in outcomes if o.reject)
    names = [name for name in dict.fromkeys([*table.names, *table.bucket])]
    told: dict[str, Any] = {
        "requests": len(outcomes),
        "completed": int(table.done.sum()),
        "rejected": dict(sorted(rejected.items())),
        "failed": {},
        "duration_s": table.last_s,
        "window_s": window_s,
        "offered_rate_per_s": len(outcomes) / window_s if window_s else None,
        "goodput_per_s": float(good.sum()) / window_s if window_s else None,
        "attainment": float(good.mean()),
        "goodput_by_bucket_per_s": {
            name: float(good[table.bucket == name].sum()) / window_s if window_s else None
            for name in names
        },
        "requests_by_bucket": {name: int((table.bucket == name).sum()) for name in names},
        "attainment_by_bucket": {
            name: float(good[of].mean()) if (of := table.bucket == name).any() else None
            for name in names
        },
        "slos": [str(slo) for slo in slos],
        "hit_ratio": cached_tokens / prompt_tokens if prompt_tokens else None,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "prompt_tokens_per_backend": dict(sorted(by_backend.items())),
        "verdict": "valid",
        "verdict_reason": "simulated: every arrival is at its time",
        "verdict_at_s": None,
        "ended": "complete",
        "schedule_lag_ms": distribution_ms(np.zeros(len(outcomes))),
        "reject_ms": {
            **distribution_ms(np.array([o.reject.queued_s for o in outcomes if o.reject])),
            "max_wall": None,  # no wall clock runs here
            "with_retry_after": sum(o.reject is not None for o in outcomes),
        },
        "itl_estimated": 0,
        "completed_without_output": 0,
        "overflow": 0,
        "late_rejections": sum(bool(o.reject and o.reject.queued_s > 0) for o in outcomes),
        "busy": [round(share, 4) for share in simulated.busy],
        "preemptions": simulated.preemptions,
    }
    for key, metric in METRICS.items():
        told[key] = _distributions(table, table.metrics[metric])
    told["queue_ms"] = _distributions(table, table.queue_s)
    told["ttft_ms_failures_as_inf"] = _distributions(table, table.metrics["ttft"], failures=True)
    return told


def _distributions(table: Table, values: Floats, *, failures: bool = False) -> dict[str, Any]:
    told = {}
    for name in ("all", *table.names):
        of = np.ones(len(values), bool) if name == "all" else table.bucket == name
        missing = int((of & ~table.done).sum()) if failures else 0
        told[name] = distribution_ms(values[of & table.done], missing)
    return told


def distribution_ms(values_s: Floats, failures: int = 0) -> dict[str, float | str | int | None]:
    """Count, nearest-rank percentiles and maximum, milliseconds; None without samples.

    `failures` more samples are infinite.
    """
    values = np.sort(values_s[~np.isnan(values_s)])
    total = len(values) + failures
    told: dict[str, float | str | int | None] = {"count": total}
    ranks = {f"p{percentile:g}": rank_of(percentile, total) for percentile in PERCENTILES}
    for name, rank in {**ranks, "max": total}.items():
        known = rank <= len(values)
        told[name] = None if not total else float(values[rank - 1]) * 1e3 if known else INFINITE
    return told


def _times(outcomes: Sequence[SimOutcome], name: str) -> Floats:
    return np.array([getattr(o, name) for o in outcomes], dtype=float)
