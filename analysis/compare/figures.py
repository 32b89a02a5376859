"""Compute the figures of one run: by bucket, by backend, of unanswered requests, and its cost.

Latencies are of answered requests, from when each was due. TTFT is also given with every rejected
or failed request as +inf, because a server that rejects requests looks faster. Nothing is printed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forebay.analysis.runs.run import LATENCIES, RunData
from forebay.analysis.statistics.quantiles import (
    MIN_BEYOND,
    SHARES,
    Floats,
    Percentiles,
    finite,
    order_statistic,
    percentile_table,
    samples_beyond,
)
from forebay.analysis.statistics.units import printable
from forebay.replay.plan.slo import SESSION, Slo
from forebay.replay.results.server_metrics import ENERGIES, GAUGES
from forebay.replay.results.summary import throughput
from forebay.replay.results.verdict import MOST_UNCOUNTED
from forebay.traces.ground.errors import InputError

TOKENS = ("prompt_tokens", "output_tokens")
MILLION = 1e6
HOUR_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a bucket of a run, or of all its buckets. Latencies are in seconds."""

    intended: int
    answered: int
    rejected: int
    failed: int
    unanswered: int  # rejected or failed
    # ttft, ttft_failures, e2e, tpot, stall, queue, itl; of all buckets also session_e2e
    latency: Mapping[str, Percentiles]
    goodput_per_s: float | None
    attainment: float | None
    hit_ratio: float | None
    # by the keys of summary.json, such as requests_per_s; of all buckets also power and energy
    rates: Mapping[str, float | None]
    observed_s: float  # the time in which requests were due, by which goodput is divided
    rows: NDArray[np.bool_] = field(repr=False)  # mask of the run's rows: requests of the bucket
    ok: NDArray[np.bool_] = field(repr=False)  # mask of the run's rows: its answered requests


@dataclass(frozen=True, slots=True)
class BackendRow:
    """The requests and prompt tokens that one backend served."""

    name: str
    requests: int
    prompt_tokens: float
    hit_ratio: float | None


@dataclass(frozen=True, slots=True)
class UnansweredRow:
    """One kind of unanswered request. `outcome` is rejected or failed."""

    outcome: str
    reason: str
    count: int
    status: str
    answer_p50_s: float | None
    answer_max_s: float | None
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class RunFigures:
    """All figures of one run. Comparisons, tables and plots only read them."""

    run: RunData
    name: str
    buckets: Sequence[str]  # buckets in which the run had requests
    of: Mapping[str | None, Figures]  # by bucket of any compared run; None: all requests
    costs: Mapping[str, float | None]
    backends: Sequence[BackendRow]
    rejections: Sequence[UnansweredRow]
    imbalance: float | None
    differs: Mapping[str, str]  # the run's own definitions of latencies, by latency


@dataclass(frozen=True, slots=True)
class Price:
    """A price, in any currency, of a GPU for an hour. `gpus` None takes the number from the run."""

    per_gpu_hour: float
    gpus: int | None = None

    def gpus_of(self, run: RunData) -> int:
        """Return the number of GPUs that the run paid for.

        A simulation records them in its run.json. Other runs count one for each backend.

        Raises:
            InputError: neither is known, and `gpus` is not given.
        """
        gpu_count = run.info.get("gpus")
        count = self.gpus or (gpu_count if type(gpu_count) is int else len(backends(run)))
        if not count:
            raise InputError(
                f"--price-per-gpu-hour: {run.name} does not say how many GPUs it used; give --gpus"
            )
        return count

    def per_million(self, run: RunData, slos: Sequence[Slo] = ()) -> dict[str, float | None]:
        """Return the cost of a million tokens: of all answers, and of answers within targets.

        The targets are `slos`, else the recorded targets of the run.
        """
        rows = {
            "cost_per_million": run.rows(outcome="ok"),
            "cost_per_million_in_time": good_rows(run, slos or run.slos()),
        }
        if not run.busy_s():
            return dict.fromkeys(rows)
        paid = self.per_gpu_hour * self.gpus_of(run) * run.busy_s() / HOUR_S
        # Prompt and output tokens, as the server counted them.
        tokens = {
            key: sum(float(np.nansum(run.numbers[name][mask])) for name in TOKENS)
            for key, mask in rows.items()
        }
        return {key: paid / count * MILLION if count else None for key, count in tokens.items()}


def run_figures(
    runs: Sequence[RunData],
    slos: Sequence[Slo] = (),
    min_beyond: int = MIN_BEYOND,
    costs: Sequence[Mapping[str, float | None]] = (),
) -> list[RunFigures]:
    """Compute all figures of runs that are compared. `costs`: one mapping a run, if known."""
    buckets = dict.fromkeys(name for run in runs for name in run.buckets())
    return [
        RunFigures(
            run=run,
            name=run.name,
            buckets=run.buckets(),
            of={name: figures(run, name, slos, min_beyond) for name in (None, *buckets)},
            costs=cost,
            backends=backends(run),
            rejections=unanswered(run),
            imbalance=imbalance(run),
            differs=run.info.get("differs") or {},
        )
        for run, cost in zip(runs, costs or [{}] * len(runs), strict=True)
    ]


def figures(
    run: RunData, bucket: str | None, slos: Sequence[Slo] = (), min_beyond: int = MIN_BEYOND
) -> Figures:
    """The figures of a bucket. Goodput is by `slos`, else as the run recorded it."""
    rows = run.rows(bucket)
    ok = run.rows(bucket, "ok")
    intended, answered = int(rows.sum()), int(ok.sum())
    latency = {
        name: percentile_table(run.numbers[column][ok], min_beyond=min_beyond)
        for name, column in LATENCIES.items()
    }
    # A server that rejects requests looks faster, so these count as infinitely late here.
    latency["ttft_failures"] = percentile_table(
        run.numbers["ttft_response_s"][ok], intended - answered, min_beyond
    )
    latency["queue"] = percentile_table(run.numbers["queue_ms"][ok] / 1e3, min_beyond=min_beyond)
    latency["itl"] = _gaps(run, bucket or "all", min_beyond)
    if bucket is None:
        times_s = list(run.task_times().values())
        latency["session_e2e"] = percentile_table(times_s, min_beyond=min_beyond)
    # Then the figures of the service, as far as the run knows them.
    goodput, attainment = _goodput(run, bucket, slos)
    prompt, output = (_tokens(run, name, ok) for name in TOKENS)
    rates = throughput(answered, prompt, output, run.busy_s())
    if bucket is None:
        rates |= {key: run.number(key) for key in (*GAUGES, *ENERGIES)}
    return Figures(
        intended=intended,
        answered=answered,
        rejected=int(run.rows(bucket, "rejected").sum()),
        failed=int(run.rows(bucket, "failed").sum()),
        unanswered=intended - answered,
        latency=latency,
        goodput_per_s=goodput,
        attainment=attainment,
        hit_ratio=_hit_ratio(run.numbers, rows),
        rates=rates,
        observed_s=run.window_s(),
        rows=rows,
        ok=ok,
    )


def _gaps(run: RunData, tag: str, min_beyond: int) -> Percentiles:
    """The inter-token latency from summary.json. The table of requests has no single gaps."""
    count = int(run.number("itl_ms", tag, "count") or 0)
    values: dict[str, float | None] = {}
    for name, share in SHARES.items():
        value_ms = run.number("itl_ms", tag, name)
        hidden = value_ms is None or samples_beyond(share, count) < min_beyond
        values[name] = None if hidden or value_ms is None else value_ms / 1e3
    longest_ms = run.number("itl_ms", tag, "max") if count else None
    return Percentiles(count, values, None if longest_ms is None else longest_ms / 1e3)


def _tokens(run: RunData, name: str, rows: NDArray[np.bool_]) -> float | None:
    """Return the tokens of answered requests, or None if too many were not counted."""
    counts = run.numbers[name][rows]
    unknown = np.isnan(run.numbers[name]).all()
    if unknown or np.isnan(counts).sum() > MOST_UNCOUNTED * len(counts):
        return None
    return float(np.nansum(counts))


def good_rows(run: RunData, slos: Sequence[Slo]) -> NDArray[np.bool_]:
    """A mask of the answered requests that met every target that applies to them, as `meets`."""
    good = run.rows(outcome="ok")
    for slo in slos:
        of_task = slo.metric == SESSION
        values = run.task_seconds() if of_task else run.numbers[LATENCIES[slo.metric]]
        missed = values > slo.limit_s
        if slo.metric in ("ttft", "e2e"):
            missed |= np.isnan(values)
        good &= ~(missed & run.rows(slo.bucket))
    return good


def _goodput(
    run: RunData, bucket: str | None, slos: Sequence[Slo]
) -> tuple[float | None, float | None]:
    if "cut" in run.info:  # its summary judges the whole run
        slos = slos or run.slos()
    elif not slos:
        if bucket is None:
            return run.number("goodput_per_s"), run.number("attainment")
        return (
            run.number("goodput_by_bucket_per_s", bucket),
            run.number("attainment_by_bucket", bucket),
        )
    rows = run.rows(bucket)
    intended = int(rows.sum())
    if not intended:
        return None, None
    good = int((good_rows(run, slos) & rows).sum())
    return (good / run.window_s() if run.window_s() else None), good / intended


def _hit_ratio(numbers: Mapping[str, Floats], rows: np.ndarray) -> float | None:
    """Cached share of the prompt tokens, or None if no answer reports cached tokens.

    vLLM omits the count from an answer without a hit, so a count missing among others is 0.
    """
    if np.isnan(numbers["cached_tokens"]).all():
        return None
    prompt = float(np.nansum(numbers["prompt_tokens"][rows]))
    return float(np.nansum(numbers["cached_tokens"][rows])) / prompt if prompt > 0 else None


def backends(run: RunData) -> list[BackendRow]:
    """The backends that served requests or that the summary lists, with their prompt tokens.

    A rejection carries the name of the proxy, which is not a backend and processed no tokens.
    """
    table = []
    names = run.words["backend"]
    worked = set(names[~np.isnan(run.numbers["prompt_tokens"])].tolist())
    recorded_tokens = run.summary.get("prompt_tokens_per_backend")
    idle = (
        {printable(str(name)) for name in recorded_tokens}
        if isinstance(recorded_tokens, Mapping)
        else set()
    )
    for name in sorted((worked | idle) - {""}):
        rows = names == name
        tokens = float(finite(run.numbers["prompt_tokens"][rows]).sum())
        table.append(BackendRow(name, int(rows.sum()), tokens, _hit_ratio(run.numbers, rows)))
    return table


def imbalance(run: RunData) -> float | None:
    """Prompt tokens of the busiest backend per token of the idlest. None below two backends."""
    tokens = [backend.prompt_tokens for backend in backends(run)]
    if len(tokens) < 2 or not max(tokens):
        return None
    return max(tokens) / min(tokens) if min(tokens) else math.inf


def unanswered(run: RunData) -> list[UnansweredRow]:
    """Every kind of unanswered request: rejected before failed, most frequent first."""
    kinds = []
    for outcome in ("rejected", "failed"):
        of_outcome = run.rows(outcome=outcome)
        for reason in set(run.words["reason"][of_outcome].tolist()):
            rows = of_outcome & (run.words["reason"] == reason)
            answer = np.sort(finite(run.numbers["reject_latency_s"][rows]))
            retry = finite(run.numbers["retry_after_s"][rows])
            statuses = sorted(set(finite(run.numbers["status"][rows]).astype(int).tolist()))
            kinds.append(
                UnansweredRow(
                    outcome=outcome,
                    reason=reason or "unknown",
                    count=int(rows.sum()),
                    status=", ".join(str(status) for status in statuses if status > 0),
                    answer_p50_s=order_statistic(answer, 0.5) if len(answer) else None,
                    answer_max_s=float(answer[-1]) if len(answer) else None,
                    retry_after_s=float(np.median(retry)) if len(retry) else None,
                )
            )
    return sorted(kinds, key=lambda row: (row.outcome != "rejected", -row.count, row.reason))
