"""Summarise a simulation: the keys of `summary.json`, computed with numpy.

Keys and definitions are as in a replay. A request is sent the moment it is due, so the
schedule lag is 0 and service times equal response times. Of the gaps between tokens only the
largest of a request (stall) and the mean (TPOT) are known, so `itl_ms` and `icl_ms` have no sample.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.replay.plan.slo import SESSION, Slo, check_sessions
from forebay.replay.plan.tasks import TaskNames, TaskTimes, seconds_of_each
from forebay.replay.results.summary import (
    INFINITE,
    PERCENTILES,
    rank_of,
    task_figures,
    throughput,
)
from forebay.replay.results.verdict import judge_answers
from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.routers.possible import most_in_time
from forebay.replay.sim.scenario import Simulated
from forebay.traces.ground.buckets import bucket_of
from forebay.traces.ground.errors import InputError

Floats = NDArray[np.float64]
ON_TIME = "simulated: every arrival is at its time"
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


def met(
    slos: Sequence[Slo],
    bucket: NDArray[np.object_],
    metrics: Mapping[str, Floats],
    done: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Return an array: True for each request that is done and met every target that applies to it.

    Args:
        bucket: the bucket of each request.
        metrics: seconds of each request by metric, NaN where undefined.
    """
    good = done.copy()
    for slo in slos:
        values = metrics[slo.metric]
        applies = bucket == slo.bucket if slo.bucket else np.ones(len(good), bool)
        missed = values > slo.limit_s
        if slo.metric in ("ttft", "e2e"):
            missed |= np.isnan(values)
        good &= ~(applies & missed)
    return good


class Table:
    """Arrays with one value for each request, in order of arrival. NaN where undefined."""

    def __init__(self, simulated: Simulated) -> None:
        # Columns of the trace.
        outcomes = simulated.outcomes
        buckets = simulated.scenario.buckets()
        self.names = [bucket.name for bucket in buckets]
        rows = [o.request for o in outcomes]
        self.bucket = np.array(
            [bucket_of(row.input_tokens, buckets) or "other" for row in rows], dtype=object
        )
        self.arrival_s = np.array([row.arrival_s for row in rows])
        self.prompt_tokens = np.array([row.input_tokens for row in rows])
        self.output = output = np.array([row.output_tokens for row in rows], dtype=float)
        # Latencies. NaN stands for a request that has none.
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
        # A task ends with its last turn, and each of its turns shows the time of the whole.
        names, times = TaskNames(), TaskTimes()
        tasks = [names.name(row) for row in rows]
        for task, outcome in zip(tasks, outcomes, strict=True):
            times.add(task, outcome.request.arrival_s, outcome.finished_s)
        self.tasks_s = times.seconds()
        self.metrics[SESSION] = np.array(seconds_of_each(tasks, self.tasks_s))
        self.queue_s = _times(outcomes, "sent_s") - self.arrival_s
        self.last_s = float(np.nanmax(last)) if self.done.any() else 0.0

    def completed_work(self) -> tuple[int, float, float]:
        """Return the completed requests, and their prompt and output tokens."""
        prompt, output = (float(of[self.done].sum()) for of in (self.prompt_tokens, self.output))
        return int(self.done.sum()), prompt, output

    def good(self, slos: Sequence[Slo]) -> NDArray[np.bool_]:
        """Return an array: True for each request that met every target that applies to it."""
        return met(slos, self.bucket, self.metrics, self.done)

    def first_token_limit_s(self, slos: Sequence[Slo]) -> Floats:
        """Return for each request the time that its targets allow to the first token, or inf."""
        limit_s = np.full(len(self.done), np.inf)
        for slo in slos:
            if slo.metric in ("ttft", "e2e"):
                applies = (self.bucket == slo.bucket) | (slo.bucket is None)
                limit_s[applies] = np.minimum(limit_s[applies], slo.limit_s)
        return limit_s


def summarise(
    simulated: Simulated, slos: Sequence[Slo], window_s: float, *, bounded: bool = True
) -> dict[str, Any]:
    """Make the summary of a trace whose arrivals went on for `window_s` seconds.

    Args:
        bounded: compute the bound for an all-knowing scheduler, which can take longer than the
            simulation. Without it, its two keys are None until `set_bound`.
    """
    table, outcomes = Table(simulated), simulated.outcomes
    check_sessions(slos, bool(table.tasks_s))
    good = table.good(slos)
    rejects = [o.reject for o in outcomes if o.reject]
    reasons: list[str] = [reject.reason for reject in rejects]
    rejected = dict(sorted(Counter(reasons).items()))
    # Keys that only a real replay can fill have the value of an undisturbed run.
    summary: dict[str, Any] = {
        "requests": len(outcomes),
        "completed": int(table.done.sum()),
        "rejected": rejected,
        "failed": {},
        "unanswered": [
            {"outcome": "rejected", "reason": name, "status": 429, "requests": count, "said": None}
            for name, count in Counter(reject.reason for reject in rejects).most_common()
        ],
        "duration_s": table.last_s,
        "window_s": window_s,
        "offered_rate_per_s": len(outcomes) / window_s if window_s else None,
        **throughput(*table.completed_work(), table.last_s),
        **_goodput(table, good, window_s),
        "possible_goodput_per_s": None,
        "share_of_possible": None,
        "slos": [str(slo) for slo in slos],
        **_cache_use(outcomes),
        **simulated_verdict(len(outcomes), int(table.done.sum()), rejected),
        "verdict_at_s": None,
        "warnings": [],
        "late_arrivals": 0,
        "ended": "complete",
        "schedule_lag_ms": distribution_ms(np.zeros(len(outcomes))),
        "reject_ms": {
            **distribution_ms(np.array([reject.queued_s for reject in rejects])),
            "max_wall": None,  # no wall clock runs here
            "with_retry_after": len(rejects),
        },
        "itl_estimated": 0,
        "completed_without_output": 0,
        "overflow": 0,
        "late_rejections": sum(reject.queued_s > 0 for reject in rejects),
        "busy": [round(share, 4) for share in simulated.busy],
        "preemptions": simulated.preemptions,
    }
    # Distributions, of all requests and by bucket.
    for key, metric in METRICS.items():
        summary[key] = _distributions(table, table.metrics[metric])
    summary |= task_figures(table.tasks_s.values())
    summary["queue_ms"] = _distributions(table, table.queue_s)
    summary["ttft_ms_failures_as_inf"] = _distributions(table, table.metrics["ttft"], failures=True)
    if bounded:
        set_bound(summary, _most_in_time(simulated, table, slos))
    return summary


def simulated_verdict(requests: int, completed: int, rejected: dict[str, int]) -> dict[str, str]:
    """Return the verdict: valid, or failed if nothing was answered."""
    lost = judge_answers(requests, completed, rejected, {})
    word, reason = (lost.word, lost.reason) if lost else ("valid", ON_TIME)
    return {"verdict": word, "verdict_reason": reason}


def bound_of(simulated: Simulated, slos: Sequence[Slo]) -> int:
    """Bound the requests in time under any scheduler (possible.py).

    The bound depends on the requests, the targets and the engines, not on the policy.
    """
    return _most_in_time(simulated, Table(simulated), slos)


def set_bound(summary: dict[str, Any], most: int) -> None:
    """Compare the goodput of a summary with the bound, `most` requests in time."""
    window_s, good = summary["window_s"], round(summary["attainment"] * summary["requests"])
    summary["possible_goodput_per_s"] = most / window_s if window_s else None
    summary["share_of_possible"] = good / most if most else None


def _goodput(table: Table, good: NDArray[np.bool_], window_s: float) -> dict[str, Any]:
    """Count the requests that met their targets, in all and by bucket."""

    def rate(requests: float) -> float | None:
        return requests / window_s if window_s else None

    members = {name: table.bucket == name for name in dict.fromkeys([*table.names, *table.bucket])}
    return {
        "goodput_per_s": rate(float(good.sum())),
        "attainment": float(good.mean()),
        "goodput_by_bucket_per_s": {
            name: rate(float(good[inside].sum())) for name, inside in members.items()
        },
        "requests_by_bucket": {name: int(inside.sum()) for name, inside in members.items()},
        "attainment_by_bucket": {
            name: float(good[inside].mean()) if inside.any() else None
            for name, inside in members.items()
        },
    }


def _most_in_time(simulated: Simulated, table: Table, slos: Sequence[Slo]) -> int:
    if simulated.waited:
        raise InputError(
            "--possible: arrivals of turns that wait depend on the policy; give --turns trace"
        )
    rows = [o.request for o in simulated.outcomes]
    if table.good(slos).all():  # nothing can be better
        return len(rows)
    limits_s = table.first_token_limit_s(slos).tolist()
    counted = most_in_time(rows, limits_s, simulated.scenario.engine, simulated.scenario.gpus)
    return int(counted.sum() + 1e-6)


def _cache_use(outcomes: Sequence[SimOutcome]) -> dict[str, Any]:
    """Count prompt tokens of the requests that were sent, and the part found in prefix caches."""
    sent = [o for o in outcomes if o.served]
    prompt_tokens = sum(o.request.input_tokens for o in sent)
    cached_tokens = sum(o.cached_tokens for o in sent)
    by_backend: Counter[str] = Counter()
    for outcome in sent:
        by_backend[outcome.backend or ""] += outcome.request.input_tokens
    return {
        "hit_ratio": cached_tokens / prompt_tokens if prompt_tokens else None,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "prompt_tokens_per_backend": dict(sorted(by_backend.items())),
    }


def _distributions(table: Table, values: Floats, *, failures: bool = False) -> dict[str, Any]:
    distributions = {}
    for name in ("all", *table.names):
        inside = np.ones(len(values), bool) if name == "all" else table.bucket == name
        missing = int((inside & ~table.done).sum()) if failures else 0
        distributions[name] = distribution_ms(values[inside & table.done], missing)
    return distributions


def distribution_ms(values_s: Floats, failures: int = 0) -> dict[str, float | str | int | None]:
    """Return count, nearest-rank percentiles and maximum in milliseconds. None without samples.

    `failures` more samples count as infinite.
    """
    values = np.sort(values_s[~np.isnan(values_s)])
    total = len(values) + failures
    shown: dict[str, float | str | int | None] = {"count": total}
    ranks = {f"p{percentile:g}": rank_of(percentile, total) for percentile in PERCENTILES}
    for name, rank in {**ranks, "max": total}.items():
        finite = rank <= len(values)
        shown[name] = None if not total else float(values[rank - 1]) * 1e3 if finite else INFINITE
    return shown


def _times(outcomes: Sequence[SimOutcome], name: str) -> Floats:
    return np.array([getattr(o, name) for o in outcomes], dtype=float)
